"""PURE: which groups are critical; their trajectories are HIGH, all others LOW (paper §4.1).

Called by the dispatcher when a group's oldest version or the current version changes.
"""

from __future__ import annotations

from typing import Protocol

from rollout.policy.staleness import is_promoted
from rollout.types import PriorityClass


class CriticalPolicy(Protocol):
    """Decides the class of a group."""

    def class_of(self, oldest_version: int | None, version: int) -> PriorityClass:
        """Class of a group whose oldest trajectory began at `oldest_version` (None: none has begun)."""


class PromotedOnly:
    """First come, first served, except that a trajectory at its last valid version comes before all others."""

    def __init__(self, max_span: int) -> None:
        self._max_span = max_span

    def class_of(self, oldest_version: int | None, version: int) -> PriorityClass:
        if oldest_version is not None and is_promoted(oldest_version, version, self._max_span):
            return PriorityClass.HIGH
        return PriorityClass.LOW
