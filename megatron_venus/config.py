"""Keys of the actor, and the whole run config: every package defines its part, this file joins them."""

from __future__ import annotations

from dataclasses import dataclass, field

from envclient.config import EnvConfig
from rollout.config import ModelConfig, RolloutConfig, RunConfig

CHUNK_LOGITS = 1 << 24
"""Logits of a chunk, of which the loss holds 8 bytes each (float32) or 10 (half precision). All chunks but the last are
computed again in the backward pass."""


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
class KlConfig:
    """KL(π_θ ‖ π_ref); the reference is `model.path`'s weights, kept as a frozen copy."""

    place: str = "none"
    """`none`; `loss`: a term of the token loss; `reward`: subtracted from the reward before the advantage."""
    estimator: str = "k3"
    """`k1` (−d), `k2` (d² / 2) or `k3` (exp(d) − 1 − d), d = log π_ref − log π_θ."""
    coefficient: float = 0.001
    """β."""
    weighted: bool = True
    """In the loss: the estimate times π_θ/π_old, whose gradient is the KL's. False: DeepSeekMath's plain estimate."""


@dataclass(kw_only=True)
class CorrectionConfig:
    """What is done about tokens whose log-prob in the engine (μ) is not the trainer's (π_old); ρ = π_old / μ."""

    weight: str = "none"
    """`none`, or a factor on the policy loss: `tis` (ρ cut to [low, high]), `icepop` (ρ inside [low, high], else 0),
    `seq_tis`, `seq_mis` (the same two with the product of ρ over the sequence)."""
    low: float = 0.0
    """Lower bound of the weight; IcePop's published range is 0.5 to 2."""
    high: float = 2.0
    """Upper bound of the weight (C, β)."""
    reject: str = "none"
    """`none`, or whole sequences leave the loss: `geometric` (exp(mean log ρ) outside [reject_low, reject_high]), `k3`
    (mean of ρ − 1 − log ρ above reject_k3)."""
    reject_low: float = 0.99
    reject_high: float = 1.01
    reject_k3: float = 0.01
    """Nats a token."""


@dataclass(kw_only=True)
class LossConfig:
    """Objective, aggregation, correction and KL of the policy loss."""

    algorithm: str = "grpo"
    """`grpo`, `dr_grpo`, `dapo`, `gspo`, `cispo` or `reinforce_plus_plus`: the objective of a token."""
    clip_low: float = 0.2
    """ε below: ratios under 1 − ε are clipped where the advantage is negative."""
    clip_high: float = 0.28
    """ε above (DAPO's clip-higher)."""
    dual_clip: float = 0.0
    """c > 1: for negative advantages the loss is at most −c·A (3 is common); 0: off."""
    aggregation: str = "token-mean"
    """Over the global batch: `token-mean`, `seq-mean-token-sum`, `seq-mean-token-mean` or `seq-mean-token-sum-norm`."""
    norm_tokens: int = 0
    """Constant length, in tokens, of `seq-mean-token-sum-norm` (Dr.GRPO), for example the longest response."""
    updates_per_batch: int = 1
    """Optimizer updates a batch, each on its own part of the batch's groups. Above 1 the batch is kept, and π_old is
    computed as groups arrive."""
    bypass: bool = False
    """π_old := μ, the engine's log-probs: ratios then contain the mismatch between engine and trainer."""
    kl: KlConfig = field(default_factory=KlConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)


@dataclass(kw_only=True)
class SyncConfig:
    """Weight broadcast from the actor into the engines."""

    bucket_mb: float = 256.0
    """Megabytes of weights per broadcast bucket (the largest tensor, if that is larger); a sync holds up to two."""
    timeout_s: float = 120.0
    """Seconds that an engine may take for a request of a sync; then it is given up, and its worker named as lost."""
    verify_first: int = 2
    """Number of an engine's first syncs after which every tensor's checksum, computed inside it, is compared."""


@dataclass(kw_only=True)
class ParallelConfig:
    """How one replica of the model is laid over processes; what is left of `actor.ranks` are replicas."""

    tensor: int = 1
    """Processes that share every layer's heads, feed-forward and the vocabulary."""
    sequence: bool = False
    """Also split norms and residuals over the tensor-parallel processes (sequence parallelism)."""
    pipeline: int = 1
    """Stages that the layers are cut into."""
    virtual_stages: int = 1
    """Pieces of every stage, run in turn (interleaved schedule)."""
    context: int = 1
    """Processes that share every sequence's tokens."""
    expert: int = 1
    """Processes that share every layer's experts; beyond tensor · context, a replica is several lanes fed together."""
    recompute: bool = False
    """Compute every layer's activations again in the backward pass instead of keeping them."""

    def replica_ranks(self) -> int:
        """Processes of one replica: all that a collective inside the model may span."""
        return self.tensor * self.context * self.pipeline * self.lanes()

    def lanes(self) -> int:
        """Data-parallel copies of the dense layers in one replica."""
        return max(1, self.expert // (self.tensor * self.context))

    def micro_batch_multiple(self) -> int:
        """A group's micro-batches come in multiples of this, so that no lane and no stage waits for want of one."""
        return self.lanes() * self.pipeline


@dataclass(kw_only=True)
class CheckpointConfig:
    """What the actor leaves on disk every `run.checkpoint_every` steps, and at the end."""

    keep: int = 2
    """Complete checkpoints kept; older ones are removed after a newer one is complete."""
    background: bool = True
    """Training goes on while files are written; costs a copy of weights and optimizer in host memory meanwhile."""
    export: bool = True
    """Also write the weights in Hugging Face's format, which engines load at a resume. False: a resume makes them
    first, from the distributed checkpoint."""
    timeout_s: float = 1800.0
    """Seconds that a process may take longer than the others over its part of a save."""


@dataclass(kw_only=True)
class ActorConfig:
    """The Megatron-core actor."""

    ranks: int = 1
    """Processes under torchrun."""
    gpus_per_machine: int = 8
    """GPUs of one training machine: consecutive processes share it."""
    gpu_memory_gb: float = 0.0
    """Memory of one training GPU in 10^9 bytes, which the plan must fit; 0: what this machine has (GPU, else host)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    micro_batch_tokens: int = 4096
    """Token budget of one packed micro-batch."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
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
