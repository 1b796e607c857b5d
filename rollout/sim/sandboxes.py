"""The environments' capacity: a number of sandboxes for the whole cluster, first come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Sandboxes:
    """`limit` 0: as many as are asked for."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.peak = 0
        self._waiting: deque[Callable[[], bool]] = deque()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def lease(self, ready: Callable[[], bool]) -> None:
        """Call `ready` when a sandbox is free; it answers whether it takes it."""
        self._waiting.append(ready)
        self._serve()

    def release(self) -> None:
        self.used -= 1
        self._serve()

    def _serve(self) -> None:
        while self._waiting and (not self.limit or self.used < self.limit):
            self.used += 1
            self.peak = max(self.peak, self.used)
            if not self._waiting.popleft()():
                self.used -= 1
