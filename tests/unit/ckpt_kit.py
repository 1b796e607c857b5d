"""Tiny checkpoints of every family that ckpt_tools knows, written by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FAMILIES = ["qwen3", "qwen3_moe", "qwen2", "llama"]
_SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
_SCALING = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def make(folder: Path, family: str, *, tied: bool, dtype: torch.dtype = torch.bfloat16, shard: str = "20KB") -> Path:
    """A random model, in several shards; nothing in it is zero or one (a mix-up shows)."""
    import transformers as t

    shape: dict[str, Any] = _SHAPE | {"tie_word_embeddings": tied}
    if family == "qwen3":
        model = t.Qwen3ForCausalLM(t.Qwen3Config(**shape, head_dim=16))
    elif family == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        model = t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**shape, **experts, head_dim=16))
    elif family == "qwen2":
        model = t.Qwen2ForCausalLM(t.Qwen2Config(**shape))
    else:
        model = t.LlamaForCausalLM(t.LlamaConfig(**shape, rope_parameters=_SCALING))
    torch.manual_seed(FAMILIES.index(family))
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text('{"kind": "stand-in"}')
    return folder


def weights_of(folder: Path) -> dict[str, Tensor]:
    """All tensors in the folder's files, read by the safetensors library."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def replace_shard(path: Path, change: dict[str, Tensor | None]) -> None:
    """Rewrite one file with some tensors changed, added, or (None) taken out."""
    tensors = load_file(path) | {name: tensor for name, tensor in change.items() if tensor is not None}
    kept = {name: tensor for name, tensor in tensors.items() if not (name in change and change[name] is None)}
    save_file(kept, path, metadata={"format": "pt"})


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
