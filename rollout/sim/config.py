"""Keys of a simulation: hardware, model, engine, workload, environments, trainer, failures. Units in names, sources
in comments: [ML.ENERGY] decode times of Qwen3-32B on H100 (12 points, worst residual 1.45 ms), [AgentCgroup] 111
SWE agent runs, [paper] the paper's own setting, [R] our estimate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.config import GroupConfig, PolicyConfig


@dataclass(kw_only=True)
class ModelCostConfig:
    """What the model costs. Defaults: Qwen3-32B in bf16."""

    parameters: float = 32.8e9
    """Parameters; a forward pass of n tokens is 2 · parameters · n FLOPs and the attention below."""
    weight_gb: float = 65.6
    """Weights on the GPUs of a worker together, GB (10⁹ bytes)."""
    kv_bytes_per_token: int = 262144
    """2 · layers · KV heads · head size · 2 bytes: 2·64·8·128·2."""
    attention_flops: float = 1.05e6
    """Attention of a forward pass over L tokens is this · L² FLOPs."""
    decode_overhead_ms: float = 5.23
    """Of a decode step whatever the GPUs [ML.ENERGY: 14.57 ms at TP2 is 5.23 + 65.6 · 0.2848 / 2; TP4 9.9, TP8 7.6]."""
    decode_ms_per_gb: float = 0.2848
    """Of a decode step, for each GB read (weights and KV), on one GPU; divided by TP [ML.ENERGY]."""
    decode_ms_per_request: float = 0.178
    """Of a decode step, for each request in the batch, on one GPU; divided by TP [ML.ENERGY]."""


@dataclass(kw_only=True)
class EngineConfig:
    """A rollout worker's engine."""

    tp: int = 4
    """GPUs of a worker."""
    hbm_gb: float = 80.0
    """Memory of a GPU, GB; the paper does not say: a parameter."""
    memory_fraction: float = 0.8556
    """Of the memory, for weights and KV: gives 272K, 794K and 1.84M tokens of 32B at TP 2, 4, 8."""
    kv_tokens: int = 0
    """KV capacity in tokens; 0: from the memory."""
    gpu_tflops: float = 989.0
    """Peak of a GPU in bf16, TFLOP/s (H100)."""
    prefill_efficiency: float = 0.30
    """Of the peak, in prefill; 0.30 untuned, 0.45 tuned servers."""
    slots: int = 64
    """Turns generated at once [paper]."""
    chunk_tokens: int = 8192
    """Tokens of a prefill batch at most; longer prompts are prefilled in chunks."""
    reserve_tokens: int = 256
    """KV that admission keeps free for each running request's output."""
    l2: str = "default"
    """Host cache: `none`, `default` (l2_ratio × device) or `large` (l2_node_gb a node)."""
    l2_ratio: float = 2.0
    """Host pool of `default` as a multiple of the device pool (HiCache's own default)."""
    l2_node_gb: float = 1800.0
    """Host memory of a node for `large`, GB."""
    gpus_per_node: int = 8
    """GPUs that share a node's host memory."""
    l2_gb_per_s: float = 25.0
    """Copy between host and one GPU, GB/s; every GPU of a worker has its own link (40K tokens of 32B at TP4: 0.1 s)."""
    kv_on_sync: str = "flush"
    """KV of the old weights at a sync: `flush` (recomputed) or `keep` (reused; running turns go on in place)."""
    priority: bool = True
    """Whether engines batch HIGH before LOW and retract LOW first, where the policy uses it."""
    tiers: bool = True
    """Whether engines evict by reference tier, where the policy uses it; else LRU."""
    migration: bool = True
    """Whether engines can hand KV over, where the policy uses it. It lands in the host cache: none, no copy."""
    migration_gb_per_s: float = 25.0
    """Copy of KV from one worker's host memory to another's, GB/s (200 Gbit/s RDMA) [R]."""


@dataclass(kw_only=True)
class WorkloadConfig:
    """What trajectories do. Lengths are log-normal: LN(mu, sigma) [AgentCgroup]."""

    kind: str = "swe"
    """`swe` (the distributions here), `sessions` (460 real coding sessions) or `from_run`."""
    run: str = ""
    """For `from_run`: folder of an own run (its events.jsonl and metrics.jsonl)."""
    turns_mu: float = 3.745
    """Of the logarithm of a trajectory's turns."""
    turns_sigma: float = 0.628
    """Of the same."""
    correlation: float = 0.6
    """Of the logarithm of the turns of two trajectories of a group; unknown: sweep 0.3, 0.6, 0.85 [R]."""
    output_mu: float = 5.089
    """Of the logarithm of a turn's generated tokens."""
    output_sigma: float = 0.945
    """Of the same."""
    appended_mu: float = 5.187
    """Of the logarithm of an observation's tokens (median 179)."""
    appended_sigma: float = 1.49
    """Of the same (mean 545)."""
    appended_max: int = 30000
    """Tokens of an observation at most."""
    first_context: int = 13500
    """Tokens of the first prompt, shared by a group."""
    max_turns: int = 300
    """[paper]"""
    context_limit: int = 131072
    """Tokens of a trajectory at most [paper: 128K]; a longer one is TRUNCATED."""
    pass_rate: float = 0.4
    """Mean of a group's success rate, which is uniform around it; 0 or 1: all rewards are equal."""
    fast_tool_share: float = 0.55
    """Of the tool calls that last LN(median fast_tool_s)."""
    fast_tool_s: float = 0.05
    slow_tool_share: float = 0.43
    """Of the tool calls that last LN(median slow_tool_s); the rest is a Pareto tail."""
    slow_tool_s: float = 5.0
    tool_sigma: float = 0.6
    """Of the logarithm of both."""
    tail_tool_s: float = 12.0
    """Smallest value of the tail, Pareto with exponent 1."""
    max_tool_s: float = 150.0
    """Longest tool call."""
    scale_tools: float = 1.0
    """Multiplies every tool latency; 0: tools take no time."""


@dataclass(kw_only=True)
class EnvironmentConfig:
    sandboxes: int = 0
    """Sandboxes at once, over the whole cluster; 0: as many as asked for."""
    open_s: float = 1.0
    """Seconds from lease to first prompt."""
    score_s: float = 10.0
    """Seconds of reward computation, in the sandbox."""


@dataclass(kw_only=True)
class TrainerConfig:
    """The actor."""

    gpus: int = 16
    """[paper: 16 of 32]"""
    replicas: int = 2
    """Data-parallel replicas that take groups by themselves."""
    efficiency: float = 0.35
    """Of the GPUs' peak, in forward and backward (3 × a forward) [R]."""
    streaming: bool = True
    """Groups are trained as they arrive; else only when the whole batch is ready."""
    optimizer_s: float = 5.0
    """Seconds of an optimizer step [R]."""
    sync_s: float = 5.0
    """Seconds of the weights' broadcast [R]."""
    speed: float = 1.0
    """Multiplies the trainer's speed, optimizer included."""


@dataclass(kw_only=True)
class FailureConfig:
    """What goes wrong, at random, the same in every policy."""

    worker_mtbf_s: float = 0.0
    """Mean seconds between losses of a worker, over the cluster; 0: never."""
    worker_restart_s: float = 120.0
    """Seconds until a lost worker joins again."""
    trajectory_rate: float = 0.0
    """Share of trajectories that fail (sandbox or verifier) at a random turn."""
    stuck_rate: float = 0.0
    """Share of trajectories whose tool never returns, at a random turn."""


@dataclass(kw_only=True)
class SimConfig:
    """A simulated run."""

    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """As in a live run; `policy.name` is the whole policy."""
    seed: int = 0
    """Of the workload and of the failures; the policies draw nothing."""
    steps: int = 20
    """Optimizer steps."""
    skip_steps: int = 2
    """First steps left out of the rates (the cluster starts empty)."""
    workers: int = 4
    """Rollout workers."""
    control_s: float = 0.005
    """Seconds of a message between coordinator and workers, one way."""
    tick_s: float = 10.0
    """Seconds between the coordinator's deadline checks; less where a policy checks more often (a live run: 1)."""
    max_trajectories: int = 0
    """Trajectories open at once on a worker; 0: no limit (that of the sandboxes holds)."""
    group: GroupConfig = field(default_factory=lambda: GroupConfig(deadline_s=36000.0))
    """As in a live run."""
    model: ModelCostConfig = field(default_factory=ModelCostConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    failures: FailureConfig = field(default_factory=FailureConfig)


PRESETS: dict[str, dict[str, object]] = {
    "32b": {},
    "4b": {
        "model": {
            "parameters": 4.0e9,
            "weight_gb": 8.0,
            "kv_bytes_per_token": 147456,
            "attention_flops": 0.295e6,
            "decode_ms_per_request": 0.12,
        },
        "engine": {"tp": 1},
        "workers": 16,
    },
}
"""Settings by the size of the Qwen3 model, on the paper's 16 rollout GPUs. 4B's times are scaled from 32B's [R]."""
