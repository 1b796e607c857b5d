"""What a checkpoint holds, as Megatron's distributed state of this process, and how it comes back.

`checkpoint_saver` writes it while training goes on; what counts as complete is in `checkpoint_index`. The optimizer is
stored `fully_reshardable`, so another number of replicas can resume; at the same number the resume is exact to the bit.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch.distributed.checkpoint import FileSystemReader

from envclient.base.errors import ConfigError, VenusError
from megatron_venus.adapters.megatron import Actor
from megatron_venus.checkpoint_index import Checkpoint
from megatron_venus.weight_map import checksum

CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def sharded_state(actor: Actor, *, loading: bool) -> dict[str, Any]:
    """Weights and optimizer of this process, each with its place in the whole. Every process calls it."""
    if not loading:
        _begin_moments(actor)
    metadata = _metadata()
    models = {
        _model_key(index, actor): chunk.sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(actor.chunks)
    }
    return models | {"optimizer": actor.optimizer.sharded_state_dict(models, is_loading=loading, metadata=metadata)}


def _begin_moments(actor: Actor) -> None:
    """Adam's state as it is before its first step, where every step so far was skipped: Megatron stores what is there,
    and would miss it."""
    for part in actor.optimizer.chained_optimizers:
        part.init_state_fn(part.optimizer, part.config)
        for group in part.optimizer.param_groups:
            group.setdefault("step", 0)


def _model_key(index: int, actor: Actor) -> str:
    return "model" if len(actor.chunks) == 1 else f"model{index}"


def small_state(step: int, nonfinite_steps: int) -> dict[str, Any]:
    """What is no tensor of the model, as it is now: stored once, by rank 0."""
    random = {"torch": torch.get_rng_state(), "megatron": tensor_parallel.get_cuda_rng_tracker().get_states()}
    return {"step": step, "nonfinite_steps": nonfinite_steps, "random": random}


def load(checkpoint: Checkpoint, actor: Actor) -> int:
    """Restore weights, optimizer and random states; returns the number of steps skipped so far. Every process calls it.

    Raises:
        ConfigError: its weights have another type than the actor's.
        VenusError: the restored weights are not those of the manifest.
    """
    dtype = _stored_dtype(checkpoint)
    if dtype != actor.dtype:
        names = [str(each).removeprefix("torch.") for each in (actor.dtype, dtype)]
        raise ConfigError(
            f"model.dtype={names[0]!r}, but checkpoint {checkpoint.path.name} holds {names[1]}",
            "resume with the type that the run began with",
        )
    state = dist_checkpointing.load(sharded_state(actor, loading=True), str(checkpoint.megatron_dir))
    for index, chunk in enumerate(actor.chunks):
        chunk.load_state_dict(state[_model_key(index, actor)])
    with torch.no_grad():
        actor.optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"]["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["random"]["megatron"])
    check_weights(checkpoint, actor, "remove that folder to resume from the checkpoint before it")
    return int(state["nonfinite_steps"])


def load_weights(checkpoint: Checkpoint, actor: Actor) -> None:
    """Fill the model, which has no optimizer yet, from a checkpoint of any type and cut. Every process calls it."""
    metadata = _metadata()
    wanted: dict[str, Any] = {}
    for index, chunk in enumerate(actor.chunks):
        # Transformer Engine's fp8 state is an object, empty here, and no part of a checkpoint of weights.
        state = chunk.sharded_state_dict(metadata=metadata).items()
        wanted[_model_key(index, actor)] = {n: value for n, value in state if not isinstance(value, ShardedObject)}
    loaded = dist_checkpointing.load(wanted, str(checkpoint.megatron_dir))
    for index, chunk in enumerate(actor.chunks):
        chunk.load_state_dict(loaded[_model_key(index, actor)], strict=False)


def check_weights(checkpoint: Checkpoint, actor: Actor, remedy: str) -> None:
    """Every process calls it.

    Raises:
        VenusError: the actor's weights are not those of the manifest.
    """
    dtype = _stored_dtype(checkpoint)
    if torch.promote_types(dtype, actor.dtype) != actor.dtype:
        return  # the actor's type is a narrower one: what was stored cannot be had back
    for name, tensor in actor.hf_tensors():
        if checksum(tensor.to(dtype)) != checkpoint.manifest.weights.get(name):
            raise VenusError(
                f"checkpoint {checkpoint.path.name}: tensor {name!r} is not the one in its manifest", remedy
            )


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    stored = FileSystemReader(checkpoint.megatron_dir).read_metadata().state_dict_metadata
    dtype: torch.dtype = stored["decoder.final_layernorm.weight"].properties.dtype
    return dtype


def _metadata() -> dict[str, Any]:
    return CONTENT | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
