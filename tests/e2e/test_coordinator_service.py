"""The coordinator as a process, over real HTTP, with a toy worker and a toy actor."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from envclient.base.errors import WireError
from envclient.base.files import read_json, read_jsonl
from envclient.base.wire import Client
from megatron_venus.config import VenusConfig
from rollout.protocol import Empty, JoinRequest, PollReply, PollRequest, Status
from rollout.replay import first_difference, read_rows
from rollout.types import Capabilities, Trajectory, TrajectoryStatus, TurnEnded
from tests.e2e.coordinator_world import (
    CoordinatorProcess,
    ToyActor,
    ToyWorker,
    connected,
    play,
    toy_config,
    with_status,
)


@contextmanager
def coordinator(run_dir: Path, config: VenusConfig, resume_step: int = -1) -> Iterator[CoordinatorProcess]:
    process = CoordinatorProcess.start(run_dir, config, resume_step)
    try:
        yield process
    finally:
        process.kill()


def trained_prompts(actor: ToyActor) -> Counter[tuple[int, str]]:
    return Counter({(step, group.prompt_id) for step, group in actor.trained})


def replayed(run_dir: Path) -> int:
    """Rows whose decisions come out as recorded, under the constants that each start recorded; none may differ."""
    agreed, difference = first_difference(read_rows(run_dir / "events.jsonl"), lambda: pytest.fail("no constants"))
    assert difference is None, difference
    return agreed


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0])
@pytest.mark.parametrize("lossy", [False, True], ids=["good wire", "replies get lost"])
def test_the_loop_makes_its_steps(tmp_path: Path, factor: float, lossy: bool) -> None:
    run_dir = tmp_path / "run"
    config = toy_config(run_dir, steps=5, async_factor=factor, tasks=40)
    config.rollout.worker.count = 2

    async def scenario(url: str) -> ToyActor:
        chance = random.Random(7) if lossy else None
        async with connected(url, chance=chance) as wire:
            workers = [ToyWorker(wire, name=f"w{i}") for i in range(2)]
            actor = ToyActor(wire, steps=5, replicas=2)
            await play(actor, *workers)
            starts = Counter(t for worker in workers for t in worker.started)
            assert max(starts.values()) == 1
            return actor

    with coordinator(run_dir, config) as process:
        actor = asyncio.run(scenario(process.url))
        assert process.end() == 0

    assert actor.step == 5
    groups = trained_prompts(actor)
    assert len({prompt for _, prompt in groups}) == len(groups) == 10
    for step, group in actor.trained:
        for sequence in group.sequences:
            ages = [step - 1 - span.version for span in sequence.spans]
            assert min(ages) >= 0
            if factor == 1.0:
                assert max(ages) == 0, "strictly on-policy"
    rows = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["groups/trained"] for row in rows] == [2, 4, 6, 8, 10]
    assert all(row["sync/seconds"] == 0.25 and row["loss"] == 0.5 and row["kv/hit_rate"] == 1 / 3 for row in rows)
    summary = read_json(run_dir / "summary.json")
    assert (summary["steps"], summary["groups_trained"], summary["ledger_ok"], summary["reason"]) == (
        5, 10, True, "done"
    )  # fmt: skip
    seqs = [row["seq"] for row in read_jsonl(run_dir / "events.jsonl")]
    assert seqs == list(range(len(seqs)))
    assert replayed(run_dir) == len(seqs)


def test_evaluations_are_recorded_and_answered_again_from_the_record(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = toy_config(run_dir, steps=2, eval_every=1, eval_after=True, eval_samples=7)

    async def scenario(url: str) -> ToyActor:
        async with connected(url) as wire:
            worker = ToyWorker(wire)

            class Actor(ToyActor):
                async def run(self) -> None:
                    await self.evaluate("before")
                    await self.evaluate("before")
                    await super().run()

            actor = Actor(wire, steps=2, evaluate_every=1)
            await play(actor, worker)
            played = [t for t in worker.started if t.startswith("before")]
            assert len(played) == 7, "the second request is answered from the record"
            return actor

    with coordinator(run_dir, config) as process:
        actor = asyncio.run(scenario(process.url))
        assert process.end() == 0
    assert [(e.eval_id, e.version, e.samples) for e in actor.evaluations] == [
        ("before", 0, 7), ("before", 0, 7), ("step1", 1, 7), ("step2", 2, 7)
    ]  # fmt: skip
    assert [row["version"] for row in read_jsonl(run_dir / "evals.jsonl")] == [0, 1, 2]
    assert all(row["edits/mean"] == 1.0 for row in read_jsonl(run_dir / "evals.jsonl"))
    passes = [row["eval/pass"] for row in read_jsonl(run_dir / "metrics.jsonl")]
    assert passes == [actor.evaluations[2].pass_rate, actor.evaluations[3].pass_rate]
    summary = read_json(run_dir / "summary.json")
    assert summary["eval_before"]["version"] == 0
    assert summary["eval_after"]["version"] == 2
    assert summary["eval_after"]["samples"] == 7
    assert summary["counts"]["submitted"] == 4, "evaluations are no prompts"


def test_a_malformed_trajectory_is_not_trained(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    bad: list[str] = []

    def corrupt(trajectory: Trajectory) -> Trajectory:
        if trajectory.trajectory_id.endswith(".0.0"):  # the first attempt of each group's first member
            bad.append(trajectory.trajectory_id)
            return with_status(trajectory, logprobs=trajectory.logprobs[:-1])
        return trajectory

    async def scenario(url: str) -> ToyActor:
        async with connected(url) as wire:
            actor = ToyActor(wire, steps=2)
            await play(actor, ToyWorker(wire, corrupt=corrupt))
            return actor

    with coordinator(run_dir, toy_config(run_dir, steps=2)) as process:
        actor = asyncio.run(scenario(process.url))
        process.end()
        assert "lengths differ" in process.log
    trained = {s.trajectory_id for _, group in actor.trained for s in group.sequences}
    assert len(bad) >= 4
    assert not trained & set(bad)
    assert len(trained) == 12
    assert read_jsonl(run_dir / "metrics.jsonl")[0]["env_failure_rate"] > 0


def test_a_prompt_that_fills_the_context_counts_in_evaluations_and_does_not_train(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    full: list[str] = []

    def fill(trajectory: Trajectory) -> Trajectory:
        if trajectory.task_id not in ("task1", "held1"):
            return trajectory
        full.append(trajectory.trajectory_id)
        nothing: dict[str, Any] = {"response_ids": [], "loss_mask": [], "logprobs": [], "spans": [], "turns": 0}
        return with_status(trajectory, status=TrajectoryStatus.TRUNCATED, reward=0.0, **nothing)

    async def scenario(url: str) -> ToyActor:
        async with connected(url) as wire:
            actor = ToyActor(wire, steps=10, evaluate_every=1)
            await play(actor, ToyWorker(wire, corrupt=fill))
            return actor

    with coordinator(run_dir, toy_config(run_dir, steps=10, epochs=1, tasks=5)) as process:
        actor = asyncio.run(scenario(process.url))
        assert process.end() == 0
        assert "malformed" not in process.log and "the prompt fills the context" in process.log
    assert [e.samples for e in actor.evaluations] == [6, 6]
    counts = read_json(run_dir / "summary.json")["counts"]
    assert (counts["accepted"], counts["failed"]) == (4, 1)
    assert all(name.split(".")[-1] == "0" for name in full), "nothing is sampled anew"
    assert all(row["env_failure_rate"] == 0 for row in read_jsonl(run_dir / "metrics.jsonl"))


def test_wrong_token_bad_body_and_unknown_worker_are_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    async def scenario(url: str) -> None:
        async with connected(url) as wire:
            async with Client(url, "guess") as stranger:
                for path in ("/v1/status", "/v1/worker/join", "/v1/actor/next_group", "/v1/actor/step"):
                    with pytest.raises(WireError, match="wrong or missing token"):
                        await stranger.call(path, Empty(), Status)
            with pytest.raises(WireError, match="BadRequest"):
                await wire.client.call("/v1/actor/step", Empty(), Empty)
            request = PollRequest(worker="w9", first_report=0, reports=[], acked_command=0, wait_s=0.0)
            with pytest.raises(WireError, match="w9 has not joined"):
                await wire.client.call("/v1/worker/poll", request, PollReply)
            status: Status = await wire.client.call("/v1/status", Empty(), Status)
            assert (status.workers, status.step, status.phase, status.failure) == (0, 0, "starting", "")

    with coordinator(run_dir, toy_config(run_dir)) as process:
        asyncio.run(scenario(process.url))
        assert process.end() == 0


def test_a_poll_with_reports_releases_the_one_that_waits(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = toy_config(run_dir)
    config.rollout.worker.count = 2  # the second never joins: nothing is started, so no command ends the first poll

    async def scenario(url: str) -> None:
        async with connected(url) as wire:
            worker = ToyWorker(wire)
            await wire.client.call("/v1/worker/join", worker.join_request(), Empty)
            request = PollRequest(worker="w0", first_report=0, reports=[], acked_command=0, wait_s=25.0)
            older = asyncio.create_task(wire.client.call("/v1/worker/poll", request, PollReply))
            await asyncio.sleep(0.2)
            assert not older.done()
            turn = TurnEnded(trajectory_id="t", turn=0, context_tokens=1, output_tokens=1, version=0)
            newer = PollRequest(worker="w0", first_report=0, reports=[turn], acked_command=0, wait_s=25.0)
            reply: PollReply = await asyncio.wait_for(wire.client.call("/v1/worker/poll", newer, PollReply), 10)
            assert reply.acked_report == 1
            await asyncio.wait_for(older, 10)

    with coordinator(run_dir, config) as process:
        asyncio.run(scenario(process.url))
        assert process.end() == 0


def test_a_worker_that_falls_silent_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    async def scenario(url: str) -> str:
        async with connected(url) as wire:
            join = JoinRequest(worker="w0", engine_url="http://x", slots=1, version=0, capabilities=Capabilities())
            await wire.client.call("/v1/worker/join", join, Empty)
            with pytest.raises(WireError) as caught:
                await ToyActor(wire, steps=1).run()
            status: Status = await wire.client.call("/v1/status", Empty(), Status)
            assert "w0" in status.failure
            return str(caught.value)

    with coordinator(run_dir, toy_config(run_dir, worker_timeout_s=0.5, tick_s=0.1)) as process:
        message = asyncio.run(scenario(process.url))
        assert process.process.wait(15) == 1
        last_line = process.log.strip().splitlines()[-1]
    assert "w0" in message
    assert "the run stopped" in last_line
    assert "w0" in last_line
    assert "w0" in read_json(run_dir / "summary.json")["reason"]


def test_a_defect_inside_ends_the_coordinator_and_nobody_waits(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    async def scenario(process: CoordinatorProcess) -> None:
        async with connected(process.url) as wire:
            worker, actor = ToyWorker(wire), ToyActor(wire, steps=50)

            async def sabotage() -> None:
                while actor.step < 2:  # noqa: ASYNC110 - a plain number of the toy
                    await asyncio.sleep(0.01)
                with sqlite3.connect(run_dir / "ledger.sqlite") as other:
                    other.execute("UPDATE prompts SET status = 'stolen' WHERE status = 'running'")

            breaking = asyncio.create_task(sabotage())
            with pytest.raises(WireError):
                await play(actor, worker)
            await breaking

    with coordinator(run_dir, toy_config(run_dir, steps=50, tasks=100)) as process:
        asyncio.run(scenario(process))
        assert process.process.wait(15) == 1
        assert "does not run" in process.log
    assert read_json(run_dir / "summary.json")["ledger_ok"] is False


def test_a_restarted_worker_replaces_itself(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = toy_config(run_dir, steps=4, tasks=40)
    config.rollout.worker.count = 2

    async def scenario(url: str) -> ToyActor:
        async with connected(url) as wire:
            actor = ToyActor(wire, steps=4)
            first = asyncio.create_task(ToyWorker(wire, name="w0", delay_s=30).run())

            async def restart_later() -> None:
                while not actor.trained:  # noqa: ASYNC110 - a plain list of the toy
                    await asyncio.sleep(0.01)
                first.cancel()
                await ToyWorker(wire, name="w0", version=actor.step).run()

            again = asyncio.create_task(restart_later())
            await play(actor, ToyWorker(wire, name="w1"))
            again.cancel()
            return actor

    with coordinator(run_dir, config) as process:
        actor = asyncio.run(scenario(process.url))
        assert process.end() == 0
    assert actor.step == 4
    assert len(trained_prompts(actor)) == 8


# ---------------------------------------------------------------------------------------------------------- W&B


def wandb_rows(path: Path) -> list[dict[str, Any]]:
    """History rows of a `.wandb` file: LevelDB's log format behind a seven-byte header, protobuf records inside."""
    from wandb.proto import wandb_internal_pb2 as pb

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    rows, position, part = [], 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        position += 7
        part = (part if kind in (3, 4) else b"") + data[position : position + length]
        position += length
        if kind in (1, 4):
            record = pb.Record()
            record.ParseFromString(part)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({(i.key or ".".join(i.nested_key)): json.loads(i.value_json) for i in items})
    return rows


def test_the_offline_wandb_run_holds_the_metrics_and_goes_on_after_a_resume(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"

    async def scenario(url: str, first: int, steps: int) -> None:
        async with connected(url) as wire:
            await play(ToyActor(wire, step=first, steps=steps), ToyWorker(wire, version=first))

    with coordinator(run_dir, toy_config(run_dir, steps=2, wandb=True)) as process:
        asyncio.run(scenario(process.url, 0, 2))
        assert process.end() == 0
    with coordinator(run_dir, toy_config(run_dir, steps=3, wandb=True), resume_step=2) as process:
        asyncio.run(scenario(process.url, 2, 3))
        assert process.end() == 0
        assert "W&B is off" not in process.log
    parts = sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({part.name for part in parts}) == 1, "one run id"
    rows = [row for part in parts for row in wandb_rows(part)]
    metrics = read_jsonl(run_dir / "metrics.jsonl")
    assert [row["_step"] for row in rows] == [row["step"] for row in metrics] == [1, 2, 3]
    for logged, written in zip(rows, metrics, strict=True):
        assert logged["reward/mean"] == written["reward/mean"]
        assert "grad_norm" not in logged, "a number that is missing is left out"
