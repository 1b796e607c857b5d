"""One safetensors file, read and written a range of bytes at a time.

Format: 8 bytes little-endian length, that many bytes of JSON (tensor → dtype, shape, [begin, end) in the data), data.
Used by `hf_checkpoint` (reading) and `to_hf` (writing). The `safetensors` library itself would map whole files.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from envclient.base.errors import ConfigError

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Types a weight may have; quantised ones are not trained."""
_BITS = {"F64": 64, "I64": 64, "U64": 64, "I32": 32, "U32": 32, "I16": 16, "U16": 16}
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
        bits = DTYPES[tensor.dtype].itemsize * 8 if tensor.dtype in DTYPES else _BITS.get(tensor.dtype)
        if bits and tensor.nbytes != math.prod(tensor.shape) * bits // 8:
            raise refuse(f"tensor {name!r} of shape {tensor.shape} has {tensor.nbytes} bytes")
    expected = max((tensor.offset + tensor.nbytes for tensor in tensors.values()), default=8 + length)
    if size < expected:
        raise refuse(f"truncated: {size} of {expected} bytes")
    if size > expected:
        raise refuse(f"{size - expected} bytes longer than its header says")
    return tensors


def create(path: Path, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> dict[str, StoredTensor]:
    """Make a file with the header of these tensors and room for their bytes, to be written in any order."""
    spelled = next(name for name, known in DTYPES.items() if known == dtype)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin, places = 0, []
    for name, shape in shapes.items():
        nbytes = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": spelled, "shape": list(shape), "data_offsets": [begin, begin + nbytes]}
        places.append((name, shape, begin, nbytes))
        begin += nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        file.truncate(8 + len(raw) + begin)
    return {
        name: StoredTensor(path=path, dtype=spelled, shape=shape, offset=8 + len(raw) + start, nbytes=nbytes)
        for name, shape, start, nbytes in places
    }
