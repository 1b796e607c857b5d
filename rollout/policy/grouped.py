"""PURE: what the policies with critical groups share: estimates, F_g, the critical set (paper §4.1)."""

from __future__ import annotations

import math
from typing import ClassVar

from envclient.base.errors import InvariantError
from rollout.policy.base import HIGH, LOW, Policy
from rollout.policy.critical import CriticalSet
from rollout.policy.jobs import Job, JobGroup, Phase
from rollout.policy.lengths import Lengths
from rollout.policy.settings import PolicyLimits, PolicySettings

_RENEW_FIRST = 24
_RENEW_FACTOR = 1.5


class GroupedPolicy(Policy):
    """F_g = max over a group's unfinished trajectories of n̂, or its place in the order of admission.

    With `tool_time` the tools of the turns still expected count too, as the tokens that could be generated meanwhile:
    the paper's n̂ · time_per_token + expected remaining turns · tool time, divided by time_per_token. All F_g are made
    with one and the same of these exchange rates, else a change of the running means would reorder groups. [R]

    Subclasses say in `_regard` what follows for the jobs of a group whose standing changed.
    """

    wants_turns = True
    own_order: ClassVar[str] = "length"
    """What `order=auto` means."""

    def __init__(self, settings: PolicySettings, limits: PolicyLimits, lengths: Lengths) -> None:
        super().__init__(settings, limits, lengths)
        order = self.own_order if settings.order == "auto" else settings.order
        self.by_admission = order == "admission"
        self.critical = CriticalSet(1.0 if self.by_admission else settings.hysteresis)
        self._promoted: set[int] = set()
        """Promoted groups with unfinished jobs, by order."""
        self._wanted = -1
        self._unsettled = False
        self._renewed = 0
        """Samples that the estimates of jobs that have not started rest on, at least."""
        self._tool_tokens = 0.0
        """Tokens that could be generated while a tool runs, as all F_g are made with."""
        self.prompt_tokens = 0.0
        """Of a group's first context; a running mean."""

    def is_high(self, group: JobGroup) -> bool:
        return group.promoted or group in self.critical

    def why(self, group: JobGroup) -> str:
        """The reason of a group's standing, for people."""
        if group.promoted:
            return group.why_promoted
        standing = "critical" if group in self.critical else "not critical"
        if self.by_admission:
            return f"{standing}: group {group.order} in the order of admission"
        return f"{standing}: F = {group.remaining:.0f}"

    def tick(self, now: float) -> None:
        """Jobs that wait have no turns that would renew their estimates: now and then all are, log-many times.

        So are all F_g when the time of tools has become another one.
        """
        measured = self.lengths.samples >= _RENEW_FACTOR * self._renewed + _RENEW_FIRST
        if measured:
            self._renewed = self.lengths.samples
            for job in self.jobs.values():
                if job.phase is Phase.NEW:
                    self._estimate(job)
        if self._exchange() or measured:
            for group in {job.group.order: job.group for job in self.jobs.values()}.values():
                self._reckon(group)
                self._regard(group)

    def _estimate(self, job: Job) -> None:
        job.context_tokens = job.group.prompt_tokens or round(self.prompt_tokens)
        job.expected_tokens, job.expected_context = self.lengths.estimate(job)

    # ------------------------------------------------------------------------------------------------------ hooks

    def _added(self, job: Job) -> None:
        self._estimate(job)
        self._reckon(job.group, job)

    def _ready(self, job: Job) -> None:
        if job.turns == 0:
            self.prompt_tokens += (0.05 if self.prompt_tokens else 1.0) * (job.context_tokens - self.prompt_tokens)
            self._reckon(job.group, job)

    def _ended_turn(self, job: Job) -> None:
        self._reckon(job.group, job)

    def _expected(self, job: Job) -> None:
        self._ended_turn(job)

    def _removed(self, job: Job) -> None:
        self._reckon(job.group, job)

    def _changed_group(self, group: JobGroup) -> None:
        self._reckon(group)
        self._regard(group)

    def _reckon(self, group: JobGroup, job: Job | None = None) -> None:
        """Recompute F_g. `job`: the only one of its members that changed, came or went; else all may have."""
        if not group.jobs:
            group.longest = None
            self._unsettled |= self.critical.drop(group)
            self._promoted.discard(group.order)
            self._wanted = -1
            return
        if self.by_admission:
            group.remaining = float(group.order)
        else:
            self._measure_longest(group, job)
        if group.promoted:
            self.critical.drop(group)
            self._promoted.add(group.order)
            self._unsettled = True
        else:
            self._promoted.discard(group.order)
            self._unsettled |= self.critical.put(group, group.remaining)

    def _measure_longest(self, group: JobGroup, job: Job | None) -> None:
        """F_g by the longest member. In a large run its siblings are far from the caches: they are left alone while a
        job that is not the longest one gets shorter."""
        left = self._with_tools if self.settings.tool_time else _tokens
        if job is not None and group.longest is not None and group.longest is not job and not self.settings.tool_time:
            if job.expected_tokens > group.remaining and job.trajectory_id in group.jobs:
                group.longest, group.remaining = job, job.expected_tokens
            return
        group.longest = max(group.jobs.values(), key=left)
        group.remaining = left(group.longest)

    def _exchange(self) -> bool:
        """Follow the running means when they have moved far. Whether they had."""
        if not self.settings.tool_time or self.by_admission or self.token_s <= 0:
            return False
        tokens = self.tool_s / self.token_s
        if self._tool_tokens / _RENEW_FACTOR <= tokens <= self._tool_tokens * _RENEW_FACTOR:
            return False
        self._tool_tokens = tokens
        return True

    def _with_tools(self, job: Job) -> float:
        """n̂ + expected remaining turns · `_tool_tokens`; a turn is as long as its own, drawn to the mean of all."""
        turn_tokens = (job.output_tokens + self.turn_tokens) / (job.turns + 1)
        return job.expected_tokens + job.expected_tokens / max(1.0, turn_tokens) * self._tool_tokens

    def _decide(self, now: float) -> None:
        wanted = max(0, self.places - len(self._promoted))
        if self._unsettled or wanted != self._wanted:
            self._wanted = wanted
            self._unsettled = False
            for group in self.critical.settle(wanted):
                self._regard(group)

    def _regard(self, group: JobGroup) -> None:
        """The group became critical or promoted, or ceased to be."""
        high = self.is_high(group)
        for job in group.jobs.values():
            if (job.priority is HIGH) is not high:
                self._set(job, HIGH if high else LOW, cause=self.why(group))

    def check_invariants(self) -> None:
        """Recount. Raises InvariantError."""
        self.critical.check_invariants()
        if self.by_admission or self.settings.tool_time:
            return
        for group in {job.group.order: job.group for job in self.jobs.values()}.values():
            longest = max(map(_tokens, group.jobs.values()))
            if group.remaining != longest:
                raise InvariantError(f"group {group.group_id}: F = {group.remaining:g}, recounted {longest:g}")


def _tokens(job: Job) -> float:
    return job.expected_tokens


def bucket(value: float, ratio: float) -> int:
    """Number of the step of a geometric scale in which `value` lies: small changes are none."""
    return math.floor(math.log(max(1e-9, value)) / math.log(ratio))
