"""PURE: a sticky working set per worker, ours: nothing is started whose KV would push out what runs.

Order: promoted groups, critical ones, the rest; inside a class that of admission; inside a group the longest remaining
first. Critical are the oldest groups (`order`): estimates change, and whoever was started and is then passed over is
one more context to recompute after every sync. A member leaves only for a better class, or when what is held does not
fit any more: whoever changes places had its KV made for nothing. What is not in the set is PARKED: not started, or not
given another turn, whatever slots are free. A worker for which nobody waits takes one that waits elsewhere. Class,
membership and (in the engine) tier come from this one rule. [R]
"""

from __future__ import annotations

import math
from typing import ClassVar

from envclient.base.errors import InvariantError
from rollout.policy.base import HIGH, LOW, PARKED
from rollout.policy.grouped import GroupedPolicy, bucket
from rollout.policy.jobs import Job, JobGroup, Move, Phase, WorkerView
from rollout.policy.lengths import Lengths
from rollout.policy.settings import PolicyLimits, PolicySettings
from rollout.policy.working_set import Key, WorkingSet

_FILL = 0.9
"""Of the KV memory, without a host cache: a full pool evicts prefixes that come back soon."""
_FILL_WITH_HOST = 1.2
"""With one, an evicted prefix costs a copy only: contexts whose tools run make room for some more. [R: more of them
raise the decode batch less than their copies and their recompute after a sync cost]"""
_RESERVE = 0.1
"""Of the expected growth, without a host cache: the pool is kept free by `_FILL` already."""
_RESERVE_WITH_HOST = 0.25
"""With one, more is admitted than fits, and what it grows by has to fit too. [R: 0.1 costs 2% of throughput there, and
0.25 costs 1% without]"""
_ALIKE = 1.3
"""Lengths within this ratio are as good as equal: no one's class or place changes for so little."""


class VenusPolicy(GroupedPolicy):
    """Admission to KV, not to slots, is what is decided."""

    slots: ClassVar[str] = "priority"
    own_order = "admission"

    def __init__(self, settings: PolicySettings, limits: PolicyLimits, lengths: Lengths) -> None:
        super().__init__(settings, limits, lengths)
        self._sets: dict[str, WorkingSet] = {}
        self._dirty: set[str] = set()
        self._short: set[str] = set()
        """Workers that have no room for some of theirs."""
        self._reserve: dict[str, float] = {}
        """Worker → share of the expected growth that is reserved there."""
        self._keyed: dict[int, Key] = {}
        """Group → its part of the keys, as its jobs carry it."""
        self._held: dict[str, float] = {}
        """Worker to which jobs can go → KV tokens held there, as a share of its own; of dirty ones before the event."""
        self._reserved: dict[str, float] = {}
        """The same of tokens reserved."""

    @classmethod
    def uses_tiers(cls, settings: PolicySettings) -> bool:
        return True

    def join(self, worker: WorkerView) -> None:
        super().join(worker)
        room = most = None
        if worker.kv_tokens:
            fill = self.settings.fill or (_FILL_WITH_HOST if worker.host_kv_tokens else _FILL)
            room, most = fill * worker.kv_tokens, max(fill, (1.0 + fill) / 2) * worker.kv_tokens
        self._sets[worker.name] = WorkingSet(room, most)
        by_itself = _RESERVE_WITH_HOST if worker.host_kv_tokens else _RESERVE
        self._reserve[worker.name] = by_itself if self.settings.reserve < 0 else self.settings.reserve
        self._weigh(worker)

    def lose(self, name: str) -> None:
        super().lose(name)
        self._held.pop(name, None)
        self._reserved.pop(name, None)
        self._sets.pop(name, None)
        self._reserve.pop(name, None)
        self._dirty.discard(name)
        self._short.discard(name)

    # ------------------------------------------------------------------------------------------------------ hooks

    def _added(self, job: Job) -> None:
        job.priority = PARKED
        super()._added(job)
        self._put(job)
        self._spread(job.group)

    def _started(self, job: Job) -> None:
        self._put(job)

    def _ready(self, job: Job) -> None:
        first = job.turns == 0
        super()._ready(job)
        if first:
            working = self._sets.get(job.worker)
            if working is not None:
                working.prompt(job.group.order, job.group.prompt_tokens)
            self._spread(job.group)
        self._put(job)
        self._consider_move(job)

    def _ended_turn(self, job: Job) -> None:
        super()._ended_turn(job)
        self._put(job)
        self._spread(job.group)

    def _removed(self, job: Job) -> None:
        super()._removed(job)
        self._drop(job, job.worker)
        self._spread(job.group)
        if not job.group.jobs:
            self._keyed.pop(job.group.order, None)

    def _moved(self, job: Job, origin: str) -> None:
        self._drop(job, origin)
        self._set(job, PARKED, cause=f"not yet in the working set of {job.worker}")
        self._put(job)

    def _estimate(self, job: Job) -> None:
        super()._estimate(job)
        if job.trajectory_id in self.jobs:
            self._put(job)

    def _regard(self, group: JobGroup) -> None:
        self._spread(group)
        for job in group.jobs.values():
            if job.priority is not PARKED:
                self._admit(job)

    # ------------------------------------------------------------------------------------------------ working set

    def _group_key(self, group: JobGroup) -> Key:
        if group.promoted:
            # What was passed over and has not begun outlives no version: it comes after what may.
            return (0, math.inf if group.oldest is None else float(group.oldest), group.order)
        return (1 if group in self.critical else 2, 0.0, group.order)

    def _spread(self, group: JobGroup) -> None:
        """When the group's place in the order changed, its jobs' keys follow."""
        if not group.jobs:
            return
        key = self._group_key(group)
        if self._keyed.get(group.order) != key:
            self._keyed[group.order] = key
            for job in group.jobs.values():
                self._put(job)

    def _put(self, job: Job) -> None:
        working = self._sets.get(job.worker)
        if working is None:
            return
        group = job.group
        key = self._keyed.get(group.order) or self._group_key(group)
        outside: Key = (*key, -bucket(job.expected_tokens, _ALIKE))
        # Of a class the shortest context leaves first: it is the cheapest to make again.
        inside: Key = (key[0], key[1], -math.inf, -bucket(job.context_tokens, _ALIKE))
        prompt = self._prompt(group)
        held = max(0.0, job.context_tokens - prompt) + self.turn_tokens
        growth = max(0.0, job.expected_context - job.context_tokens - self.turn_tokens)
        if capacity := self.workers[job.worker].kv_tokens:  # a predictor may answer anything
            growth = min(growth, max(0.0, capacity - job.context_tokens))
        working.put(
            job.trajectory_id,
            inside=inside,
            outside=outside,
            held=0.0 if job.phase is Phase.NEW else held,
            reserved=held + self._reserve[job.worker] * growth,
            shared=group.order,
            prompt_tokens=prompt,
            new=job.phase is Phase.NEW,
        )
        self._dirty.add(job.worker)

    def _drop(self, job: Job, worker: str) -> None:
        working = self._sets.get(worker)
        if working is not None:
            working.drop(job.trajectory_id)
            self._dirty.add(worker)

    def _decide(self, now: float) -> None:
        super()._decide(now)
        changed = sorted(self._dirty)
        for name in changed:
            working, worker = self._sets.get(name), self.workers.get(name)
            if working is None or worker is None:
                continue
            openings = self.limits.max_trajectories - worker.open - working.pending
            for trajectory_id in working.settle(openings):
                job = self.jobs[trajectory_id]
                if working.entries[trajectory_id].member:
                    self._admit(job)
                else:
                    room = f"{working.reserved:.0f} tokens are reserved on {name}"
                    self._set(job, PARKED, cause=f"no room: {room}; {self.why(job.group)}")
            if working.outsiders:
                self._short.add(name)
            else:
                self._short.discard(name)
            self._weigh(worker)
        self._dirty.clear()
        if self._short and len(self._short) < len(self._sets) and self.settings.migration and not self.moves:
            self._share(changed)

    def _share(self, changed: list[str]) -> None:
        """A worker for which nobody waits takes one that waits elsewhere: the longest queue ends the batch. [R]

        Whoever is parked has lost its KV to others, or soon will, so that little is lost by the move. Only what changed
        is looked at: room where nobody waits, or who waits elsewhere.
        """
        takers = [name for name in self._sets if name not in self._short and self.workers[name].kv_tokens]
        if any(name not in self._short for name in changed):
            givers = sorted(self._short, key=lambda name: (-self._sets[name].outsiders, name))
        else:
            givers = [name for name in changed if name in self._short]
        for giver in givers:
            for entry in self._sets[giver].first_outsiders():
                job = self.jobs[entry.name]
                for name in takers:
                    room = self._sets[name].fits(entry.reserved, self._prompt(job.group))
                    if room and self._may_go(job, self.workers[name]):
                        self.moves.append(Move(job=job, to=name, cause=f"parked here, and nobody waits on {name}"))
                        return

    def _may_go(self, job: Job, target: WorkerView) -> bool:
        """Whether the worker has a place, and the trajectory has not started or can be handed over."""
        here = self.workers[job.worker]
        movable = job.phase is Phase.NEW or (job.phase is Phase.READY and here.migration and target.migration)
        return movable and target.open + self._sets[target.name].pending < self.limits.max_trajectories

    def _prompt(self, group: JobGroup) -> float:
        return group.prompt_tokens or self.prompt_tokens

    def _admit(self, job: Job) -> None:
        priority = HIGH if self.is_high(job.group) else LOW
        if priority is not job.priority:
            self._set(job, priority, cause=self.why(job.group))

    def _consider_move(self, job: Job) -> None:
        """A pending turn goes where it finds room when it is parked, and where less KV is held when it is not.

        The slowest worker's last trajectories end the batch: a decode step costs what its contexts hold. Whoever runs
        moves where its KV can be copied to, or where what it has still to generate is worth computing that again: a
        decode step of a full memory takes some 10 ms longer than one of an empty one, prefill of a token 0.1 ms. [R]
        """
        here = self.workers.get(job.worker)
        if here is None or not (self.settings.migration and here.migration and here.kv_tokens):
            return
        parked = job.priority is PARKED
        for name in self._dirty & self._held.keys():
            self._weigh(self.workers[name])
        loads = self._reserved if parked else self._held
        target = self.workers[min(loads, key=loads.__getitem__)]
        prompt = job.group.prompt_tokens
        reserved = self._sets[here.name].entries[job.trajectory_id].reserved
        tokens = prompt + reserved if parked else job.context_tokens
        gap = loads[here.name] - loads[target.name]
        if (
            # There it must be better off, with itself: then it does not pay to go back.
            gap > self.settings.move_gap + tokens / target.kv_tokens
            and (parked or target.host_kv_tokens or tokens < self.settings.move_recompute * gap * job.expected_tokens)
            and self._sets[target.name].fits(reserved, prompt)
            and self._may_go(job, target)
        ):
            why = "parked here, and" if parked else "it goes on, but"
            cause = f"{why} {target.name} has {gap:.2f} of its KV memory less {'reserved' if parked else 'held'}"
            self.moves.append(Move(job=job, to=target.name, cause=cause))

    def _weigh(self, worker: WorkerView) -> None:
        if worker.migration and worker.kv_tokens:
            working = self._sets[worker.name]
            self._held[worker.name] = working.held / worker.kv_tokens
            self._reserved[worker.name] = working.reserved / worker.kv_tokens

    def check_invariants(self) -> None:
        super().check_invariants()
        for working in self._sets.values():
            working.check_invariants()
        for name in self._held.keys() - self._dirty:
            working, worker = self._sets[name], self.workers[name]
            shares = (working.held / worker.kv_tokens, working.reserved / worker.kv_tokens)
            if (self._held[name], self._reserved[name]) != shares:
                raise InvariantError(f"{name} holds and reserves {shares} of its KV memory, other shares are known")
        short = {name for name, working in self._sets.items() if working.outsiders}
        if not self._dirty and short != self._short:
            raise InvariantError(f"short of room are {sorted(self._short)}, recounted {sorted(short)}")


class OraclePolicy(VenusPolicy):
    """The same with true lengths, in the order of the ends: the bound that estimates can be compared with."""

    own_order = "length"
