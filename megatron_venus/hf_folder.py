"""A Hugging Face checkpoint folder: read its weights, write one that engines can load.

Only safetensors, no `transformers`: importing it would cost seconds at every start. Used by the actor and checkpoints.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from envclient.base.files import write_json_atomic
from megatron_venus.safetensors_header import INDEX, WEIGHTS, read_folder

FILE_BYTES = 5_000_000_000
"""A file of weights has at most so many bytes, as Hugging Face's own have."""
_WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"}


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of the checkpoint in `folder`, one file or several.

    Raises:
        ConfigError: see `safetensors_header.read_folder`.
    """
    files = {tensor.path for tensor in read_folder(folder).values()}
    return {name: tensor for path in sorted(files) for name, tensor in load_file(path).items()}


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


def copy_companions(source: Path, folder: Path) -> None:
    """Make `folder`, with everything of the checkpoint `source` but its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in companions(source):
        shutil.copy2(path, folder / path.name)


def state_dtype(config: Path, dtype: torch.dtype) -> None:
    """Make config.json state the type that the weights have: a run may train in another one than it started from."""
    values = json.loads(config.read_text())
    name = str(dtype).removeprefix("torch.")
    changed = {key: name for key in ("dtype", "torch_dtype") if values.get(key, name) != name}
    if changed:
        write_json_atomic(config, values | changed)


def into_files(sizes: Mapping[str, int], most_bytes: int) -> dict[str, list[str]]:
    """File name → names of the tensors in it, in their order; `sizes` are the tensors' bytes."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, nbytes in sizes.items():
        if groups[-1] and filled + nbytes > most_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    if len(groups) == 1:
        return {WEIGHTS: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, 1)}


def index_of(files: Mapping[str, list[str]], sizes: Mapping[str, int]) -> dict[str, Any]:
    """The index of weights in several files."""
    weight_map = {name: file for file, names in files.items() for name in names}
    return {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}


def write_weights(folder: Path, weights: Mapping[str, Tensor]) -> None:
    """Write `weights` (CPU, contiguous) into `folder`: one file, or several with their index."""
    sizes = {name: tensor.nbytes for name, tensor in weights.items()}
    files = into_files(sizes, FILE_BYTES)
    for file, names in files.items():
        save_file({name: weights[name] for name in names}, folder / file, metadata={"format": "pt"})
    if len(files) > 1:
        write_json_atomic(folder / INDEX, index_of(files, sizes))
