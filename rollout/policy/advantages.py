"""PURE: from a sealed group's rewards to its advantages (GRPO, Dr.GRPO, REINFORCE++), and DAPO's overlong penalty.

Called once a group, with one reward a trajectory, however many turns or fragments it had; groups never mix, so unequal
sizes (shrunken groups) stay separate. The dispatcher calls it when it seals a group; the actor calls it again where the
reward holds a KL penalty, and finishes REINFORCE++'s advantages, which need the whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rollout.types import Record

if TYPE_CHECKING:
    from rollout.config import AdvantageConfig

STD_EPSILON = 1e-6
"""Added to the standard deviation (GRPO)."""

EQUAL_REWARDS = 1e-9
"""Rewards closer than this are equal: 0.1 + 0.2 and 0.3 are the same reward."""

ESTIMATORS = ("group", "batch", "group_batch")
"""Values of `rollout.advantage.estimator`."""


class AdvantageRule(Record, frozen=True):
    """How rewards become advantages. Names and meanings are those of `rollout.config.AdvantageConfig`."""

    estimator: str = "group"
    normalise_std: bool = True
    overlong_tokens: int = 0
    overlong_buffer: int = 0
    overlong_factor: float = 1.0

    @classmethod
    def from_config(cls, config: AdvantageConfig) -> AdvantageRule:
        """The built config (duck-typed, so that this file stays pure)."""
        return cls(
            estimator=config.estimator,
            normalise_std=config.normalise_std,
            overlong_tokens=config.overlong_tokens,
            overlong_buffer=config.overlong_buffer,
            overlong_factor=config.overlong_factor,
        )

    @property
    def needs_batch(self) -> bool:
        """Whether advantages are normalised over the whole batch, so that no backward pass can start before it ends."""
        return self.estimator != "group"

    def shaped(self, rewards: Sequence[float], tokens: Sequence[int]) -> list[float]:
        """Rewards with the overlong penalty; `tokens` are generated ones."""
        return [
            reward + overlong_penalty(count, self.overlong_tokens, self.overlong_buffer, self.overlong_factor)
            for reward, count in zip(rewards, tokens, strict=True)
        ]

    def of_group(self, shaped: Sequence[float]) -> list[float]:
        """Advantages of a group; where the batch normalises them, what it normalises: R, or R − mean of the group."""
        if self.estimator == "batch":
            return list(shaped)
        return group_advantages(shaped, normalise_std=self.normalise_std and self.estimator == "group")


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


def overlong_penalty(tokens: int, limit: int, buffer: int, factor: float) -> float:
    """factor · clip((limit − buffer − tokens) / buffer, −1, 0): DAPO's soft overlong punishment (Yu et al. 2025).

    0 up to limit − buffer generated tokens, then falling linearly to −factor at `limit`; `limit` 0: no penalty.
    """
    if not limit or tokens <= limit - buffer:
        return 0.0
    if tokens >= limit:
        return -factor
    return factor * (limit - buffer - tokens) / buffer
