"""A Hugging Face checkpoint folder, checked from its headers alone and read a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ckpt_tools.raw import OpenFiles, read_into
from ckpt_tools.safetensors_file import DTYPES
from envclient.base.errors import ConfigError
from megatron_venus.architecture import Architecture, architecture_in
from megatron_venus.safetensors_header import StoredTensor, dtype_of, read_folder
from megatron_venus.weight_map import check_shapes

BLOCK_BYTES = 16_000_000
"""Memory of one block of rows; a tool holds a few at a time, whatever the model's size. Below 32 MiB the allocator uses
the same memory for the next block, which halves the system's time against 128 MB."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Consecutive rows of one Hugging Face tensor."""

    tensor: str
    start: int
    rows: Tensor


class HfCheckpoint:
    """Tensors of the folder: complete, of the shapes that its config.json promises, of one type."""

    def __init__(self, folder: Path, arch: Architecture, tensors: dict[str, StoredTensor], dtype: torch.dtype) -> None:
        self.folder, self.arch, self.tensors, self.dtype = folder, arch, tensors, dtype
        self._files = OpenFiles()

    @classmethod
    def open(cls, folder: Path, *, any_dtype: bool = False) -> HfCheckpoint:
        """Check the folder; `any_dtype` also takes a type other than the one config.json states.

        Raises:
            ConfigError: names the file or tensor that is missing, truncated, unknown, or of a wrong shape or type.
        """
        if not folder.is_dir():
            raise ConfigError(f"{str(folder)!r} is not a folder", "name the folder of a checkpoint")
        arch = architecture_in(folder, "checkpoint")
        tensors = read_folder(folder)
        dtype = DTYPES[dtype_of(folder, tensors, any_dtype=any_dtype)]
        check_shapes({name: tensor.shape for name, tensor in tensors.items()}, arch, str(folder))
        checkpoint = cls(folder, arch, tensors, dtype)
        if arch.tied and "lm_head.weight" in tensors:
            checkpoint._check_tied_copy()
            del tensors["lm_head.weight"]
        return checkpoint

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def units(self) -> list[str]:
        """What `blocks` takes: tensors, in the order of the files."""
        return sorted(self.tensors, key=lambda name: (self.tensors[name].path, self.tensors[name].offset))

    def blocks(self, unit: str) -> Iterator[Block]:
        """The tensor's rows, ascending."""
        place = self.tensors[unit]
        step = max(1, BLOCK_BYTES // max(1, place.row_bytes))
        for start in range(0, place.shape[0], step):
            yield Block(tensor=unit, start=start, rows=self.rows(unit, start, min(step, place.shape[0] - start)))

    def rows(self, name: str, start: int, count: int) -> Tensor:
        """Rows [start, start + count) of the tensor."""
        out = torch.empty((count, *self.tensors[name].shape[1:]), dtype=self.dtype)
        self.read_rows(name, start, out)
        return out

    def read_rows(self, name: str, start: int, out: Tensor) -> None:
        """Fill `out` (contiguous) with the rows from `start` on."""
        place = self.tensors[name]
        read_into(self._files.fd(place.path), out, place.offset + start * place.row_bytes)

    def _check_tied_copy(self) -> None:
        pairs = zip(self.blocks("model.embed_tokens.weight"), self.blocks("lm_head.weight"), strict=True)
        for ours, theirs in pairs:
            if not torch.equal(ours.rows.view(torch.uint8), theirs.rows.view(torch.uint8)):
                raise ConfigError(
                    f"model {self.folder}: lm_head.weight differs from model.embed_tokens.weight,"
                    " yet config.json says tie_word_embeddings",
                    "set tie_word_embeddings to false in config.json",
                )
