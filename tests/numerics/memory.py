"""This process's memory at its peak, by the kernel's account. Torch's small blocks aside: allocators keep those."""

from __future__ import annotations

from pathlib import Path

_at_reset = 0


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def reset_peak() -> None:
    """From here on peaks count."""
    global _at_reset
    Path("/proc/self/clear_refs").write_text("5")
    _at_reset = _status("VmRSS")


def extra_bytes() -> int:
    """Resident bytes at the peak since the reset, beyond those at the reset."""
    return _status("VmHWM") - _at_reset
