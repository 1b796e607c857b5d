"""Keys of the rollout: run, model, sampling, gate, groups, workers, tasks. One sentence and a unit each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass(kw_only=True)
class RunConfig:
    """What every role knows about the run."""

    name: str = "quickstart"
    """Folder under `root`; letters, digits, `-`, `_` and `.`."""
    root: str = "runs"
    """Folder of all runs."""
    seed: int = 0
    """Seed of the task order, of training and of the engines' sampling."""
    steps: int = 2
    """Optimizer steps to make."""
    epochs: int = 0
    """Times the list of training tasks is gone through; 0: endless. A drained list ends the run before `steps`."""
    mode: str = "default"
    """`default`: short run; `learn`: the config's `learn` overlay (about 30 steps with evaluations)."""
    resume: str = "never"
    """`never`: refuse a folder that exists; `auto`: go on from the last complete checkpoint, or start; `overwrite`."""
    checkpoint_every: int = 10
    """Optimizer steps between checkpoints; one is always written at the end. 0: only at the end."""
    eval_every: int = 0
    """Optimizer steps between evaluations; 0: none during training."""
    eval_before: bool = False
    """Evaluate the loaded weights before step 1."""
    eval_after: bool = False
    """Evaluate the final weights."""
    eval_samples: int = 128
    """Trajectories per evaluation, spread evenly over the held-out tasks."""
    save_rollouts: bool = False
    """Write the trained groups of every step, tokens and all, into the run's `rollouts/`."""
    wandb: bool = True
    """Write an offline W&B run into the run's folder."""


@dataclass(kw_only=True)
class YarnConfig:
    """YaRN: positions beyond those that the model was trained with, alike in engine, actor and export."""

    factor: float = 1.0
    """The model's positions become `factor` · `original_length`; 1: as its config.json says."""
    original_length: int = 0
    """Positions before scaling; 0: config.json's `max_position_embeddings` (Qwen3: set 32768)."""
    attention_factor: float = 0.0
    """Scale of queries and keys; 0: the usual 0.1 · ln(factor) + 1."""


@dataclass(kw_only=True)
class ModelConfig:
    """The policy model; one description for engine and actor."""

    path: str = MISSING
    """Folder of a Hugging Face checkpoint with tokenizer."""
    megatron: str = ""
    """Folder that `python -m ckpt_tools.from_hf` made of `path`: every actor process reads only its own part of it,
    instead of the whole of `path`. Engines always load `path`."""
    dtype: str = "float32"
    """`float32` or `bfloat16`."""
    context_length: int = 640
    """Tokens of prompt and response together, at most; a longer episode is TRUNCATED."""
    yarn: YarnConfig = field(default_factory=YarnConfig)


@dataclass(kw_only=True)
class SamplingConfig:
    """How tokens are sampled. Only what the trainer can reproduce exactly is accepted."""

    temperature: float = 1.0
    """> 0; the log-probs are those of the tempered distribution, on both sides."""
    top_p: float = 1.0
    """Only 1.0: a truncated distribution's log-probs cannot be reproduced by the trainer."""
    top_k: int = -1
    """Only -1, as top_p."""


@dataclass(kw_only=True)
class GroupConfig:
    """Sample groups and the gate."""

    size: int = 8
    """K: trajectories of a prompt."""
    batch: int = 16
    """B: groups of an optimizer step."""
    async_factor: float = 1.0
    """Groups in flight ≤ floor(async_factor · B); 1.0 is strictly on-policy, more oversamples."""
    max_version_span: int = 2
    """S: a trajectory that would sample under more than S versions is discarded."""
    include_promoted: bool = True
    """Groups at their last valid version get a place in the next batch before fresher ones."""
    filter_zero_variance: bool = False
    """Close groups whose rewards are all equal as FILTERED and refill (DAPO's dynamic filter)."""
    max_refills: int = 512
    """Filtered groups per step before the run stops with a message."""
    max_resamples: int = 2
    """Times that a discarded or failed member is sampled anew before `on_lost_member` decides."""
    on_lost_member: str = "drop"
    """`drop`: the group closes as DISCARDED or FAILED; `shrink`: it is sealed without the member (≥ 2 left)."""
    deadline_s: float = 600.0
    """Seconds from a trajectory's start until it counts as stuck: aborted and treated as FAILED."""
    train_truncated: bool = True
    """Whether TRUNCATED trajectories train (else they count as lost members without a resample)."""


@dataclass(kw_only=True)
class AdvantageConfig:
    """GRPO's advantage by default: (R − mean) / (std + 1e-6) in the group, unbiased std."""

    estimator: str = "group"
    """`group`; `batch`: (R − mean) / std over the whole batch's tokens (REINFORCE++); `group_batch`: R − mean of the
    group, then divided by the batch's std (REINFORCE++-baseline). The last two hold gradients until the batch ends."""
    normalise_std: bool = True
    """False: R − mean (Dr.GRPO)."""
    overlong_tokens: int = 0
    """DAPO's overlong penalty: generated tokens at which `overlong_factor` is taken from the reward; 0: none."""
    overlong_buffer: int = 0
    """Tokens below `overlong_tokens` over which the penalty grows linearly from 0."""
    overlong_factor: float = 1.0
    """The whole penalty, in units of reward."""


@dataclass(kw_only=True)
class PolicyConfig:
    """The scheduling policy, whole: which trajectories run where and before which others (paper §4)."""

    name: str = "action"
    """`action`: slots are free during tool calls, turns first come, first served; `trajectory`: slots are held through
    tool calls; `fcfs_priority`: oldest groups are critical; `longest_first`: Heddle's; `program_aware`: ThunderAgent's,
    as published; `program_aware_plus`: the same with promotion and group placement; `paper`: VenusRL as described;
    `venus`: a sticky working set per worker; `oracle`: `venus` with true lengths, in simulations only."""
    order: str = "auto"
    """paper, venus: which groups are critical: `length` (expected to end first) or `admission` (oldest); `auto`: venus
    by admission, paper and oracle by length."""
    hysteresis: float = 0.95
    """0 to 1: a group replaces a critical one only if its F_g is below this share of the other's."""
    tool_time: bool = False
    """F_g with the tool time of the turns still expected, as tokens that could be generated meanwhile."""
    priority: bool = True
    """paper: critical groups are HIGH and preempt others' slots (off: slots as in `action`)."""
    residency: bool = True
    """paper: engines that have reference tiers derive them from the classes."""
    demotion: bool = True
    """paper: HIGH trajectories beyond a worker's KV capacity are LOW, the shortest contexts first."""
    migration: bool = True
    """paper, venus, program_aware: pending turns may move to other workers, where engines can migrate; venus: what has
    not started may too, wherever it is."""
    fill: float = 0.0
    """venus: share (0 to 2) of the KV capacity that the working set may need; 0: 0.9 without a host
    cache, 1.2 with one."""
    reserve: float = -1.0
    """venus: share (0 to 1) of a trajectory's expected growth that is reserved for it from the start; below 0: 0.1
    without a host cache, 0.25 with one."""
    growth_tokens: int = 1000
    """Tokens (0 to 10⁷) of growth expected of a context before any length was measured."""
    move_gap: float = 0.1
    """Smallest difference in load (share of KV capacity, 0 to 10) between two workers that is worth a move."""
    move_recompute: float = 64.0
    """venus: tokens of context (0 to 10⁶) that a move may have computed again for each token still to be generated,
    where that goes on beside a whole KV memory less; in proportion where it is less. With a host cache KV is copied."""
    interval_s: float = 5.0
    """program_aware: seconds (0.1 to 3600) between its checks (ThunderAgent's default); coordinator.tick_s at least."""
    buffer_tokens: int = 100
    """program_aware: KV tokens (0 to 10⁶) kept free for each active trajectory (ThunderAgent's BUFFER_PER_PROGRAM)."""
    acting_decay: bool = False
    """program_aware: on resuming, count the tokens of a tool call of t seconds 2^−t times (ThunderAgent's option)."""
    longest_wait_s: float = 1800.0
    """program_aware: seconds (0 to 10⁷) after which a paused trajectory is resumed whatever the load, if its worker can
    have it open (ThunderAgent's)."""


@dataclass(kw_only=True)
class WorkerConfig:
    """Rollout workers, each the parent of one engine."""

    count: int = 1
    """Number of workers."""
    engine: str = "sglang"
    """`sglang`: a real engine on `model.path`; `scripted`: made-up tokens in the worker's process, for tests."""
    slots: int = 32
    """Turns generated at once on one worker."""
    max_trajectories: int = 128
    """Episodes open at once on one worker (each holds a sandbox)."""
    kv_tokens: int = 65536
    """KV capacity of the engine in tokens."""
    host_kv_tokens: int = 0
    """Tokens that the engine's host cache (memory level L2) holds; 0: there is none. Told to the policy only."""
    engine_start_timeout_s: float = 240.0
    """Seconds an engine may take to come up."""
    request_timeout_s: float = 300.0
    """Seconds a single turn may take in the engine."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further SGLang server arguments (name without dashes → value)."""


@dataclass(kw_only=True)
class FactoryConfig:
    """An object named by its place: `package.module:function`, called with `args`."""

    factory: str = MISSING
    """`package.module:function`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the factory."""


@dataclass(kw_only=True)
class CoordinatorConfig:
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """0: any free port."""
    tick_s: float = 1.0
    """Seconds between deadline checks."""
    worker_timeout_s: float = 60.0
    """Seconds without a poll after which a worker counts as lost."""


@dataclass(kw_only=True)
class PredictorConfig:
    """A small language model that is asked at every turn's end, while the tool runs, how much is still to come."""

    enabled: bool = False
    """Start the predictor's service and ask it. The embedded estimate is always on, and alone without it."""
    record: bool = False
    """Write finished training episodes into the run's `predictor/`, to train on; `enabled` with `refresh` does too."""
    record_steps: int = 8
    """Optimizer steps whose episodes are kept; 0: all."""
    model: str = ""
    """Folder of a trained predictor; empty: none answers until the first refresh has made one."""
    trunk: str = ""
    """Folder of the Qwen3 that a first predictor is made of, with the policy's tokenizer (Qwen3-0.6B for Qwen3-32B)."""
    engine: str = "sglang"
    """`sglang`: a server of its own (classify path); `torch`: in the service's process, for very small models."""
    dtype: str = "float32"
    """`float32` or `bfloat16`, in the engine."""
    context_tokens: int = 4096
    """Longest input; of a longer context so many tokens are read: its beginning, and at least as much of its end."""
    slots: int = 16
    """Inputs computed at once."""
    kv_tokens: int = 65536
    """KV capacity of its engine, in tokens: prefixes that stay there are not computed again."""
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further SGLang server arguments (name without dashes → value)."""
    timeout_s: float = 10.0
    """Seconds after which an answer is not waited for any more; a tool that returns earlier does not wait at all."""
    max_questions: int = 64
    """Questions of one worker under way at once; turns that end beyond them are not asked about."""
    refresh: bool = True
    """Train it again on the run's own episodes at every checkpoint, in the background."""
    refresh_minutes: float = 5.0
    """Minutes that one training may take."""
    host: str = "127.0.0.1"
    """Address of the service."""
    port: int = 0
    """0: any free port."""

    @property
    def records(self) -> bool:
        """Whether the coordinator writes episodes down."""
        return self.record or (self.enabled and self.refresh)


@dataclass(kw_only=True)
class RolloutConfig:
    """The rollout's part of the run config."""

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    group: GroupConfig = field(default_factory=GroupConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    worker: WorkerConfig = field(default_factory=WorkerConfig)
    coordinator: CoordinatorConfig = field(default_factory=CoordinatorConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    tasks: FactoryConfig = field(default_factory=FactoryConfig)
    """TaskSource: which tasks there are."""
    agent: FactoryConfig = field(default_factory=FactoryConfig)
    """Agent: how an episode of a task is played and scored."""
