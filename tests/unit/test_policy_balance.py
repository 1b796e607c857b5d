"""`venus` evens KV memory out: a pending turn goes where contexts hold less, if its KV can be copied there."""

from __future__ import annotations

import pytest

from rollout.policy.settings import PolicySettings
from rollout.types import (
    AnyCommand,
    Capabilities,
    MoveTrajectory,
    PriorityClass,
    SetClass,
    TurnEnded,
    TurnReady,
    WorkerJoined,
)
from tests.unit.dispatcher_kit import Bench, of


class Pair(Bench):
    """Two workers of 1,000 KV tokens; groups of one trajectory, placed in turn."""

    def __init__(self, *, host_kv_tokens: int, migration: bool = True) -> None:
        self.host_kv_tokens = host_kv_tokens
        policy = PolicySettings(name="venus", growth_tokens=0, fill=1.0, reserve=0.0, order="admission")
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
