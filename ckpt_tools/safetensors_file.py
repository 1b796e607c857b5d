"""A safetensors file that is written a range of bytes at a time (`to_hf`); `safetensors` itself would take it whole."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_venus.safetensors_header import WEIGHT_TYPES, StoredTensor

DTYPES = {spelled: getattr(torch, name) for spelled, name in WEIGHT_TYPES.items()}


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
