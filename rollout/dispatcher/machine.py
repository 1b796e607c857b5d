"""The coordinator's state machine. Pure: `handle(event, now)` returns the commands; nothing else changes it.

What the shell around it must know:
* Events are handled one at a time; their commands are executed in order. Events may be repeated (retries on the wire):
  repeats change nothing, but a repeated request is answered again.
* A trajectory ends by its worker's TrajectoryEnded (or by WorkerLost). AbortTrajectory only asks for it: a report of
  FINISHED that crossed the abort on the wire still counts, judged by its own versions.
* The shell keeps the tokens of every reported trajectory until DropTrajectories names it, its evaluation is finished,
  or its prompt is ACCEPTED by ClosePrompt.
* A GroupRequested that cannot be answered waits in here (one a replica). When the shell's long poll ran out meanwhile,
  it may ignore the DeliverGroup or CloseBatch that comes later: the replica's next request is answered again.
* The actor syncs after every optimizer step, then asks for the next step's groups. Step s + 1 is filled only under
  version s (or when replica 0 asks for it without a sync: then the weights of step s are not coming).
* Finite source: once it is exhausted and nothing is in flight, the last batch closes short; a request after that is
  answered by a CloseBatch of 0 groups, and StopRun with an empty cause is emitted once. Syncs and evaluations work
  even after that. After a StopRun with a cause every event is ignored.

Nobody starves, whatever the policy and however unfair the world (S = max_version_span, G = groups that the gate
allows, K = their size, M = max_trajectories, R = max_resamples):
* A trajectory that starts under version v ends, or is aborted with a cause, before a worker samples under version
  v + S; also `deadline_s` after its start at the latest, time in the car park not counted. Aborted ones are reported
  within `abort_grace_s`, or the run stops with a cause.
* A member is sampled at most 1 + R times, lost workers not counted; then its group is shrunk or closed with a cause.
* A group admitted under version v has started before version v + 2·S + S · ceil(G·K·(1 + R) / M): after 2·S it is
  overdue and comes before all others that have not started, and all M places of a worker change hands within S
  versions. Lost workers, evaluations and unreported aborts hold that up. Policies that promote nobody (`program_aware`,
  as published) bound the wait in seconds: `longest_wait_s`.
"""

from __future__ import annotations

from collections import deque

from envclient.base.errors import InvariantError
from rollout.dispatcher.batch import Ages, TrainBatch
from rollout.dispatcher.config import DispatcherConfig
from rollout.dispatcher.evaluations import Evaluations
from rollout.dispatcher.groups import Groups
from rollout.dispatcher.pool import WorkerPool
from rollout.dispatcher.records import Episode, EpisodeState, Group
from rollout.dispatcher.schedule import Schedule
from rollout.dispatcher.sync import SyncState, WeightSync
from rollout.policy.gate import Gate
from rollout.policy.lengths import Lengths
from rollout.policy.registry import make_policy
from rollout.types import (
    AnyCommand,
    AnyEvent,
    DropTrajectories,
    EvalRequested,
    FetchPrompts,
    GroupAcknowledged,
    GroupRequested,
    LengthEstimated,
    PromptStatus,
    PromptSubmitted,
    RunStarted,
    SourceExhausted,
    StepFinished,
    StopRun,
    SyncFinished,
    SyncRequested,
    Tick,
    TrajectoryEnded,
    TrajectoryStatus,
    TurnEnded,
    TurnReady,
    WeightsAcknowledged,
    WorkerJoined,
    WorkerLost,
    WorkerPaused,
)


class Dispatcher:
    """Decides everything between prompt source, workers and actor."""

    def __init__(self, config: DispatcherConfig, truth: Lengths | None = None) -> None:
        """`truth`: true lengths, for the policy `oracle` of a simulation."""
        self.config = config
        self.stopped: str | None = None
        """Cause of StopRun ('' when the source was drained)."""
        self._gate = Gate(config.gate_groups)
        self.policy = make_policy(config.policy, config.policy_limits, truth)
        self._pool = WorkerPool(workers=config.workers, max_trajectories=config.max_trajectories, policy=self.policy)
        self._ages = Ages()
        self._batch = TrainBatch(config, self._ages, step=1)
        self._groups = Groups(config, self._pool, self._gate, self._batch, self._ages, self.policy)
        self._sync = WeightSync()
        self._schedule = Schedule(config, self.policy, self._pool, self._groups, self._sync)
        self._evaluations = Evaluations(self._pool)
        self._attempt = 0
        self._known: set[str] = set()
        """Every prompt id ever submitted: a repeated PromptSubmitted must not train twice."""
        self._backlog: deque[tuple[str, str]] = deque()
        """(prompt id, task id) that wait for a credit: requeued ones first."""
        self._exhausted = False
        self._consumed: dict[int, int] = {}
        """Step → its groups' credits, until the step's weights are acknowledged."""
        self._trajectories_done = 0
        self._turns_done = 0

    @property
    def version(self) -> int:
        """Weight version acknowledged by every worker."""
        return self._groups.version

    @property
    def step(self) -> int:
        """Optimizer step whose batch is being filled."""
        return self._batch.step

    def handle(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        """Commands that `event` causes at time `now` (seconds, monotonic, never smaller than before)."""
        out: list[AnyCommand] = []
        if self.stopped:
            return out
        self._pool.now = now
        match event:
            case TurnReady() | TurnEnded():
                self._turns_done += isinstance(event, TurnEnded)
                self._schedule.turn(event, out)
                return out
            case LengthEstimated():
                self._schedule.estimated(event, out)
                return out
            case TrajectoryEnded():
                self._trajectory_ended(event, out)
            case GroupRequested():
                self._group_requested(event, out)
            case GroupAcknowledged():
                self._batch.acknowledge(event.step, event.replica, event.group_id, event.tokens)
            case PromptSubmitted():
                self._prompt_submitted(event)
            case SourceExhausted():
                self._exhausted = True
                self._gate.expected = 0
            case StepFinished():
                self._step_finished(event, out)
            case SyncRequested():
                self._sync.request(event.version, out)
            case WorkerPaused():
                self._sync.worker_paused(event.worker, event.version, out)
            case SyncFinished():
                self._sync_finished(event, out)
            case WeightsAcknowledged():
                self._weights_acknowledged(event, out)
            case EvalRequested():
                self._evaluations.request(event, out)
            case Tick():
                self._tick(out)
            case WorkerJoined():
                self._worker_joined(event, out)
            case WorkerLost():
                self._worker_lost(event.worker, event.cause, out)
            case RunStarted():
                self._run_started(event)
        self._advance(out)
        return out

    def _advance(self, out: list[AnyCommand]) -> None:
        """Do whatever has become possible. Nothing here depends on how many trajectories there are."""
        self._stop_if_futile(out)
        if self.stopped:
            return
        if self._sync.state is SyncState.DUE and self._pool.complete and not self._evaluations.running:
            self._sync.pause(self._pool.workers, out)
        if not self._sync.active and self._pool.complete:
            self._evaluations.begin(self.version, out)
            self._admit(out)
        self.policy.places = max(0, self._batch.free - len(self._batch.ready))
        self._schedule.run(out)
        self._batch.serve(drained=self._drained, out=out)
        if self._batch.closed is not None and self._batch.closed.groups == 0:
            self._stop("", out)

    # ------------------------------------------------------------------------------------------- prompts and groups

    def _run_started(self, event: RunStarted) -> None:
        self._groups.version = self.policy.version = event.version
        self._batch.step = event.version + 1
        self._attempt = event.next_attempt
        for prompt_id, task_id in event.requeued:
            self._known.add(prompt_id)
            self._backlog.append((prompt_id, task_id))

    def _prompt_submitted(self, event: PromptSubmitted) -> None:
        if event.prompt_id in self._known:
            return
        self._known.add(event.prompt_id)
        self._gate.expected = max(0, self._gate.expected - 1)
        self._backlog.append((event.prompt_id, event.task_id))

    def _admit(self, out: list[AnyCommand]) -> None:
        """Turn free credits into groups, waiting prompts first, then ask the source for as many as still fit."""
        room = self._gate.free
        if self.config.steps:
            trainable = self.config.batch * max(0, self.config.steps - self.step + 1)
            room = min(room, trainable - len(self._groups.live) - self._gate.expected)
        while self._backlog and room > 0:
            prompt_id, task_id = self._backlog.popleft()
            self._groups.admit(prompt_id, task_id, self._attempt)
            room -= 1
        if room > 0 and not self._exhausted:
            self._gate.expected += room
            out.append(FetchPrompts(count=room))

    def _trajectory_ended(self, event: TrajectoryEnded, out: list[AnyCommand]) -> None:
        episode = self._pool.episodes.get(event.trajectory_id)
        if episode is None:
            out.append(DropTrajectories(trajectory_ids=[event.trajectory_id]))
            return
        if episode.state not in (EpisodeState.RUNNING, EpisodeState.ABORTING):
            return
        if episode.job is not None and event.status in (TrajectoryStatus.FINISHED, TrajectoryStatus.TRUNCATED):
            self.policy.finished(episode.job, event.generated_tokens)
        self._pool.end(episode)
        self._trajectories_done += 1
        if isinstance(episode.owner, Group):
            self._groups.member_ended(episode, episode.owner, event, out)
        else:
            self._evaluations.ended(episode.owner, out)

    def _tick(self, out: list[AnyCommand]) -> None:
        self.policy.tick(self._pool.now)
        for episode in self._pool.due():
            if episode.state is EpisodeState.ABORTING:
                grace = self.config.abort_grace_s
                self._stop(
                    f"worker {episode.worker} did not report {episode.trajectory_id} within {grace:g} s of its abort",
                    out,
                )
            else:
                cause = f"not ended within deadline_s = {self.config.deadline_s:g} s"
                self._groups.abort(episode, TrajectoryStatus.ABORTED, TrajectoryStatus.FAILED, cause, out)

    # ----------------------------------------------------------------------------------------------- actor replicas

    def _group_requested(self, event: GroupRequested, out: list[AnyCommand]) -> None:
        if not self._batch.request(event.step, event.replica):
            self._stop(f"replica {event.replica} asks for step {event.step}, the run is at step {self.step}", out)
            return
        if event.step == self.step and event.replica == 0 and not self._sync.active and not self._batch.opened:
            self._open_batch()

    def _step_finished(self, event: StepFinished, out: list[AnyCommand]) -> None:
        closed = self._batch.closed
        if event.step < self.step or (closed is not None and closed.groups == 0):
            return
        if event.step > self.step or closed is None:
            self._stop(f"the actor finished step {event.step}, but the batch of step {self.step} is not closed", out)
            return
        groups = self._batch.finish()
        for group in groups:
            self._groups.trained(group, event.step, out)
        self._consumed[event.step] = len(groups)
        self._groups.untrained = dict.fromkeys(PromptStatus, 0)

    def _open_batch(self) -> None:
        """The weights that the batch's step starts from are current: credits of the steps before it return."""
        self._batch.opened = True
        for step in [step for step in self._consumed if step < self.step]:
            self._gate.held -= self._consumed.pop(step)

    # ------------------------------------------------------------------------------------------------------ syncs

    def _sync_finished(self, event: SyncFinished, out: list[AnyCommand]) -> None:
        if self._sync.state is not SyncState.BROADCAST or event.version != self._sync.version:
            return
        self._groups.discard_stale(event.version, out)
        self._sync.resume(out)

    def _weights_acknowledged(self, event: WeightsAcknowledged, out: list[AnyCommand]) -> None:
        if self._sync.acknowledged(event.worker, event.version):
            self._complete_sync(out)

    def _complete_sync(self, out: list[AnyCommand]) -> None:
        """When every worker has acknowledged: the version is current."""
        if not self._sync.complete:
            return
        self._sync.finish()
        for worker in self._pool.workers.values():
            worker.usable = worker.name in self._sync.members
        self._pool.touch()
        self._groups.promote(self._sync.version)
        if self.version >= self.step - 1:
            self._open_batch()

    # ----------------------------------------------------------------------------------------------------- workers

    def _worker_joined(self, event: WorkerJoined, out: list[AnyCommand]) -> None:
        known = self._pool.workers.get(event.worker)
        if known is not None and known.load == 0 and not self._sync.active:
            left = []  # most likely a repeated call: nothing is lost by taking it as a restart
        elif known is not None:
            left = self._pool.lose(event.worker)
            self._sync.drop(event.worker, out)
            self._complete_sync(out)
        else:
            left = []
        usable = event.version == self.version and not self._sync.begun
        self._pool.join(event, usable=usable)
        self._sync.add(event.worker, out)
        if self._pool.complete and not self._pool.usable:
            held = f"holds weights of version {event.version}, the run is at version {self.version}"
            self._stop(f"worker {event.worker} {held}: resume the run from its checkpoint", out)
            return
        self._restart(left, out)

    def _worker_lost(self, name: str, cause: str, out: list[AnyCommand]) -> None:
        if name not in self._pool.workers:
            return
        left = self._pool.lose(name)
        if not self._pool.usable:
            self._stop(f"worker {name} is lost and no other one can take over: {cause}", out)
            return
        self._sync.drop(name, out)
        self._complete_sync(out)
        self._restart(left, out)

    def _restart(self, episodes: list[Episode], out: list[AnyCommand]) -> None:
        for episode in episodes:
            if isinstance(episode.owner, Group):
                self._groups.restart(episode, episode.owner, out)
            else:
                self._evaluations.restart(episode, episode.owner)

    # -------------------------------------------------------------------------------------------------------- ends

    @property
    def _drained(self) -> bool:
        """No group will become ready any more."""
        return self._exhausted and not self._backlog and not self._gate.expected and not self._groups.generating

    def _stop_if_futile(self, out: list[AnyCommand]) -> None:
        untrained = self._groups.untrained
        total = sum(untrained.values())
        if total > self.config.max_refills:
            kinds = ", ".join(f"{n} {status.value}" for status, n in untrained.items() if n)
            self._stop(
                f"step {self.step}: {total} groups left untrained ({kinds}), more than max_refills = "
                f"{self.config.max_refills}; the last one: {self._groups.last_cause}",
                out,
            )

    def _stop(self, cause: str, out: list[AnyCommand]) -> None:
        if self.stopped is None or (not self.stopped and cause):
            self.stopped = cause
            out.append(StopRun(cause=cause))

    # ------------------------------------------------------------------------------------------------------- status

    @property
    def phase(self) -> str:
        """One word for people: starting, rollout, train, sync, eval, done."""
        if self.stopped is not None:
            return "done"
        if not self._pool.complete:
            return "starting"
        if self._sync.active:
            return "sync"
        if self._evaluations.running:
            return "eval"
        return "train" if self._batch.free == 0 else "rollout"

    def counts(self) -> dict[str, int]:
        """Prompts by PromptStatus value, plus `submitted`, since RunStarted (requeued ones included)."""
        counts = {status.value: number for status, number in self._groups.closed.items()}
        counts[PromptStatus.RUNNING.value] = len(self._backlog) + len(self._groups.live)
        counts["submitted"] = len(self._known)
        return counts

    def statistics(self) -> dict[str, float]:
        """Numbers for status and logs. Groups: running = generating, ready = sealed, taken = handed out."""
        workers = self._pool.workers.values()
        return {
            "workers": len(workers),
            "groups_running": self._groups.generating,
            "groups_ready": len(self._batch.ready),
            "groups_taken": len(self._batch.taken),
            "gate_held": self._gate.held,
            "gate_limit": self._gate.limit,
            "trajectories_running": sum(len(worker.open) for worker in workers),
            "trajectories_waiting": sum(worker.queued for worker in workers),
            "trajectories_done": self._trajectories_done,
            "trajectories_discarded": self._groups.lost[TrajectoryStatus.DISCARDED],
            "trajectories_failed": self._groups.lost[TrajectoryStatus.FAILED],
            "trajectories_resampled": self._groups.resamples,
            "turns_done": self._turns_done,
        }

    def check_invariants(self) -> None:
        """Cheap promises, O(1): the prompts' identity and the gate. Raises InvariantError."""
        counts = self.counts()
        submitted = counts.pop("submitted")
        if sum(counts.values()) != submitted:
            raise InvariantError(f"{submitted} prompts were submitted, but {counts} add up to {sum(counts.values())}")
        gate = self._gate
        if gate.held < 0 or gate.expected < 0 or gate.free < 0:
            raise InvariantError(f"the gate of {gate.limit} has {gate.held} held and {gate.expected} expected credits")
        if gate.held != len(self._groups.live) + sum(self._consumed.values()):
            raise InvariantError(
                f"{gate.held} credits are held by {len(self._groups.live)} groups and {self._consumed}"
            )
        if len(self._batch.taken) > self.config.batch:
            raise InvariantError(f"step {self.step} took {len(self._batch.taken)} groups of {self.config.batch}")

    def audit(self) -> None:
        """Everything that can be recounted, O(state): for tests. Raises InvariantError."""
        self.check_invariants()
        self._pool.audit()
        self._groups.audit()
