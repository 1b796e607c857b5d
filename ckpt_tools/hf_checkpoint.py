"""A Hugging Face checkpoint folder, checked from its headers alone and read a block of rows at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ckpt_tools.raw import OpenFiles, read_into
from ckpt_tools.safetensors_file import DTYPES, StoredTensor, read_header
from envclient.base.errors import ConfigError
from megatron_venus.hf_folder import INDEX, WEIGHTS
from megatron_venus.weight_map import Architecture, architecture_in, check_shapes

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
        tensors = _stored(folder)
        dtype = _dtype(folder, tensors, any_dtype)
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


def _stored(folder: Path) -> dict[str, StoredTensor]:
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


def _dtype(folder: Path, tensors: Mapping[str, StoredTensor], any_dtype: bool) -> torch.dtype:
    found: str | None = None
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise ConfigError(
                f"model {folder}: tensor {name!r} has dtype {tensor.dtype}", f"weights must be {', '.join(DTYPES)}"
            )
        found = found or tensor.dtype
        if tensor.dtype != found:
            raise ConfigError(
                f"model {folder}: tensor {name!r} has dtype {tensor.dtype}, others {found}",
                "all weights must have one dtype",
            )
    if found is None:
        raise ConfigError(f"model {folder} holds no tensor", "use a complete checkpoint")
    dtype = DTYPES[found]
    stated = stated_dtype(folder)
    if stated and stated != str(dtype).removeprefix("torch.") and not any_dtype:
        raise ConfigError(
            f"model {folder}: its tensors have dtype {found}, config.json says dtype = {stated!r}",
            "--any-dtype takes them as they are",
        )
    return dtype


def stated_dtype(folder: Path) -> str | None:
    """The weights' type in config.json (transformers 5 spells the key `dtype`, earlier ones `torch_dtype`)."""
    config = json.loads((folder / "config.json").read_text())
    return config.get("dtype") or config.get("torch_dtype")
