"""PURE: which worker gets a new group. All members stay on one worker: they share the prompt's prefix."""

from __future__ import annotations

from collections.abc import Iterable


def least_loaded(loads: Iterable[tuple[str, int]]) -> str | None:
    """Worker with the fewest trajectories, open or queued; the first one of equals, None without workers."""
    best = min(loads, key=lambda item: item[1], default=None)
    return None if best is None else best[0]
