"""Virtual time: a heap of calls. Equal times run in the order they were asked for: a run depends on its seed alone."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Call = Callable[[], None]


class Clock:
    """Seconds since the start of the simulation."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Call]] = []
        self._number = 0
        self.calls_run = 0

    def at(self, time_s: float, call: Call) -> None:
        self._number += 1
        heapq.heappush(self._calls, (time_s, self._number, call))

    def after(self, seconds: float, call: Call) -> None:
        self.at(self.now + seconds, call)

    def step(self) -> bool:
        """Run the next call; False when there is none."""
        if not self._calls:
            return False
        self.now, _, call = heapq.heappop(self._calls)
        self.calls_run += 1
        call()
        return True
