"""Memory of an engine's GPUs: its weights and the KV cache that `rollout.worker.kv_tokens` promises."""

from __future__ import annotations

from dataclasses import dataclass

from envclient.base.errors import ConfigError
from megatron_venus.architecture import Architecture
from megatron_venus.config import VenusConfig
from megatron_venus.plan.memory import BYTES, GB, Target
from megatron_venus.plan.parameters import whole_parameters
from rollout.engine_args import tensor_parallel


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Bytes on each of an engine's GPUs; what its kernels need besides is not counted."""

    weights: int
    kv: int


def engine_memory(config: VenusConfig, arch: Architecture) -> EngineMemory:
    """Of one GPU of one engine; key-value heads are copied where there are fewer of them than GPUs."""
    worker, size = config.rollout.worker, BYTES[config.model.dtype]
    gpus = tensor_parallel(worker)
    heads = max(1, arch.kv_heads // gpus)
    token = 2 * arch.layers * heads * arch.head_dim * size
    return EngineMemory(weights=size * whole_parameters(arch) // gpus, kv=token * worker.kv_tokens)


def check_engine(config: VenusConfig, arch: Architecture, target: Target) -> None:
    """On GPUs: an engine's weights and KV cache fit.

    Raises:
        ConfigError: they do not; names the number of tokens that would.
    """
    if target.kind != "GPU" or config.rollout.worker.engine != "sglang":
        return
    memory, worker = engine_memory(config, arch), config.rollout.worker
    if memory.weights + memory.kv > target.capacity:
        room = max(0, target.capacity - memory.weights) * worker.kv_tokens // memory.kv
        raise ConfigError(
            f"rollout.worker.kv_tokens={worker.kv_tokens}: weights {memory.weights / GB:.1f} GB and KV "
            f"{memory.kv / GB:.1f} GB do not fit a GPU of {target.capacity / GB:.1f} GB ({target.source})",
            f"at most {room} tokens fit, or raise rollout.worker.engine_args.tp-size={tensor_parallel(worker)}",
        )
