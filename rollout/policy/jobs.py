"""What a policy knows of trajectories, groups and workers, and what it decides about them.

The dispatcher makes these records and passes them in; the policy alone writes `priority`, `rank` and `cause`, and every
other field is written by the base class `rollout.policy.base.Policy`. A job is one attempt at a trajectory that has not
ended; evaluations are no jobs (they are HIGH, and counted by no policy).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from rollout.types import PriorityClass


class Phase(Enum):
    """Where a job is between its start and its end."""

    NEW = "new"
    """Not started: it waits in its worker's queue."""
    OPENING = "opening"
    """Started; its sandbox comes up."""
    READY = "ready"
    """It wants a slot, or generates."""
    TOOL = "tool"
    """Its tool runs."""


@dataclass(slots=True, kw_only=True, eq=False)
class JobGroup:
    """A sample group as policies see it."""

    order: int
    """Place in the order of admission."""
    group_id: str
    size: int = 1
    """Members, K."""
    admitted: int = 0
    """Weight version at its admission."""
    oldest: int | None = None
    """Oldest weight version one of its trajectories began under; None before the first start."""
    jobs: dict[str, Job] = field(default_factory=dict)
    """Its unfinished jobs."""
    finished_tokens: list[int] = field(default_factory=list)
    """Output tokens of the siblings that have finished."""
    prompt_tokens: int = 0
    """Known from the first turn on; shared by all its jobs, so counted once on a worker."""
    longest: Job | None = None
    """The unfinished job that `remaining` is measured by."""
    critical: bool = False
    """In the critical set, which alone writes it."""
    promoted: bool = False
    """At its last valid weight version, or not started for too long."""
    remaining: float = 0.0
    """F_g in tokens (with `tool_time` those that could be generated while tools run too), or its order of admission."""

    @property
    def why_promoted(self) -> str:
        """The reason, for people."""
        since = f"admitted under version {self.admitted}, not started" if self.oldest is None else ""
        return f"promoted: {since or f'begun under version {self.oldest}'}"


@dataclass(slots=True, kw_only=True, eq=False)
class Job:
    """A trajectory that has not ended, as policies see it."""

    trajectory_id: str
    group: JobGroup
    member: int
    worker: str
    phase: Phase = Phase.NEW
    since_s: float = 0.0
    """When its phase began."""
    turns: int = 0
    """Finished ones."""
    context_tokens: int = 0
    output_tokens: int = 0
    """Generated so far, without the running turn."""
    expected_tokens: float = 0.0
    """n̂: remaining output tokens as last estimated."""
    expected_context: float = 0.0
    """Context at its end as last estimated."""
    priority: PriorityClass = PriorityClass.LOW
    rank: int = 0
    cause: str = ""


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerView:
    """A worker as policies see it."""

    name: str
    slots: int
    kv_tokens: int
    """0: unknown."""
    host_kv_tokens: int
    migration: bool
    open: int = 0
    """Jobs that are started and have not ended."""
    jobs: int = 0
    """Jobs that are placed on it, started or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A pending job goes to another worker."""

    job: Job
    to: str
    cause: str
