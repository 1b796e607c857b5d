"""Megatron's distributed checkpoint (`torch_dist`), read a stored chunk at a time, without Megatron.

`.metadata` (torch's) says which tensor's which part is where in the `.distcp` files; each part is a `torch.save` blob.
"""

from __future__ import annotations

import itertools
import json
import math
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from ckpt_tools.layout import Box
from ckpt_tools.raw import FileSlice, OpenFiles
from envclient.base.errors import ConfigError, InvariantError

CONFIG = "metadata.json"
COMMON = "common.pt"
BACKEND = {
    "sharded_backend": "torch_dist",
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


class DistCheckpoint:
    """The folder's tensors (`tensors`: shape, type and chunks by key) and other objects (`objects`: keys)."""

    def __init__(self, folder: Path, metadata: Any) -> None:
        self.folder = folder
        entries = metadata.state_dict_metadata
        self.tensors: dict[str, Any] = {k: v for k, v in entries.items() if isinstance(v, TensorStorageMetadata)}
        self.objects: list[str] = [k for k, v in entries.items() if isinstance(v, BytesStorageMetadata)]
        self._storage: dict[tuple[str, tuple[int, ...] | None], Any] = {
            (index.fqn, tuple(index.offset) if index.offset is not None else None): info
            for index, info in metadata.storage_data.items()
        }
        self._by_lead: dict[str, tuple[int, dict[tuple[int, ...], list[Box]]]] = {}
        self._files = OpenFiles()
        self._local = threading.local()

    @classmethod
    def open(cls, folder: Path) -> DistCheckpoint:
        """Check that the folder is whole: every byte that `.metadata` speaks of is there.

        `.metadata` is a pickle, as Megatron wants it: open only what you would also train from.

        Raises:
            ConfigError: names the file or tensor.
        """

        def refuse(what: str) -> ConfigError:
            return ConfigError(f"checkpoint {str(folder)!r}: {what}", "use a complete distributed checkpoint")

        try:
            backend = json.loads((folder / CONFIG).read_text())["sharded_backend"]
        except (OSError, ValueError, KeyError, TypeError):
            raise refuse(f"no valid {CONFIG}") from None
        if backend != BACKEND["sharded_backend"]:
            raise refuse(f"{CONFIG} names backend {backend!r}, not 'torch_dist'")
        try:
            metadata = FileSystemReader(folder).read_metadata()
        except Exception as error:
            raise refuse(f".metadata cannot be read ({type(error).__name__})") from None
        checkpoint = cls(folder, metadata)
        sizes: dict[str, int] = {}
        for (key, _), info in checkpoint._storage.items():
            name = info.relative_path
            if name not in sizes:
                path = folder / name
                if not path.is_file():
                    raise refuse(f"file {name!r} (of {key}) is missing")
                sizes[name] = path.stat().st_size
            if sizes[name] < info.offset + info.length:
                raise refuse(
                    f"file {name!r} is truncated: {sizes[name]} bytes, {key} ends at {info.offset + info.length}"
                )
        for key, entry in checkpoint.tensors.items():
            stored = sum(math.prod(c.sizes) for c in entry.chunks if (key, tuple(c.offsets)) in checkpoint._storage)
            if stored != math.prod(entry.size):
                raise refuse(f"tensor {key!r} holds {stored} of {math.prod(entry.size)} numbers")
        return checkpoint

    @property
    def files(self) -> list[str]:
        return sorted({info.relative_path for info in self._storage.values()})

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self.tensors[key].size)

    def dtype(self, key: str) -> torch.dtype:
        dtype: torch.dtype = self.tensors[key].properties.dtype
        return dtype

    def chunks(self, key: str) -> list[Box]:
        """The parts in which the tensor is stored."""
        return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in self.tensors[key].chunks]

    def chunks_at(self, key: str, box: Box) -> list[Box]:
        """The parts that share something with the box.

        A tensor of experts has tens of thousands: they are found by layer and expert, not by going through all.
        """
        if key not in self._by_lead:
            # Leading axes on which every chunk is 1 long; Megatron stacks layers and experts so.
            sizes = [chunk[1] for chunk in self.chunks(key)]
            depth = 0
            while depth < len(sizes[0]) - 1 and all(size[depth] == 1 for size in sizes):
                depth += 1
            index: dict[tuple[int, ...], list[Box]] = {}
            for chunk in self.chunks(key):
                index.setdefault(chunk[0][:depth], []).append(chunk)
            self._by_lead[key] = depth, index
        depth, index = self._by_lead[key]
        leads = itertools.product(*(range(o, o + n) for o, n in zip(box[0][:depth], box[1][:depth], strict=True)))
        near = [chunk for lead in leads for chunk in index.get(lead, [])]
        return [chunk for chunk in near if intersection(box, chunk)]

    def read(self, key: str, box: Box) -> Tensor:
        """That part of the tensor, put together from the chunks that hold it."""
        out: Tensor | None = None
        filled = 0
        for chunk in self.chunks_at(key, box):
            common = intersection(box, chunk)
            assert common is not None
            part = self._load(key, chunk[0])
            if tuple(part.shape) != chunk[1] or part.dtype != self.dtype(key):
                raise ConfigError(f"{self.folder}: a part of {key!r} is not what .metadata says", "use another copy")
            if chunk == box:
                return part.contiguous()
            if out is None:
                out = torch.empty(box[1], dtype=self.dtype(key))
            source, target = _slices(common, chunk[0]), _slices(common, box[0])
            out[target] = part[source]
            filled += math.prod(common[1])
        if out is None or filled != math.prod(box[1]):
            raise InvariantError(f"{self.folder}: {key!r} {box} is not covered by its chunks")
        return out

    def read_object(self, key: str) -> bytes:
        """A stored object that is no tensor, as it lies in its file."""
        info = self._storage[key, None]
        with FileSlice(self._fd(info.relative_path), info.offset, info.length) as blob:
            return blob.readall()

    def _load(self, key: str, offsets: tuple[int, ...]) -> Tensor:
        # The last chunk stays: a large one is cut into several blocks one after another.
        last: tuple[tuple[str, tuple[int, ...]], Tensor] | None = getattr(self._local, "last", None)
        if last and last[0] == (key, offsets):
            return last[1]
        self._local.last = last = None
        info = self._storage[key, offsets]
        with FileSlice(self._fd(info.relative_path), info.offset, info.length) as blob:
            try:
                tensor: Tensor = torch.load(blob, map_location="cpu", weights_only=True)
            except Exception as error:
                raise ConfigError(
                    f"{self.folder / info.relative_path}: {key!r} at byte {info.offset} cannot be read"
                    f" ({type(error).__name__})",
                    "use another copy of the checkpoint",
                ) from None
        self._local.last = ((key, offsets), tensor)
        return tensor

    def _fd(self, name: str) -> int:
        return self._files.fd(self.folder / name)


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes share."""
    starts = tuple(map(max, a[0], b[0]))
    ends = [min(o + s for o, s in pair) for pair in zip(zip(*a, strict=True), zip(*b, strict=True), strict=True)]
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def _slices(box: Box, origin: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o - zero, o - zero + size) for o, size, zero in zip(*box, origin, strict=True))
