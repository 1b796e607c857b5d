"""PURE: what the policies with critical groups share: estimates, F_g, the critical set (paper §4.1)."""

from __future__ import annotations

import math

from rollout.policy.base import HIGH, LOW, Policy
from rollout.policy.critical import CriticalSet
from rollout.policy.jobs import Job, JobGroup, Phase
from rollout.policy.lengths import Lengths
from rollout.policy.settings import PolicyLimits, PolicySettings

_RENEW_FIRST = 24
_RENEW_FACTOR = 1.5


class GroupedPolicy(Policy):
    """F_g = max over a group's unfinished trajectories of n̂, or its place in the order of admission.

    Subclasses say in `_regard` what follows for the jobs of a group whose standing changed.
    """

    wants_turns = True

    def __init__(self, settings: PolicySettings, limits: PolicyLimits, lengths: Lengths) -> None:
        super().__init__(settings, limits, lengths)
        self.by_admission = settings.order == "admission"
        self.critical = CriticalSet(1.0 if self.by_admission else settings.hysteresis)
        self._promoted: set[int] = set()
        """Promoted groups with unfinished jobs, by order."""
        self._wanted = -1
        self._unsettled = False
        self._renewed = 0
        """Samples that the estimates of jobs that have not started rest on, at least."""
        self.prompt_tokens = 0.0
        """Of a group's first context; a running mean."""

    def is_high(self, group: JobGroup) -> bool:
        return group.promoted or group in self.critical

    def why(self, group: JobGroup) -> str:
        """The reason of a group's standing, for people."""
        if group.promoted:
            return f"promoted: begun under version {group.oldest}"
        standing = "critical" if group in self.critical else "not critical"
        if self.by_admission:
            return f"{standing}: group {group.order} in the order of admission"
        return f"{standing}: F = {group.remaining:.0f}"

    def tick(self, now: float) -> None:
        """Jobs that wait have no turns that would renew their estimates: now and then all are, log-many times."""
        if self.lengths.samples >= _RENEW_FACTOR * self._renewed + _RENEW_FIRST:
            self._renewed = self.lengths.samples
            for job in self.jobs.values():
                if job.phase is Phase.NEW:
                    self._estimate(job)
            for group in {job.group.order: job.group for job in self.jobs.values()}.values():
                self._reckon(group)
                self._regard(group)

    def _estimate(self, job: Job) -> None:
        job.context_tokens = job.group.prompt_tokens or round(self.prompt_tokens)
        job.expected_tokens, job.expected_context = self.lengths.estimate(job)

    # ------------------------------------------------------------------------------------------------------ hooks

    def _added(self, job: Job) -> None:
        self._estimate(job)
        self._reckon(job.group)

    def _ready(self, job: Job) -> None:
        if job.turns == 0:
            self.prompt_tokens += (0.05 if self.prompt_tokens else 1.0) * (job.context_tokens - self.prompt_tokens)
            self._reckon(job.group)

    def _ended_turn(self, job: Job) -> None:
        self._reckon(job.group)

    def _expected(self, job: Job) -> None:
        self._ended_turn(job)

    def _removed(self, job: Job) -> None:
        self._reckon(job.group)

    def _changed_group(self, group: JobGroup) -> None:
        self._reckon(group)
        self._regard(group)

    def _reckon(self, group: JobGroup) -> None:
        """Recompute F_g; its members are few."""
        if not group.jobs:
            self._unsettled |= self.critical.drop(group)
            self._promoted.discard(group.order)
            self._wanted = -1
            return
        if self.by_admission:
            group.remaining = float(group.order)
        else:
            tokens = max(job.expected_tokens for job in group.jobs.values())
            group.remaining = self._seconds(tokens) if self.settings.tool_time else tokens
        if group.promoted:
            self.critical.drop(group)
            self._promoted.add(group.order)
            self._unsettled = True
        else:
            self._promoted.discard(group.order)
            self._unsettled |= self.critical.put(group, group.remaining)

    def _seconds(self, tokens: float) -> float:
        """n̂ · time per token + expected remaining turns · tool time."""
        turns = tokens / self.turn_tokens if self.turn_tokens >= 1 else 0.0
        return tokens * max(self.token_s, 1e-6) + turns * self.tool_s

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
        self.critical.check_invariants()


def bucket(value: float, ratio: float) -> int:
    """Number of the step of a geometric scale in which `value` lies: small changes are none."""
    return math.floor(math.log(max(1e-9, value)) / math.log(ratio))
