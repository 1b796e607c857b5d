"""Keys of the actor, and the whole run config: every package defines its part, this file joins them."""

from __future__ import annotations

from dataclasses import dataclass, field

from envclient.config import EnvConfig
from rollout.config import ModelConfig, RolloutConfig, RunConfig


@dataclass(kw_only=True)
class OptimizerConfig:
    """Adam over the summed and once-scaled gradient."""

    lr: float = 4e-4
    """Learning rate, constant after the warm-up."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up from 0."""
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_grad: float = 1.0
    """Global gradient norm above which the gradient is scaled down."""
    max_nonfinite_steps: int = 3
    """Steps skipped for a non-finite gradient, in a row, before the run stops."""


@dataclass(kw_only=True)
class LossConfig:
    """GRPO's clipped objective."""

    clip_low: float = 0.2
    """ε below: ratios under 1 − ε are clipped where the advantage is negative."""
    clip_high: float = 0.28
    """ε above (DAPO's clip-higher)."""
    aggregation: str = "token-mean"
    """`token-mean` over the global batch; other aggregations come with the actor's own issue."""


@dataclass(kw_only=True)
class SyncConfig:
    """Weight broadcast from the actor into the engines."""

    bucket_mb: float = 64.0
    """Megabytes of weights per broadcast bucket."""
    timeout_s: float = 120.0
    """Seconds after which a sync that makes no progress is an error naming the engine."""
    verify_first: int = 2
    """Number of first syncs after which every tensor's checksum is compared inside the engine."""


@dataclass(kw_only=True)
class ActorConfig:
    """The Megatron-core actor."""

    ranks: int = 1
    """Processes under torchrun, each a data-parallel replica here."""
    micro_batch_tokens: int = 4096
    """Token budget of one packed micro-batch."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    keep_checkpoints: int = 2
    """Complete checkpoints kept; older ones are removed after a newer one is complete."""
    skip_zero_advantage: bool = True
    """Leave out the forward pass of sequences whose gradient is exactly zero (their tokens still count)."""
    poll_s: float = 20.0
    """Seconds of one long poll for the next group."""


@dataclass(kw_only=True)
class VenusConfig:
    """The whole run. `python -m megatron_venus.launch --config FILE [key=value …]`."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
