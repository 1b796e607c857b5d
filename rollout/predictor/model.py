"""A Qwen3 trunk with one linear output: log(1 + remaining tokens) at the last token of what was said so far.

Saved as a `Qwen3ForSequenceClassification` folder with one label, which SGLang serves as it is. `train` fits it,
`scorer` and `evaluate` run it in this process.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from envclient.base.errors import ConfigError

ARCHITECTURE = "Qwen3ForSequenceClassification"
LABEL = "log1p_remaining_tokens"
WEIGHTS = "model.safetensors"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json")


class LengthModel(nn.Module):
    """Trunk and head.

    Args:
        trunk: a transformers `Qwen3Model`.
        bias: first output of an untrained head, in log(1 + tokens).
    """

    def __init__(self, trunk: nn.Module, bias: float = 0.0) -> None:
        super().__init__()
        self.trunk = trunk
        self.score = nn.Linear(trunk.config.hidden_size, 1)  # type: ignore[union-attr, arg-type]
        nn.init.zeros_(self.score.weight)
        nn.init.constant_(self.score.bias, bias)

    @property
    def vocabulary(self) -> int:
        """Token ids below it have an embedding."""
        return int(self.trunk.config.vocab_size)  # type: ignore[union-attr, arg-type]

    @property
    def positions(self) -> int:
        """Longest input, in tokens."""
        return int(self.trunk.config.max_position_embeddings)  # type: ignore[union-attr, arg-type]

    def forward(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """log(1 + remaining) after every token: [number of sequences, longest]; beyond a sequence's end meaningless."""
        longest = max(map(len, sequences))
        ids = torch.zeros(len(sequences), longest, dtype=torch.long)
        mask = torch.zeros(len(sequences), longest, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            ids[row, : len(sequence)] = torch.tensor(sequence)
            mask[row, : len(sequence)] = 1
        device = self.score.weight.device
        hidden = self.trunk(input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False)
        return self.score(hidden.last_hidden_state).squeeze(-1).float()

    @torch.no_grad()
    def predict(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """log(1 + remaining) at the end of each sequence."""
        scores = self(sequences)
        return [float(scores[row, len(sequence) - 1]) for row, sequence in enumerate(sequences)]

    def save(self, folder: Path) -> None:
        """Write config, weights and the trunk's tokenizer into `folder`, which must not hold a model yet."""
        folder.mkdir(parents=True, exist_ok=True)
        config: dict[str, Any] = self.trunk.config.to_dict()  # type: ignore[union-attr, operator]
        config |= {"architectures": [ARCHITECTURE], "num_labels": 1, "id2label": {"0": LABEL}, "label2id": {LABEL: 0}}
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True, default=str) + "\n")
        tensors = {f"model.{name}": value for name, value in self.trunk.state_dict().items()}
        tensors |= {f"score.{name}": value for name, value in self.score.state_dict().items()}
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
        source = Path(str(self.trunk.config._name_or_path))  # type: ignore[union-attr]
        for name in _TOKENIZER:
            if (source / name).is_file() and source != folder:
                shutil.copyfile(source / name, folder / name)


def load(path: Path, bias: float = 0.0) -> LengthModel:
    """The model in `path`: a saved predictor, or a Qwen3 whose trunk gets a fresh head.

    Raises:
        ConfigError: no such folder, or it holds another kind of model.
    """
    from transformers import AutoConfig, AutoModel

    try:
        kinds = json.loads((path / "config.json").read_text()).get("architectures") or []
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"predictor model {str(path)!r}: {error}", "name a folder with a Qwen3 model") from None
    if kinds not in ([ARCHITECTURE], ["Qwen3ForCausalLM"]):
        raise ConfigError(f"predictor model {str(path)!r} is {kinds}", f"use {ARCHITECTURE} or Qwen3ForCausalLM")
    if kinds != [ARCHITECTURE]:
        return LengthModel(AutoModel.from_pretrained(str(path), dtype=torch.float32), bias).eval()
    model = LengthModel(AutoModel.from_config(AutoConfig.from_pretrained(str(path)), dtype=torch.float32))
    tensors = load_file(path / WEIGHTS)
    model.load_state_dict({name.replace("model.", "trunk.", 1): value for name, value in tensors.items()})
    return model.eval()
