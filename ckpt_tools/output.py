"""Output folders, complete or absent: room is checked, all is written beside, made durable, then renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from envclient.base.errors import ConfigError, PreflightError
from envclient.base.files import fsync_dir

_MARGIN_BYTES = 64_000_000
"""Kept free beside what is written."""


def check_target(out: Path, needed_bytes: int) -> None:
    """Refuse a target that is taken or has no room.

    Raises:
        ConfigError: the folder is there and not empty.
        PreflightError: the disk is too small; names the sizes.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"output {str(out)!r} exists already", "remove it or choose another")
    existing = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes + _MARGIN_BYTES:
        raise PreflightError(
            f"output {str(out)!r} needs {gigabytes(needed_bytes + _MARGIN_BYTES)}, its disk has {gigabytes(free)} free",
            "choose a larger disk or make room",
        )


@contextlib.contextmanager
def complete_or_absent(out: Path) -> Iterator[Path]:
    """A folder to write in; it becomes `out` when the block ends well and is removed when it does not."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    for stale in out.parent.glob(f".{out.name}.*.partial"):
        pid = stale.name.split(".")[-2]
        if pid.isdigit() and not Path("/proc", pid).exists():  # its writer was killed
            shutil.rmtree(stale)
    beside = out.with_name(f".{out.name}.{os.getpid()}.partial")
    beside.mkdir()
    try:
        yield beside
        _make_durable(beside)
        if out.exists():
            out.rmdir()  # empty: `check_target`
        os.rename(beside, out)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    fsync_dir(out.parent)


def _make_durable(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            fsync_dir(path)
        else:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
    fsync_dir(folder)


def file_sizes(folder: Path) -> dict[str, int]:
    """Path relative to the folder → bytes, of every file in it."""
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}


def gigabytes(size: float) -> str:
    """A number of bytes for people."""
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
