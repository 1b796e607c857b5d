"""Golden traces of the baselines, from their published rules by hand: who runs when, to the second.

`a`, `b`, … are groups of one trajectory unless a test says otherwise, in the order of admission; a turn of n tokens
runs n seconds. See `small_cluster_kit` for what is left out.
"""

from __future__ import annotations

import pytest

from tests.unit.small_cluster_kit import Script, SmallCluster

WITH_TOOL: Script = [(2, 3), (2, 0)]
"""Two tokens, a tool of three seconds, two tokens."""


def runs(policy: str, *scripts: Script, **keys: float) -> list[tuple[int, int, str]]:
    """Stretches of running, with the letter of each trajectory's group."""
    cluster = SmallCluster(policy, [[script] for script in scripts], **keys)  # type: ignore[arg-type]
    return [(since, until, "abcdef"[int(name.split(".")[0])]) for since, until, name in cluster.runs()]


def test_trajectory_holds_its_slot_while_its_tool_runs() -> None:
    """Slime: a trajectory keeps its slot from its first turn to its end (paper 2.2, 6.1: trajectory-level scheduling).

    One slot: a runs 0 to 2, its tool 2 to 5 leaves the slot idle, a runs 5 to 7; only then b starts.
    Two slots and three trajectories: b ends at 4 and c takes its slot, although a's has been idle since 2.
    """
    assert runs("trajectory", WITH_TOOL, [(4, 0)]) == [(0, 2, "a"), (5, 7, "a"), (7, 11, "b")]
    assert runs("trajectory", WITH_TOOL, [(4, 0)], [(1, 0)], slots=2) == [
        (0, 2, "a"), (0, 4, "b"), (4, 5, "c"), (5, 7, "a"),
    ]  # fmt: skip


def test_action_gives_the_slot_away_and_serves_turns_first_come_first_served() -> None:
    """RollFlash: slots are held by turns only, FCFS, nobody is preempted (paper 2.2, 6.1: action-level scheduling).

    b takes the slot at 2, when a's tool begins. a returns at 5, behind c, which waits since 0: b to 6, c to 7, a to 9.
    """
    assert runs("action", WITH_TOOL, [(4, 0)], [(1, 0)]) == [(0, 2, "a"), (2, 6, "b"), (6, 7, "c"), (7, 9, "a")]


def test_fcfs_priority_prefers_the_oldest_groups_whatever_their_length() -> None:
    """The ablation "priority by order of admission" (paper 6.3): the k oldest groups are critical; B = 1, so k = 1.

    b fills the slot that a's tool leaves; a returns at 5 and preempts it, 3 of b's 4 tokens are kept: b ends at 8.
    With action-level scheduling a ends at 8 and b at 6. A short c does not overtake: it is the youngest.
    """
    assert runs("fcfs_priority", WITH_TOOL, [(4, 0)]) == [(0, 2, "a"), (2, 5, "b"), (5, 7, "a"), (7, 8, "b")]
    assert runs("fcfs_priority", [(6, 0)], [(4, 0)], [(1, 0)]) == [(0, 6, "a"), (6, 10, "b"), (10, 11, "c")]


def test_longest_first_runs_the_longest_and_preempts_the_shorter() -> None:
    """Heddle (2603.28101): priority is the predicted length, renewed at every step; the longest preempts.

    a has 2 tokens, c 4, b 3 + 5 with a tool of 2 s. b (8) runs first, 0 to 3; c (4) before a (2) in the gap; at 5 b
    returns with 5 left, more than the 4 that c was predicted to have, and preempts it. Then c's last 2, then a.
    With 3 left instead of 5 b does not preempt: c to 7, b (3) before a (2).
    """
    assert runs("longest_first", [(2, 0)], [(3, 2), (5, 0)], [(4, 0)]) == [
        (0, 3, "b"), (3, 5, "c"), (5, 10, "b"), (10, 12, "c"), (12, 14, "a"),
    ]  # fmt: skip
    assert runs("longest_first", [(2, 0)], [(3, 2), (3, 0)], [(4, 0)]) == [
        (0, 3, "b"), (3, 7, "c"), (7, 10, "b"), (10, 12, "a"),
    ]  # fmt: skip


def test_program_aware_pauses_the_smallest_acting_program_and_resumes_it_when_it_fits() -> None:
    """ThunderAgent (2602.13692, `ThunderAgent/scheduler/router.py`): every 5 s resume what fits, then pause.

    Capacity 10, prompts of 1, two slots; a program counts its context at its last turn's start or end.
    At 0 no length is known: all three are active. b acts from 5 on with 6 tokens, a from 6 on with 7, c generates 30.
    Check at 5: 1 + 6 + 1 = 8 of 10. Check at 10: a 7 + b 6 + c 1 = 14: the smallest acting one, b, is paused.
    b's tool returns at 25: it waits although a slot is idle, since 6 > 10 - 8 at the check of 25. a runs 26 to 27 and
    is gone. Check at 30: 10 - 1 leaves room for 6: b runs 30 to 31, five seconds after its tool.
    """
    a, b, c = [(6, 20), (1, 0)], [(5, 20), (1, 0)], [(30, 0)]
    assert runs("program_aware", a, b, c, slots=2, kv_tokens=10) == [
        (0, 5, "b"), (0, 6, "a"), (5, 35, "c"), (26, 27, "a"), (30, 31, "b"),
    ]  # fmt: skip
    assert (25, 26, "b") in runs("program_aware", a, b, c, slots=2, kv_tokens=14), "14 of 14: nobody is paused"


def test_paper_runs_first_the_k_groups_that_are_expected_to_end_first() -> None:
    """VenusRL (paper 4.1, 4.3): F_g = the longest remaining member; the B smallest are HIGH and preempt LOW.

    B = 1. b (4 left) is critical, a (10 left) is not. b runs 0 to 2; a takes the idle slot during the tool; at 5 b
    preempts it (3 of a's 10 tokens are kept) and ends at 7; a's other 7 tokens last to 14.
    """
    assert runs("paper", [(10, 0)], WITH_TOOL) == [(0, 2, "b"), (2, 5, "a"), (5, 7, "b"), (7, 14, "a")]


def test_paper_judges_a_group_by_its_longest_member() -> None:
    """B = 1, groups of two. F = max(1, 6) = 6 and max(4, 4) = 4: the second group is critical and complete at 8.

    The first one's short member does not come first, although a shortest-trajectory-first rule would run it at 0.
    """
    cluster = SmallCluster("paper", [[[(1, 0)], [(6, 0)]], [[(4, 0)], [(4, 0)]]])
    assert cluster.runs() == [(0, 4, "1.0"), (4, 8, "1.1"), (8, 9, "0.0"), (9, 15, "0.1")]
    assert cluster.sealed_at == [8, 15]


@pytest.mark.parametrize(("hysteresis", "first"), [(0.95, "a"), (1.0, "b")])
def test_paper_replaces_a_critical_group_only_by_a_clearly_better_one(hysteresis: float, first: str) -> None:
    """a is critical when b comes. 19 is not below 0.95 * 20 = 19, but it is below 20."""
    assert runs("paper", [(20, 0)], [(19, 0)], hysteresis=hysteresis)[0][2] == first
