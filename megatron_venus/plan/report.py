"""The plan as a person reads it in the dry run."""

from __future__ import annotations

from megatron_venus.architecture import Architecture
from megatron_venus.config import VenusConfig
from megatron_venus.plan.engine import engine_memory
from megatron_venus.plan.memory import GB, MemoryPlan, StageMemory
from megatron_venus.plan.places import places
from rollout.engine_args import tensor_parallel

_LASTING = {"weights": "weights", "gradients": "gradients", "optimizer": "optimizer", "reference": "reference"}
_COMING = {
    "activations": "activations",
    "layer": "a layer's backward",
    "rows": "loss: hidden states",
    "logits": "loss: logits chunk",
    "sync": "sync buckets",
}


def plan_text(config: VenusConfig, arch: Architecture, plan: MemoryPlan) -> list[str]:
    """Every process with its place, then the memory sum."""
    worker, env = config.rollout.worker, config.env
    gpus = tensor_parallel(worker)
    engine = f"each with one engine of {worker.slots} slots"
    if plan.target.kind == "GPU":
        sizes = engine_memory(config, arch)
        engine += f" on {gpus} GPU(s): weights {sizes.weights / GB:.1f} + KV {sizes.kv / GB:.1f} GB each"
    where = env.url or f"1 process, backend {env.backend}, at most {env.max_sandboxes} sandboxes"
    return [
        "processes:",
        f"  environment   {where}",
        "  coordinator   1 process",
        *(["  predictor     1 process"] if config.rollout.predictor.enabled else []),
        f"  workers       {worker.count}, {engine}",
        f"  actor         {config.actor.ranks} rank(s) under torchrun",
        *(f"    {line}" for line in places_text(config, arch)),
        "memory:",
        *(f"  {line}" for line in memory_text(plan)),
    ]


def places_text(config: VenusConfig, arch: Architecture) -> list[str]:
    """One line a process."""
    parallel = config.actor.parallel
    layers = arch.layers // parallel.pipeline
    lines = ["rank  machine  device  replica  stage  layers   tensor  context  expert"]
    for place in places(config.actor):
        first = place.stage * layers
        held = f"{first}-{first + layers - 1}" if parallel.virtual_stages == 1 else f"{layers} in turn"
        lines.append(
            f"{place.rank:>4}  {place.machine:>7}  {place.device:>6}  {place.replica:>7}  {place.stage:>5}  "
            f"{held:<7}  {place.tensor_rank:>6}  {place.context_rank:>7}  {place.expert_rank:>6}"
        )
    return lines


def memory_text(plan: MemoryPlan) -> list[str]:
    """The sum, a column for every stage, and the verdict."""
    small = plan.worst.peak < 10 * GB
    unit, name = (GB // 1000, "MB (10^6 bytes)") if small else (GB, "GB (10^9 bytes)")
    columns = [f"stage {stage.stage}" for stage in plan.stages]
    lines = [f"{name + ' of one process':<32}" + "".join(f"{column:>12}" for column in columns)]

    def row(label: str, values: list[int]) -> None:
        lines.append(f"  {label:<30}" + "".join(f"{value / unit:>12.2f}" for value in values))

    for field, label in (_LASTING | _COMING).items():
        values = [getattr(stage, field) for stage in plan.stages]
        if any(values):
            row(label, values)
    row("allowance", [stage.allowance for stage in plan.stages])
    row("peak", [stage.peak for stage in plan.stages])
    lines.append(f"  {'reached in':<30}" + "".join(f"{_phase(stage):>12}" for stage in plan.stages))
    lines.append(
        f"verdict: {'fits' if plan.fits else 'does NOT fit'}: {plan.needed / GB:.2f} GB of "
        f"{plan.target.capacity / GB:.2f} GB ({plan.target.source}), micro-batches of up to {plan.tokens} tokens"
    )
    return lines


def _phase(stage: StageMemory) -> str:
    phases = stage.phases()
    return max(phases, key=lambda name: phases[name])
