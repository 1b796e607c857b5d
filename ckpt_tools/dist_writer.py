"""Writes Megatron's distributed checkpoint (`torch_dist`) a chunk at a time; files may be written by several threads.

A chunk is a `torch.save` blob at the end of a file; `.metadata` (torch's) says what is where. The blobs carry no
CRC-32: `manifest.json` has a checksum of every tensor, and the CRC would be a seventh of a conversion's time.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from ckpt_tools.dist_reader import BACKEND, COMMON, CONFIG
from ckpt_tools.layout import Box
from ckpt_tools.raw import SmallWrites
from envclient.base.files import write_json_atomic

THREADS = 3
"""Files written at a time: one waits for the disk while two read and hash."""
FILE_BYTES = 1_000_000_000
"""A file is closed after this many bytes."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A part of a tensor."""

    key: str
    global_shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype

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


class DistFile:
    """One file of the checkpoint, open for one thread."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._stream = io.BufferedWriter(SmallWrites(path))
        self.chunks: list[Chunk] = []
        self.results: list[Any] = []

    def add(self, chunk: Chunk, tensor: Tensor) -> None:
        """Append the chunk, whose content is `tensor`: contiguous, with memory of its own."""
        start = self._stream.tell()
        torch.save(tensor, self._stream)
        self._note(MetadataIndex(chunk.key, torch.Size(chunk.box[0])), start)
        self.chunks.append(chunk)

    def add_object(self, item: StoredObject) -> None:
        """Append something that is no tensor."""
        start = self._stream.tell()
        self._stream.write(item.data)
        self._note(MetadataIndex(item.key), start)

    def close(self) -> None:
        """Its content is durable when this returns."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()

    def abandon(self) -> None:
        """What was not written yet never will be."""
        self._stream.raw.close()

    def _note(self, index: Any, start: int) -> None:
        length = self._stream.tell() - start
        storage = _StorageInfo(self._name, start, length)
        self.results.append(WriteResult(index=index, size_in_bytes=length, storage_data=storage))


class DistWriter:
    """A distributed checkpoint in the making, in a folder that exists. Not whole before `finish`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[int, DistFile] = {}

    @contextlib.contextmanager
    def file(self, number: int) -> Iterator[DistFile]:
        """The file of that number, new; complete and durable when the block ends well."""
        file = DistFile(self._folder / f"__{number}_0.distcp")
        try:
            yield file
            file.close()
        except BaseException:
            file.abandon()
            raise
        self._files[number] = file

    def finish(self, *, objects: Sequence[StoredObject] = (), common: bytes | None = None) -> None:
        """Write the objects and what makes the folder whole.

        `common` is the content of Megatron's file of small values; without it, one of a checkpoint that holds only
        weights.
        """
        if objects:
            with self.file(max(self._files, default=-1) + 1) as file:
                for item in objects:
                    file.add_object(item)
        written = [file for _, file in sorted(self._files.items())]
        entries: dict[str, Any] = {item.key: BytesStorageMetadata() for item in objects}
        for chunk in (chunk for file in written for chunk in file.chunks):
            entry = entries.setdefault(
                chunk.key,
                TensorStorageMetadata(
                    properties=TensorProperties(dtype=chunk.dtype), size=torch.Size(chunk.global_shape), chunks=[]
                ),
            )
            offsets, sizes = map(torch.Size, chunk.box)
            entry.chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
        write_json_atomic(self._folder / CONFIG, BACKEND)
        if common is None:
            torch.save({"content_metadata": {"singleton_local_shards": False}}, self._folder / COMMON)
        else:
            (self._folder / COMMON).write_bytes(common)
        FileSystemWriter(self._folder).finish(Metadata(entries), [file.results for file in written])


@contextlib.contextmanager
def no_crc() -> Iterator[None]:
    """Within, `torch.save` computes no CRC-32."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)
