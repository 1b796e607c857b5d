"""The files that weights come from and checkpoints go to, checked by the launcher before any process starts.

No torch here and no large read: headers, sizes, and the checksums of small tensors.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envclient.base.checksum import checksum
from envclient.base.errors import ConfigError, PreflightError
from megatron_venus.checkpoint_index import Checkpoint, open_checkpoint
from megatron_venus.config import VenusConfig
from megatron_venus.safetensors_header import StoredTensor, dtype_of, read_folder

_SMALL_BYTES = 1 << 20
"""Tensors up to this size (every norm, a tiny model whole) tell whether two checkpoints are of the same weights."""
_OPTIMIZER_BYTES = 12
"""Of a parameter, in a checkpoint: its fp32 main copy and Adam's two moments."""
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_SHAPE_KEYS = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "num_experts",
    "num_local_experts",
    "moe_intermediate_size",
)
"""Of config.json: what decides the weights' names and shapes."""


def check_model_files(config: VenusConfig, run_dir: Path) -> None:
    """`model.path`'s weights are whole and of one type, `model.megatron` is made of them, checkpoints have room.

    Raises:
        ConfigError: names the key and the file or tensor.
        PreflightError: the disk is too small.
    """
    folder = Path(config.model.path)
    tensors = read_folder(folder)
    dtype_of(folder, tensors)
    if config.model.megatron:
        check_made_of(open_checkpoint(Path(config.model.megatron), "model.megatron"), folder, tensors)
    check_room(config, run_dir, sum(math.prod(tensor.shape) for tensor in tensors.values()))


def check_made_of(checkpoint: Checkpoint, folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse a checkpoint that holds other weights than `folder`, whose tensors lie where `tensors` says.

    Raises:
        ConfigError: names the first tensor that only one has, or that differs; large ones are not read.
    """
    known = checkpoint.manifest.weights
    remedy = f"make it again: python -m ckpt_tools.from_hf {folder} OUT"
    for name in sorted((known.keys() ^ tensors.keys()) - {"lm_head.weight"}):  # a tied model may have it as a copy
        where = "model.path" if name in known else "it"
        raise ConfigError(f"model.megatron={str(checkpoint.path)!r} is of another model: {where} has no {name}", remedy)
    for name, tensor in tensors.items():
        if tensor.nbytes <= _SMALL_BYTES and name in known and _checksum(tensor) != known[name]:
            raise ConfigError(
                f"model.megatron={str(checkpoint.path)!r} is of other weights: {name} is not model.path's", remedy
            )


def _checksum(tensor: StoredTensor) -> str:
    with open(tensor.path, "rb") as file:
        file.seek(tensor.offset)
        return checksum(file.read(tensor.nbytes))


def check_room(config: VenusConfig, run_dir: Path, parameters: int) -> None:
    """Refuse a disk that cannot hold the checkpoints of the run, with the one that is written before another goes.

    Raises:
        PreflightError: names the sizes.
    """
    settings, item = config.actor.checkpoint, _ITEM_BYTES[config.model.dtype]
    one = parameters * (item + _OPTIMIZER_BYTES + (item if settings.export else 0))
    every = config.run.checkpoint_every
    count = min(max(1, settings.keep) + 1, 1 + (config.run.steps - 1) // every if every else 1)
    # With `never` an earlier run of this name stays, and the new one gets a folder of its own.
    old = (run_dir / "checkpoints").rglob("*") if config.run.resume != "never" else ()
    held = sum(path.stat().st_size for path in old if path.is_file())
    place = run_dir.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if free + held < count * one:
        raise PreflightError(
            f"run.root={config.run.root!r}: {count} checkpoints of {one / 1e9:.2f} GB need {count * one / 1e9:.2f} GB,"
            f" {(free + held) / 1e9:.2f} GB are there",
            "make room, choose another run.root, lower actor.checkpoint.keep or set actor.checkpoint.export=false",
        )


def check_resumes(checkpoint: Checkpoint, folder: Path) -> None:
    """Refuse to go on from a checkpoint of another model than the one in `folder`.

    Raises:
        ConfigError: names the key of config.json and both values.
    """
    ours, theirs = (_config(path) for path in (checkpoint.hf_dir, folder))
    for key in _SHAPE_KEYS:
        if ours.get(key) != theirs.get(key):
            raise ConfigError(
                f"{checkpoint.path} is of another model than model.path={str(folder)!r}: {key} {ours.get(key)!r}, not"
                f" {theirs.get(key)!r}",
                "resume with the model that the run began with",
            )


def _config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config
