"""Keys of the environment service."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class EnvConfig:
    """Environments' part of the run config."""

    backend: str = "process"
    """`process`: bubblewrap sandboxes on this machine."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """0: any free port."""
    url: str = ""
    """Of a service that already runs elsewhere; empty: the launcher starts one."""
    max_sandboxes: int = 256
    """Sandboxes alive at once; a lease beyond it waits."""
    lease_wait_s: float = 120.0
    """Seconds a lease may wait for room before it is refused."""
