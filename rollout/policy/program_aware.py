"""PURE: ThunderAgent's program-aware scheduling as published (arXiv 2602.13692 and its open-source router).

A program is a trajectory. On a worker its tokens count while it reasons (wants or has a turn) and while it acts (its
tool runs), shared prefixes once, plus `buffer_tokens` each. Every `interval_s`: paused programs are resumed as far as
they fit, those with a pending turn first, then new ones, then acting ones, smallest first, placed largest first on the
worker with the most room (best fit decreasing); then each worker over its capacity pauses acting programs, smallest
first, and marks reasoning ones, smallest first, which are paused at the end of their turn. A new program starts at
once when nobody is paused and it fits. A program that was paused for `longest_wait_s` is resumed in any case.

Deviations. Two without which our setting would stand still: a worker on which nothing is active takes one program
whatever its size, and a started program moves only where engines can migrate. Two in its favour: a program that is
placed counts without a prompt that is there already, and `longest_wait_s` runs from the pause, not from the pending
turn after it. One that follows from what is reported: a context grows at its turns' ends, not token by token.
"""

from __future__ import annotations

import math
from bisect import insort

from envclient.base.errors import InvariantError
from rollout.policy.base import HIGH, LOW, PARKED, Policy
from rollout.policy.jobs import Job, JobGroup, Move, Phase, WorkerView
from rollout.policy.lengths import Lengths
from rollout.policy.program_load import ProgramLoad
from rollout.policy.settings import PolicyLimits, PolicySettings
from rollout.types import PriorityClass

_ROUNDING_S = 1e-6
"""Of sums of ticks: one that comes when a check is due must not be taken to be early."""


class ProgramAwarePolicy(Policy):
    """Pause and resume of whole programs by KV capacity. A check costs O(n log n), as in the original."""

    slots = "priority"  # for PARKED; everybody else is LOW, and slots are first come, first served
    wants_turns = True
    promotes = False
    by_room = True
    """Whether each new program goes to the worker with the most room; else to its group's."""

    def __init__(self, settings: PolicySettings, limits: PolicyLimits, lengths: Lengths) -> None:
        super().__init__(settings, limits, lengths)
        self._loads: dict[str, ProgramLoad] = {}
        """Worker → its active programs."""
        self._paused: dict[str, float] = {}
        """Program → when it was paused."""
        self._home: dict[str, str] = {}
        """Active program → worker on which it counts, from the moment it is sent there."""
        self._sent: dict[str, Job] = {}
        """Programs that were sent to another worker and have not arrived: the dispatcher may refuse a move."""
        self._marked: set[str] = set()
        """Active programs that are paused at the end of their turn."""
        self._prompt_tokens = 0.0
        """Of a first context; a running mean, for programs that have not started."""
        self._checked = 0.0
        self._now = 0.0

    @classmethod
    def longest_tick_s(cls, settings: PolicySettings) -> float:
        return settings.interval_s

    def join(self, worker: WorkerView) -> None:
        super().join(worker)
        before = self._loads.get(worker.name)
        self._loads[worker.name] = ProgramLoad(self.settings.buffer_tokens)
        self._recount(before)

    def lose(self, name: str) -> None:
        super().lose(name)
        self._recount(self._loads.pop(name, None))

    # ------------------------------------------------------------------------------------------------------ hooks

    def _added(self, job: Job) -> None:
        job.priority = PARKED
        job.context_tokens = job.group.prompt_tokens or round(self._prompt_tokens)
        self._paused[job.trajectory_id] = self._now
        if len(self._paused) == 1:
            homes = [name for name in self._loads if self._may_go(job, name)]
            target = max(homes, key=self._room, default=None)
            if target is not None and self._required(job, target) <= self._room(target):
                self._resume(job, target, "there is room, and nobody waits")

    def _started(self, job: Job) -> None:
        if (home := self._home.get(job.trajectory_id)) is not None:
            self._loads[home].started()

    def _ready(self, job: Job) -> None:
        if job.turns == 0:
            weight = 0.05 if self._prompt_tokens else 1.0
            self._prompt_tokens += weight * (job.context_tokens - self._prompt_tokens)
            for load in self._loads.values():
                load.prompted(job.group)
        self._count(job)

    def _ended_turn(self, job: Job) -> None:
        self._count(job)
        if job.trajectory_id in self._marked:
            self._pause(job, "it was marked while it generated")

    def _removed(self, job: Job) -> None:
        self._deactivate(job)
        self._paused.pop(job.trajectory_id, None)

    def _moved(self, job: Job, origin: str) -> None:
        self._sent.pop(job.trajectory_id, None)

    def _changed_group(self, group: JobGroup) -> None:
        for job in group.jobs.values():
            if job.priority is not PARKED:
                self._set(job, self._class(job), cause="promoted" if group.promoted else "no longer promoted")

    def tick(self, now: float) -> None:
        self._now = now
        if now - self._checked < self.settings.interval_s - _ROUNDING_S:
            return
        self._checked = now
        for job in [job for job in self._sent.values() if job.trajectory_id in self._home]:
            self._count_at(job, job.worker)
        self._sent.clear()
        self._resume_what_fits()
        for name in self._loads:
            self._pause_until_it_fits(name)

    def _decide(self, now: float) -> None:
        self._now = now
        if self._paused and not all(load.active for load in self._loads.values()):
            self._wake_idle_workers()

    # --------------------------------------------------------------------------------------------- pause and resume

    def _resume_what_fits(self) -> None:
        for trajectory_id in [t for t, s in self._paused.items() if self._now - s > self.settings.longest_wait_s]:
            job = self.jobs[trajectory_id]
            if self._can_open(job, job.worker):
                self._resume(job, job.worker, f"it was paused for {self.settings.longest_wait_s:g} s")
        room = {name: self._room(name, decay=self.settings.acting_decay) for name in self._loads}
        total = sum(free for free in room.values() if free > self.settings.buffer_tokens)
        chosen: list[Job] = []
        for job in sorted((self.jobs[t] for t in self._paused), key=self._urgency):
            need = job.context_tokens + self.settings.buffer_tokens
            if need <= total:
                chosen.append(job)
                total -= need
        ranking = sorted((-free, place, name) for place, (name, free) in enumerate(room.items()))
        for job in sorted(chosen, key=lambda job: -job.context_tokens):
            best = next((item for item in ranking if self._may_go(job, item[2])), None)
            if best is not None and (left := -best[0] - self._required(job, best[2])) >= 0:
                ranking.remove(best)
                insort(ranking, (-left, *best[1:]))
                self._resume(job, best[2], f"{left:.0f} tokens stay free")

    def _pause_until_it_fits(self, name: str) -> None:
        load = self._loads[name]
        if self._room(name) >= 0:
            return
        for phase in (Phase.TOOL, Phase.READY):
            for job in sorted((j for j in load.active.values() if j.phase is phase), key=lambda j: j.context_tokens):
                if self._room(name) >= 0 or load.counted <= 1:
                    return
                if job.trajectory_id in self._marked:
                    continue
                if phase is Phase.TOOL:
                    self._pause(job, "its worker is over capacity")
                else:
                    self._marked.add(job.trajectory_id)
                    load.mark(job)

    def _wake_idle_workers(self) -> None:
        """A worker without an active program takes one, whatever its size: nothing else would ever make room."""
        for name, load in self._loads.items():
            if load.active or not self.workers[name].jobs:
                continue
            here = [
                job
                for trajectory_id in self._paused
                if (job := self.jobs[trajectory_id]).worker == name and self._can_open(job, name)
            ]
            if here:
                self._resume(min(here, key=self._urgency), name, "its worker is idle")

    def _resume(self, job: Job, to: str, cause: str) -> None:
        del self._paused[job.trajectory_id]
        self._set(job, self._class(job), cause=f"resumed: {cause}")
        self._home[job.trajectory_id] = to
        self._loads[to].add(job)
        if to != job.worker:
            self._sent[job.trajectory_id] = job
            self.moves.append(Move(job=job, to=to, cause=cause))

    def _pause(self, job: Job, cause: str) -> None:
        self._deactivate(job)
        self._paused[job.trajectory_id] = self._now
        self._set(job, PARKED, cause=f"paused: {cause}")

    def _count_at(self, job: Job, worker: str) -> None:
        """An active program counts on another worker than before."""
        home = self._home[job.trajectory_id]
        if home in self._loads:
            self._loads[home].drop(job)
        self._home[job.trajectory_id] = worker
        self._loads[worker].add(job)
        if job.trajectory_id in self._marked:
            self._loads[worker].mark(job)

    def _recount(self, gone: ProgramLoad | None) -> None:
        """Programs that counted on a worker that is gone, and never came there, count where they are."""
        for job in gone.active.values() if gone is not None else ():
            if job.worker in self._loads:
                self._home[job.trajectory_id] = ""
                self._count_at(job, job.worker)

    def _deactivate(self, job: Job) -> None:
        self._sent.pop(job.trajectory_id, None)
        self._marked.discard(job.trajectory_id)
        home = self._home.pop(job.trajectory_id, "")
        if home in self._loads:
            self._loads[home].drop(job)

    def _count(self, job: Job) -> None:
        """Its context has changed."""
        if (home := self._home.get(job.trajectory_id)) is not None:
            self._loads[home].changed(job)

    # ------------------------------------------------------------------------------------------------------ measures

    def _class(self, job: Job) -> PriorityClass:
        return HIGH if job.group.promoted else LOW

    def _urgency(self, job: Job) -> tuple[int, int, int]:
        """Programs with a pending turn, then new ones, then acting ones; smallest first."""
        kinds = {Phase.READY: 0, Phase.NEW: 1, Phase.OPENING: 1, Phase.TOOL: 2}
        return (int(not job.group.promoted), kinds[job.phase], job.context_tokens)

    def _may_go(self, job: Job, name: str) -> bool:
        """Whether the worker can take the program. Any can that has a place, while it has not started; then only where
        engines migrate."""
        if name != job.worker:
            migrate = self.workers[job.worker].migration and self.workers[name].migration
            if not (self.settings.migration and (self.by_room if job.phase is Phase.NEW else migrate)):
                return False
        return self._can_open(job, name)

    def _can_open(self, job: Job, name: str) -> bool:
        """Whether a new program would find a place: paused ones keep theirs, so no more may be resumed than fit."""
        if job.phase is not Phase.NEW:
            return True
        return self.workers[name].open + self._loads[name].fresh < self.limits.max_trajectories

    def _private(self, job: Job) -> float:
        return max(0.0, job.context_tokens - self._prompt(job.group))

    def _prompt(self, group: JobGroup) -> float:
        return float(group.prompt_tokens) or self._prompt_tokens

    def _required(self, job: Job, name: str) -> float:
        prompt = 0.0 if self._loads[name].holds(job.group) else self._prompt(job.group)
        return self._private(job) + prompt + self.settings.buffer_tokens

    def _room(self, name: str, *, decay: bool = False) -> float:
        """Capacity less what active programs count for; those marked count no more."""
        capacity = self.workers[name].kv_tokens
        if not capacity:
            return math.inf
        load = self._loads[name]
        used = load.tokens(self._prompt_tokens)
        if decay:
            acting = (j for j in load.active.values() if j.phase is Phase.TOOL and j.trajectory_id not in self._marked)
            used -= sum((1.0 - 2.0 ** -(self._now - job.since_s)) * self._private(job) for job in acting)
        return capacity - used

    def check_invariants(self) -> None:
        active = {t: name for name, load in self._loads.items() for t in load.active}
        if active.keys() & self._paused.keys() or active.keys() | self._paused.keys() != self.jobs.keys():
            raise InvariantError("program_aware: a program is neither active nor paused, or both")
        for trajectory_id, job in self.jobs.items():
            if (job.priority is PARKED) is not (trajectory_id in self._paused):
                raise InvariantError(f"program_aware: {trajectory_id} is {job.priority.value}")
        for load in self._loads.values():
            load.check_invariants(self._marked, self._prompt_tokens)


class ProgramAwarePlusPolicy(ProgramAwarePolicy):
    """The same rule, given our promotion of stale groups and our placement of whole groups."""

    promotes = True
    by_room = False
