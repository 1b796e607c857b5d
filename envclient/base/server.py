"""The HTTP server of a role's process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn


class RoleServer(uvicorn.Server):
    """uvicorn without its signal handlers: a role has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
