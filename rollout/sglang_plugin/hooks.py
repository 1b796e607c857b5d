"""Hooks around methods of SGLang's scheduler process. Each takes the original first and may call it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

CHECKSUM_ACTION = "venus_checksum"


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
    """Around WeightChecker.handle: the action `venus_checksum` (see the package's docstring) beside SGLang's own.

    SGLang's own `checksum` needs CUDA and its hash cannot be recomputed by a trainer that lacks SGLang.
    """
    if action != CHECKSUM_ACTION:
        return original(self, action, *args, **kwargs)
    checksums = {name: tensor_digest(value) for name, value in self._get_model().named_parameters()}
    whole = hashlib.blake2b("".join(f"{n}{c}" for n, c in sorted(checksums.items())).encode(), digest_size=32)
    return {
        "checksums": checksums,
        "per_gpu_checksum": whole.hexdigest(),
        "parallelism_info": self._parallelism_info().model_dump(),
    }


def tensor_digest(tensor: Any) -> str:
    """blake2b (32 bytes, hex) of a tensor's contiguous raw bytes."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=32).hexdigest()


AROUND: dict[str, Callable[..., Any]] = {
    "sglang.srt.managers.scheduler.Scheduler.flush_cache": flush_cache,
    "sglang.srt.utils.weight_checker.WeightChecker.handle": weight_checker,
}
