"""Bytes between files and tensors: positioned reads into fresh memory, positioned writes, slices of a file.

Reads are no memory maps: what is read is bounded, owned by the reader, and a file that shrinks meanwhile is an error
and not a crash of the process.
"""

from __future__ import annotations

import io
import os
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from envclient.base.errors import PreflightError

WRITE_BYTES = 1 << 20
"""Most bytes of one write. Linux 6.18, ext4: 1 GB in writes of 16 MB costs 0.4 to 2.2 s of CPU, of 1 MB 0.2 s."""


def as_bytes(tensor: Tensor) -> memoryview:
    """The raw bytes of a contiguous CPU tensor, not copied."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def read_into(fd: int, tensor: Tensor, offset: int) -> None:
    """Fill a contiguous tensor from `offset` of the file.

    Raises:
        PreflightError: the file ends before.
    """
    view = as_bytes(tensor)
    while view:
        count = os.preadv(fd, [view], offset)
        if not count:
            raise PreflightError("a file of the checkpoint became shorter while it was read", "copy it again")
        view, offset = view[count:], offset + count


def write_from(fd: int, tensor: Tensor, offset: int) -> None:
    """Write a contiguous tensor's bytes at `offset` of the file."""
    view = as_bytes(tensor)
    while view:
        count = os.pwrite(fd, view[:WRITE_BYTES], offset)
        view, offset = view[count:], offset + count


class SmallWrites(io.FileIO):
    """A new file that takes at most `WRITE_BYTES` a call; a buffered writer above it goes on with the rest."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, "w")

    def write(self, data: Any) -> int:
        return super().write(memoryview(data)[:WRITE_BYTES])


class OpenFiles:
    """Files opened for reading at first use, shared by threads (all reads are positioned), closed with their owner."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fds: dict[Path, int] = {}

    def fd(self, path: Path) -> int:
        with self._lock:
            if path not in self._fds:
                self._fds[path] = os.open(path, os.O_RDONLY)
            return self._fds[path]

    def __del__(self) -> None:
        for fd in self._fds.values():
            os.close(fd)


class FileSlice(io.RawIOBase):
    """Bytes [start, start + length) of an open file as a file of their own, for `torch.load`."""

    def __init__(self, fd: int, start: int, length: int) -> None:
        self._fd, self._start, self._length, self._at = fd, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        count = os.preadv(self._fd, [view], self._start + self._at) if view else 0
        self._at += count
        return count
