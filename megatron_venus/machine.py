"""What this machine has for a run: its GPUs, as `nvidia-smi` lists them, and its memory. No torch here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

_TIMEOUT_S = 20.0


def gpu_memories() -> list[int]:
    """Memory of each GPU that this process may use, in bytes; empty without a driver, or where they are hidden."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if (visible is not None and visible.strip() in ("", "-1")) or shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    memories = [int(line) << 20 for line in done.stdout.split("\n") if line.strip().isdigit()]
    return memories if visible is None else memories[: len(visible.split(","))]


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(gpu_memories())
    return [name.strip() for name in named.split(",")][:count] if named is not None else [str(n) for n in range(count)]


def host_memory() -> int:
    """Bytes of memory of this machine."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
