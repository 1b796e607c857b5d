"""Complete checkpoints: Megatron's distributed one, an export that engines load, and a manifest written last.

Every rank calls `save` and `load`; the layout and what counts as complete are in `checkpoint_index`. The optimizer is
stored `fully_reshardable`, so another number of replicas can resume; at the same number the resume is exact to the bit.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from envclient.base.errors import VenusError
from envclient.base.files import fsync_dir
from megatron_venus.adapters.megatron import Actor
from megatron_venus.checkpoint_index import Checkpoint, Manifest, checkpoint_dir, find_all, write_manifest
from megatron_venus.hf_folder import write_weights
from megatron_venus.weight_map import checksum
from rollout.rope import Rope

log = logging.getLogger("venus.checkpoint")
_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def _state(actor: Actor, *, loading: bool) -> dict[str, Any]:
    metadata = _CONTENT | {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    models = {
        _model_key(index, actor): chunk.sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(actor.chunks)
    }
    return models | {"optimizer": actor.optimizer.sharded_state_dict(models, is_loading=loading, metadata=metadata)}


def _model_key(index: int, actor: Actor) -> str:
    return "model" if len(actor.chunks) == 1 else f"model{index}"


def _random_states() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state(),
        "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def save(run_dir: Path, step: int, actor: Actor, nonfinite_steps: int, *, hf_source: Path, keep: int) -> None:
    """Write the checkpoint of `step`; when it is complete, remove all but the newest `keep` and every broken folder.

    `hf_source` is the folder whose config and tokenizer go with the exported weights.
    """
    folder = checkpoint_dir(run_dir, step)
    leader = dist.get_rank() == 0
    if leader:
        # A broken folder of the same step: a kill while saving, then a resume from before it.
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "megatron").mkdir(parents=True)
    dist.barrier()
    # Megatron would start a manager process for results of this very process: seconds, and an orphan after a kill.
    filesystem_async._results_queue = queue.Queue()
    extra = {"step": step, "nonfinite_steps": nonfinite_steps, "random": _random_states()}
    dist_checkpointing.save(
        _state(actor, loading=False) | extra,
        str(folder / "megatron"),
        # One writer a rank: Megatron forks its writers.
        TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
        content_metadata=_CONTENT,
    )
    weights: dict[str, torch.Tensor] = {}
    if actor.layout.replica == 0:
        for name, tensor in actor.hf_tensors():
            if leader:
                weights[name] = tensor
    if leader:
        write_weights(folder / "hf", weights, hf_source)
        _keep_rope(folder / "hf" / "config.json", actor.rope)
        _complete(folder, step, {name: checksum(tensor) for name, tensor in weights.items()})
        _retain(run_dir, keep)
    dist.barrier()


def _keep_rope(path: Path, rope: Rope) -> None:
    """Positions stretched by the run's config belong to the exported model."""
    config = json.loads(path.read_text())
    if changed := rope.config_fields(config):
        path.write_text(json.dumps(config | changed, indent=2) + "\n")


def _complete(folder: Path, step: int, weights: dict[str, str]) -> None:
    """Make everything in `folder` durable, then write the manifest."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    for inner in (folder / "megatron", folder / "hf", folder, folder.parent):
        fsync_dir(inner)
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    write_manifest(folder, Manifest(step=step, weights=weights, files=sizes))


def _retain(run_dir: Path, keep: int) -> None:
    kept = {checkpoint.path for checkpoint in find_all(run_dir)[-max(1, keep) :]}
    for folder in (run_dir / "checkpoints").glob("step_*"):
        if folder not in kept:
            log.info("removing %s", folder.name)
            shutil.rmtree(folder, ignore_errors=True)


def load(checkpoint: Checkpoint, actor: Actor) -> int:
    """Restore weights, optimizer and random states; returns the number of steps skipped so far.

    Raises:
        VenusError: the restored weights are not those of the manifest.
    """
    state = dist_checkpointing.load(_state(actor, loading=True), str(checkpoint.megatron_dir))
    for index, chunk in enumerate(actor.chunks):
        chunk.load_state_dict(state[_model_key(index, actor)])
    with torch.no_grad():
        actor.optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"]["torch"])
    tensor_parallel.get_cuda_rng_tracker().set_states(state["random"]["megatron"])
    for name, tensor in actor.hf_tensors():
        if checksum(tensor) != checkpoint.manifest.weights.get(name):
            raise VenusError(
                f"checkpoint {checkpoint.path.name}: tensor {name!r} is not the one in its manifest",
                "remove that folder to resume from the checkpoint before it",
            )
    return int(state["nonfinite_steps"])
