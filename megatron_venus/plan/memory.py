"""The memory sum of every pipeline stage's processes, and whether it fits the GPU (or, on a CPU, the host).

Weights, gradients, optimizer and reference are always there. What comes on top differs by phase: a micro-batch's
backward pass, its loss, or a weight sync; the largest counts, as the allocator reuses what a phase has freed. The
optimizer's step needs nothing more: it works in place on this process's shard.

A micro-batch is taken as long as it can be: one trajectory of `model.context_length` tokens, or the token budget where
that is more, with every response token in the loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_venus.architecture import Architecture
from megatron_venus.config import ActorConfig, VenusConfig
from megatron_venus.plan.activations import Kernels, stage_bytes
from megatron_venus.plan.parameters import largest_tensor, rank_parameters, whole_parameters

GB = 10**9
BYTES = {"bfloat16": 2, "float32": 4}
CONTEXT_BYTES = 1 * GB
"""CUDA context, cuBLAS and cuDNN workspaces of a process: an assumption, not measured here."""
COMMUNICATOR_BYTES = 256 << 20
"""NCCL's buffers of a communicator: NCCL_BUFFSIZE (4 MiB by default) to send and to receive on each of 32 channels."""
ALLOCATOR_SHARE = 0.05
"""Of what comes and goes, lost to fragmentation and rounding: an assumption, not measured here."""
PROCESS_BYTES = 1 * GB
"""Resident memory of an actor process on a CPU before its model: Python, torch and Megatron (0.8 GB measured)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What the plan must fit."""

    kind: str
    """`GPU`: every process has one to itself; `host`: all processes share the memory of a CPU machine."""
    capacity: int
    """Bytes of one GPU, or of the host."""
    source: str
    """Where the number comes from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Bytes of one process of a pipeline stage."""

    stage: int
    weights: int
    gradients: int
    optimizer: int
    reference: int
    """Frozen copy of the weights, where the loss asks for KL."""
    activations: int
    """Kept for the backward passes of all micro-batches in flight."""
    layer: int
    """Backward pass of one layer, besides."""
    rows: int
    """Loss: last hidden states, besides."""
    logits: int
    """Loss: a chunk of logits, besides."""
    sync: int
    """Weight sync: two buckets and the gathered tensor."""
    allowance: int
    """Context, communicators, fragmentation."""

    def phases(self) -> dict[str, int]:
        """What comes on top of the lasting part in each phase."""
        return {
            "backward": self.activations + self.layer,
            "loss": self.activations + self.rows + self.logits,
            "weight sync": self.sync,
        }

    @property
    def lasting(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def peak(self) -> int:
        return self.lasting + max(self.phases().values()) + self.allowance


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """The sum of every stage, and the verdict."""

    target: Target
    tokens: int
    """Of the longest micro-batch."""
    processes: int
    """Of a stage."""
    stages: list[StageMemory]

    @property
    def worst(self) -> StageMemory:
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def needed(self) -> int:
        """Bytes that must fit `target.capacity`."""
        if self.target.kind == "GPU":
            return self.worst.peak
        return self.processes * sum(stage.peak for stage in self.stages)

    @property
    def fits(self) -> bool:
        return self.needed <= self.target.capacity


def memory_plan(config: VenusConfig, arch: Architecture, target: Target) -> MemoryPlan:
    """Of a config whose layout `layout_rules` has let pass."""
    tokens = max(config.actor.micro_batch_tokens, config.model.context_length)
    pipeline = config.actor.parallel.pipeline
    stages = [_stage(config, arch, target, stage, tokens) for stage in range(pipeline)]
    return MemoryPlan(target=target, tokens=tokens, processes=config.actor.ranks // pipeline, stages=stages)


def _stage(config: VenusConfig, arch: Architecture, target: Target, stage: int, tokens: int) -> StageMemory:
    actor, size = config.actor, BYTES[config.model.dtype]
    parallel, on_gpu = actor.parallel, target.kind == "GPU"
    held = rank_parameters(arch, parallel, stage)
    # Adam's two moments in float32, and a master copy where the weights themselves are not float32.
    per_parameter = 8 + (0 if size == 4 else 4)
    copies = actor.ranks // (parallel.tensor * parallel.pipeline)
    expert_copies = actor.ranks // (parallel.expert * parallel.pipeline)
    activations = stage_bytes(arch, parallel, Kernels(fused=on_gpu, size=size), stage=stage, tokens=tokens)
    largest, whole = size * largest_tensor(arch), size * whole_parameters(arch)
    # A tensor larger than a bucket is one by itself; a small model does not fill one.
    bucket = min(max(int(actor.sync.bucket_mb * 1e6), largest), whole)
    memory = StageMemory(
        stage=stage,
        weights=size * held.total,
        gradients=4 * held.total,
        optimizer=per_parameter * (held.dense // copies + held.expert // expert_copies),
        reference=size * held.total if actor.loss.kl.place != "none" else 0,
        activations=activations.kept,
        layer=activations.layer,
        rows=activations.rows,
        logits=activations.logits,
        # Besides, a tensor's parts and the whole made of them.
        sync=2 * bucket + 2 * largest,
        allowance=0,
    )
    return _with_allowance(memory, actor, on_gpu)


def _with_allowance(memory: StageMemory, actor: ActorConfig, on_gpu: bool) -> StageMemory:
    parallel = actor.parallel
    fixed = PROCESS_BYTES
    if on_gpu:
        replicas = actor.ranks // parallel.replica_ranks()
        sizes = (parallel.tensor, parallel.context, parallel.pipeline, parallel.expert, replicas)
        # One of all processes and one with the engines are always there.
        fixed = CONTEXT_BYTES + (2 + sum(size > 1 for size in sizes)) * COMMUNICATOR_BYTES
    return replace(memory, allowance=fixed + int(ALLOCATOR_SHARE * max(memory.phases().values())))
