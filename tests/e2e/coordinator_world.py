"""A toy world around a real coordinator: its process, workers and an actor that speak the real protocol over HTTP.

The toy engine is deterministic: a trajectory's tokens and reward are a function of its task and member alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from envclient.base.configs import to_yaml
from envclient.base.errors import WireError
from envclient.base.ports import listen, port_of
from envclient.base.wire import Client
from megatron_venus.config import VenusConfig
from rollout.config import (
    AdvantageConfig,
    CoordinatorConfig,
    FactoryConfig,
    GroupConfig,
    ModelConfig,
    RolloutConfig,
    RunConfig,
    WorkerConfig,
)
from rollout.protocol import (
    AckRequest,
    Empty,
    EngineAddress,
    EvaluateReply,
    EvaluateRequest,
    JoinRequest,
    NextGroupRequest,
    PollReply,
    PollRequest,
    Status,
    StepRequest,
    SyncBeginReply,
    SyncBeginRequest,
    SyncEndRequest,
    WorkerReport,
)
from rollout.types import (
    AbortTrajectory,
    BatchClosed,
    BatchCounts,
    Capabilities,
    NextGroup,
    PauseWorker,
    ResumeWorker,
    StartTrajectory,
    TrainGroup,
    Trajectory,
    TrajectoryStatus,
    TurnEnded,
    VersionSpan,
    WeightsAcknowledged,
    WorkerPaused,
)

TOKEN = "token-of-the-toy-world"


class ToyTasks:
    """A TaskSource of `count` training tasks."""

    def __init__(self, count: int, held_out: int) -> None:
        self._count, self._held_out = count, held_out

    def train_ids(self) -> list[str]:
        return [f"task{i}" for i in range(self._count)]

    def eval_ids(self) -> list[str]:
        return [f"held{i}" for i in range(self._held_out)]


def toy_tasks(count: int = 8, held_out: int = 3) -> ToyTasks:
    """The factory that the config names."""
    return ToyTasks(count, held_out)


def toy_config(run_dir: Path, **changes: Any) -> VenusConfig:
    """A small run; `changes` are keys of run, group and coordinator, and `tasks` (number of training tasks)."""
    run = RunConfig(name=run_dir.name, root=str(run_dir.parent), steps=3, wandb=False, eval_samples=6)
    group = GroupConfig(size=3, batch=2, deadline_s=60.0)
    coordinator = CoordinatorConfig(tick_s=0.2)
    tasks = changes.pop("tasks", 8)
    for key, value in changes.items():
        owner = next(part for part in (run, group, coordinator) if hasattr(part, key))
        setattr(owner, key, value)
    rollout = RolloutConfig(
        group=group,
        coordinator=coordinator,
        worker=WorkerConfig(count=1),
        advantage=AdvantageConfig(),
        tasks=FactoryConfig(factory="tests.e2e.coordinator_world:toy_tasks", args={"count": tasks}),
        agent=FactoryConfig(factory="none:none"),
    )
    return VenusConfig(run=run, model=ModelConfig(path="none"), rollout=rollout)


@dataclass
class CoordinatorProcess:
    """The real coordinator in a process of its own."""

    run_dir: Path
    process: subprocess.Popen[bytes]
    url: str

    @classmethod
    def start(cls, run_dir: Path, config: VenusConfig, resume_step: int = -1) -> CoordinatorProcess:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(to_yaml(config))
        with listen("127.0.0.1") as sock, open(run_dir / "coordinator.log", "ab") as log:
            argv = [sys.executable, "-m", "rollout.coordinator", "--run-dir", str(run_dir), "--fd", str(sock.fileno())]
            process = subprocess.Popen(
                [*argv, "--resume-step", str(resume_step)],
                pass_fds=[sock.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "VENUS_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
                cwd=Path(__file__).parents[2],
            )
            return cls(run_dir, process, f"http://127.0.0.1:{port_of(sock)}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self.process.terminate()
        return self.process.wait(10)

    @property
    def log(self) -> str:
        return (self.run_dir / "coordinator.log").read_text()


@dataclass
class Wire:
    """A caller that loses replies: the request arrives, the answer does not, and it is sent again."""

    client: Client
    chance: random.Random | None = None
    before_call: Callable[[str], None] = lambda path: None
    """Called with the path just after the request has left."""

    async def call(self, path: str, request: Any, reply: Any, wait_s: float = 30.0) -> Any:
        calling = asyncio.ensure_future(self.client.call(path, request, reply, timeout_s=wait_s))
        await asyncio.sleep(0.001)
        self.before_call(path)
        answer = await calling
        while self.chance is not None and self.chance.random() < 0.3:
            answer = await self.client.call(path, request, reply, timeout_s=wait_s)
        return answer


def toy_number(*parts: object) -> int:
    return zlib.crc32(" ".join(map(str, parts)).encode())


@dataclass
class ToyWorker:
    """A worker that plays trajectories of two turns."""

    wire: Wire
    name: str = "w0"
    version: int = 0
    engine_url: str = ""
    delay_s: float = 0.004
    corrupt: Callable[[Trajectory], Trajectory] = lambda trajectory: trajectory
    started: list[str] = field(default_factory=list)
    _reports: list[WorkerReport] = field(default_factory=list)
    _acked: int = 0
    _commands: int = 0
    _tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def run(self) -> None:
        self._go = asyncio.Event()
        self._go.set()
        self._news = asyncio.Event()
        await self.wire.call("/v1/worker/join", self.join_request(), Empty)
        try:
            while True:
                await self._poll()
        finally:
            for task in self._tasks.values():
                task.cancel()

    def join_request(self) -> JoinRequest:
        return JoinRequest(
            worker=self.name,
            engine_url=self.engine_url or f"http://engine-of-{self.name}:1",
            slots=8,
            version=self.version,
            capabilities=Capabilities(),
        )

    async def _poll(self) -> None:
        request = PollRequest(
            worker=self.name,
            first_report=self._acked,
            reports=self._reports[self._acked :],
            acked_command=self._commands,
            wait_s=0.0 if self._news.is_set() else 0.02,
        )
        self._news.clear()
        reply: PollReply = await self.wire.call("/v1/worker/poll", request, PollReply)
        self._acked = max(self._acked, reply.acked_report)
        for number, command in enumerate(reply.commands, start=reply.first_command):
            if number == self._commands:
                self._commands += 1
                self._obey(command)

    def _report(self, report: WorkerReport) -> None:
        self._reports.append(report)
        self._news.set()

    def _obey(self, command: Any) -> None:
        match command:
            case StartTrajectory():
                self.started.append(command.trajectory_id)
                self._tasks[command.trajectory_id] = asyncio.ensure_future(self._play(command))
            case AbortTrajectory():
                task = self._tasks[command.trajectory_id]
                if task.cancel():
                    self._report(self._empty(command))
            case PauseWorker():
                self._go.clear()
                self._report(WorkerPaused(worker=self.name, version=command.version))
            case ResumeWorker():
                self.version = command.version
                self._go.set()
                self._report(WeightsAcknowledged(worker=self.name, version=command.version))

    def _empty(self, command: AbortTrajectory) -> Trajectory:
        group_id, _, _ = command.trajectory_id.rsplit(".", 2)
        order = self._orders[command.trajectory_id]
        return Trajectory(
            trajectory_id=command.trajectory_id,
            group_id=group_id,
            task_id=order.task_id,
            purpose=order.purpose,
            status=command.status,
            stop_reason=command.cause,
            prompt_ids=[],
            response_ids=[],
            loss_mask=[],
            logprobs=[],
            spans=[],
            turns=0,
            reward=0.0,
        )

    _orders: dict[str, StartTrajectory] = field(default_factory=dict)

    async def _play(self, order: StartTrajectory) -> None:
        self._orders[order.trajectory_id] = order
        member = order.trajectory_id.split(".")[-2]
        versions = []
        for turn in range(2):
            await asyncio.sleep(self.delay_s * (1 + toy_number(order.task_id, member, turn) % 4))
            await self._go.wait()
            versions.append(self.version)
            self._report(
                TurnEnded(
                    trajectory_id=order.trajectory_id,
                    turn=turn,
                    context_tokens=3 + 3 * turn,
                    output_tokens=2,
                    version=self.version,
                )
            )
        self._report(self.corrupt(toy_trajectory(order, versions)))


def toy_trajectory(order: StartTrajectory, versions: list[int]) -> Trajectory:
    """Two turns of two tokens with an observation of one token in between."""
    member = order.trajectory_id.split(".")[-2]
    number = toy_number(order.task_id, member)
    return Trajectory(
        trajectory_id=order.trajectory_id,
        group_id=order.group_id,
        task_id=order.task_id,
        purpose=order.purpose,
        status=TrajectoryStatus.FINISHED,
        stop_reason="submit",
        prompt_ids=[1, 2, 3],
        response_ids=[number % 97, 5, 6, 7, 8],
        loss_mask=[1, 1, 0, 1, 1],
        logprobs=[-0.5, -0.25, 0.0, -1.0, -2.0],
        spans=[VersionSpan(start=0, end=2, version=versions[0]), VersionSpan(start=3, end=5, version=versions[1])],
        turns=2,
        reward=float(number % 2),
        stats={"tool_calls": 2.0, "tool_errors": 1.0, "cached_tokens": 3.0, "sent_tokens": 9.0, "edits": 1.0},
    )


@dataclass
class ToyActor:
    """Trains nothing, in the order of the real one; a checkpoint is a number."""

    wire: Wire
    steps: int
    step: int = 0
    checkpoint_every: int = 1
    checkpoint: int = 0
    evaluate_every: int = 0
    replicas: int = 1
    trained: list[tuple[int, TrainGroup]] = field(default_factory=list)
    evaluations: list[EvaluateReply] = field(default_factory=list)
    drained: bool = False

    async def run(self) -> None:
        while self.step < self.steps and not self.drained:
            await self._one_step(self.step + 1)

    async def _one_step(self, step: int) -> None:
        closed = await asyncio.gather(*[self._stream(step, replica) for replica in range(self.replicas)])
        assert len(set(map(str, closed))) == 1
        counts = closed[0]
        if counts.groups == 0:
            self.drained = True
            return
        metrics = {"loss": 0.5, "lr": 1e-3, "time/train_s": 0.1}
        await self.wire.call(
            "/v1/actor/step", StepRequest(step=step, skipped=False, counts=counts, metrics=metrics), Empty
        )
        begun = await self.wire.call("/v1/actor/sync_begin", SyncBeginRequest(version=step), SyncBeginReply)
        await self.wire.call("/v1/actor/sync_end", await self.send(step, begun.engines), Empty)
        self.step = step
        if step % self.checkpoint_every == 0:
            self.checkpoint = step
        if self.evaluate_every and step % self.evaluate_every == 0:
            await self.evaluate(f"step{step}")

    async def send(self, step: int, engines: list[EngineAddress]) -> SyncEndRequest:
        """Bring the engines to the weights of `step`."""
        return SyncEndRequest(version=step, seconds={"send": 0.25})

    async def evaluate(self, eval_id: str) -> None:
        request = EvaluateRequest(eval_id=eval_id, version=self.step)
        self.evaluations.append(await self.wire.call("/v1/actor/evaluate", request, EvaluateReply))

    async def _stream(self, step: int, replica: int) -> BatchCounts:
        while True:
            request = NextGroupRequest(step=step, replica=replica, wait_s=0.3)
            answer = await self.wire.call("/v1/actor/next_group", request, NextGroup)
            if isinstance(answer, BatchClosed):
                return answer.counts
            if isinstance(answer, TrainGroup):
                self.trained.append((step, answer))
                tokens = sum(sum(s.loss_mask) for s in answer.sequences)
                ack = AckRequest(step=step, replica=replica, group_id=answer.group_id, tokens=tokens)
                await self.wire.call("/v1/actor/ack", ack, Empty)


@contextlib.asynccontextmanager
async def connected(url: str, **wire: Any) -> AsyncIterator[Wire]:
    """A wire to the coordinator, once it answers."""
    async with Client(url, TOKEN, timeout_s=30.0) as client:
        for _ in range(600):
            try:
                await client.call("/v1/status", Empty(), Status)
                break
            except WireError:
                await asyncio.sleep(0.05)
        yield Wire(client, **wire)


async def play(actor: ToyActor, *workers: ToyWorker) -> None:
    """Run the workers until the actor is done. Raises what any of them raises."""
    working = [asyncio.ensure_future(worker.run()) for worker in workers]
    acting = asyncio.ensure_future(actor.run())
    done, _ = await asyncio.wait([acting, *working], return_when=asyncio.FIRST_COMPLETED, timeout=100)
    for task in (acting, *working):
        task.cancel()
    await asyncio.gather(acting, *working, return_exceptions=True)
    if not done:
        raise TimeoutError("the toy world is stuck")
    for task in done:
        task.result()


def with_status(trajectory: Trajectory, **changes: Any) -> Trajectory:
    return msgspec.structs.replace(trajectory, **changes)
