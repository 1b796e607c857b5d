"""Micro-batches keep to their budget, are few, and level their tokens; lanes that meet then wait for little."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_venus.partition import Parts, first_fit, level, micro_batches

LENGTHS = st.lists(st.integers(1, 120), max_size=12)


def in_order(lengths: Sequence[int], budget: int) -> Parts:
    """The rule to beat: the longest first, a new part whenever the last one has no room."""
    parts: Parts = []
    room = 0
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if lengths[index] > room:
            parts.append([])
            room = budget
        parts[-1].append(index)
        room -= lengths[index]
    return parts


def sums(lengths: Sequence[int], parts: Parts) -> list[int]:
    return [sum(lengths[index] for index in part) for part in parts]


def lane_time(lengths: Sequence[int], parts: Parts, lanes: int) -> int:
    """Tokens one after another when `lanes` processes compute neighbours together and wait for the longest."""
    loads = sums(lengths, parts)
    return sum(max(loads[start : start + lanes]) for start in range(0, len(loads), lanes))


@given(LENGTHS, st.integers(1, 100), st.integers(1, 4))
def test_parts_hold_all_within_the_budget(lengths: list[int], budget: int, multiple: int) -> None:
    parts = micro_batches(lengths, budget, multiple)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    loads = sums(lengths, parts)
    assert all(part and (load <= budget or len(part) == 1) for part, load in zip(parts, loads, strict=True))
    assert loads == sorted(loads, reverse=True)
    assert len(parts) % multiple == 0 or len(parts) == len(lengths)
    if multiple == 1:
        assert len(parts) <= len(first_fit(lengths, budget)) <= len(in_order(lengths, budget))


@given(LENGTHS, st.integers(1, 6))
def test_level_parts(lengths: list[int], count: int) -> None:
    parts = level(lengths, count)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    if lengths:
        loads = sums(lengths, parts)
        # No difference is ever larger than the largest length, and no part stays empty for nothing.
        assert max(loads) - min(loads) <= max(lengths)
        assert sum(map(bool, parts)) == min(count, len(lengths))


def test_level_by_hand() -> None:
    # The differences: 8 − 7 = 1, 6 − 5 = 1, then 4 − 1 − 1 = 2. The longest into the emptiest part would leave 4.
    lengths = [8, 7, 6, 5, 4]
    assert sorted(sums(lengths, level(lengths, 2))) == [14, 16]
    assert sorted(sums([4, 5, 6, 7, 8, 9], level([4, 5, 6, 7, 8, 9], 3))) == [13, 13, 13]


@pytest.mark.parametrize("lanes", [2, 4])
def test_lanes_wait_for_little(lanes: int) -> None:
    """Groups of 16 whose lengths spread over 1 : 64, as agents' do: how much longer than with perfectly even lanes."""
    generator = random.Random(7)
    ours = rule = even = 0.0
    for _ in range(50):
        lengths = [int(64 * 64 ** generator.random()) for _ in range(16)]
        ours += lane_time(lengths, micro_batches(lengths, 4096, lanes), lanes)
        rule += lane_time(lengths, in_order(lengths, 4096), lanes)
        even += sum(lengths) / lanes
    print(f"{lanes} lanes: {ours / even:.3f}, greedy in order {rule / even:.3f}")
    assert ours / even <= {2: 1.05, 4: 1.15}[lanes]
    assert rule / even >= {2: 1.15, 4: 1.45}[lanes]


def test_few_sequences_are_spread_over_lanes() -> None:
    """All would fit one micro-batch, while the other lanes wait: each lane gets its own."""
    assert [len(part) for part in micro_batches([30, 20, 10, 40], 1000, 2)] == [2, 2]
    assert sums([30, 20, 10, 40], micro_batches([30, 20, 10, 40], 1000, 2)) == [50, 50]
    assert len(micro_batches([30, 20, 10], 1000, 4)) == 3
