"""What the dispatcher keeps of trajectories, groups, evaluations and workers. Mutable; it alone owns them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from rollout.policy.jobs import Job, JobGroup
from rollout.types import Capabilities, PriorityClass, Purpose, TrajectoryStatus


class EpisodeState(Enum):
    WAITING = "waiting"
    """In its worker's queue."""
    RUNNING = "running"
    ABORTING = "aborting"
    """Abort asked for; the worker's report decides."""
    ENDED = "ended"


class GroupState(Enum):
    GENERATING = "generating"
    READY = "ready"
    TAKEN = "taken"
    """Handed to a replica."""
    CLOSED = "closed"
    """Trained or dropped."""


@dataclass(slots=True, kw_only=True, eq=False)
class Episode:
    """One attempt at a trajectory."""

    trajectory_id: str
    task_id: str
    owner: Group | Evaluation
    member: int
    attempt: int
    worker: str = ""
    placed: str = ""
    """Why there, for people."""
    state: EpisodeState = EpisodeState.WAITING
    version: int = -1
    """Oldest version it can have sampled under: the one at its start, then the reported one; −1 before the start."""
    reward: float = 0.0
    tokens: int = 0
    """Generated ones."""
    context_tokens: int = 0
    """Prompt, generated tokens and observations at its end."""
    fate: TrajectoryStatus | None = None
    """What an abort makes of it: DISCARDED, FAILED (deadline) or ABORTED (its group is gone)."""
    cause: str = ""
    job: Job | None = None
    """What the policy decides about it, while it waits or runs; None for an evaluation."""
    told: tuple[PriorityClass, int] = (PriorityClass.LOW, 0)
    """Class and rank as its worker knows them."""
    ticket: int = 0
    """Number of its valid entry in its worker's queue; 0: none."""
    parked_at_s: float | None = None
    """Since when it is parked, if it is."""
    parked_s: float = 0.0
    """Seconds that it was parked before."""
    forgiven_s: float = 0.0
    """Parked seconds that its deadline has been moved by."""

    @property
    def purpose(self) -> Purpose:
        return Purpose.TRAIN if isinstance(self.owner, Group) else Purpose.EVAL

    @property
    def key(self) -> tuple[int, int, int]:
        """Evaluations, then groups as admitted, then members. Smallest first."""
        return (int(self.purpose is Purpose.TRAIN), self.owner.order, self.member)


@dataclass(slots=True, kw_only=True, eq=False)
class Group:
    """A sample group from admission to its end."""

    order: int
    """Place in the order of admission."""
    group_id: str
    prompt_id: str
    task_id: str
    worker: str = ""
    state: GroupState = GroupState.GENERATING
    slots: list[Episode | None] = field(default_factory=list)
    """Current attempt of each member; None when the group was shrunk by it."""
    resamples: list[int] = field(default_factory=list)
    missing: int = 0
    """Members that have not ended well yet."""
    oldest: int | None = None
    """Smallest version of its episodes; None before the first one started."""
    jobs: JobGroup
    """Its unfinished members as the policy sees them."""

    @property
    def episodes(self) -> list[Episode]:
        return [episode for episode in self.slots if episode is not None]

    @property
    def context_tokens(self) -> int:
        """What its training costs, about."""
        return sum(episode.context_tokens for episode in self.episodes)


@dataclass(slots=True, kw_only=True, eq=False)
class Evaluation:
    """An evaluation in progress."""

    order: int
    eval_id: str
    version: int
    slots: dict[int, Episode] = field(default_factory=dict)
    """Current attempt at each task, by its place in the request."""
    missing: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class Worker:
    """A rollout worker as the dispatcher sees it."""

    number: int
    """Place in the order of joining."""
    name: str
    slots: int
    usable: bool
    """Whether it samples under the current version; one that joined with older weights waits for the next sync."""
    capabilities: Capabilities
    open: dict[str, Episode] = field(default_factory=dict)
    """Started and not reported yet, by trajectory id."""
    waiting: dict[str, Episode] = field(default_factory=dict)
    """Not started yet, by trajectory id, in the order of arrival."""
    queue: list[tuple[tuple[int, ...], int, Episode]] = field(default_factory=list)
    """Heap of (key, ticket, episode): who waits and is not parked; an entry with an old ticket is dropped when met."""

    @property
    def queued(self) -> int:
        return len(self.waiting)

    @property
    def load(self) -> int:
        return len(self.open) + len(self.waiting)
