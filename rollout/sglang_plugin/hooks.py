"""Hooks around methods of SGLang's scheduler process. Each takes the original first and may call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from envclient.base.checksum import checksum, combined
from rollout.sglang_plugin.receive import group_timeout, nowhere, place_in, receive_bucket
from rollout.sglang_plugin.targets import WEIGHT_UPDATER

CHECKSUM_ACTION = "venus_checksum"
LAYOUT_ACTION = "venus_layout"


def flush_cache(original: Callable[..., bool], self: Any, *args: Any, **kwargs: Any) -> bool:
    """Around Scheduler.flush_cache.

    A paused scheduler with requests only in its waiting queue holds no KV for them, yet 0.5.17 counts them as work,
    refuses to flush and then dies of its own assertion after a weight update. Their queue is set aside meanwhile.
    """
    if getattr(self, "_engine_paused", False) and self.running_batch.is_empty() and self.waiting_queue:
        waiting, self.waiting_queue = self.waiting_queue, []
        try:
            return original(self, *args, **kwargs)
        finally:
            self.waiting_queue = waiting
    return original(self, *args, **kwargs)


def weight_checker(original: Callable[..., Any], self: Any, action: str, *args: Any, **kwargs: Any) -> Any:
    """Around WeightChecker.handle: two actions (see the package's docstring) beside SGLang's own.

    SGLang's own `checksum` needs CUDA and its hash cannot be recomputed by a trainer that lacks SGLang.
    """
    describe = {CHECKSUM_ACTION: tensor_digest, LAYOUT_ACTION: tensor_layout}.get(action)
    if describe is None:
        return original(self, action, *args, **kwargs)
    checksums = {name: describe(value) for name, value in self._get_model().named_parameters()}
    return {
        "checksums": checksums,
        "per_gpu_checksum": combined(checksums.items()),
        "parallelism_info": self._parallelism_info().model_dump(),
    }


def tensor_digest(tensor: Any) -> str:
    """Checksum of a tensor's contiguous raw bytes."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return checksum(flat.numpy().data)


def tensor_layout(tensor: Any) -> str:
    """Type and shape, such as `bfloat16[96, 32]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def join_update_group(
    original: Callable[..., tuple[bool, str]],
    self: Any,
    master_address: str,
    master_port: int,
    rank_offset: int,
    world_size: int,
    group_name: str,
    backend: str = "nccl",
) -> tuple[bool, str]:
    """Around WeightUpdater.init_weights_update_group: a group whose name tells a timeout keeps to it."""
    timeout = group_timeout(group_name)
    if timeout is None:
        return original(self, master_address, master_port, rank_offset, world_size, group_name, backend)
    from sglang.srt.utils import init_custom_process_group
    from sglang.srt.utils.network import NetworkAddress

    try:
        self._model_update_group[group_name] = init_custom_process_group(
            backend=backend,
            init_method=NetworkAddress(master_address, master_port).to_tcp(),
            timeout=timeout,
            world_size=world_size,
            rank=rank_offset + self.tp_rank,
            group_name=group_name,
        )
    except Exception as error:
        return False, f"cannot join the group of the weight update: {error}"
    return True, "joined"


def update_weights(
    original: Callable[..., tuple[bool, str]],
    self: Any,
    names: list[str],
    dtypes: list[str],
    shapes: list[list[int]],
    group_name: str,
    load_format: str | None = None,
) -> tuple[bool, str]:
    """Around WeightUpdater.update_weights_from_distributed: an unknown group is an answer.

    SGLang asserts, which ends the scheduler: a server that was restarted on its old port would be lost to a sync that
    still knows the old one.
    """
    if group_name not in self._model_update_group:
        return False, f"this engine is not in the group {group_name}"
    return original(self, names, dtypes, shapes, group_name, load_format)


def update_bucket(
    original: Callable[..., tuple[bool, str]],
    self: Any,
    names: list[str],
    dtypes: list[str],
    shapes: list[list[int]],
    group_name: str,
) -> tuple[bool, str]:
    """Around WeightUpdater._update_bucketed_weights_from_distributed: our receiver in place of SGLang's."""
    try:
        model, group = self.get_model(), self._model_update_group[group_name]
        # With several ranks every one takes its part of the tensors: SGLang's loaders know which.
        alone = self.get_model_runner().server_args.tp_size == 1
        lies = place_in(dict(model.named_parameters())) if alone else nowhere
        model.load_weights(receive_bucket(group, names, dtypes, shapes, self.device, lies))
    except Exception as error:
        return False, f"the weight update failed, the engine's weights are mixed: {error}"
    return True, "loaded"


AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.managers.scheduler.Scheduler.flush_cache": flush_cache,
    "sglang.srt.utils.weight_checker.WeightChecker.handle": weight_checker,
    f"{WEIGHT_UPDATER}.init_weights_update_group": join_update_group,
    f"{WEIGHT_UPDATER}.update_weights_from_distributed": update_weights,
    f"{WEIGHT_UPDATER}._update_bucketed_weights_from_distributed": update_bucket,
}
