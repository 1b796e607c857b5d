"""The dispatcher's shell: events in, decisions made durable, commands out.

Endpoints submit events and wait. One task drains whatever has come, lets the pure dispatcher decide event by event,
writes the ledger's transaction, logs the rows to `events.jsonl`, and only then lets the commands act: workers' mail,
the actor's answers, the shelf of tokens, the run's metrics. A submitter is answered after that.

Anything unexpected in here ends the coordinator: a run that decides on a broken state is worse than one that resumes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from envclient.base.errors import InvariantError, VenusError
from envclient.base.files import JsonlWriter
from rollout.coordinator.evaluation import judge
from rollout.coordinator.intake import admit, as_event
from rollout.coordinator.ledger import Ledger
from rollout.coordinator.mailbox import Mailbox
from rollout.coordinator.shelf import SealedGroup, Shelf
from rollout.coordinator.source import TaskOrder
from rollout.coordinator.tracker import Tracker
from rollout.coordinator.waiters import Waiters
from rollout.dispatcher import Dispatcher
from rollout.predictor.episodes import EpisodeLog
from rollout.protocol import EngineAddress, EvaluateReply, SyncBeginReply, WorkerReport
from rollout.types import (
    AbortTrajectory,
    AnyCommand,
    AnyEvent,
    BatchClosed,
    CloseBatch,
    ClosePrompt,
    DeliverGroup,
    DropTrajectories,
    EvalRequested,
    EventRow,
    FetchPrompts,
    FinishEval,
    GrantSync,
    MoveTrajectory,
    PauseWorker,
    PromptStatus,
    Purpose,
    ResumeWorker,
    SealGroup,
    SetClass,
    SourceExhausted,
    StartTrajectory,
    StepFinished,
    StopRun,
    SyncFinished,
    Tick,
    Trajectory,
    TurnEnded,
    WorkerCommand,
    WorkerJoined,
    WorkerLost,
)

log = logging.getLogger("venus.coordinator")
MAX_BATCH = 256
"""Submissions in one transaction: bounds how long an answer can wait for others'."""


@dataclass(kw_only=True)
class _Submission:
    events: tuple[AnyEvent, ...]
    done: asyncio.Future[None]


@dataclass(kw_only=True)
class Progress:
    """What happened since the last optimizer step, for the person who watches."""

    trajectories: int = 0
    turns: int = 0


@dataclass(kw_only=True)
class Shell:
    """Owner of the run's state: nothing else changes dispatcher, ledger, mail or shelf."""

    dispatcher: Dispatcher
    ledger: Ledger
    source: TaskOrder
    tracker: Tracker
    events: JsonlWriter
    next_event: int
    """Number of the first row that this shell writes."""
    clock: Callable[[], float]
    episodes: EpisodeLog | None = None
    """Where finished episodes are written down for the predictor, if they are."""
    waiters: Waiters = field(default_factory=Waiters)
    shelf: Shelf = field(default_factory=Shelf)
    mailboxes: dict[str, Mailbox] = field(default_factory=dict)
    joining: dict[str, Mailbox] = field(default_factory=dict)
    """Mail of workers whose WorkerJoined is not handled yet."""
    progress: Progress = field(default_factory=Progress)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    """The run stopped with a cause, or the shell broke."""
    failure: str = ""

    def __post_init__(self) -> None:
        self._queue: asyncio.Queue[_Submission] = asyncio.Queue()
        self._position = self.ledger.next_position
        counts = self.ledger.counts
        running = counts[PromptStatus.RUNNING.value]
        self._closed_before = {**counts, PromptStatus.RUNNING.value: 0, "submitted": counts["submitted"] - running}
        self._loaded = 0
        self._seconds: dict[int, dict[str, float]] = {}
        self._unanswered: set[asyncio.Future[None]] = set()

    # ------------------------------------------------------------------------------------------------- inside

    async def submit(self, *events: AnyEvent) -> None:
        """Returns when `events` are handled, durable and acted upon. Without events: when all earlier ones are.

        Raises:
            VenusError: the run has stopped.
        """
        self.waiters.check()
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unanswered.add(done)
        done.add_done_callback(self._unanswered.discard)
        self._queue.put_nowait(_Submission(events=events, done=done))
        await done

    async def run(self) -> None:
        """Handle events until cancelled. Whatever it raises is a defect, and nobody is left waiting."""
        try:
            while True:
                batch = [await self._queue.get()]
                while not self._queue.empty() and len(batch) < MAX_BATCH:
                    batch.append(self._queue.get_nowait())
                self._step(batch)
        except Exception as error:
            self.stop(f"coordinator: {type(error).__name__}: {error}")
            raise

    def stop(self, cause: str) -> None:
        """End the run: everyone who waits is told `cause`."""
        if not self.failure:
            self.failure = cause
        error = VenusError(f"the run stopped: {self.failure}", "see logs/coordinator.log")
        self.waiters.fail(error)
        for done in list(self._unanswered):
            if not done.done():
                done.set_exception(error)
        for mailbox in self.mailboxes.values():
            mailbox.release()
        self.stopped.set()

    def _step(self, batch: list[_Submission]) -> None:
        rows: list[EventRow] = []
        for submission in batch:
            for event in submission.events:
                self._decide(event, rows)
        self.ledger.commit(rows)
        self._check_counts()
        if rows:
            self.events.write(b"\n".join(map(msgspec.json.encode, rows)))
        for row in rows:
            self._act(row)
        self._answer_sync_ends()
        for submission in batch:
            if not submission.done.done():
                submission.done.set_result(None)

    def _decide(self, event: AnyEvent, rows: list[EventRow]) -> None:
        """Handle `event` and, when it makes the dispatcher fetch prompts, those prompts at once."""
        pending: deque[AnyEvent] = deque([event])
        while pending:
            event = pending.popleft()
            now = self.clock()
            commands = self.dispatcher.handle(event, now)
            self.dispatcher.check_invariants()
            rows.append(EventRow(seq=self.next_event, now=now, event=event, commands=commands))
            self.next_event += 1
            for command in commands:
                if isinstance(command, FetchPrompts):
                    pending.extend(self._fetch(command.count))

    def _fetch(self, count: int) -> Iterable[AnyEvent]:
        for _ in range(count):
            prompt = self.source.at(self._position)
            if prompt is None:
                yield SourceExhausted()
                return
            self._position += 1
            yield prompt

    def _check_counts(self) -> None:
        """The dispatcher's account and the ledger's are kept apart and must agree."""
        here, there = self.dispatcher.counts(), self.ledger.counts
        for name, before in self._closed_before.items():
            if before + here[name] != there[name]:
                raise InvariantError(f"{name}: dispatcher {here[name]} + {before} before, ledger {there[name]}")

    # ------------------------------------------------------------------------------------------------- acting

    def _act(self, row: EventRow) -> None:
        """Carry out a row whose transaction is durable."""
        event = row.event
        if self.episodes is not None:
            self.episodes.follow(row)
        if isinstance(event, WorkerJoined):
            self.mailboxes[event.worker] = self.joining.pop(event.worker)
            self.tracker.worker_joined(row.now)
        elif isinstance(event, WorkerLost):
            log.warning("worker %s is lost: %s", event.worker, event.cause)
            self._remove_mailbox(event.worker)
        elif isinstance(event, EvalRequested):
            self.tracker.eval_requested(row.now)
        elif isinstance(event, TurnEnded):
            self.progress.turns += 1
        elif isinstance(event, SyncFinished):
            self._loaded = max(self._loaded, event.version)
        trained: list[SealedGroup] = []
        for command in row.commands:
            self._carry_out(command, row.now, trained)
        if isinstance(event, StepFinished) and trained:
            self.tracker.step_finished(event.step, event.skipped, trained, row.now)
            self.progress = Progress()

    def _carry_out(self, command: AnyCommand, now: float, trained: list[SealedGroup]) -> None:
        match command:
            case StartTrajectory():
                self.shelf.expect(command)
                self._post(command)
            case AbortTrajectory() | SetClass() | MoveTrajectory() | PauseWorker() | ResumeWorker():
                self._post(command)
            case SealGroup():
                self.shelf.seal(command, now)
            case DropTrajectories():
                self.shelf.drop(command.trajectory_ids)
            case ClosePrompt():
                group = self.shelf.close(command.group_id)
                if command.status is PromptStatus.ACCEPTED:
                    if group is None:
                        raise InvariantError(f"group {command.group_id} was trained, but it was never sealed")
                    trained.append(group)
                elif command.cause:
                    log.info("prompt %s closed as %s: %s", command.prompt_id, command.status.value, command.cause)
            case DeliverGroup():
                group = self.shelf.sealed(command.group_id)
                self.waiters.resolve(("group", command.replica, command.step), group.for_step(command.step))
            case CloseBatch():
                closed = BatchClosed(step=command.step, counts=command.counts)
                self.waiters.resolve(("group", command.replica, command.step), closed)
            case GrantSync():
                addresses = [
                    EngineAddress(worker=w, engine_url=self.mailboxes[w].join.engine_url)
                    for w in command.workers
                    if w in self.mailboxes
                ]
                self.waiters.resolve(("sync", command.version), SyncBeginReply(engines=addresses))
            case FinishEval():
                self._finish_eval(command, now)
            case StopRun():
                self._stop_run(command)
            case FetchPrompts():
                pass  # done while deciding

    def _post(self, command: WorkerCommand) -> None:
        mailbox = self.mailboxes.get(command.worker)
        if mailbox is not None:  # else it was lost later in this batch, and the dispatcher knows
            mailbox.post(command)

    def _remove_mailbox(self, worker: str) -> None:
        mailbox = self.mailboxes.pop(worker, None)
        if mailbox is not None:
            mailbox.release()

    def _finish_eval(self, command: FinishEval, now: float) -> None:
        trajectories = self.shelf.drop(command.trajectory_ids)
        try:
            row = judge(command.eval_id, command.version, trajectories, len(command.trajectory_ids))
        except VenusError as error:
            log.error("%s", error)
            self.waiters.refuse(("eval", command.eval_id), error)
            return
        self.tracker.evaluated(row, now)
        self.waiters.resolve(("eval", command.eval_id), eval_reply(row))

    def _stop_run(self, command: StopRun) -> None:
        if command.cause:
            log.error("the run stops: %s", command.cause)
            self.stop(command.cause)
        else:
            log.info("the source is drained and nothing is in flight")

    def _answer_sync_ends(self) -> None:
        version = self.dispatcher.version
        for waiting in sorted(v for v in self._seconds if v <= version):
            self.tracker.sync_finished(waiting, self._seconds.pop(waiting), self.clock())
            self.waiters.resolve(("resumed", waiting), True)

    # --------------------------------------------------------------------------------------------- translating

    def loaded(self, version: int) -> None:
        """The run begins with engines that hold `version`."""
        self._loaded = version

    def sync_ends(self, version: int, seconds: dict[str, float]) -> asyncio.Future[bool]:
        """Open the wait for every worker's acknowledgement of `version`."""
        future = self.waiters.open(("resumed", version))
        self._seconds.setdefault(version, seconds)
        return future

    def sync_is_ending(self, version: int) -> bool:
        """Whether `sync_ends` was called for it before, and not everyone has acknowledged it yet."""
        return version in self._seconds

    def as_event(self, report: WorkerReport, worker: str) -> AnyEvent:
        """A worker's report as the dispatcher takes it; keeps a trajectory's tokens."""
        if not isinstance(report, Trajectory):
            return report
        order = self.shelf.order(report.trajectory_id)
        trajectory = admit(report, order, self._loaded)
        event = as_event(trajectory, worker)
        if order is not None and self.shelf.put(trajectory):
            if trajectory is not report:
                log.error("trajectory %s from %s: %s", report.trajectory_id, worker, trajectory.stop_reason)
            if order.purpose is Purpose.TRAIN:
                if self.episodes is not None:
                    self.episodes.reported(trajectory)
                self.progress.trajectories += 1
                self.tracker.trajectory_ended(event)
        return event

    def tick(self, worker_timeout_s: float) -> list[AnyEvent]:
        """Events that the passing of time causes."""
        now = self.clock()
        silent = {w: now - m.last_poll for w, m in self.mailboxes.items() if now - m.last_poll > worker_timeout_s}
        lost = [WorkerLost(worker=w, cause=f"it has not polled for {s:.0f} s") for w, s in silent.items()]
        return [*lost, Tick()]


def eval_reply(row: dict[str, object]) -> EvaluateReply:
    """The answer that a row of evals.jsonl means."""
    return msgspec.convert(
        {
            "eval_id": row["eval_id"],
            "version": row["version"],
            "samples": row["samples"],
            "pass_rate": row["pass"],
            "standard_error": row["standard_error"],
        },
        EvaluateReply,
    )
