"""A Hugging Face checkpoint folder: read its weights, write one that engines can load.

Only safetensors, no `transformers`: importing it would cost seconds at every start. Used by the actor and checkpoints.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from envclient.base.errors import ConfigError

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of the checkpoint in `folder`, one file or several.

    Raises:
        ConfigError: no safetensors there, or a file named by the index is missing.
    """
    if (folder / _INDEX).is_file():
        index: dict[str, str] = json.loads((folder / _INDEX).read_text())["weight_map"]
        files = sorted(set(index.values()))
    else:
        files = [_WEIGHTS]
    weights: dict[str, Tensor] = {}
    for name in files:
        if not (folder / name).is_file():
            raise ConfigError(f"model.path {str(folder)!r} has no {name}", "name a folder with safetensors weights")
        weights |= load_file(folder / name)
    return weights


def companions(folder: Path) -> list[Path]:
    """The files of the checkpoint in `folder` beside its weights: config, tokenizer, chat template."""
    return [
        path
        for path in sorted(folder.iterdir())
        if path.is_file()
        and path.suffix not in _WEIGHT_SUFFIXES
        and not path.name.startswith(".")
        and not path.name.endswith(".index.json")
    ]


def write_weights(folder: Path, weights: Mapping[str, Tensor], source: Path) -> None:
    """Make `folder` a checkpoint of `weights` with everything else (config, tokenizer) copied from `source`."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in companions(source):
        shutil.copy2(path, folder / path.name)
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()},
        folder / _WEIGHTS,
        metadata={"format": "pt"},
    )
