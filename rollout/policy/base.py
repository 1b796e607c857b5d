"""PURE: the interface of whole scheduling policies, and the simplest of them.

The dispatcher tells a policy what happens to workers and trajectories, asks `decide` after every event, and turns what
changed into commands: class and rank of each trajectory (SetClass; a PARKED one that has not started stays in its
queue), and moves between workers. How slots are given on a worker follows from the class attribute `slots`
(`rollout.policy.slots`). Policies hold no clock: times are the events'.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

from rollout.policy.jobs import Job, JobGroup, Move, Phase, WorkerView
from rollout.policy.lengths import Lengths
from rollout.policy.settings import PolicyLimits, PolicySettings
from rollout.policy.staleness import is_overdue, is_promoted
from rollout.types import PriorityClass

HIGH, LOW, PARKED = PriorityClass.HIGH, PriorityClass.LOW, PriorityClass.PARKED
_MEASURE = 0.05
"""Weight of the newest sample in a running mean."""


class Policy:
    """Promoted groups are HIGH, all others LOW, nobody is parked (`action` and `trajectory` differ in slots only).

    Subclasses override the hooks `_added`, `_started`, `_ready`, `_ended_turn`, `_removed`, `_changed_group`, and
    `_decide`; each costs O(log n) in the number of trajectories, and so does an event.
    """

    slots: ClassVar[str] = "action"
    """Rule of the workers' slots: `action`, `trajectory`, `priority` (classes, with preemption) or `rank`."""
    wants_turns: ClassVar[bool] = False
    """Whether TurnReady must be reported, and turns are followed at all."""
    promotes: ClassVar[bool] = True
    """Whether a group at its last valid version, or one passed over for too long, comes before all others."""

    def __init__(self, settings: PolicySettings, limits: PolicyLimits, lengths: Lengths) -> None:
        self.settings = settings
        self.limits = limits
        self.lengths = lengths
        self.version = 0
        self.places = limits.batch
        """k: places of the batch being filled that no ready group has."""
        self.workers: dict[str, WorkerView] = {}
        self.jobs: dict[str, Job] = {}
        self.moves: list[Move] = []
        self.token_s = 0.0
        """Seconds a generated token takes, queueing for its slot included; a running mean."""
        self.tool_s = 0.0
        self.turn_tokens = 0.0
        self._changed: dict[str, tuple[Job, PriorityClass, int]] = {}
        """Jobs that `_set` touched, with their class and rank before."""

    @classmethod
    def slot_rule(cls, settings: PolicySettings) -> str:
        """The rule of the workers' slots under these settings."""
        return cls.slots

    @classmethod
    def uses_tiers(cls, settings: PolicySettings) -> bool:
        """Whether engines that have reference tiers should derive them from the classes."""
        return False

    @classmethod
    def longest_tick_s(cls, settings: PolicySettings) -> float:
        """Seconds between calls of `tick` that it can do with."""
        return math.inf

    # ------------------------------------------------------------------------------------- told by the dispatcher

    def join(self, worker: WorkerView) -> None:
        self.workers[worker.name] = worker

    def lose(self, name: str) -> None:
        """The dispatcher has removed the worker's jobs before."""
        self.workers.pop(name, None)

    def add(self, job: Job) -> None:
        """The job waits on its worker."""
        self.jobs[job.trajectory_id] = job
        job.group.jobs[job.trajectory_id] = job
        if (worker := self.workers.get(job.worker)) is not None:
            worker.jobs += 1
        self._added(job)

    def start(self, job: Job, now: float) -> None:
        """The dispatcher starts the job on its worker."""
        job.phase = Phase.OPENING
        job.since_s = now
        if (worker := self.workers.get(job.worker)) is not None:
            worker.open += 1
        self._started(job)

    def turn_ready(self, trajectory_id: str, turn: int, context_tokens: int, now: float) -> None:
        """TurnReady. Unknown trajectories and repeats are ignored."""
        job = self.jobs.get(trajectory_id)
        if job is None or job.phase not in (Phase.OPENING, Phase.TOOL) or turn != job.turns + 1:
            return
        if job.phase is Phase.TOOL:
            self.tool_s += _MEASURE * (now - job.since_s - self.tool_s)
        first = job.phase is Phase.OPENING
        job.phase = Phase.READY
        job.since_s = now
        job.context_tokens = context_tokens
        if first:
            job.group.prompt_tokens = context_tokens
            self.lengths.observe(job)
            job.expected_tokens, job.expected_context = self.lengths.estimate(job)
        self._ready(job)

    def turn_ended(self, trajectory_id: str, turn: int, context_tokens: int, output_tokens: int, now: float) -> None:
        """TurnEnded. Unknown trajectories and repeats are ignored."""
        job = self.jobs.get(trajectory_id)
        if job is None or job.phase is not Phase.READY or turn != job.turns + 1:
            return
        if output_tokens > 0:
            self.token_s += _MEASURE * ((now - job.since_s) / output_tokens - self.token_s)
            self.turn_tokens += _MEASURE * (output_tokens - self.turn_tokens)
        job.phase = Phase.TOOL
        job.since_s = now
        job.turns += 1
        job.context_tokens = context_tokens + output_tokens
        job.output_tokens += output_tokens
        self.lengths.observe(job)
        job.expected_tokens, job.expected_context = self.lengths.estimate(job)
        self._ended_turn(job)

    def estimated(self, trajectory_id: str, turn: int, remaining_tokens: float) -> None:
        """LengthEstimated. One that a later turn has overtaken, of an unknown trajectory, or no number, is ignored."""
        job = self.jobs.get(trajectory_id)
        if job is None or turn != job.turns or job.phase not in (Phase.READY, Phase.TOOL):
            return
        if not math.isfinite(remaining_tokens):
            return
        self.lengths.predicted(job, remaining_tokens)
        job.expected_tokens, job.expected_context = self.lengths.estimate(job)
        self._expected(job)

    def finished(self, job: Job, output_tokens: int) -> None:
        """The job ended well; `remove` follows."""
        job.group.finished_tokens.append(output_tokens)
        self.lengths.finished(job, output_tokens)

    def remove(self, job: Job) -> None:
        """The job ended, is being aborted, or leaves its worker; idempotent."""
        if self.jobs.pop(job.trajectory_id, None) is None:
            return
        job.group.jobs.pop(job.trajectory_id, None)
        self.lengths.dropped(job)
        self._changed.pop(job.trajectory_id, None)
        if (worker := self.workers.get(job.worker)) is not None:
            worker.jobs -= 1
            worker.open -= job.phase is not Phase.NEW
        self._removed(job)

    def moved(self, job: Job, to: str) -> None:
        """The dispatcher sent the job to another worker, as the policy wished."""
        before, after = self.workers[job.worker], self.workers[to]
        started = int(job.phase is not Phase.NEW)
        before.jobs, before.open = before.jobs - 1, before.open - started
        after.jobs, after.open = after.jobs + 1, after.open + started
        origin, job.worker = job.worker, to
        self._moved(job, origin)

    def age(self, group: JobGroup, oldest: int | None) -> None:
        """Oldest version of the group, or the current version, changed."""
        group.oldest = oldest
        span = self.limits.max_version_span
        if oldest is None:
            promoted = self.promotes and is_overdue(group.admitted, self.version, span)
        else:
            promoted = self.promotes and is_promoted(oldest, self.version, span)
        if promoted is not group.promoted:
            group.promoted = promoted
            self._changed_group(group)

    def tick(self, now: float) -> None:
        """Time passes."""

    def decide(self, now: float) -> list[Job]:
        """Jobs whose class, rank or worker changed since the last call, each once. `moves` holds those to other
        workers; the dispatcher empties it."""
        self._decide(now)
        if not self._changed:
            return []
        changed = [
            job for job, priority, rank in self._changed.values() if (priority, rank) != (job.priority, job.rank)
        ]
        self._changed.clear()
        return changed

    # --------------------------------------------------------------------------------------------- for subclasses

    def _set(self, job: Job, priority: PriorityClass, rank: int = 0, cause: str = "") -> None:
        if priority is not job.priority or rank != job.rank:
            if job.trajectory_id not in self._changed:
                self._changed[job.trajectory_id] = (job, job.priority, job.rank)
            job.priority = priority
            job.rank = rank
            job.cause = cause

    def _classify(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.group.promoted:
                self._set(job, HIGH, cause=job.group.why_promoted)
            else:
                self._set(job, LOW, cause="no longer promoted")

    def _added(self, job: Job) -> None:
        self._classify([job])

    def _started(self, job: Job) -> None: ...

    def _ready(self, job: Job) -> None: ...

    def _ended_turn(self, job: Job) -> None: ...

    def _expected(self, job: Job) -> None:
        """The predictor answered: `expected_tokens` and `expected_context` changed between two turns."""

    def _removed(self, job: Job) -> None: ...

    def _moved(self, job: Job, origin: str) -> None: ...

    def _changed_group(self, group: JobGroup) -> None:
        self._classify(group.jobs.values())

    def _decide(self, now: float) -> None: ...

    def check_invariants(self) -> None:
        """Recount what is kept; for tests. Raises InvariantError."""


class ActionPolicy(Policy):
    """Slots are free while tools run, turns first come, first served (RollFlash's rule)."""


class TrajectoryPolicy(Policy):
    """A slot is held from a trajectory's first turn to its end, tools included (Slime's rule)."""

    slots = "trajectory"
