"""Where every actor process stands: machine and GPU, replica, stage, and its ranks inside the replica.

The order is Megatron's default `tp-cp-ep-dp-pp`: tensor-parallel neighbours are consecutive ranks, stages are farthest
apart. `adapters.layout` reads the same places from Megatron's groups.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_venus.config import ActorConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One process."""

    rank: int
    machine: int
    device: int
    """GPU of that machine."""
    replica: int
    lane: int
    """Index among the data-parallel lanes of the replica (above 0 only with experts)."""
    stage: int
    tensor_rank: int
    context_rank: int
    expert_rank: int


def places(actor: ActorConfig) -> list[Place]:
    """Of all `actor.ranks` processes, in order of their ranks."""
    parallel = actor.parallel
    per_stage = actor.ranks // parallel.pipeline
    found = []
    for rank in range(actor.ranks):
        stage, in_stage = divmod(rank, per_stage)
        data_rank, in_copy = divmod(in_stage, parallel.tensor * parallel.context)
        context_rank, tensor_rank = divmod(in_copy, parallel.tensor)
        replica, lane = divmod(data_rank, parallel.lanes())
        machine, device = divmod(rank, actor.gpus_per_machine)
        found.append(
            Place(
                rank=rank,
                machine=machine,
                device=device,
                replica=replica,
                lane=lane,
                stage=stage,
                tensor_rank=tensor_rank,
                context_rank=context_rank,
                expert_rank=in_stage % parallel.expert,
            )
        )
    return found
