"""`venus` evens work out: a pending turn goes where contexts hold less, if its KV can be copied there, and whoever is
parked goes where nobody waits."""

from __future__ import annotations

import pytest

from rollout.policy.settings import PolicySettings
from rollout.types import (
    AnyCommand,
    Capabilities,
    MoveTrajectory,
    PriorityClass,
    SetClass,
    StartTrajectory,
    TurnEnded,
    TurnReady,
    WorkerJoined,
)
from tests.unit.dispatcher_kit import Bench, of


class Pair(Bench):
    """Two workers of 1,000 KV tokens; groups of one trajectory, placed in turn."""

    def __init__(
        self, *, host_kv_tokens: int, migration: bool = True, share: bool = True, growth_tokens: int = 0, **more: float
    ) -> None:
        self.host_kv_tokens = host_kv_tokens
        keys = {"growth_tokens": growth_tokens, "fill": 1.0, "reserve": 0.0, "migration": share, **more}
        policy = PolicySettings(name="venus", **keys)
        capabilities = Capabilities(priority=True, migration=migration)
        super().__init__(workers=2, capabilities=capabilities, group_size=1, batch=3, policy=policy)

    def join(self, name: str, *, version: int = 0) -> list[AnyCommand]:
        return self.send(
            WorkerJoined(
                worker=name,
                slots=8,
                version=version,
                capabilities=self.capabilities,
                kv_tokens=1000,
                host_kv_tokens=self.host_kv_tokens,
            )
        )

    def play(self, number: int, turn: int, context: int, output: int) -> list[AnyCommand]:
        """A turn, from wanted to ended."""
        commands = self.ready(number, turn, context)
        name = f"p{number}.0.0.0"
        ended = TurnEnded(trajectory_id=name, turn=turn, context_tokens=context, output_tokens=output, version=0)
        return commands + self.send(ended)

    def ready(self, number: int, turn: int, context: int) -> list[AnyCommand]:
        return self.send(TurnReady(trajectory_id=f"p{number}.0.0.0", turn=turn, context_tokens=context))

    def crowd(self) -> list[AnyCommand]:
        """700 tokens on w0, 50 on w1; then a third trajectory, on w0, wants its first turn, and a second one."""
        for _ in range(3):
            self.prompt()
        self.play(0, 1, 600, 100)
        self.play(1, 1, 40, 10)
        return self.play(2, 1, 90, 10) + self.ready(2, 2, 110)


def test_a_running_trajectory_moves_from_the_fuller_worker_to_the_emptier() -> None:
    pair = Pair(host_kv_tokens=2000)
    (move,) = of(MoveTrajectory, pair.crowd())
    assert (move.worker, move.trajectory_id, move.to) == ("w0", "p2.0.0.0", "w1")
    assert "of its KV memory less held" in move.cause
    told = of(SetClass, pair.tick(1.0))
    assert told == [] and pair.dispatcher.policy.jobs["p2.0.0.0"].priority is PriorityClass.HIGH, "it has its place"
    assert of(MoveTrajectory, pair.play(2, 2, 110, 10) + pair.ready(2, 3, 130)) == [], "it does not go back"


@pytest.mark.parametrize(("host_kv_tokens", "migration"), [(0, True), (2000, False)])
def test_it_stays_where_its_kv_would_have_to_be_recomputed(host_kv_tokens: int, migration: bool) -> None:
    assert of(MoveTrajectory, Pair(host_kv_tokens=host_kv_tokens, migration=migration).crowd()) == []


def test_it_moves_without_its_kv_when_enough_is_left_to_generate() -> None:
    """110 tokens of context are worth computing again for 100 − 10 more, where 0.6 of the memory less is held."""
    (move,) = of(MoveTrajectory, Pair(host_kv_tokens=0, growth_tokens=100).crowd())
    assert (move.trajectory_id, move.to) == ("p2.0.0.0", "w1")
    dearer = Pair(host_kv_tokens=0, growth_tokens=100, move_recompute=1.0)
    assert of(MoveTrajectory, dearer.crowd()) == [], "0.6 · 90 tokens are worth 54 of context"


@pytest.mark.parametrize(("balanced", "worker"), [(True, "w1"), (False, "w0")])
def test_a_worker_for_which_nobody_waits_takes_whom_another_has_no_room_for(balanced: bool, worker: str) -> None:
    """p2 has not started: it goes without any help of the engines. Without sharing it waits for p0's end."""
    pair = Pair(host_kv_tokens=0, migration=False, share=balanced)
    for number in range(2):
        pair.prompt()
        pair.ready(number, 1, 900)
    assert of(StartTrajectory, pair.prompt()) == [], "900 of 1,000 tokens are taken on either worker"
    begun = of(StartTrajectory, pair.end("p1.0.0.0", worker="w1") + pair.end("p0.0.0.0", worker="w0"))
    assert [(start.trajectory_id, start.worker) for start in begun] == [("p2.0.0.0", worker)]
    assert begun[0].placed == ("parked here, and nobody waits on w1" if balanced else "fewest trajectories: 1")
