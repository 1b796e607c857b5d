"""Reference tiers: what a class refers to, and how much of a cache it may take."""

from __future__ import annotations

import pytest

from rollout.policy.tiers import HIGH_REF, LOW_REF, UNUSED, budget, evicts_up_to, shared_tier, tier_of
from rollout.types import PriorityClass


def test_whoever_comes_back_keeps_a_reference() -> None:
    assert [tier_of(each) for each in PriorityClass] == [HIGH_REF, LOW_REF, LOW_REF], "a parked one comes back"


@pytest.mark.parametrize(
    ("references", "tier"),
    [([5, 0, 0], UNUSED), ([5, 1, 0], LOW_REF), ([0, 7, 1], HIGH_REF), ([0, 0, 0], UNUSED)],
)
def test_a_shared_prefix_has_its_best_tier(references: list[int], tier: int) -> None:
    assert shared_tier(references) == tier


def test_nobody_evicts_a_better_class() -> None:
    evictable = [10, 20, 40]
    takes = [budget(100, 30, evictable, evicts_up_to(high, tiers=True)) for high in (False, True)]
    assert takes == [100 - 30 - 40, 100 - 30], "LOW leaves HIGH's pages alone, HIGH takes all that is not in use"
    assert budget(100, 30, evictable, UNUSED) == 100 - 30 - 40 - 20
    plain = [70, 0, 0]
    assert [budget(100, 30, plain, evicts_up_to(high, tiers=False)) for high in (False, True)] == [70, 70]
