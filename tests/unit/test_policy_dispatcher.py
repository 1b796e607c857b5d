"""Single decisions of the dispatcher, step by step; and its config's errors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from envclient.base.errors import ConfigError
from rollout.config import RolloutConfig
from rollout.dispatcher import Dispatcher, DispatcherConfig
from rollout.types import (
    AbortTrajectory,
    Capabilities,
    CloseBatch,
    ClosePrompt,
    DeliverGroup,
    DropTrajectories,
    EvalRequested,
    FetchPrompts,
    FinishEval,
    GrantSync,
    PauseWorker,
    PriorityClass,
    PromptStatus,
    ResumeWorker,
    RunStarted,
    SealGroup,
    SetClass,
    SourceExhausted,
    StartTrajectory,
    StepFinished,
    StopRun,
    SyncFinished,
    SyncRequested,
    Tick,
    TrajectoryStatus,
    TurnEnded,
    WeightsAcknowledged,
    WorkerJoined,
    WorkerLost,
    WorkerPaused,
)
from tests.unit.dispatcher_kit import Bench, kinds, only, started


def test_fetches_as_many_prompts_as_the_gate_has_credits() -> None:
    assert Bench(batch=4, async_factor=1.5).first == [FetchPrompts(count=6)]
    assert Bench(batch=20, async_factor=1.15).first == [FetchPrompts(count=23)]


def test_waits_for_all_configured_workers() -> None:
    bench = Bench(batch=2, group_size=2, workers=2)
    assert bench.first == [FetchPrompts(count=2)]
    first, second = bench.prompt(), bench.prompt()
    assert {command.worker for command in first if isinstance(command, StartTrajectory)} == {"w0"}
    placed = [command.placed for command in first if isinstance(command, StartTrajectory)]
    assert placed == ["fewest trajectories: 0", *["with group p0.0"] * (len(placed) - 1)]
    assert {command.worker for command in second if isinstance(command, StartTrajectory)} == {"w1"}


def test_no_group_beyond_the_last_step() -> None:
    bench = Bench(batch=1, group_size=1, async_factor=2.0, steps=1)
    assert bench.first == [FetchPrompts(count=1)]
    bench.prompt()
    bench.end("p0.0.0.0")
    assert FetchPrompts not in kinds(bench.train("p0.0", 1))


def test_a_step_from_prompt_to_new_weights() -> None:
    bench = Bench(batch=1, group_size=2)
    assert started(bench.prompt()) == ["p0.0.0.0", "p0.0.1.0"]
    assert bench.ask() == []
    assert bench.end("p0.0.1.0", 1.0) == []
    seal, deliver = bench.end("p0.0.0.0", 0.0)
    assert isinstance(seal, SealGroup) and seal.members == ["p0.0.0.0", "p0.0.1.0"]
    assert seal.advantages == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)
    assert isinstance(deliver, DeliverGroup) and (deliver.step, deliver.replica, deliver.group_id) == (1, 0, "p0.0")
    assert deliver.cause.startswith("the largest of those that come first: ")
    assert bench.acknowledge("p0.0") == []
    counts = only(bench.ask(), CloseBatch).counts
    assert (counts.groups, counts.sequences, counts.tokens) == (1, 2, 10)
    accepted = only(bench.send(StepFinished(step=1)), ClosePrompt)
    assert (accepted.status, accepted.step) == (PromptStatus.ACCEPTED, 1)
    assert kinds(bench.sync(1)) == [PauseWorker, GrantSync, ResumeWorker, FetchPrompts]
    assert bench.dispatcher.version == 1 and bench.dispatcher.step == 2


def test_repeated_requests_are_answered_again() -> None:
    bench = Bench(batch=1, group_size=1)
    bench.prompt()
    bench.end("p0.0.0.0")
    first, again, third = (only(bench.ask(), DeliverGroup) for _ in range(3))
    assert (first.step, first.replica, first.group_id) == (1, 0, "p0.0") and "tokens" in first.cause
    assert again == third == msgspec.structs.replace(first, cause="it has not acknowledged it yet")
    bench.acknowledge("p0.0")
    closed = bench.ask()
    assert bench.ask() == closed and kinds(closed) == [CloseBatch]
    bench.send(StepFinished(step=1))
    assert bench.ask() == closed
    assert bench.send(StepFinished(step=1)) == []


def test_the_batch_closes_for_every_replica_only_when_all_is_acknowledged() -> None:
    bench = Bench(batch=2, group_size=1)
    bench.prompt()
    bench.prompt()
    bench.end("p0.0.0.0")
    bench.end("p1.0.0.0")
    bench.ask(replica=0)
    bench.ask(replica=1)
    bench.acknowledge("p0.0", replica=0)
    assert bench.ask(replica=0) == []
    closed = bench.acknowledge("p1.0", replica=1)
    assert kinds(closed) == [CloseBatch]
    assert kinds(bench.ask(replica=1)) == [CloseBatch]


def test_failed_member_is_sampled_anew_then_its_group_is_dropped() -> None:
    bench = Bench(batch=1, group_size=2, max_resamples=1)
    bench.prompt()
    bench.end("p0.0.0.0")
    again = bench.end("p0.0.1.0", status=TrajectoryStatus.FAILED)
    assert started(again) == ["p0.0.1.1"]
    assert only(again, DropTrajectories).trajectory_ids == ["p0.0.1.0"]
    dropped = bench.end("p0.0.1.1", status=TrajectoryStatus.FAILED)
    closed = only(dropped, ClosePrompt)
    assert closed.status is PromptStatus.FAILED and "p0.0.1.1: broken" in closed.cause
    assert FetchPrompts(count=1) in dropped, "the credit returns at once"
    names = [n for command in dropped if isinstance(command, DropTrajectories) for n in command.trajectory_ids]
    assert sorted(names) == ["p0.0.0.0", "p0.0.1.1"]


def test_dropping_a_group_aborts_its_siblings() -> None:
    bench = Bench(batch=1, group_size=3, max_resamples=0, max_trajectories=2)
    assert started(bench.prompt()) == ["p0.0.0.0", "p0.0.1.0"]
    abort = only(bench.end("p0.0.0.0", status=TrajectoryStatus.DISCARDED), AbortTrajectory)
    assert (abort.trajectory_id, abort.status) == ("p0.0.1.0", TrajectoryStatus.ABORTED)
    late = bench.end("p0.0.1.0", status=TrajectoryStatus.ABORTED)
    assert late == [DropTrajectories(trajectory_ids=["p0.0.1.0"])]


def test_shrink_seals_without_the_lost_member_while_two_are_left() -> None:
    bench = Bench(batch=1, group_size=3, max_resamples=0, on_lost_member="shrink")
    bench.prompt()
    bench.end("p0.0.0.0", 1.0)
    bench.end("p0.0.1.0", status=TrajectoryStatus.FAILED)
    seal = only(bench.end("p0.0.2.0", 0.0), SealGroup)
    assert seal.members == ["p0.0.0.0", "p0.0.2.0"]
    other = Bench(batch=1, group_size=2, max_resamples=0, on_lost_member="shrink")
    other.prompt()
    assert only(other.end("p0.0.1.0", status=TrajectoryStatus.FAILED), ClosePrompt).status is PromptStatus.FAILED


def test_truncated_trains_or_loses_its_group_by_the_flag() -> None:
    for flag, kind in ((True, SealGroup), (False, ClosePrompt)):
        bench = Bench(batch=1, group_size=1, train_truncated=flag)
        bench.prompt()
        assert only(bench.end("p0.0.0.0", status=TrajectoryStatus.TRUNCATED), kind)


def test_a_reward_that_is_no_number_is_a_failure() -> None:
    bench = Bench(batch=1, group_size=1, max_resamples=0)
    bench.prompt()
    closed = only(bench.end("p0.0.0.0", float("nan")), ClosePrompt)
    assert closed.status is PromptStatus.FAILED and "reward is nan" in closed.cause


def test_zero_variance_is_filtered_and_refilled_a_bounded_number_of_times() -> None:
    bench = Bench(batch=1, group_size=2, filter_zero_variance=True, max_refills=1)
    for number in range(2):
        bench.prompt()
        bench.end(f"p{number}.0.0.0", 1.0)
        out = bench.end(f"p{number}.0.1.0", 1.0)
        assert only(out, ClosePrompt).status is PromptStatus.FILTERED
        assert (FetchPrompts in kinds(out)) is (number == 0)
    cause = only(out, StopRun).cause
    assert "step 1" in cause and "2 filtered" in cause and "max_refills = 1" in cause
    assert bench.ask() == [], "nothing happens after the end"


def test_trajectories_are_discarded_before_their_worker_goes_on() -> None:
    bench = Bench(batch=1, group_size=1, async_factor=3.0, max_version_span=1, include_promoted=False)
    for _ in range(3):
        bench.prompt()
    bench.end("p0.0.0.0")
    out = bench.train("p0.0", 1)
    aborts = [command for command in out if isinstance(command, AbortTrajectory)]
    assert [a.trajectory_id for a in aborts] == ["p1.0.0.0", "p2.0.0.0"]
    assert all(a.status is TrajectoryStatus.DISCARDED and "begun under version 0" in a.cause for a in aborts)
    assert kinds(out).index(ResumeWorker) > kinds(out).index(AbortTrajectory)
    assert started(bench.end("p1.0.0.0", status=TrajectoryStatus.DISCARDED)) == ["p1.0.0.1"]
    assert kinds(bench.end("p2.0.0.0", versions=(0, 0))) == [SealGroup], "it had ended before the abort came"


def test_a_span_beyond_s_is_never_sealed() -> None:
    bench = Bench(batch=1, group_size=1, max_version_span=2, max_resamples=0)
    bench.prompt()
    closed = only(bench.end("p0.0.0.0", versions=(0, 2)), ClosePrompt)
    assert closed.status is PromptStatus.DISCARDED and "3 weight versions" in closed.cause


def test_a_fresh_group_waits_for_the_promoted_one() -> None:
    bench = Bench(batch=1, group_size=1, async_factor=2.0, max_version_span=2)
    bench.prompt()
    bench.prompt()
    bench.end("p0.0.0.0")
    bench.train("p0.0", 1)
    bench.prompt()
    bench.end("p2.0.0.0", versions=(1, 1))
    assert bench.ask(2) == [], "the only place of step 2 belongs to p1, at its last valid version"
    out = bench.end("p1.0.0.0", versions=(0, 1))
    assert only(out, DeliverGroup).group_id == "p1.0"


def test_classes_are_sent_only_to_engines_with_priorities_and_when_they_change() -> None:
    for priority in (True, False):
        bench = Bench(batch=1, group_size=1, async_factor=2.0, capabilities=Capabilities(priority=priority))
        bench.prompt()
        bench.prompt()
        bench.end("p0.0.0.0")
        out = bench.train("p0.0", 1)
        if priority:
            change = only(out, SetClass)
            assert (change.trajectory_id, change.priority) == ("p1.0.0.0", PriorityClass.HIGH)
        else:
            assert SetClass not in kinds(out)


def test_a_sync_waits_for_evaluations_which_still_start() -> None:
    bench = Bench(batch=1, group_size=1, max_trajectories=1)
    assert started(bench.send(EvalRequested(eval_id="e", task_ids=["a", "b"]))) == ["e.0.0"]
    assert bench.send(SyncRequested(version=1)) == []
    assert started(bench.end("e.0.0", status=TrajectoryStatus.FAILED)) == ["e.1.0"]
    done, pause = bench.end("e.1.0", 1.0)
    assert done == FinishEval(eval_id="e", version=0, trajectory_ids=["e.0.0", "e.1.0"])
    assert pause == PauseWorker(worker="w0", version=1)


def test_evaluations_come_before_waiting_training() -> None:
    bench = Bench(batch=1, group_size=3, max_trajectories=1)
    bench.prompt()
    assert bench.send(EvalRequested(eval_id="e", task_ids=["a"])) == []
    assert started(bench.end("p0.0.0.0")) == ["e.0.0"]
    assert bench.dispatcher.phase == "eval"


def test_nothing_starts_on_a_paused_worker() -> None:
    bench = Bench(batch=1, group_size=2, max_trajectories=1)
    bench.prompt()
    bench.send(SyncRequested(version=1))
    assert started(bench.end("p0.0.0.0")) == []
    assert started(bench.send(WorkerPaused(worker="w0", version=1))) == []
    assert started(bench.send(SyncFinished(version=1))) == []
    assert started(bench.send(WeightsAcknowledged(worker="w0", version=1))) == ["p0.0.1.0"]


def test_a_lost_worker_s_trajectories_restart_elsewhere() -> None:
    bench = Bench(batch=2, group_size=2, workers=2)
    bench.prompt()
    bench.end("p0.0.0.0")
    out = bench.send(WorkerLost(worker="w0", cause="killed"))
    assert [(c.worker, c.trajectory_id) for c in out if isinstance(c, StartTrajectory)] == [("w1", "p0.0.1.1")]
    assert bench.end("p0.0.1.0") == [DropTrajectories(trajectory_ids=["p0.0.1.0"])]
    assert kinds(bench.end("p0.0.1.1", worker="w1")) == [SealGroup]
    stop = only(bench.send(WorkerLost(worker="w1", cause="killed too")), StopRun)
    assert "w1" in stop.cause and "killed too" in stop.cause


def test_a_worker_is_lost_while_it_discards_a_member_whose_sibling_waits() -> None:
    bench = Bench(
        batch=1, group_size=2, workers=2, async_factor=2.0, max_version_span=1, max_resamples=0, max_trajectories=1,
        include_promoted=False,
    )  # fmt: skip
    bench.prompt()
    assert started(bench.prompt()) == ["p1.0.0.0"], "on w1; its sibling waits"
    bench.end("p0.0.0.0", worker="w0")
    bench.end("p0.0.1.0", worker="w0")
    bench.ask()
    bench.acknowledge("p0.0")
    bench.ask()
    bench.send(StepFinished(step=1))
    assert only(bench.sync(1, ("w0", "w1")), AbortTrajectory).trajectory_id == "p1.0.0.0"
    out = bench.send(WorkerLost(worker="w1", cause="killed"))
    assert only(out, ClosePrompt).status is PromptStatus.DISCARDED
    assert started(out) == []


def test_a_worker_with_old_weights_waits_for_the_next_sync() -> None:
    bench = Bench(batch=1, group_size=1, async_factor=2.0)
    bench.prompt()
    bench.end("p0.0.0.0")
    bench.train("p0.0", 1)
    bench.join("w1", version=0)
    workers = [c.worker for _ in range(2) for c in bench.prompt() if isinstance(c, StartTrajectory)]
    assert workers == ["w0", "w0"], "w1 is idle, but may not start anything"
    bench.end("p1.0.0.0", versions=(1, 1))
    bench.ask(2)
    bench.acknowledge("p1.0", 2)
    bench.ask(2)
    bench.send(StepFinished(step=2))
    bench.sync(2, ("w0", "w1"))
    assert [c.worker for c in bench.prompt() if isinstance(c, StartTrajectory)] == ["w1"]


def test_the_only_worker_with_old_weights_ends_the_run() -> None:
    bench = Bench(batch=1, group_size=1)
    bench.prompt()
    bench.end("p0.0.0.0")
    bench.train("p0.0", 1)
    cause = only(bench.join("w0", version=0), StopRun).cause
    assert "worker w0 holds weights of version 0, the run is at version 1" in cause


def test_deadline_then_grace() -> None:
    bench = Bench(batch=1, group_size=1, deadline_s=10.0)
    bench.prompt()
    bench.now = 9.9
    assert bench.send(Tick()) == []
    bench.now = 10.0
    assert only(bench.send(Tick()), AbortTrajectory).trajectory_id == "p0.0.0.0"
    assert bench.send(Tick()) == []
    again = bench.end("p0.0.0.0", status=TrajectoryStatus.ABORTED)
    assert started(again) == ["p0.0.0.1"]
    bench.now = 20.0
    bench.send(Tick())
    bench.now = 80.0
    assert "w0 did not report p0.0.0.1" in only(bench.send(Tick()), StopRun).cause


def test_a_finite_source_closes_its_last_batch_short_and_then_ends() -> None:
    bench = Bench(batch=2, group_size=1)
    bench.prompt()
    bench.send(SourceExhausted())
    bench.end("p0.0.0.0")
    bench.ask()
    bench.acknowledge("p0.0")
    assert only(bench.ask(), CloseBatch).counts.groups == 1
    bench.send(StepFinished(step=1))
    assert bench.dispatcher.counts() == {
        "running": 0, "accepted": 1, "filtered": 0, "failed": 0, "discarded": 0, "submitted": 1,
    }  # fmt: skip
    bench.sync(1)
    closed, stop = bench.ask(2)
    assert isinstance(closed, CloseBatch) and closed.counts.groups == 0
    assert stop == StopRun(cause="")
    assert kinds(bench.ask(2)) == [CloseBatch]
    assert started(bench.send(EvalRequested(eval_id="after", task_ids=["a"]))) == ["after.0.0"]


def test_an_actor_that_goes_on_without_a_sync_gets_its_groups() -> None:
    bench = Bench(batch=1, group_size=1)
    bench.prompt()
    bench.end("p0.0.0.0")
    bench.ask()
    bench.acknowledge("p0.0")
    bench.ask()
    assert FetchPrompts not in kinds(bench.send(StepFinished(step=1, skipped=True)))
    assert kinds(bench.ask(2, replica=1)) == []
    assert kinds(bench.ask(2, replica=0)) == [FetchPrompts]


def test_requeued_prompts_come_first_with_a_new_attempt() -> None:
    dispatcher = Dispatcher(DispatcherConfig(batch=2, group_size=1))
    dispatcher.handle(RunStarted(version=4, requeued=[("p7", "t7")], next_attempt=3), 0.0)
    out = dispatcher.handle(WorkerJoined(worker="w0", slots=1, version=4, capabilities=Capabilities()), 0.0)
    assert out[0] == FetchPrompts(count=1)
    assert started(out) == ["p7.3.0.0"]
    assert (dispatcher.step, dispatcher.counts()["submitted"]) == (5, 1)


def test_work_per_event_does_not_grow_with_the_number_of_trajectories() -> None:
    """A turn's end touches nothing; statistics and cheap invariants need no scan over trajectories."""
    bench = Bench(batch=4, group_size=8)
    for _ in range(4):
        bench.prompt()
    before = bench.dispatcher.statistics()["turns_done"]
    turn = TurnEnded(trajectory_id="p0.0.0.0", turn=0, context_tokens=1, output_tokens=1, version=0)
    assert bench.send(turn) == []
    assert bench.dispatcher.statistics()["turns_done"] == before + 1


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"group_size": 0}, "group_size"),
        ({"batch": 0}, "batch"),
        ({"async_factor": 0.5}, "async_factor"),
        ({"async_factor": float("nan")}, "async_factor"),
        ({"max_version_span": 0}, "max_version_span"),
        ({"on_lost_member": "ignore"}, "on_lost_member"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"max_resamples": -1}, "max_resamples"),
        ({"filter_zero_variance": True, "group_size": 1}, "filter_zero_variance"),
    ],
)
def test_values_that_cannot_work_are_named(keys: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DispatcherConfig(**keys)


def test_config_comes_from_the_rollout_section() -> None:
    rollout = RolloutConfig()
    rollout.group.batch = 3
    rollout.worker.count = 2
    config = DispatcherConfig.from_config(rollout, steps=9)
    assert (config.batch, config.workers, config.steps, config.group_size) == (3, 2, 9, 8)
