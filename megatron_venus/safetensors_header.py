"""Where the tensors of a Hugging Face folder lie: its safetensors headers, without torch and without a weight read.

Format: 8 bytes little-endian length, that many bytes of JSON (tensor → dtype, shape, [begin, end) in the data), data.
Used by the launcher's and the actor's checks before weights are loaded, and by `ckpt_tools`.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from envclient.base.errors import ConfigError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHT_TYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Types a weight may have, as the format and as torch spells them; quantised ones are not trained."""
_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "BF16": 16, "F16": 16, "I16": 16, "U16": 16}
_LONGEST_HEADER = 100_000_000
"""Bytes; the safetensors library refuses longer ones too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredTensor:
    """Where the bytes of a tensor lie."""

    path: Path
    dtype: str
    """As the format spells it, e.g. `BF16`."""
    shape: tuple[int, ...]
    offset: int
    """From the start of the file, in bytes."""
    nbytes: int

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the file.

    Raises:
        ConfigError: not a safetensors file, or shorter (or longer) than its header says.
    """

    def refuse(what: str) -> ConfigError:
        return ConfigError(f"{path}: {what}", "download or copy that file again")

    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= _LONGEST_HEADER:
            raise refuse("not a safetensors file")
        raw = file.read(length)
    if len(raw) < length:
        raise refuse(f"truncated: {size} bytes, its header alone needs {8 + length}")
    tensors = {}
    try:
        header = json.loads(raw)
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            shape = tuple(int(n) for n in entry["shape"])
            tensors[name] = StoredTensor(
                path=path, dtype=entry["dtype"], shape=shape, offset=8 + length + begin, nbytes=end - begin
            )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise refuse(f"its safetensors header is not valid ({type(error).__name__}: {error})") from None
    for name, tensor in tensors.items():
        bits = _BITS.get(tensor.dtype)
        if bits and tensor.nbytes != math.prod(tensor.shape) * bits // 8:
            raise refuse(f"tensor {name!r} of shape {tensor.shape} has {tensor.nbytes} bytes")
    expected = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=8 + length)
    if size < expected:
        raise refuse(f"truncated: {size} of {expected} bytes")
    if size > expected:
        raise refuse(f"{size - expected} bytes longer than its header says")
    return tensors


def read_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of the checkpoint in `folder`, one file or several with their index.

    Raises:
        ConfigError: no weights, a file that is missing or broken, or an index that does not fit the files.
    """
    if (folder / INDEX).is_file():
        return _indexed(folder)
    if not (folder / WEIGHTS).is_file():
        raise ConfigError(
            f"{str(folder)!r} has neither {INDEX} nor {WEIGHTS}", "name a folder with safetensors weights"
        )
    return read_header(folder / WEIGHTS)


def _indexed(folder: Path) -> dict[str, StoredTensor]:
    try:
        weight_map: Mapping[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        shards = sorted(set(weight_map.values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{folder / INDEX}: not a valid index ({error!r})", "download or copy it again") from None
    tensors: dict[str, StoredTensor] = {}
    for shard in shards:
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise ConfigError(f"{folder / INDEX} names shard {shard!r}, which is not there", "download or copy it")
        for name, tensor in read_header(folder / shard).items():
            if weight_map.get(name) != shard:
                raise ConfigError(
                    f"{folder / shard} holds tensor {name!r}, which the index places in {weight_map.get(name)!r}",
                    f"use the {INDEX} that came with these shards",
                )
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise ConfigError(
                f"{folder / INDEX} names tensor {name!r}, which is not in {shard!r}",
                "use the index that came with these shards",
            )
    return tensors


def dtype_of(folder: Path, tensors: Mapping[str, StoredTensor], *, any_dtype: bool = False) -> str:
    """The one type of all weights, as the format spells it; `any_dtype`: also another than config.json states.

    Raises:
        ConfigError: several types, one that is not trained, or not the one that config.json states.
    """
    found: str | None = None
    for name, tensor in tensors.items():
        if tensor.dtype not in WEIGHT_TYPES:
            raise ConfigError(
                f"model {folder}: tensor {name!r} has dtype {tensor.dtype}",
                f"weights must be {', '.join(WEIGHT_TYPES)}",
            )
        found = found or tensor.dtype
        if tensor.dtype != found:
            raise ConfigError(
                f"model {folder}: tensor {name!r} has dtype {tensor.dtype}, others {found}",
                "all weights must have one dtype",
            )
    if found is None:
        raise ConfigError(f"model {folder} holds no tensor", "use a complete checkpoint")
    stated = stated_dtype(folder)
    if stated and stated != WEIGHT_TYPES[found] and not any_dtype:
        raise ConfigError(
            f"model {folder}: its tensors have dtype {found}, config.json says dtype = {stated!r}",
            "mend config.json; python -m ckpt_tools.from_hf --any-dtype takes them as they are",
        )
    return found


def stated_dtype(folder: Path) -> str | None:
    """The weights' type in config.json (transformers 5 spells the key `dtype`, earlier ones `torch_dtype`)."""
    config = json.loads((folder / "config.json").read_text())
    return config.get("dtype") or config.get("torch_dtype")
