"""The dispatcher on a bench: events in, commands out, one by one."""

from __future__ import annotations

from typing import Any

from rollout.dispatcher import Dispatcher, DispatcherConfig
from rollout.policy.lengths import Lengths
from rollout.types import (
    AnyCommand,
    AnyEvent,
    Capabilities,
    CloseBatch,
    DeliverGroup,
    GroupAcknowledged,
    GroupRequested,
    PromptSubmitted,
    RunStarted,
    StartTrajectory,
    StepFinished,
    SyncFinished,
    SyncRequested,
    Tick,
    TrajectoryEnded,
    TrajectoryStatus,
    WeightsAcknowledged,
    WorkerJoined,
    WorkerPaused,
)


class Bench:
    """A dispatcher with one or more workers, and short names for its events; an audit follows each.

    Args:
        capabilities: of every engine; default: none.
        kv_tokens: of every engine.
        truth: lengths for the policy `oracle`.
        keys: the dispatcher's constants.
    """

    def __init__(
        self,
        *,
        workers: int = 1,
        capabilities: Capabilities | None = None,
        kv_tokens: int = 0,
        truth: Lengths | None = None,
        **keys: Any,
    ) -> None:
        self.dispatcher = Dispatcher(DispatcherConfig(workers=workers, **keys), truth)
        self.capabilities = capabilities or Capabilities()
        self.kv_tokens = kv_tokens
        self.now = 0.0
        self.submitted = 0
        self.send(RunStarted(version=0))
        self.first: list[AnyCommand] = []
        for index in range(workers):
            self.first = self.join(f"w{index}")

    def send(self, event: AnyEvent) -> list[AnyCommand]:
        commands = self.dispatcher.handle(event, self.now)
        self.dispatcher.audit()
        return commands

    def join(self, name: str, *, version: int = 0) -> list[AnyCommand]:
        joined = WorkerJoined(
            worker=name, slots=8, version=version, capabilities=self.capabilities, kv_tokens=self.kv_tokens
        )
        return self.send(joined)

    def tick(self, seconds: float) -> list[AnyCommand]:
        self.now += seconds
        return self.send(Tick())

    def prompt(self) -> list[AnyCommand]:
        self.submitted += 1
        name = f"p{self.submitted - 1}"
        return self.send(PromptSubmitted(prompt_id=name, task_id=f"t-{name}", epoch=0))

    def end(
        self,
        trajectory: str,
        reward: float = 0.0,
        status: TrajectoryStatus = TrajectoryStatus.FINISHED,
        versions: tuple[int, int] = (0, 0),
        worker: str = "w0",
    ) -> list[AnyCommand]:
        return self.send(
            TrajectoryEnded(
                trajectory_id=trajectory,
                worker=worker,
                status=status,
                reward=reward,
                first_version=versions[0],
                last_version=versions[1],
                generated_tokens=5,
                turns=1,
                cause="broken" if status is TrajectoryStatus.FAILED else "",
            )
        )

    def ask(self, step: int = 1, replica: int = 0) -> list[AnyCommand]:
        return self.send(GroupRequested(step=step, replica=replica))

    def acknowledge(self, group: str, step: int = 1, replica: int = 0) -> list[AnyCommand]:
        return self.send(GroupAcknowledged(step=step, replica=replica, group_id=group, tokens=10))

    def sync(self, version: int, workers: tuple[str, ...] = ("w0",)) -> list[AnyCommand]:
        out = self.send(SyncRequested(version=version))
        for worker in workers:
            out += self.send(WorkerPaused(worker=worker, version=version))
        out += self.send(SyncFinished(version=version))
        for worker in workers:
            out += self.send(WeightsAcknowledged(worker=worker, version=version))
        return out

    def train(self, group: str, step: int) -> list[AnyCommand]:
        """Hand out a ready group as the whole batch of `step` (B = 1), and sync."""
        assert kinds(self.ask(step)) == [DeliverGroup]
        self.acknowledge(group, step)
        assert kinds(self.ask(step)) == [CloseBatch]
        return self.send(StepFinished(step=step)) + self.sync(step)


def kinds(commands: list[AnyCommand]) -> list[type]:
    return [type(command) for command in commands]


def started(commands: list[AnyCommand]) -> list[str]:
    return [command.trajectory_id for command in commands if isinstance(command, StartTrajectory)]


def only(commands: list[AnyCommand], kind: type) -> Any:
    found = of(kind, commands)
    assert len(found) == 1, commands
    return found[0]


def of(kind: type, commands: list[AnyCommand]) -> list[Any]:
    return [command for command in commands if isinstance(command, kind)]
