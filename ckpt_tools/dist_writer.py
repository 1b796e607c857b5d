"""Writes Megatron's distributed checkpoint (`torch_dist`) a chunk at a time, through torch's own writer.

Each file's chunks become a plan as if a rank of its own had made it; a tensor exists only while its chunk is written.
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import BytesIOWriteData, TensorWriteData, WriteItem, WriteItemType

from ckpt_tools.dist_reader import BACKEND, COMMON, CONFIG
from ckpt_tools.layout import Box
from ckpt_tools.raw import SmallWrites
from ckpt_tools.workers import Workers
from envclient.base.files import write_json_atomic

THREADS = 2
"""Files written at a time: one waits for the disk while the other reads."""
FILE_BYTES = 1_000_000_000
"""A file is closed after this many bytes."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a tensor, made when its turn comes."""

    key: str
    global_shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        return torch.Size(self.box[1]).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class StoredObject:
    """Something that is no tensor, already in bytes."""

    key: str
    data: bytes


def into_files(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Consecutive chunks, a file's worth each."""
    files: list[list[Chunk]] = []
    filled = FILE_BYTES
    for chunk in chunks:
        if filled >= FILE_BYTES:
            files.append([])
            filled = 0
        files[-1].append(chunk)
        filled += chunk.nbytes
    return files


class _Files(FileSystem):  # type: ignore[misc]
    """torch's files, written in small calls."""

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
        else:
            with io.BufferedWriter(SmallWrites(path)) as stream:
                yield stream


class _Planner(DefaultSavePlanner):  # type: ignore[misc]
    """Hands torch's writer each piece of data as it asks for it."""

    def __init__(
        self, sources: dict[tuple[str, tuple[int, ...]], Chunk], objects: dict[str, bytes], workers: Workers
    ) -> None:
        super().__init__()
        self._sources, self._objects, self._workers = sources, objects, workers

    def resolve_data(self, write_item: Any) -> Any:
        self._workers.check()
        index = write_item.index
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._objects[index.fqn])
        return self._sources[index.fqn, tuple(index.offset)].make()


def write(
    folder: Path, files: Sequence[Sequence[Chunk]], *, objects: Sequence[StoredObject] = (), common: bytes | None = None
) -> None:
    """Make `folder` (which exists) a whole distributed checkpoint of the chunks and objects.

    `common` is the content of Megatron's file of small values; without it, one of a checkpoint that holds only weights.
    """
    plans = [SavePlan([_item(chunk) for chunk in chunks]) for chunks in files]
    if objects:
        plans.append(SavePlan([_object_item(item) for item in objects]))
    plans, metadata = create_default_global_save_plan(plans)
    writer = FileSystemWriter(folder, sync_files=True)
    writer.fs = _Files()
    plans = writer.prepare_global_plan(plans)
    workers = Workers(THREADS)
    planner = _Planner(
        {(chunk.key, chunk.box[0]): chunk for chunks in files for chunk in chunks},
        {item.key: item.data for item in objects},
        workers,
    )

    def write_file(plan: Any) -> Any:
        return writer.write_data(plan, planner).value()

    results = workers.run([functools.partial(write_file, plan) for plan in plans])
    write_json_atomic(folder / CONFIG, BACKEND)
    if common is None:
        torch.save({"content_metadata": {"singleton_local_shards": False}}, folder / COMMON)
    else:
        (folder / COMMON).write_bytes(common)
    writer.finish(metadata, results)


def _item(chunk: Chunk) -> Any:
    offsets, sizes = map(torch.Size, chunk.box)
    return WriteItem(
        index=MetadataIndex(chunk.key, offsets),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=chunk.dtype),
            size=torch.Size(chunk.global_shape),
        ),
    )


def _object_item(item: StoredObject) -> Any:
    return WriteItem(
        index=MetadataIndex(item.key), type=WriteItemType.BYTE_IO, bytes_io_data=BytesIOWriteData(nbytes=len(item.data))
    )
