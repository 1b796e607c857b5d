"""PURE: the group-relative advantage of sealed groups (GRPO, Dr.GRPO).

Called once a group, with one reward a trajectory, however many turns or fragments it had; groups never mix, so unequal
sizes (shrunken groups) stay separate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

STD_EPSILON = 1e-6
"""Added to the standard deviation (GRPO)."""

EQUAL_REWARDS = 1e-9
"""Rewards closer than this are equal: 0.1 + 0.2 and 0.3 are the same reward."""


def group_advantages(rewards: Sequence[float], *, normalise_std: bool) -> list[float]:
    """A_i = (R_i − mean) / (std + 1e-6) with the unbiased std; without `normalise_std` R_i − mean (Dr.GRPO).

    Equal rewards give exactly 0.0, and so does a group of one (it is its own baseline).
    """
    n = len(rewards)
    if n < 2 or rewards_equal(rewards):
        return [0.0] * n
    mean = math.fsum(rewards) / n
    centred = [reward - mean for reward in rewards]
    if not normalise_std:
        return centred
    std = math.sqrt(math.fsum(d * d for d in centred) / (n - 1))
    return [d / (std + STD_EPSILON) for d in centred]


def rewards_equal(rewards: Sequence[float]) -> bool:
    """Whether the group carries no signal: what the dynamic filter (DAPO) drops."""
    return max(rewards) - min(rewards) <= EQUAL_REWARDS
