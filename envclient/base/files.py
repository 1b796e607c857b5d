"""Files that are complete or absent: write beside, fsync, rename, fsync the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def fsync_dir(path: Path) -> None:
    """Make the entries of folder `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replace `path` by `data`: a reader or a crash sees the old content or the new, never a part."""
    raw = data.encode() if isinstance(data, str) else data
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(beside, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    fsync_dir(path.parent)


def write_json_atomic(path: Path, value: Any) -> None:
    """`write_atomic` of `value` as indented JSON with a closing newline."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> Any:
    """The JSON value in `path`."""
    return json.loads(path.read_text())


class JsonlWriter:
    """Appends one JSON object a line; every `write` reaches the kernel before it returns."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as its owner

    def write(self, row: bytes | dict[str, Any]) -> None:
        raw = row if isinstance(row, bytes) else json.dumps(row).encode()
        left = memoryview(raw + b"\n")
        while left:  # a raw file may write less than it was given
            left = left[self._file.write(left) :]

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Rows of a JSONL file; a torn last line (the writer was killed) is left out."""
    rows: list[dict[str, Any]] = []
    if not path.exists():
        return rows
    for line in path.read_bytes().split(b"\n"):
        if not line:
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return rows
