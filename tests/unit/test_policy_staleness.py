"""Version spans, promotion and reserved places, by hand."""

from __future__ import annotations

from rollout.policy.placement import least_loaded
from rollout.policy.staleness import is_promoted, is_stale, leaves_room_for_older, version_span


def test_spans() -> None:
    assert version_span(3, 3) == 1
    assert version_span(3, 4) == 2
    assert version_span(-1, -1) == 0


def test_promoted_at_the_last_valid_version_then_stale() -> None:
    assert [is_promoted(3, version, 2) for version in (3, 4, 5)] == [False, True, True]
    assert [is_stale(3, version, 2) for version in (3, 4, 5)] == [False, False, True]
    assert is_promoted(3, 3, 1) and is_stale(3, 4, 1)


def room(oldest: int, older: list[tuple[int, int]], free: int, step: int, batch: int, span: int) -> bool:
    return leaves_room_for_older(oldest, older, free=free, step=step, batch=batch, max_span=span)


def test_a_fresh_group_takes_only_places_that_promoted_ones_leave() -> None:
    # S = 2, step 6 (version 5): groups of version 4 are promoted.
    assert room(5, [(4, 2), (5, 3)], free=3, step=6, batch=4, span=2)
    assert not room(5, [(4, 2), (5, 3)], free=2, step=6, batch=4, span=2)


def test_a_promoted_group_takes_any_place() -> None:
    assert room(4, [(4, 9)], free=1, step=6, batch=4, span=2)


def test_deadlines_that_meet_in_a_later_batch_count_too() -> None:
    # S = 3, B = 1, step 2 (version 1): two groups of version 0 need steps 2 and 3, so a fresh one cannot have step 2.
    assert not room(1, [(0, 2), (1, 1)], free=1, step=2, batch=1, span=3)
    assert room(1, [(0, 1), (1, 1)], free=1, step=2, batch=1, span=3)


def test_groups_past_their_deadline_count_for_the_current_batch() -> None:
    assert not room(5, [(1, 1)], free=1, step=6, batch=4, span=2)


def test_placement_takes_the_least_loaded_then_the_first() -> None:
    assert least_loaded([("a", 2), ("b", 1), ("c", 1)]) == ("b", 1)
    assert least_loaded([]) is None
