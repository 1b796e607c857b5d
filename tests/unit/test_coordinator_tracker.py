"""What a run leaves: rows are complete, in time, and undone by a resume; W&B cannot hurt the run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from envclient.base.files import JsonlWriter, read_json, read_jsonl
from rollout.coordinator.ledger import Identity
from rollout.coordinator.metrics import batch_metrics
from rollout.coordinator.shelf import SealedGroup
from rollout.coordinator.tracker import Tracker
from rollout.coordinator.wandb_run import WandbRun
from rollout.types import (
    PriorityClass,
    PromptStatus,
    Purpose,
    SealGroup,
    StartTrajectory,
    TrajectoryEnded,
    TrajectoryStatus,
)
from tests.e2e.coordinator_world import toy_trajectory, with_status

COUNTS = {status.value: 1 for status in PromptStatus} | {"submitted": 5}


def group(versions: list[list[int]], sealed_at: float = 3.0, **changes: Any) -> SealedGroup:
    members = []
    for number, pair in enumerate(versions):
        order = StartTrajectory(
            worker="w",
            trajectory_id=f"p0.0.{number}.0",
            group_id="p0.0",
            task_id="t",
            purpose=Purpose.TRAIN,
            priority=PriorityClass.LOW,
        )
        members.append(with_status(toy_trajectory(order, pair), **changes))
    seal = SealGroup(
        group_id="p0.0",
        prompt_id="p0",
        task_id="t",
        members=[m.trajectory_id for m in members],
        advantages=[0.0] * len(members),
    )
    return SealedGroup(seal=seal, members=tuple(members), sealed_at=sealed_at)


def tracker(run_dir: Path, resume_step: int = 0, faults: tuple[str, ...] = ()) -> Tracker:
    return Tracker(
        run_dir,
        resume_step=resume_step,
        identity=lambda: Identity(counts=COUNTS, faults=faults),
        now=0.0,
    )


def ended(status: TrajectoryStatus) -> TrajectoryEnded:
    return TrajectoryEnded(
        trajectory_id="t",
        worker="w",
        status=status,
        reward=0.0,
        first_version=0,
        last_version=0,
        generated_tokens=1,
        turns=1,
    )


def evaluation(version: int, value: float = 0.5) -> dict[str, Any]:
    return {
        "eval_id": f"e{version}", "version": version, "step": version, "samples": 4, "pass": value,
        "standard_error": 0.1,
    }  # fmt: skip


def make_step(one: Tracker, step: int, now: float) -> None:
    one.report(step, {"loss": float(step)})
    one.step_finished(step, False, [group([[step - 1, step - 1]], sealed_at=now - 2)], now - 1)
    one.sync_finished(step, {"total": 0.5, "broadcast": 0.25}, now)


def test_a_row_is_written_when_its_sync_is_over_and_times_add_up(tmp_path: Path) -> None:
    one = tracker(tmp_path)
    one.worker_joined(4.0)  # the engine needed 4 s to come up: no part of step 1
    for status in (TrajectoryStatus.FINISHED, TrajectoryStatus.FAILED, TrajectoryStatus.ABORTED):
        one.trajectory_ended(ended(status))
    one.worker_joined(5.0)
    make_step(one, 1, 10.0)
    make_step(one, 2, 14.0)
    first, second = read_jsonl(tmp_path / "metrics.jsonl")
    assert (first["time/step_s"], first["time/rollout_s"], first["sync/seconds"]) == (6.0, 4.0, 0.5)
    assert (first["sync/broadcast_s"], first["loss"], first["env_failure_rate"]) == (0.25, 1.0, 0.5)
    assert (second["time/step_s"], second["time/rollout_s"], second["env_failure_rate"]) == (4.0, 2.0, None)
    assert first["tokens_per_s"] == pytest.approx(4 / 6)
    assert first["grad_norm"] is None


def test_an_evaluation_is_filled_into_the_row_of_its_step(tmp_path: Path) -> None:
    one = tracker(tmp_path)
    make_step(one, 1, 5.0)
    make_step(one, 2, 10.0)
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2], "a kill would lose a row that waits"
    one.eval_requested(10.0)
    one.evaluated(evaluation(2, 0.75), 12.0)
    one.evaluated(evaluation(1, 0.5), 12.0)  # of no step that is the newest: in evals.jsonl alone
    make_step(one, 3, 20.0)
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(r["step"], r["eval/pass"], r["time/eval_s"]) for r in rows] == [(1, None, 0), (2, 0.75, 0), (3, None, 2.0)]
    assert rows[1]["eval/standard_error"] == 0.1
    one.step_finished(4, False, [group([[3, 3]])], 31.0)
    one.close("stopped")
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]
    assert read_json(tmp_path / "summary.json")["reason"] == "stopped"


def test_a_repeated_step_report_changes_nothing(tmp_path: Path) -> None:
    one = tracker(tmp_path)
    make_step(one, 1, 5.0)
    one.report(1, {"loss": 99.0})
    one.step_finished(1, False, [], 6.0)
    one.close("done")
    assert [r["loss"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [1.0]


def test_a_resume_takes_back_the_rows_of_lost_weights(tmp_path: Path) -> None:
    one = tracker(tmp_path)
    one.evaluated(evaluation(0), 1.0)
    for step in (1, 2, 3):
        make_step(one, step, 5.0 * step)
        one.evaluated(evaluation(step), 5.0 * step + 1)
    one.close("killed")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "torn')
    two = tracker(tmp_path, resume_step=2)
    assert [e["version"] for e in two.evaluations] == [0, 1, 2]
    assert read_json(tmp_path / "summary.json")["eval_after"]["version"] == 2
    make_step(two, 3, 30.0)
    two.close("done")
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert [r["version"] for r in read_jsonl(tmp_path / "evals.jsonl")] == [0, 1, 2]
    summary = read_json(tmp_path / "summary.json")
    assert (summary["steps"], summary["eval_before"]["version"], summary["eval_after"]) == (3, 0, None)


def test_a_kill_during_an_evaluation_loses_no_row(tmp_path: Path) -> None:
    make_step(tracker(tmp_path), 1, 5.0)  # and then it is killed
    two = tracker(tmp_path, resume_step=1)
    two.evaluated(evaluation(1, 0.25), 9.0)
    make_step(two, 2, 15.0)
    assert [(r["step"], r["eval/pass"]) for r in read_jsonl(tmp_path / "metrics.jsonl")] == [(1, 0.25), (2, None)]


def test_a_row_is_written_whole_where_the_kernel_takes_it_in_parts(tmp_path: Path) -> None:
    class Slow:
        def write(self, data: memoryview) -> int:
            taken.extend(data[:3])
            return len(data[:3])

    taken = bytearray()
    writer: Any = JsonlWriter(tmp_path / "rows.jsonl")
    writer.close()
    writer._file = Slow()
    writer.write({"step": 1})
    assert taken == b'{"step": 1}\n'


def test_numbers_that_are_none_become_null_and_faults_are_told(tmp_path: Path) -> None:
    one = tracker(tmp_path, faults=("a group entered two optimizer steps",))
    one.report(1, {"grad_norm": math.nan, "loss": math.inf})
    one.step_finished(1, True, [group([[0, 0]])], 4.0)
    one.close("done")
    raw = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(raw, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (row["grad_norm"], row["loss"], row["skipped"]) == (None, None, True)
    summary = read_json(tmp_path / "summary.json")
    assert (summary["ledger_ok"], summary["ledger_faults"]) == (False, ["a group entered two optimizer steps"])


def test_batch_metrics_of_mixed_versions() -> None:
    numbers = batch_metrics([group([[1, 3], [2, 2]], status=TrajectoryStatus.TRUNCATED), group([[3, 3]])], 4)
    assert numbers["staleness/span_max"] == 3
    assert numbers["staleness/age_max"] == 2
    assert numbers["truncated_rate"] == pytest.approx(2 / 3)
    assert (numbers["kv/hit_rate"], numbers["tool_error_rate"], numbers["edits/mean"]) == (1 / 3, 0.5, 1.0)
    assert batch_metrics([group([[0, 0]], stats={})], 1)["kv/hit_rate"] is None
    empty = batch_metrics([group([[0, 0]], spans=[], response_ids=[], loss_mask=[], logprobs=[])], 1)
    assert (empty["tokens/trained"], empty["staleness/span_max"], empty["staleness/age_max"]) == (0, 0, 0)


def test_a_broken_wandb_does_not_stop_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = WandbRun(tmp_path, "no/valid:id", "name", {})
    run.log({"loss": 1.0}, 1)
    run.log({"loss": 1.0}, 2)
    run.finish(30.0)
    assert [r.message.partition(":")[0] for r in caplog.records] == ["W&B is off for this run"]
