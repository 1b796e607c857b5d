"""What the dispatcher makes of a policy's decisions: classes, starts, moves, and deadlines of parked trajectories."""

from __future__ import annotations

import pytest

from rollout.policy.lengths import TrueLengths
from rollout.policy.settings import PolicySettings
from rollout.types import (
    AbortTrajectory,
    AnyCommand,
    Capabilities,
    MoveTrajectory,
    PriorityClass,
    SealGroup,
    SetClass,
    StartTrajectory,
    TurnEnded,
    TurnReady,
    WorkerLost,
)
from tests.unit.dispatcher_kit import Bench, of, started

HIGH, LOW, PARKED = PriorityClass.HIGH, PriorityClass.LOW, PriorityClass.PARKED


class PolicyBench(Bench):
    """The dispatcher under a policy, groups of one trajectory."""

    def __init__(
        self, name: str, *, workers: int = 1, kv_tokens: int = 1000, priority: bool = True, migration: bool = False
    ) -> None:
        policy = PolicySettings(name=name, growth_tokens=0, fill=1.0, reserve=0.0, order="admission", buffer_tokens=0)
        self.turns: dict[str, int] = {}
        super().__init__(
            workers=workers,
            capabilities=Capabilities(priority=priority, migration=migration),
            kv_tokens=kv_tokens,
            group_size=1,
            batch=3,
            deadline_s=50.0,
            policy=policy,
        )

    def prompts(self, count: int) -> list[AnyCommand]:
        return [command for _ in range(count) for command in self.prompt()]

    def ready(self, number: int, context: int) -> list[AnyCommand]:
        name = f"p{number}.0.0.0"
        self.turns[name] = self.turns.get(name, 0) + 1
        return self.send(TurnReady(trajectory_id=name, turn=self.turns[name], context_tokens=context))

    def turn(self, number: int, context: int, output: int) -> list[AnyCommand]:
        name = f"p{number}.0.0.0"
        return self.send(
            TurnEnded(
                trajectory_id=name, turn=self.turns[name], context_tokens=context, output_tokens=output, version=0
            )
        )

    def finish(self, number: int, worker: str = "w0") -> list[AnyCommand]:
        return self.end(f"p{number}.0.0.0", 1.0, worker=worker)


@pytest.mark.parametrize("name", ["paper", "fcfs_priority"])
def test_a_critical_trajectory_is_started_as_high(name: str) -> None:
    """The rule of demotion takes it for LOW until it is found to fit, within the same event."""
    bench = PolicyBench(name)
    (start,) = of(StartTrajectory, bench.prompts(1))
    assert start.priority is HIGH and start.cause.startswith("critical")
    assert bench.dispatcher.policy.jobs["p0.0.0.0"].priority is HIGH


@pytest.mark.parametrize("name", ["oracle", "venus"])
def test_a_group_that_is_always_the_longest_is_passed_over_for_one_batch_at_most(name: str) -> None:
    """One place for all. By length it waits until shorter groups have filled the batch, by admission not at all."""
    truth = TrueLengths(lambda name: (900, 900) if name.startswith("p1.") else (9, 9))
    policy = PolicySettings(name=name)
    bench = Bench(batch=2, group_size=1, async_factor=3.0, max_trajectories=1, truth=truth, policy=policy)
    begun = [each for _ in range(5) for each in started(bench.prompt())]
    while not begun[-1].startswith("p1."):
        begun += started(bench.end(begun[-1])) + started(bench.prompt())
    assert [each.split(".")[0] for each in begun] == (["p0", "p1"] if name == "venus" else ["p0", "p2", "p1"])


def test_a_parked_trajectory_is_told_why_and_its_deadline_waits() -> None:
    bench = PolicyBench("venus")
    assert len(of(StartTrajectory, bench.prompts(2))) == 2
    bench.ready(0, 500)
    bench.ready(1, 400)
    (parked,) = bench.turn(0, 500, 200)
    assert (parked.trajectory_id, parked.priority) == ("p1.0.0.0", PARKED) and "no room" in parked.cause
    assert of(AbortTrajectory, bench.tick(49.0)) == []
    late = bench.tick(2.0)
    assert [abort.trajectory_id for abort in of(AbortTrajectory, late)] == ["p0.0.0.0"], "the other one was parked"
    assert [(c.trajectory_id, c.priority is PARKED) for c in of(SetClass, late)] == [("p1.0.0.0", False)]
    assert of(AbortTrajectory, bench.tick(48.0)) == []
    assert len(of(AbortTrajectory, bench.tick(3.0))) == 1, "50 s since its start, the 51 s in the car park left out"


def test_workers_without_classes_are_told_none_but_what_waits_is_not_started() -> None:
    bench = PolicyBench("venus", priority=False)
    bench.prompts(2)
    bench.ready(0, 500)
    bench.ready(1, 400)
    assert bench.turn(0, 500, 200) == [], "one is parked: decided, not told"
    assert bench.dispatcher.policy.jobs["p1.0.0.0"].priority is PARKED
    started = of(StartTrajectory, bench.prompts(3))
    assert started == [], "a third would not fit"
    assert len(of(StartTrajectory, bench.finish(0))) == 1
    assert {command.priority for command in started} <= {LOW}


def test_a_pending_turn_moves_where_there_is_room_and_ends_there() -> None:
    bench = PolicyBench("venus", workers=2, migration=True)
    assert [c.worker for c in of(StartTrajectory, bench.prompts(3))] == ["w0", "w1", "w0"]
    bench.ready(0, 500)
    bench.ready(2, 300)
    bench.turn(2, 300, 10)
    bench.turn(0, 500, 300)
    (move,) = of(MoveTrajectory, bench.ready(2, 350))
    assert (move.worker, move.trajectory_id, move.to) == ("w0", "p2.0.0.0", "w1") and "parked" in move.cause
    assert len(of(SealGroup, bench.finish(2, worker="w1"))) == 1


def test_a_moved_trajectory_is_sampled_anew_when_its_new_worker_is_lost() -> None:
    bench = PolicyBench("venus", workers=2, migration=True)
    bench.prompts(3)
    bench.ready(0, 500)
    bench.ready(2, 300)
    bench.turn(2, 300, 10)
    bench.turn(0, 500, 300)
    bench.ready(2, 350)
    bench.send(WorkerLost(worker="w1", cause="killed"))
    assert bench.dispatcher.policy.jobs.keys() == {"p0.0.0.0", "p1.0.0.1", "p2.0.0.1"}


def test_program_aware_sends_new_programs_where_there_is_room() -> None:
    bench = PolicyBench("program_aware", workers=2, kv_tokens=1000)
    started = of(StartTrajectory, bench.prompts(1))
    bench.ready(0, 900)
    started += of(StartTrajectory, bench.prompts(3))
    assert [(c.trajectory_id, c.worker) for c in started] == [("p0.0.0.0", "w0"), ("p1.0.0.0", "w1")]
    assert len(of(StartTrajectory, bench.finish(0))) == 1, "an idle worker takes the next at once"
