"""The seams of the rollout: wire messages between roles, and the protocols that real systems stand behind.

Who calls what:
* rollout worker -> coordinator: `/v1/worker/join`, `/v1/worker/poll` (long poll: reports go up, commands come down)
* actor replica  -> coordinator: `/v1/actor/next_group`, `/v1/actor/ack`, `/v1/actor/step`, `/v1/actor/sync_begin`,
  `/v1/actor/sync_end`, `/v1/actor/evaluate`
* launcher       -> coordinator: `/v1/status`
* rollout worker -> predictor:   `/v1/predict`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from rollout.types import (
    BatchCounts,
    Capabilities,
    LengthEstimated,
    Purpose,
    Record,
    Trajectory,
    TrajectoryStatus,
    TurnEnded,
    TurnReady,
    WeightsAcknowledged,
    WorkerCommand,
    WorkerPaused,
)

# ---------------------------------------------------------------------------------------------- coordinator's wire


class Empty(Record, frozen=True, kw_only=True):
    """No fields."""


class JoinRequest(Record, frozen=True, kw_only=True):
    """A worker's engine is up and its weights are `version`."""

    worker: str
    engine_url: str
    slots: int
    version: int
    capabilities: Capabilities
    kv_tokens: int = 0
    """As in WorkerJoined."""
    host_kv_tokens: int = 0


WorkerReport = TurnReady | TurnEnded | LengthEstimated | WorkerPaused | WeightsAcknowledged | Trajectory
"""What a worker tells: events, and whole trajectories (from which the shell makes TrajectoryEnded)."""


class PollRequest(Record, frozen=True, kw_only=True):
    """`reports` start at number `first_report`; the coordinator drops those it has seen. `acked_command` is the number
    of commands the worker has taken; later ones are sent again until acknowledged."""

    worker: str
    first_report: int
    reports: list[WorkerReport]
    acked_command: int
    wait_s: float


class PollReply(Record, frozen=True, kw_only=True):
    """`commands` start at number `first_command`; `acked_report` is the number of reports taken."""

    first_command: int
    commands: list[WorkerCommand]
    acked_report: int


class NextGroupRequest(Record, frozen=True, kw_only=True):
    step: int
    replica: int
    wait_s: float


class AckRequest(Record, frozen=True, kw_only=True):
    step: int
    replica: int
    group_id: str
    tokens: int


class StepRequest(Record, frozen=True, kw_only=True):
    """Rank 0 reports a finished optimizer step with the trainer's metrics (names as in metrics.jsonl)."""

    step: int
    skipped: bool
    counts: BatchCounts
    metrics: dict[str, float]


class SyncBeginRequest(Record, frozen=True, kw_only=True):
    version: int


class EngineAddress(Record, frozen=True, kw_only=True):
    worker: str
    engine_url: str


class SyncBeginReply(Record, frozen=True, kw_only=True):
    """Every worker is paused; broadcast to these engines."""

    engines: list[EngineAddress]


class SyncEndRequest(Record, frozen=True, kw_only=True):
    """The engines loaded `version`; answered once every worker has acknowledged it. Seconds by phase go to the log."""

    version: int
    seconds: dict[str, float]
    lost: dict[str, str] = msgspec.field(default_factory=dict)
    """Worker whose engine is dead or stuck → why: it counts as lost."""


class EvaluateRequest(Record, frozen=True, kw_only=True):
    """Evaluate the current version with `run.eval_samples` trajectories; blocks until done."""

    eval_id: str
    version: int


class EvaluateReply(Record, frozen=True, kw_only=True):
    eval_id: str
    version: int
    samples: int
    pass_rate: float
    standard_error: float


class Status(Record, frozen=True, kw_only=True):
    """What the launcher shows while the run goes on."""

    step: int
    steps: int
    version: int
    workers: int
    groups_ready: int
    """Sealed groups, taken by the trainer or not: at most those of the batch being filled and of the next ones."""
    groups_running: int
    trajectories_done: int
    """Since the last optimizer step, as `turns_done`."""
    trajectories_running: int
    turns_done: int
    counts: dict[str, int]
    """Prompts by PromptStatus value, plus `submitted`."""
    phase: str
    """One word for people: starting, rollout, train, sync, eval, done."""
    failure: str = ""


# ------------------------------------------------------------------------------------------------------ predictor


class PredictRequest(Record, frozen=True, kw_only=True):
    """`/v1/predict`: how much will this trajectory still generate?"""

    trajectory_id: str
    turn: int
    """Turns that have ended."""
    token_ids: list[int]
    """Prompt and everything after it, up to the end of that turn; of a long context what the predictor reads of it."""


class PredictReply(Record, frozen=True, kw_only=True):
    """None: there is no trained model yet, or the answer comes too late (`rollout.predictor.questions`)."""

    remaining_tokens: float | None


# --------------------------------------------------------------------------------------------------------- engine


class GenerateRequest(Record, frozen=True, kw_only=True):
    """One turn. Token in, token out; the distribution is tempered, never truncated (top-p, top-k)."""

    request_id: str
    trajectory_id: str
    input_ids: list[int]
    max_new_tokens: int
    temperature: float
    stop_token_ids: list[int]
    priority: int = 0


class Generation(Record, frozen=True, kw_only=True):
    """What came back. len(token_ids) = len(logprobs); the stop token is included when it was sampled."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """`stop`, `length` or `abort` (then the tokens so far)."""
    cached_tokens: int


class Engine(Protocol):
    """A generation engine, as the worker sees it. Implementations: SGLang over HTTP, a scripted one for tests."""

    @property
    def url(self) -> str: ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def start(self) -> None:
        """Bring the engine up; raises VenusError with the engine's last log lines when it does not come up."""

    async def generate(self, request: GenerateRequest) -> Generation:
        """Raises WireError when the engine is gone."""

    async def abort_all(self) -> None:
        """Every running request returns with finish_reason `abort` and its tokens so far."""

    async def abort(self, request_id: str) -> None: ...

    async def flush(self) -> None:
        """Forget all cached KV. Only with no request in the engine."""

    async def wait_dead(self) -> str:
        """Returns only when the engine has died: the reason with its last log lines."""

    async def stop(self) -> None: ...


# ---------------------------------------------------------------------------------------------------------- agent


class Observation(Record, frozen=True, kw_only=True):
    """The environment's answer to an action."""

    token_ids: list[int]
    """Appended to the context before the next turn (mask 0); empty when `done`."""
    done: bool


class Outcome(Record, frozen=True, kw_only=True):
    """How the episode ended, scored while its sandbox lived."""

    reward: float
    status: TrajectoryStatus
    stop_reason: str
    stats: dict[str, float]


class Episode(Protocol):
    """One trajectory's side of the environment: owns its sandbox lease from `open` to `close`."""

    async def open(self) -> list[int]:
        """Lease the sandbox; returns the prompt's token ids. Raises VenusError when the environment fails."""

    async def act(self, token_ids: Sequence[int]) -> Observation:
        """Execute the action that the generated `token_ids` encode (stop token included)."""

    async def score(self, status: TrajectoryStatus, stop_reason: str) -> Outcome:
        """Compute the reward while the sandbox lives."""

    async def close(self) -> None:
        """Release the lease; idempotent, also after a failure or cancellation."""


class Agent(Protocol):
    """Makes episodes. Built once a worker by the factory that `rollout.agent.factory` names."""

    max_new_tokens: int
    """Of one turn."""
    stop_token_ids: list[int]

    def episode(self, task_id: str, trajectory_id: str, purpose: Purpose) -> Episode:
        """Raises ConfigError for a task id it does not know."""

    def statistics(self) -> dict[str, float]:
        """Numbers since the start for the log (for example the memo's hits)."""

    async def aclose(self) -> None: ...


class TaskSource(Protocol):
    """Names the tasks. Built by the coordinator from the factory that `rollout.tasks.factory` names."""

    def train_ids(self) -> list[str]: ...

    def eval_ids(self) -> list[str]: ...
