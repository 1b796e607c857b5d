"""Everything around the dispatcher as the tests know it; each command is checked against that. See dispatcher_world."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rollout.dispatcher import Dispatcher, DispatcherConfig
from rollout.types import (
    AbortTrajectory,
    AnyCommand,
    AnyEvent,
    CloseBatch,
    ClosePrompt,
    DeliverGroup,
    DropTrajectories,
    FetchPrompts,
    FinishEval,
    GrantSync,
    MoveTrajectory,
    PauseWorker,
    PriorityClass,
    PromptStatus,
    Purpose,
    ResumeWorker,
    RunStarted,
    SealGroup,
    SetClass,
    StartTrajectory,
    StopRun,
    TrajectoryEnded,
    TrajectoryStatus,
    WeightsAcknowledged,
    WorkerPaused,
)

SCORED = (TrajectoryStatus.FINISHED, TrajectoryStatus.TRUNCATED)


@dataclass
class Episode:
    trajectory_id: str
    group_id: str
    purpose: Purpose
    place: int
    """In the order of starts."""
    first: int = -1
    last: int = -1
    tokens: int = 0
    turns: int = 0
    context: int = 9
    ready: bool = False
    """It wants a slot."""
    abort: TrajectoryStatus | None = None


@dataclass
class Worker:
    name: str
    version: int
    priority: bool
    paused: bool = False
    open: dict[str, Episode] = field(default_factory=dict)
    outbox: deque[AnyEvent] = field(default_factory=deque)


@dataclass
class Replica:
    waiting: bool = False
    group: str = ""
    closed: bool = False


class CheckedWorld:
    def __init__(
        self,
        config: DispatcherConfig,
        *,
        replicas: int = 1,
        prompts: int | None = None,
        requeued: int = 0,
        resume_step: int = 0,
        priority: bool = False,
        migration: bool = False,
        kv_tokens: int = 0,
    ) -> None:
        self.config = config
        self.kv_tokens = kv_tokens
        self.migration = migration
        self.located: dict[str, str] = {}
        """Where the dispatcher holds a place for each trajectory whose end it does not know yet."""
        self.moves = 0
        self.dispatcher = Dispatcher(config)
        self.now = 0.0
        self.log: list[tuple[AnyEvent, float, list[AnyCommand]]] = []
        self.prompts_left = prompts
        self.position = requeued
        self.fetch = 0
        self.exhausted = False
        self.workers: dict[str, Worker] = {}
        self.departed: deque[AnyEvent] = deque()
        """Late reports of lost workers."""
        self.joined = 0
        self.priority = priority
        self.replicas = [Replica() for _ in range(replicas)]
        self.version = resume_step
        self.step = resume_step + 1
        self.phase = "train"
        """Of the actor: train, sync_due, sync_asked, broadcast, acknowledging."""
        self.unacknowledged: set[str] = set()
        """Workers that were told to resume."""
        self.acked: list[tuple[str, int]] = []
        self.steps_done = 0
        self.started: set[str] = set()
        self.group_of: dict[str, str] = {}
        self.reported: dict[str, TrajectoryEnded] = {}
        """Tokens that the shell keeps."""
        self.sealed: dict[str, list[str]] = {}
        self.step_of_group: dict[str, int] = {}
        self.in_flight: set[str] = set()
        self.consumed: dict[str, int] = {}
        self.submitted: dict[str, PromptStatus] = {}
        self.running_evals: set[str] = set()
        self.evals = 0
        self.classes: dict[str, tuple[PriorityClass, int]] = {}
        self.discards = 0
        self.promised_no_discards = False
        self.stop_cause: str | None = None
        self.broken = False
        """A check has failed: nothing more is asked of this world."""
        names = [(f"p{i:06d}", f"t{i}") for i in range(requeued)]
        self.submitted.update((prompt_id, PromptStatus.RUNNING) for prompt_id, _ in names)
        self.send(RunStarted(version=resume_step, requeued=names, next_attempt=int(resume_step > 0)))

    # ------------------------------------------------------------------------------------------ events and checks

    def send(self, event: AnyEvent) -> None:
        if isinstance(event, TrajectoryEnded):
            self.located.pop(event.trajectory_id, None)
            self.reported.setdefault(event.trajectory_id, event)
        self.broken = True
        commands = self.dispatcher.handle(event, self.now)
        self.log.append((event, self.now, commands))
        for command in commands:
            self.obey(command)
        self.dispatcher.audit()
        counts = dict.fromkeys(PromptStatus, 0)
        for status in self.submitted.values():
            counts[status] += 1
        if not self.stop_cause:
            expected = {status.value: number for status, number in counts.items()} | {"submitted": len(self.submitted)}
            assert self.dispatcher.counts() == expected
            holding = self.in_flight | self.consumed.keys()
            assert len(holding) <= self.config.gate_groups, "more groups in flight than the gate allows"
        self.broken = False

    def obey(self, command: AnyCommand) -> None:
        assert not self.stop_cause, f"{command} after the end"
        match command:
            case FetchPrompts(count=count):
                assert count > 0 and not self.exhausted
                self.fetch += count
            case StartTrajectory():
                self.start(command)
            case AbortTrajectory(worker=name, trajectory_id=trajectory, status=status):
                assert trajectory in self.started
                if status is TrajectoryStatus.DISCARDED:
                    self.discards += 1
                    assert not self.promised_no_discards
                episode = self.workers[name].open.get(trajectory)
                if episode is not None:
                    assert episode.abort is None, "aborted twice"
                    episode.abort = status
            case SetClass(worker=name, trajectory_id=trajectory, priority=priority, rank=rank, cause=cause):
                assert self.priority and trajectory in self.started
                assert self.classes[trajectory] != (priority, rank), "neither class nor rank changed"
                assert cause and self.located[trajectory] == name
                self.classes[trajectory] = (priority, rank)
                assert name in self.workers
            case MoveTrajectory(worker=name, trajectory_id=trajectory, to=to, cause=cause):
                assert self.migration and cause and name != to and self.located[trajectory] == name
                assert self.phase in ("train", "sync_due"), "moved during a sync"
                self.located[trajectory] = to
                self.moves += 1
                if (episode := self.workers[name].open.pop(trajectory, None)) is not None:
                    self.workers[to].open[trajectory] = episode
            case SealGroup():
                self.seal(command)
            case ClosePrompt():
                self.close(command)
            case DropTrajectories(trajectory_ids=trajectories):
                for trajectory in trajectories:
                    group = self.group_of.get(trajectory, "")
                    assert group not in self.in_flight or trajectory not in self.sealed.get(group, []), (
                        "tokens of a sealed group were dropped"
                    )
                    self.reported.pop(trajectory, None)
            case DeliverGroup(step=step, replica=replica, group_id=group):
                assert step == self.step and group in self.sealed
                assert self.phase == "train", "handed out under the weights before the last step's"
                assert self.step_of_group.setdefault(group, step) == step, "a group in two steps"
                others = [r.group for i, r in enumerate(self.replicas) if i != replica]
                assert group not in others and group not in dict(self.acked), "a group was handed out twice"
                if self.replicas[replica].waiting:
                    self.replicas[replica].waiting = False
                    self.replicas[replica].group = group
            case CloseBatch(step=step, replica=replica, counts=counts):
                if step == self.step and self.replicas[replica].waiting:
                    members = [m for group, _ in self.acked for m in self.sealed[group]]
                    assert counts.groups == len(self.acked) <= self.config.batch
                    assert counts.sequences == len(members)
                    assert counts.tokens == sum(self.reported[m].generated_tokens for m in members)
                    assert counts.groups == self.config.batch or self.exhausted
                    self.replicas[replica].waiting = False
                    self.replicas[replica].closed = True
            case PauseWorker(worker=name):
                assert not self.running_evals, "paused during an evaluation"
                assert self.phase == "sync_asked"
                self.workers[name].paused = True
                self.workers[name].outbox.append(WorkerPaused(worker=name, version=command.version))
            case GrantSync(version=version, workers=names):
                assert version == self.step - 1 and self.phase in ("sync_asked", "broadcast")
                assert names and all(self.workers[name].paused for name in names)
                self.phase = "broadcast"
            case ResumeWorker(worker=name, version=version):
                worker = self.workers[name]
                assert worker.paused and version == self.step - 1
                worker.paused = False
                worker.version = version
                self.unacknowledged.add(name)
                worker.outbox.append(WeightsAcknowledged(worker=name, version=version))
            case FinishEval(eval_id=eval_id, version=version, trajectory_ids=trajectories):
                if eval_id in self.running_evals:
                    self.running_evals.discard(eval_id)
                    for trajectory in trajectories:
                        event = self.reported.pop(trajectory)
                        assert event.status not in SCORED or event.first_version in (-1, version)
                        assert event.status not in SCORED or event.last_version in (-1, version)
            case StopRun(cause=cause):
                self.stop_cause = cause

    def start(self, command: StartTrajectory) -> None:
        worker = self.workers[command.worker]
        assert command.trajectory_id not in self.started, "started twice"
        assert not worker.paused and worker.version == self.dispatcher.version
        places = sum(name == command.worker for name in self.located.values())
        assert places < self.config.max_trajectories
        assert command.priority is not PriorityClass.PARKED, "a parked trajectory was started"
        self.located[command.trajectory_id] = command.worker
        episode = Episode(command.trajectory_id, command.group_id, command.purpose, len(self.started))
        worker.open[command.trajectory_id] = episode
        self.started.add(command.trajectory_id)
        self.group_of[command.trajectory_id] = command.group_id
        self.classes[command.trajectory_id] = (command.priority, command.rank)
        if command.purpose is Purpose.TRAIN:
            assert self.phase in ("train", "sync_due"), "a training trajectory was started during a sync"
            self.in_flight.add(command.group_id)
            prompt_id, attempt = command.group_id.rsplit(".", 1)
            assert self.submitted[prompt_id] is PromptStatus.RUNNING and int(attempt) >= 0
        else:
            self.running_evals.add(command.group_id)

    def seal(self, command: SealGroup) -> None:
        assert command.group_id not in self.sealed
        assert len(command.members) == len(command.advantages) == len(set(command.members))
        wanted = self.config.group_size
        assert len(command.members) == wanted or (self.config.on_lost_member == "shrink" and len(command.members) >= 2)
        assert abs(sum(command.advantages)) < 1e-6
        for member in command.members:
            event = self.reported[member]
            assert self.group_of[member] == command.group_id and event.status in SCORED
            assert event.first_version < 0 or event.last_version - event.first_version < self.config.max_version_span
        self.sealed[command.group_id] = command.members

    def close(self, command: ClosePrompt) -> None:
        assert self.submitted[command.prompt_id] is PromptStatus.RUNNING, "closed twice"
        self.submitted[command.prompt_id] = command.status
        self.in_flight.discard(command.group_id)
        if command.status is PromptStatus.ACCEPTED:
            assert self.step_of_group[command.group_id] == command.step
            self.consumed[command.group_id] = command.step
            for member in self.sealed[command.group_id]:
                event = self.reported.pop(member)
                if self.config.gate_groups == self.config.batch and event.first_version >= 0:
                    assert event.first_version == event.last_version == command.step - 1, "not on-policy"
        else:
            assert command.cause and command.group_id not in self.step_of_group
