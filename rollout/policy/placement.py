"""PURE: which worker gets a new group. All members stay on one worker: they share the prompt's prefix."""

from __future__ import annotations

from collections.abc import Iterable


def least_loaded(loads: Iterable[tuple[str, int]]) -> tuple[str, int] | None:
    """Worker with the fewest trajectories, open or queued, and their number; the first one of equals, None without
    workers."""
    return min(loads, key=lambda item: item[1], default=None)
