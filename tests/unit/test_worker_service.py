"""The worker over real HTTP against an in-process coordinator that speaks rollout/protocol.py, polls lost included."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn

from envclient.base.errors import VenusError, WireError
from envclient.base.ports import listen, port_of
from envclient.base.wire import Client, endpoint, make_app
from rollout.adapters.scripted_engine import ScriptedEngine
from rollout.config import RolloutConfig, WorkerConfig
from rollout.protocol import Empty, JoinRequest, PollReply, PollRequest, WorkerReport
from rollout.types import (
    AbortTrajectory,
    PauseWorker,
    ResumeWorker,
    Trajectory,
    TrajectoryStatus,
    TurnEnded,
    WeightsAcknowledged,
    WorkerCommand,
    WorkerPaused,
)
from rollout.worker.service import RolloutWorker
from tests.unit.worker_kit import ToyAgent, order, run


class FakeCoordinator:
    """Takes reports and gives commands, each once; loses a share of its answers."""

    def __init__(self, loss: float = 0.0) -> None:
        self.loss = loss
        self.dice = random.Random(1)
        self.joins: list[JoinRequest] = []
        self.reports: list[WorkerReport] = []
        self.commands: list[WorkerCommand] = []
        self.acknowledged = 0
        self.changed = asyncio.Condition()
        self.polls = 0

    async def send(self, *commands: WorkerCommand) -> None:
        async with self.changed:
            self.commands += commands
            self.changed.notify_all()

    async def wait_report(self, kind: type, count: int = 1) -> list[WorkerReport]:
        async with self.changed:
            await self.changed.wait_for(lambda: sum(isinstance(r, kind) for r in self.reports) >= count)
        return [report for report in self.reports if isinstance(report, kind)]

    async def join(self, request: JoinRequest) -> Empty:
        self.joins.append(request)
        return Empty()

    async def poll(self, request: PollRequest) -> PollReply:
        self.polls += 1
        mine = self.polls
        async with self.changed:
            assert request.first_report <= len(self.reports), "a report was skipped"
            fresh = request.reports[len(self.reports) - request.first_report :]
            self.reports += fresh
            self.acknowledged = max(self.acknowledged, request.acked_command)
            self.changed.notify_all()
            with suppress(TimeoutError):
                async with asyncio.timeout(request.wait_s):
                    await self.changed.wait_for(
                        lambda: bool(fresh) or len(self.commands) > self.acknowledged or self.polls > mine
                    )
        if self.dice.random() < self.loss:
            raise WireError("lost")
        return PollReply(
            first_command=self.acknowledged,
            commands=self.commands[self.acknowledged :],
            acked_report=len(self.reports),
        )


@asynccontextmanager
async def serving(coordinator: FakeCoordinator) -> AsyncIterator[str]:
    app = make_app("coordinator", "token")
    endpoint(app, "/v1/worker/join", JoinRequest)(coordinator.join)
    endpoint(app, "/v1/worker/poll", PollRequest)(coordinator.poll)
    sock: socket.socket = listen("127.0.0.1")
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning", timeout_graceful_shutdown=1))
    serving_task = asyncio.ensure_future(server.serve(sockets=[sock]))
    try:
        yield f"http://127.0.0.1:{port_of(sock)}"
    finally:
        server.should_exit = True
        await serving_task


@asynccontextmanager
async def working(
    coordinator: FakeCoordinator, agent: ToyAgent, engine: ScriptedEngine
) -> AsyncIterator[asyncio.Future[None]]:
    """A worker joined to `coordinator`; cancelled at the end."""
    await engine.start()
    async with serving(coordinator) as url, Client(url, "token") as client:
        worker = RolloutWorker(
            name="w0",
            engine=engine,
            agent=agent,
            coordinator=client,
            config=RolloutConfig(worker=WorkerConfig(slots=2)),
            context_length=400,
            version=3,
        )
        running = asyncio.ensure_future(worker.run())
        try:
            yield running
        finally:
            running.cancel()
            await asyncio.wait([running])


@pytest.mark.parametrize("loss", [0.0, 0.3])
def test_trajectories_updates_and_turns_are_reported_once(loss: float) -> None:
    async def scenario() -> None:
        coordinator, agent = FakeCoordinator(loss), ToyAgent(turns=3)
        async with working(coordinator, agent, ScriptedEngine(stop_every=3, token_s=0.001)):
            names = [f"p{i}.0.0.0" for i in range(8)]
            await coordinator.send(*[order(name) for name in names[:6]])
            await coordinator.wait_report(Trajectory, 1)
            await coordinator.send(PauseWorker(worker="w0", version=4))
            assert await coordinator.wait_report(WorkerPaused) == [WorkerPaused(worker="w0", version=4)]
            turns = len([r for r in coordinator.reports if isinstance(r, TurnEnded)])
            await coordinator.send(*[order(name) for name in names[6:]])
            await asyncio.sleep(0.4)
            assert len([r for r in coordinator.reports if isinstance(r, TurnEnded)]) == turns, "a turn while paused"
            await coordinator.send(ResumeWorker(worker="w0", version=4))
            assert await coordinator.wait_report(WeightsAcknowledged) == [WeightsAcknowledged(worker="w0", version=4)]
            trajectories = await coordinator.wait_report(Trajectory, 8)
            await asyncio.sleep(0.1)
        assert [join.version for join in coordinator.joins] == [3]
        assert sorted(t.trajectory_id for t in trajectories) == names
        assert {t.status for t in trajectories} <= {TrajectoryStatus.FINISHED, TrajectoryStatus.TRUNCATED}
        reported = [(r.trajectory_id, r.turn) for r in coordinator.reports if isinstance(r, TurnEnded)]
        assert len(reported) == len(set(reported)) == sum(t.turns for t in trajectories)
        late = [t for t in trajectories if t.trajectory_id in names[6:]]
        assert {span.version for t in late for span in t.spans} == {4}
        assert agent.opened == agent.closed == set(names)
        assert coordinator.polls < 120

    run(scenario())


def test_an_aborted_trajectory_is_reported_with_the_ordered_status_and_frees_its_lease() -> None:
    async def scenario() -> None:
        coordinator, agent = FakeCoordinator(), ToyAgent(hang_at="act")
        async with working(coordinator, agent, ScriptedEngine(stop_every=1)):
            await coordinator.send(order("a.0.0.0"), order("b.0.0.0"))
            await coordinator.wait_report(TurnEnded, 2)
            aborts = [
                AbortTrajectory(worker="w0", trajectory_id=f"{name}.0.0.0", status=status, cause="why not")
                for name, status in [("a", TrajectoryStatus.DISCARDED), ("b", TrajectoryStatus.ABORTED)]
            ]
            # One that comes together with its order, and one of a trajectory that nobody knows.
            together = AbortTrajectory(
                worker="w0", trajectory_id="c.0.0.0", status=TrajectoryStatus.ABORTED, cause="at once"
            )
            unknown = AbortTrajectory(
                worker="w0", trajectory_id="d.0.0.0", status=TrajectoryStatus.ABORTED, cause="unknown"
            )
            await coordinator.send(*aborts, order("c.0.0.0"), together, unknown)
            ended = await coordinator.wait_report(Trajectory, 3)
            await asyncio.sleep(0.05)
        found = {t.trajectory_id: (t.status, t.stop_reason) for t in ended if isinstance(t, Trajectory)}
        assert found == {
            "a.0.0.0": (TrajectoryStatus.DISCARDED, "why not"),
            "b.0.0.0": (TrajectoryStatus.ABORTED, "why not"),
            "c.0.0.0": (TrajectoryStatus.ABORTED, "at once"),
        }
        assert agent.opened == agent.closed

    run(scenario())


async def wait_opened(agent: ToyAgent) -> None:
    """Until an episode is open; bounded by `run`."""
    while True:
        await asyncio.sleep(0.01)
        if agent.opened:
            return


def test_a_dead_engine_ends_the_worker_with_its_last_words() -> None:
    async def scenario() -> None:
        coordinator, agent, engine = FakeCoordinator(), ToyAgent(), ScriptedEngine(token_s=0.05)
        async with working(coordinator, agent, engine) as running:
            await coordinator.send(order("a.0.0.0"))
            await wait_opened(agent)
            engine.die("engine ended: the last line of its log")
            with pytest.raises(VenusError, match="the last line of its log"):
                await running
        assert agent.opened == agent.closed == {"a.0.0.0"}

    run(scenario())


def test_a_coordinator_that_is_gone_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.worker.mail.Mail.__init__.__kwdefaults__", {"wait_s": 0.2, "patience_s": 0.3})

    async def scenario() -> None:
        coordinator, agent = FakeCoordinator(loss=1.0), ToyAgent(hang_at="act")
        async with working(coordinator, agent, ScriptedEngine(stop_every=1)) as running:
            await coordinator.send(order("a.0.0.0"))
            with pytest.raises(WireError, match="coordinator is gone"):
                await running
        assert agent.opened == agent.closed

    run(scenario())


def test_stopping_a_worker_releases_every_lease() -> None:
    async def scenario() -> None:
        coordinator, agent = FakeCoordinator(), ToyAgent(hang_at="act")
        engine = ScriptedEngine(stop_every=1)
        async with working(coordinator, agent, engine):
            await coordinator.send(*[order(f"p{i}.0.0.0") for i in range(5)])
            await coordinator.wait_report(TurnEnded, 5)
        assert len(agent.opened) == 5
        assert agent.opened == agent.closed
        assert engine._running == {}

    run(scenario())
