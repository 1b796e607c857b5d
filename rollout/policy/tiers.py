"""PURE: reference tiers of a worker's KV cache, and how much of it each class may take (paper §4.2).

A page is referenced by the trajectories that will read it again, as their class says. Pages of no one that is left go
first, then those of LOW trajectories, then those of HIGH ones, and a request evicts nothing of a better tier than its
own. The simulator's engine runs these rules; a real engine's radix cache has a seat for them only.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollout.types import PriorityClass

UNUSED, LOW_REF, HIGH_REF = 0, 1, 2
"""Reference tiers, the first to be evicted first."""


def tier_of(priority: PriorityClass) -> int:
    """Tier of what a trajectory that has not ended refers to. PARKED goes as LOW: it comes back."""
    return HIGH_REF if priority is PriorityClass.HIGH else LOW_REF


def shared_tier(references: Sequence[int]) -> int:
    """Tier of a prefix that several trajectories share: the best of them.

    Args:
        references: how many of them are in each tier.
    """
    return HIGH_REF if references[HIGH_REF] > 0 else LOW_REF if references[LOW_REF] > 0 else UNUSED


def evicts_up_to(high: bool, tiers: bool) -> int:
    """Best tier that a request of the class may evict pages of. Without tiers all pages are in `UNUSED`."""
    return (HIGH_REF if high else LOW_REF) if tiers else UNUSED


def budget(capacity: int, locked: int, evictable: Sequence[int], limit: int) -> int:
    """Tokens that a request may take which evicts pages of tiers up to `limit`.

    Args:
        locked: tokens in use by requests.
        evictable: tokens not in use, by tier.
    """
    left = capacity - locked
    if limit < HIGH_REF:
        left -= evictable[HIGH_REF]
        if limit < LOW_REF:
            left -= evictable[LOW_REF]
    return left
