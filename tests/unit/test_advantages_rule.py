"""The rule of a run: shaped rewards, what is sealed under each estimator, and what the dispatcher makes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.config import AdvantageConfig
from rollout.policy.advantages import AdvantageRule, group_advantages, overlong_penalty


def test_overlong_by_hand() -> None:
    # Free up to 100 − 20 tokens, then 1/20 a token, the whole penalty from 100 on.
    expected = {0: 0.0, 80: 0.0, 81: -0.05, 90: -0.5, 99: -0.95, 100: -1.0, 5000: -1.0}
    assert {tokens: overlong_penalty(tokens, 100, 20, 1.0) for tokens in expected} == pytest.approx(expected)
    assert overlong_penalty(90, 100, 20, 0.4) == pytest.approx(-0.2)
    assert overlong_penalty(10**6, 0, 0, 1.0) == 0.0
    # Without a buffer the penalty is a step.
    assert [overlong_penalty(tokens, 100, 0, 1.0) for tokens in (100, 101)] == [0.0, -1.0]


@given(st.integers(0, 300), st.integers(1, 200), st.integers(0, 200))
def test_overlong_falls(tokens: int, limit: int, buffer: int) -> None:
    buffer = min(buffer, limit)
    now, longer = (overlong_penalty(count, limit, buffer, 2.0) for count in (tokens, tokens + 1))
    assert -2.0 <= longer <= now <= 0.0


def test_estimators() -> None:
    rewards, tokens = [1.0, 0.0, 0.0, 1.0], [10, 20, 30, 40]
    plain = AdvantageRule()
    assert plain.shaped(rewards, tokens) == rewards
    assert plain.of_group(rewards) == group_advantages(rewards, normalise_std=True)
    assert not plain.needs_batch
    assert AdvantageRule(normalise_std=False).of_group(rewards) == [0.5, -0.5, -0.5, 0.5]
    # The batch divides by its std later: here stands what it normalises.
    batch = AdvantageRule(estimator="batch", normalise_std=False)
    assert batch.of_group(rewards) == rewards and batch.needs_batch
    baseline = AdvantageRule(estimator="group_batch", normalise_std=False)
    assert baseline.of_group(rewards) == [0.5, -0.5, -0.5, 0.5] and baseline.needs_batch


def test_penalty_moves_the_advantage() -> None:
    """Equal rewards of unequal lengths carry a signal once the overlong one is penalised."""
    rule = AdvantageRule(overlong_tokens=100, overlong_buffer=50, normalise_std=False)
    shaped = rule.shaped([1.0, 1.0], [10, 75])
    assert shaped == [1.0, 0.5]
    assert rule.of_group(shaped) == [0.25, -0.25]


def test_rule_has_every_key_of_the_config() -> None:
    config = AdvantageConfig(
        estimator="batch", normalise_std=False, overlong_tokens=9, overlong_buffer=3, overlong_factor=0.5
    )
    rule = AdvantageRule.from_config(config)
    assert {name: getattr(rule, name) for name in rule.__struct_fields__} == vars(config)
    assert AdvantageRule.from_config(AdvantageConfig()) == AdvantageRule()
