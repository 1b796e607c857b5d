"""PURE: VenusRL's scheduling as the paper describes it (§4.1–4.4), each mechanism with its switch; and two baselines.

Trajectories of critical and promoted groups are HIGH, all others LOW; LOW runs only in slots that would be idle. A HIGH
trajectory that does not fit into its worker's KV beside the other HIGH ones is demoted, the shortest context first, and
promoted back when there is room again. A worker that holds more HIGH KV than it can hand over pending turns.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from envclient.base.errors import InvariantError
from rollout.policy.base import HIGH, LOW
from rollout.policy.grouped import GroupedPolicy, bucket
from rollout.policy.jobs import Job, JobGroup, Move, Phase, WorkerView
from rollout.policy.lengths import Lengths
from rollout.policy.settings import PolicyLimits, PolicySettings
from rollout.policy.working_set import Key, WorkingSet


class PaperPolicy(GroupedPolicy):
    """Two classes, demotion, and re-dispatch of pending turns."""

    slots: ClassVar[str] = "priority"

    def __init__(self, settings: PolicySettings, limits: PolicyLimits, lengths: Lengths) -> None:
        super().__init__(settings, limits, lengths)
        self._resident: dict[str, WorkingSet] = {}
        """Per worker: its HIGH trajectories; those outside the set are demoted."""
        self._dirty: set[str] = set()
        self._pressures: dict[str, float] = {}
        """Worker to which jobs can go → p_w; of dirty ones before the event."""

    @classmethod
    def slot_rule(cls, settings: PolicySettings) -> str:
        return cls.slots if settings.priority else "action"

    @classmethod
    def uses_tiers(cls, settings: PolicySettings) -> bool:
        return settings.residency

    def join(self, worker: WorkerView) -> None:
        super().join(worker)
        room = float(worker.kv_tokens) if worker.kv_tokens and self.settings.demotion else None
        self._resident[worker.name] = WorkingSet(room, room)
        self._weigh(worker)

    def lose(self, name: str) -> None:
        super().lose(name)
        self._resident.pop(name, None)
        self._pressures.pop(name, None)
        self._dirty.discard(name)

    def pressure(self, worker: WorkerView) -> float:
        """p_w: HIGH KV tokens ÷ capacity, demoted ones included."""
        return self._resident[worker.name].demand / worker.kv_tokens if worker.kv_tokens else 0.0

    # ------------------------------------------------------------------------------------------------------ hooks

    def _started(self, job: Job) -> None:
        self._place(job)

    def _ready(self, job: Job) -> None:
        super()._ready(job)
        self._place(job)
        self._consider_move(job)

    def _ended_turn(self, job: Job) -> None:
        super()._ended_turn(job)
        self._place(job)

    def _removed(self, job: Job) -> None:
        super()._removed(job)
        self._leave(job, job.worker)

    def _moved(self, job: Job, origin: str) -> None:
        self._leave(job, origin)
        self._place(job)

    def _regard(self, group: JobGroup) -> None:
        for job in group.jobs.values():
            self._place(job)
            if job.phase is Phase.NEW:
                self._tell(job, self.is_high(group))

    def _tell(self, job: Job, high: bool) -> None:
        if (job.priority is HIGH) is high:
            return
        demoted = not high and self.is_high(job.group)
        cause = f"demoted: {job.context_tokens} tokens do not fit beside longer HIGH ones" if demoted else ""
        self._set(job, HIGH if high else LOW, cause=cause or self.why(job.group))

    def _place(self, job: Job) -> None:
        """An open job enters its worker's HIGH set, leaves it, or has another context than before."""
        resident = self._resident.get(job.worker)
        if resident is None or job.phase is Phase.NEW:
            return
        if not self.is_high(job.group):
            self._leave(job, job.worker)
            self._tell(job, False)
            return
        group = job.group
        prompt = group.prompt_tokens
        private = float(max(0, job.context_tokens - prompt))
        fresh = job.trajectory_id not in resident.entries
        key: Key = (0, float(group.oldest or 0)) if group.promoted else (1, -float(job.context_tokens))
        resident.prompt(group.order, prompt)
        resident.put(
            job.trajectory_id,
            inside=key,
            outside=key,
            held=private,
            reserved=private,
            shared=group.order,
            prompt_tokens=prompt,
            new=False,
        )
        if fresh:
            self._tell(job, False)  # until it is found to fit, at the end of this event
        self._dirty.add(job.worker)

    def _leave(self, job: Job, worker: str) -> None:
        resident = self._resident.get(worker)
        if resident is not None and job.trajectory_id in resident.entries:
            resident.drop(job.trajectory_id)
            self._dirty.add(worker)

    def _decide(self, now: float) -> None:
        super()._decide(now)
        for name in sorted(self._dirty):
            resident = self._resident.get(name)
            if resident is None:
                continue
            for trajectory_id in resident.settle(0):
                self._tell(self.jobs[trajectory_id], resident.entries[trajectory_id].member)
            self._weigh(self.workers[name])
        self._dirty.clear()

    def _consider_move(self, job: Job) -> None:
        """A pending turn of a HIGH trajectory leaves a worker on which HIGH ones contend (§4.4)."""
        here = self.workers.get(job.worker)
        if here is None or not (self.settings.migration and here.migration and here.kv_tokens):
            return
        if not self.is_high(job.group):
            return
        pressure = self.pressure(here)
        if pressure <= 1.0:
            return
        for name in self._dirty & self._pressures.keys():
            self._weigh(self.workers[name])
        target = self.workers[min(self._pressures, key=self._pressures.__getitem__)]
        there = self._pressures[target.name]
        weight = 2 * job.context_tokens / target.kv_tokens  # what the move itself changes: it must not pay to go back
        if pressure - there > self.settings.move_gap + weight:
            cause = f"HIGH KV pressure is {pressure:.2f} here and {there:.2f} there"
            self.moves.append(Move(job=job, to=target.name, cause=cause))

    def _weigh(self, worker: WorkerView) -> None:
        if worker.migration and worker.kv_tokens:
            self._pressures[worker.name] = self.pressure(worker)

    def check_invariants(self) -> None:
        super().check_invariants()
        for resident in self._resident.values():
            resident.check_invariants()
        for name in self._pressures.keys() - self._dirty:
            if self._pressures[name] != self.pressure(self.workers[name]):
                raise InvariantError(f"the pressure of {name} is taken to be {self._pressures[name]:g}: it is another")


class FcfsPriorityPolicy(PaperPolicy):
    """The oldest k groups are HIGH: priority without any idea of lengths, residency or load (the paper's ablation)."""

    def __init__(self, settings: PolicySettings, limits: PolicyLimits, lengths: Lengths) -> None:
        plain = msgspec.structs.replace(settings, order="admission", priority=True, demotion=False, migration=False)
        super().__init__(plain, limits, lengths)

    @classmethod
    def slot_rule(cls, settings: PolicySettings) -> str:
        return cls.slots

    @classmethod
    def uses_tiers(cls, settings: PolicySettings) -> bool:
        return False


class LongestFirstPolicy(GroupedPolicy):
    """The turn of the longest remaining trajectory goes first and preempts a shorter one's (Heddle's rule, 2603.28101).

    Estimates are renewed at every turn ("progressive priority"). Promotion for staleness is added, as everywhere.
    """

    slots = "rank"

    def _added(self, job: Job) -> None:
        super()._added(job)
        self._rank(job)

    def _ready(self, job: Job) -> None:
        super()._ready(job)
        self._rank(job)

    def _ended_turn(self, job: Job) -> None:
        super()._ended_turn(job)
        self._rank(job)

    def _regard(self, group: JobGroup) -> None:
        for job in group.jobs.values():
            self._rank(job)

    def _rank(self, job: Job) -> None:
        rank = -bucket(job.expected_tokens, 1.1)
        high = job.group.promoted
        if rank != job.rank or (job.priority is HIGH) is not high:
            cause = self.why(job.group) if high else f"{job.expected_tokens:.0f} tokens expected"
            self._set(job, HIGH if high else LOW, rank, cause)
