"""Group-relative advantages against hand-computed values."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.policy.advantages import group_advantages, rewards_equal


def test_grpo_by_hand() -> None:
    # mean 0.25, unbiased variance (3 · 0.0625 + 0.5625) / 3 = 0.25, std 0.5
    assert group_advantages([1.0, 0.0, 0.0, 0.0], normalise_std=True) == pytest.approx(
        [0.75 / 0.500001, -0.25 / 0.500001, -0.25 / 0.500001, -0.25 / 0.500001]
    )


def test_dr_grpo_by_hand() -> None:
    assert group_advantages([1.0, 0.0, 0.0, 0.0], normalise_std=False) == [0.75, -0.25, -0.25, -0.25]


@pytest.mark.parametrize("rewards", [[1.0], [0.0, 0.0], [0.1 + 0.2, 0.3], [7.0] * 8])
@pytest.mark.parametrize("normalise", [True, False])
def test_no_signal_is_exactly_zero(rewards: list[float], normalise: bool) -> None:
    assert group_advantages(rewards, normalise_std=normalise) == [0.0] * len(rewards)


def test_no_rewards_no_advantages() -> None:
    assert group_advantages([], normalise_std=True) == []


def test_equal_rewards() -> None:
    assert rewards_equal([0.1 + 0.2, 0.3])
    assert not rewards_equal([0.0, 0.001])


@given(st.lists(st.integers(-100, 100).map(lambda n: n / 10), min_size=2, max_size=16), st.integers(-50, 50))
def test_shift_order_and_scale(rewards: list[float], shift: int) -> None:
    advantages = group_advantages(rewards, normalise_std=True)
    assert abs(sum(advantages)) < 1e-6
    shifted = group_advantages([reward + shift for reward in rewards], normalise_std=True)
    assert shifted == pytest.approx(advantages, abs=1e-6)
    assert group_advantages(rewards[::-1], normalise_std=True) == pytest.approx(advantages[::-1])
    if not rewards_equal(rewards):
        assert statistics.stdev(advantages) == pytest.approx(1.0, abs=1e-4)
        order = sorted(range(len(rewards)), key=lambda i: (rewards[i], i))
        assert order == sorted(range(len(rewards)), key=lambda i: (advantages[i], i))
