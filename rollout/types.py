"""The vocabulary of the rollout: records, events and commands (schema version 1).

Pure: standard library and msgspec only. Events enter the dispatcher, commands leave it; both are tagged unions, so a
run's `events.jsonl` (rows of `EventRow`) can be replayed through the dispatcher and compared. Trajectory ids are
`{group_id}.{member}.{attempt}`, group ids are the prompt's id plus its attempt: `p000012.0`; a prompt id is `p` and the
prompt's place in the submitted stream. Weight version v is the number of the optimizer step that made the weights;
the loaded model is version 0, and step s (from 1) makes version s out of groups sampled at versions < s.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec

SCHEMA_VERSION = 1

POLICY_NAMES = (
    "action",
    "trajectory",
    "fcfs_priority",
    "longest_first",
    "program_aware",
    "program_aware_plus",
    "paper",
    "venus",
    "oracle",
)
"""Whole scheduling policies: see `rollout.policy.registry`."""

POLICY_ORDERS = ("auto", "admission", "length")

POLICY_RANGES: dict[str, tuple[float, float]] = {
    "hysteresis": (0.01, 1.0),
    "fill": (0.0, 2.0),
    "reserve": (-1.0, 1.0),
    "growth_tokens": (0, 10**7),
    "move_gap": (0.0, 10.0),
    "move_recompute": (0.0, 10.0**6),
    "interval_s": (0.1, 3600.0),
    "buffer_tokens": (0, 10**6),
    "longest_wait_s": (0.0, 10.0**7),
}
"""Keys of `rollout.policy` → smallest and largest value, both allowed."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every record: immutable, keyword-only, strict on the wire."""


class Purpose(str, Enum):
    """What a trajectory is for."""

    TRAIN = "train"
    EVAL = "eval"
    """Evaluation: never trained, holds no gate credit."""


class PriorityClass(str, Enum):
    """What the dispatcher decided for a trajectory; workers and engines derive everything else from it."""

    HIGH = "high"
    LOW = "low"
    PARKED = "parked"
    """Not started, whatever slots are free."""

    __hash__ = str.__hash__  # as fast as a lookup by it has to be, and that of the string which it equals


class TrajectoryStatus(str, Enum):
    """How a trajectory ended."""

    FINISHED = "finished"
    """The agent ended the episode (submitted, or used its turns up) and was scored."""
    TRUNCATED = "truncated"
    """A turn was cut by its length, or the prompt reached the context limit. Scored; trains if the config says so."""
    FAILED = "failed"
    """Sandbox, verifier or engine failed: no reward, out of loss and baseline."""
    DISCARDED = "discarded"
    """Its version span would have exceeded S."""
    ABORTED = "aborted"
    """Cancelled by the dispatcher (its group is gone)."""


class PromptStatus(str, Enum):
    """Fate of a submitted prompt. accepted + filtered + failed + discarded + running = submitted, always."""

    RUNNING = "running"
    """In flight: waiting for its group, generating, ready or taken by the trainer; also requeued by a resume."""
    ACCEPTED = "accepted"
    """An optimizer step was made with its group."""
    FILTERED = "filtered"
    """Closed because all its rewards were equal (dynamic filter)."""
    FAILED = "failed"
    """Too many of its trajectories failed, more than the allowed number of times."""
    DISCARDED = "discarded"
    """Too many of its trajectories became stale, more than the allowed number of times."""


class VersionSpan(Record, frozen=True, kw_only=True):
    """Generated tokens [start, end) of a response, sampled under one weight version."""

    start: int
    end: int
    version: int


class Trajectory(Record, frozen=True, kw_only=True, tag="trajectory", tag_field="event"):
    """One finished episode, exactly as sampled: token in, token out.

    `response_ids` holds everything after the prompt: generated tokens and observations in order;
    len(response_ids) = len(loss_mask) = len(logprobs). loss_mask is 1 on generated tokens only; log-probs are the
    engine's, of the distribution it sampled from, 0.0 where the mask is 0. `spans` cover exactly the generated tokens.
    """

    trajectory_id: str
    group_id: str
    task_id: str
    purpose: Purpose
    status: TrajectoryStatus
    stop_reason: str
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    turns: int
    reward: float
    stats: dict[str, float] = {}
    """Numbers for the metrics: tool_calls, tool_errors, cached_tokens, sent_tokens, tool_s, generate_s, …"""

    @property
    def generated_tokens(self) -> int:
        return sum(self.loss_mask)


class TrainSequence(Record, frozen=True, kw_only=True):
    """A trajectory of a sealed group as the trainer takes it: the Trajectory's tokens plus its advantage."""

    trajectory_id: str
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    advantage: float
    reward: float


class TrainGroup(Record, frozen=True, kw_only=True, tag="group"):
    """A sealed sample group, handed to one actor replica for one step."""

    group_id: str
    prompt_id: str
    task_id: str
    step: int
    sequences: list[TrainSequence]


class BatchCounts(Record, frozen=True, kw_only=True):
    """Global denominators of a step's batch. tokens = sum of loss masks."""

    groups: int
    sequences: int
    tokens: int


class BatchClosed(Record, frozen=True, kw_only=True, tag="closed"):
    """No more groups for this step: all B are handed out and acknowledged."""

    step: int
    counts: BatchCounts


class NoGroupYet(Record, frozen=True, kw_only=True, tag="wait"):
    """The long poll ran out without a group; ask again."""

    step: int


NextGroup = TrainGroup | BatchClosed | NoGroupYet


class Capabilities(Record, frozen=True, kw_only=True):
    """What an engine can do; a command beyond it is never emitted."""

    priority: bool = False
    tiers: bool = False
    migration: bool = False


# --------------------------------------------------------------------------------------------------------- events


class Event(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="event"):
    """Base of every event."""


class RunStarted(Event, frozen=True, kw_only=True, tag="run_started"):
    """First event of a run and of every resume.

    `version` is the weight version loaded; prompts are only those requeued by the resume, in order.
    """

    version: int
    requeued: list[tuple[str, str]] = []
    """(prompt_id, task_id), sampled anew before any new prompt."""
    next_attempt: int = 0
    """Attempt number for groups made from now on: greater than any used before, so that ids never repeat."""
    constants: dict[str, Any] = {}
    """The dispatcher's constants from here on, for the replay (`DispatcherConfig.recorded`). Empty in older files."""


class WorkerJoined(Event, frozen=True, kw_only=True, tag="worker_joined"):
    worker: str
    slots: int
    version: int
    capabilities: Capabilities
    kv_tokens: int = 0
    """KV capacity of the engine in tokens; 0: unknown, and nothing is parked for want of it."""
    host_kv_tokens: int = 0
    """Tokens that its host cache (memory level L2) holds beyond that; 0: it has none."""


class WorkerLost(Event, frozen=True, kw_only=True, tag="worker_lost"):
    worker: str
    cause: str


class PromptSubmitted(Event, frozen=True, kw_only=True, tag="prompt_submitted"):
    """The source answered a FetchPrompts; `prompt_id` is written to the ledger first."""

    prompt_id: str
    task_id: str
    epoch: int


class SourceExhausted(Event, frozen=True, kw_only=True, tag="source_exhausted"):
    """A finite source has no prompt left."""


class TurnReady(Event, frozen=True, kw_only=True, tag="turn_ready"):
    """A trajectory has its observation (or its prompt) and wants a slot. Reported where the policy asks for it."""

    trajectory_id: str
    turn: int
    """Number of the turn that it wants, from 1."""
    context_tokens: int


class TurnEnded(Event, frozen=True, kw_only=True, tag="turn_ended"):
    """A generation came back whole (or was cut by its length)."""

    trajectory_id: str
    turn: int
    context_tokens: int
    output_tokens: int
    version: int
    """Weight version the turn's last token was sampled under; the present one while the trajectory has none."""
    preempted_by: list[str] = []
    """Trajectories, of a better class or rank at that time, for whose sake its slot was taken, one entry each time."""


class LengthEstimated(Event, frozen=True, kw_only=True, tag="length_estimated"):
    """The predictor answered while the trajectory's tool ran. One that never comes, or late, changes the order only."""

    trajectory_id: str
    turn: int
    """Turns that had ended when it was asked."""
    remaining_tokens: float
    """Output tokens that it expects after those turns."""
    latency_s: float
    """Seconds from the turn's end to the answer."""


class TrajectoryEnded(Event, frozen=True, kw_only=True, tag="trajectory_ended"):
    """Worker's report without the tokens (the shell keeps those until the group is sealed)."""

    trajectory_id: str
    worker: str
    status: TrajectoryStatus
    reward: float
    first_version: int
    """Of its generated tokens; -1 when it generated none."""
    last_version: int
    generated_tokens: int
    context_tokens: int = 0
    """Prompt, generated tokens and observations; 0 in records of earlier releases."""
    turns: int
    cause: str = ""


class GroupRequested(Event, frozen=True, kw_only=True, tag="group_requested"):
    """Actor replica asks for its next group of `step`. Idempotent: an unacknowledged group is handed out again."""

    step: int
    replica: int


class GroupAcknowledged(Event, frozen=True, kw_only=True, tag="group_acknowledged"):
    """The replica has added the group's gradient. Idempotent."""

    step: int
    replica: int
    group_id: str
    tokens: int


class StepFinished(Event, frozen=True, kw_only=True, tag="step_finished"):
    """The optimizer made step `step` with its batch: the batch's prompts are accepted."""

    step: int
    skipped: bool = False
    """The gradient was not finite and the weights did not change."""


class SyncRequested(Event, frozen=True, kw_only=True, tag="sync_requested"):
    """The actor wants to broadcast weights `version`: workers must pause."""

    version: int


class WorkerPaused(Event, frozen=True, kw_only=True, tag="worker_paused"):
    """The worker has no request in its engine and will start none until resumed."""

    worker: str
    version: int


class SyncFinished(Event, frozen=True, kw_only=True, tag="sync_finished"):
    """Every engine has answered that it loaded weights `version`."""

    version: int


class WeightsAcknowledged(Event, frozen=True, kw_only=True, tag="weights_acknowledged"):
    """The worker samples under `version` from now on."""

    worker: str
    version: int


class EvalRequested(Event, frozen=True, kw_only=True, tag="eval_requested"):
    """Evaluate the current weights on `task_ids`, one trajectory each (repeat an id for more samples)."""

    eval_id: str
    task_ids: list[str]


class Tick(Event, frozen=True, kw_only=True, tag="tick"):
    """Time passes: deadlines are judged."""


AnyEvent = (
    RunStarted
    | WorkerJoined
    | WorkerLost
    | PromptSubmitted
    | SourceExhausted
    | TurnReady
    | TurnEnded
    | LengthEstimated
    | TrajectoryEnded
    | GroupRequested
    | GroupAcknowledged
    | StepFinished
    | SyncRequested
    | WorkerPaused
    | SyncFinished
    | WeightsAcknowledged
    | EvalRequested
    | Tick
)


# ------------------------------------------------------------------------------------------------------- commands


class Command(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="command"):
    """Base of every command."""


class FetchPrompts(Command, frozen=True, kw_only=True, tag="fetch_prompts"):
    """Take `count` prompts from the source; each comes back as PromptSubmitted."""

    count: int


class StartTrajectory(Command, frozen=True, kw_only=True, tag="start_trajectory"):
    """Worker: run this episode."""

    worker: str
    trajectory_id: str
    group_id: str
    task_id: str
    purpose: Purpose
    priority: PriorityClass
    rank: int = 0
    """Order among the turns that wait in one class: smaller first, equal ones first come, first served."""
    cause: str = ""
    """Why this class, where the policy has a reason to tell."""
    placed: str = ""
    """Why this worker."""


class AbortTrajectory(Command, frozen=True, kw_only=True, tag="abort_trajectory"):
    """Worker: cancel generation, tool and reward work of this trajectory within 5 s; it reports TrajectoryEnded."""

    worker: str
    trajectory_id: str
    status: TrajectoryStatus
    """What it is reported as: DISCARDED or ABORTED."""
    cause: str


class SetClass(Command, frozen=True, kw_only=True, tag="set_class"):
    """Worker: this trajectory's class and rank from now on. Only to workers with the `priority` capability."""

    worker: str
    trajectory_id: str
    priority: PriorityClass
    epoch: int
    rank: int = 0
    cause: str = ""


class MoveTrajectory(Command, frozen=True, kw_only=True, tag="move_trajectory"):
    """Worker: hand this trajectory over to the worker `to` before its next turn. Only between workers with the
    `migration` capability; the prefix is copied or computed again, nothing is sampled twice."""

    worker: str
    trajectory_id: str
    to: str
    cause: str


class SealGroup(Command, frozen=True, kw_only=True, tag="seal_group"):
    """The group is ready: `members` train with `advantages` (same order)."""

    group_id: str
    prompt_id: str
    task_id: str
    members: list[str]
    advantages: list[float]


class ClosePrompt(Command, frozen=True, kw_only=True, tag="close_prompt"):
    """The prompt ends with `status` (any but RUNNING) for the stated cause."""

    prompt_id: str
    group_id: str
    status: PromptStatus
    cause: str
    step: int = -1
    """The optimizer step that trained it, for ACCEPTED."""


class DropTrajectories(Command, frozen=True, kw_only=True, tag="drop_trajectories"):
    """Forget the tokens of these trajectories (their group is closed or they were replaced)."""

    trajectory_ids: list[str]


class DeliverGroup(Command, frozen=True, kw_only=True, tag="deliver_group"):
    """Answer a replica's GroupRequested with this sealed group."""

    step: int
    replica: int
    group_id: str
    cause: str = ""
    """Why this group."""


class CloseBatch(Command, frozen=True, kw_only=True, tag="close_batch"):
    """Answer a replica's GroupRequested: the batch of `step` is complete."""

    step: int
    replica: int
    counts: BatchCounts


class PauseWorker(Command, frozen=True, kw_only=True, tag="pause_worker"):
    """Worker: abort what runs (keep its tokens), flush the cache, start nothing; answer WorkerPaused."""

    worker: str
    version: int


class GrantSync(Command, frozen=True, kw_only=True, tag="grant_sync"):
    """Answer the actor's SyncRequested: every worker is paused."""

    version: int
    workers: list[str]


class ResumeWorker(Command, frozen=True, kw_only=True, tag="resume_worker"):
    """Worker: go on under `version`; answer WeightsAcknowledged."""

    worker: str
    version: int


class FinishEval(Command, frozen=True, kw_only=True, tag="finish_eval"):
    """All trajectories of an evaluation ended."""

    eval_id: str
    version: int
    trajectory_ids: list[str]


class StopRun(Command, frozen=True, kw_only=True, tag="stop_run"):
    """The run cannot go on (cause), or the source is exhausted and drained (cause empty)."""

    cause: str


AnyCommand = (
    FetchPrompts
    | StartTrajectory
    | AbortTrajectory
    | SetClass
    | MoveTrajectory
    | SealGroup
    | ClosePrompt
    | DropTrajectories
    | DeliverGroup
    | CloseBatch
    | PauseWorker
    | GrantSync
    | ResumeWorker
    | FinishEval
    | StopRun
)

WorkerCommand = StartTrajectory | AbortTrajectory | SetClass | MoveTrajectory | PauseWorker | ResumeWorker


class EventRow(Record, frozen=True, kw_only=True):
    """One row of `events.jsonl`."""

    seq: int
    now: float
    event: AnyEvent
    commands: list[AnyCommand]
