"""A process's memory at its peak, by the kernel's account."""

from __future__ import annotations

import os
from pathlib import Path

_at_reset: dict[int, int] = {}


def _status(pid: int, field: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def reset_peak(pid: int | None = None) -> None:
    """From here on peaks of the process (by default this one) count."""
    pid = pid or os.getpid()
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    _at_reset[pid] = _status(pid, "VmRSS")


def extra_bytes(pid: int | None = None) -> int:
    """Resident bytes at the peak since the reset, beyond those at the reset."""
    pid = pid or os.getpid()
    return _status(pid, "VmHWM") - _at_reset[pid]
