"""Which of a machine's GPUs each role may use: the actor's ranks have the first ones, then each engine has its own.

NCCL refuses two members of a group on one GPU, and the weights' broadcast joins the actor with every engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_venus.config import VenusConfig
from rollout.engine_args import tensor_parallel

VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceShares:
    """Environment of each role; on a machine without GPUs nothing is set."""

    actor: dict[str, str]
    workers: list[dict[str, str]]
    others: dict[str, str]
    """Of roles that have no work for a GPU."""


def needed_gpus(config: VenusConfig) -> int:
    """Of the actor and all engines."""
    return config.actor.ranks + config.rollout.worker.count * _of_engine(config)


def device_shares(config: VenusConfig, visible: Sequence[str]) -> DeviceShares:
    """Shares of the GPUs `visible`, as `CUDA_VISIBLE_DEVICES` names them; at least `needed_gpus` or none at all."""
    worker = config.rollout.worker
    if not visible:
        return DeviceShares(actor={}, workers=[{} for _ in range(worker.count)], others={})
    size, first = _of_engine(config), config.actor.ranks
    starts = range(first, first + worker.count * size, size) if size else [first] * worker.count
    return DeviceShares(
        actor={VARIABLE: ",".join(visible[:first])},
        workers=[{VARIABLE: ",".join(visible[start : start + size])} for start in starts],
        others={VARIABLE: ""},
    )


def _of_engine(config: VenusConfig) -> int:
    worker = config.rollout.worker
    return tensor_parallel(worker) if worker.engine == "sglang" else 0
