"""A worker whose engine is stuck in a weight sync, in a real coordinator's run: named, left out, and taken back."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from envclient.base.errors import WireError
from envclient.base.files import read_jsonl
from megatron_venus.weight_sync import WeightSync
from rollout.protocol import Empty, EngineAddress, SyncEndRequest
from tests.e2e.coordinator_world import CoordinatorProcess, ToyActor, ToyWorker, connected, toy_config
from tests.numerics.engine_double import doubles
from tests.numerics.test_sync_faults import SHAPES, assert_holds, sync_of, weights_of

STEPS = 6


@dataclass
class SyncingActor(ToyActor):
    """Sends real tensors; stops in the sync of step 3 until `rejoined`."""

    victim: int = 0
    """Process that is frozen before the sync of step 2."""
    rejoined: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.weights = weights_of(0)
        self.sync: WeightSync = sync_of(self.weights)

    async def send(self, step: int, engines: list[EngineAddress]) -> SyncEndRequest:
        for name, tensor in weights_of(step).items():
            self.weights[name].copy_(tensor)
        if step == 2:
            os.kill(self.victim, signal.SIGSTOP)
        if step == 3:
            await asyncio.wait_for(self.rejoined.wait(), 60)
        result = await asyncio.to_thread(self.sync.send, step, engines)
        return SyncEndRequest(version=step, seconds=result.seconds, lost=result.lost)


def test_a_stuck_engine_costs_its_worker_only(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    config = toy_config(run_dir, steps=STEPS, tasks=40)
    config.rollout.worker.count = 2

    async def scenario(url: str) -> None:
        async with connected(url) as wire:
            w0 = ToyWorker(wire, name="w0", engine_url=engine0.address.engine_url)
            w1 = ToyWorker(wire, name="w1", engine_url=engine1.address.engine_url)
            actor = SyncingActor(wire, steps=STEPS, victim=engine1.process.pid)
            good, acting = asyncio.ensure_future(w0.run()), asyncio.ensure_future(actor.run())
            with pytest.raises(WireError, match="worker w1 has not joined, or counts as lost"):
                await asyncio.wait_for(w1.run(), 60)
            again = ToyWorker(wire, name="w1", version=0, engine_url=engine1_again.address.engine_url)
            await wire.call("/v1/worker/join", again.join_request(), Empty)
            actor.rejoined.set()
            back = asyncio.ensure_future(again.run())
            await asyncio.wait_for(acting, 100)
            assert w0.version == again.version == STEPS
            assert again.started, "the worker that came back was given work"
            for engine in (engine0, engine1_again):
                assert_holds(engine, actor.weights)
            for task in (good, back):
                task.cancel()

    def rows_of(worker: str) -> list[dict[str, dict[str, object]]]:
        return [row for row in read_jsonl(run_dir / "events.jsonl") if row["event"].get("worker") == worker]

    with doubles(SHAPES, "w0", "w1", "w1") as (engine0, engine1, engine1_again):
        process = CoordinatorProcess.start(run_dir, config)
        try:
            asyncio.run(scenario(process.url))
            assert process.end() == 0
        finally:
            process.kill()

    lost = [row["event"] for row in rows_of("w1") if row["event"]["event"] == "worker_lost"]
    assert len(lost) == 1 and "engine of worker w1" in str(lost[0]["cause"]) and "not answered within 2 s" in str(lost)
    # Work comes only after the weights.
    seen = [row["event"]["event"] for row in rows_of("w1")]
    after = seen[seen.index("worker_lost") :]
    first_work = min(after.index(event) for event in ("turn_ended", "trajectory_ended") if event in after)
    assert after.index("weights_acknowledged") < first_work
