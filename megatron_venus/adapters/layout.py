"""Where this process stands: its place in Megatron's groups, and in the replica that the coordinator knows.

A replica is every process that a collective inside the model spans: tensor, pipeline and context parallel ones, and
with expert parallelism the data-parallel lanes between which tokens travel to their experts. Its processes take the
same groups in the same order, so that they always meet; one of them, the head, speaks with the coordinator and tells
the others. Replicas among each other meet only when the batch is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from envclient.base.errors import ConfigError
from megatron_venus.config import ParallelConfig

T = TypeVar("T")
COLLECTIVE_TIMEOUT_S = 3600.0
"""A process waits this long for another one; rank 0 may evaluate meanwhile, which takes minutes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """One process's place. Sizes are in `parallel`."""

    parallel: ParallelConfig
    replica: int
    replicas: int
    head: bool
    """Speaks for the replica."""
    lane: int
    """Index among the data-parallel lanes of the replica."""
    lanes: int
    tensor_rank: int
    context_rank: int
    expert_rank: int
    stage: int
    peers: Any
    """Process group of the replica, on gloo: for plain objects."""

    @property
    def last_stage(self) -> bool:
        return self.stage == self.parallel.pipeline - 1

    @property
    def counts_losses(self) -> bool:
        """Of the processes that compute the same losses, this one's sums count."""
        return self.last_stage and self.tensor_rank == 0 and self.context_rank == 0

    @property
    def counts_groups(self) -> bool:
        """Of all processes that see a group and hold the same part of the model, this one's count is the one."""
        return self.context_rank == 0 and self.lane == 0

    def share(self, make: Callable[[], T]) -> T:
        """What the head makes, on every process of the replica."""
        if dist.get_world_size(self.peers) == 1:
            return make()
        box = [make() if self.head else None]
        dist.broadcast_object_list(box, group=self.peers, group_src=0)
        value = box[0]
        return value  # type: ignore[return-value]


def join(parallel: ParallelConfig) -> Layout:
    """Rendezvous of all processes (torchrun's environment), Megatron's groups, and this process's place.

    Raises:
        ConfigError: the processes are not a whole number of replicas.
    """
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    world, size = dist.get_world_size(), parallel.replica_ranks()
    if world % size:
        raise ConfigError(
            f"actor.ranks={world} is no multiple of the {size} processes of a replica (actor.parallel)", "change either"
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=parallel.tensor,
            pipeline_model_parallel_size=parallel.pipeline,
            virtual_pipeline_model_parallel_size=parallel.virtual_stages if parallel.virtual_stages > 1 else None,
            context_parallel_size=parallel.context,
            expert_model_parallel_size=parallel.expert,
            # Experts are whole: Megatron would gather uneven numbers of tokens to cut them, which gloo cannot.
            expert_tensor_parallel_size=1,
        )
    lanes = parallel.lanes()
    replica, lane = divmod(parallel_state.get_data_parallel_rank(), lanes)
    replicas = world // size
    members: list[Any] = [None] * world
    dist.all_gather_object(members, replica)
    peers = None
    # Every process takes part in the making of every group.
    for index in range(replicas):
        ranks = [rank for rank in range(world) if members[rank] == index]
        group = dist.new_group(ranks, timedelta(seconds=COLLECTIVE_TIMEOUT_S), "gloo")
        if index == replica:
            peers = group
    return Layout(
        parallel=parallel,
        replica=replica,
        replicas=replicas,
        head=dist.get_rank(peers) == 0,
        lane=lane,
        lanes=lanes,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        context_rank=parallel_state.get_context_parallel_rank(),
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        peers=peers,
    )
