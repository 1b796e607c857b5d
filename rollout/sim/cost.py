"""Seconds: what prefill, decode, training and copies take. Pure functions of the numbers in `config`."""

from __future__ import annotations

import math
from dataclasses import dataclass

from envclient.base.errors import ConfigError
from rollout.sim.config import EngineConfig, ModelCostConfig, SimConfig, TrainerConfig

L2_KINDS = ("none", "default", "large")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """A worker's engine in seconds and tokens."""

    base_s: float
    """Of a decode step, and of a prefill batch at least."""
    request_s: float
    """Of a decode step, for each request."""
    kv_token_s: float
    """Of a decode step, for each token of context that is attended to."""
    token_s: float
    """Of prefill, for each token: the matrix products."""
    attention_s: float
    """Of prefill from context a to b: this · (b² − a²)."""
    load_token_s: float
    """Of a copy from the host, for each token."""
    move_token_s: float
    """Of a copy to another worker's host, for each token."""
    kv_tokens: int
    """Capacity of the device."""
    host_tokens: int
    """Capacity of the host cache; 0: none."""

    def prefill_s(self, start: int, end: int) -> float:
        """Compute of context positions [start, end); a batch takes at least `base_s`."""
        return self.token_s * (end - start) + self.attention_s * (float(end) * end - float(start) * start)

    def decode_s(self, steps: int, batch: int, context_tokens: int) -> float:
        """`steps` decode steps of `batch` requests that attend to `context_tokens` together in the first one.

        Each step adds `batch` tokens: Σ_{i<n} (base + r·B + k·(C + i·B)).
        """
        first = self.base_s + self.request_s * batch + self.kv_token_s * context_tokens
        return steps * first + self.kv_token_s * batch * (steps * (steps - 1) / 2)

    def decode_steps(self, seconds: float, batch: int, context_tokens: int) -> int:
        """Smallest n ≥ 1 with decode_s(n) ≥ seconds: the step that is running then is the n-th."""
        half = self.kv_token_s * batch / 2
        linear = self.base_s + self.request_s * batch + self.kv_token_s * context_tokens - half
        root = 2 * seconds / (linear + math.sqrt(linear * linear + 4 * half * seconds)) if seconds > 0 else 0.0
        steps = max(1, math.ceil(root - 1e-9))
        return steps if self.decode_s(steps, batch, context_tokens) >= seconds - 1e-9 else steps + 1


def engine_cost(model: ModelCostConfig, engine: EngineConfig) -> EngineCost:
    """Raises: ConfigError: a model that does not fit, or an unknown host cache."""
    if engine.l2 not in L2_KINDS:
        raise ConfigError(f"engine.l2 is {engine.l2!r}", f"use one of {', '.join(L2_KINDS)}")
    if engine.kv_on_sync not in ("flush", "keep"):
        raise ConfigError(f"engine.kv_on_sync is {engine.kv_on_sync!r}", "use flush or keep")
    kv_gb = engine.memory_fraction * engine.hbm_gb * engine.tp - model.weight_gb
    kv_tokens = engine.kv_tokens or int(kv_gb * 1e9 / model.kv_bytes_per_token)
    if kv_tokens < 1:
        raise ConfigError(f"engine: {model.weight_gb} GB of weights leave no KV memory", "raise engine.tp or hbm_gb")
    node_share = engine.l2_node_gb * 1e9 * engine.tp / engine.gpus_per_node
    host = {
        "none": 0,
        "default": int(engine.l2_ratio * kv_tokens),
        "large": int(node_share / model.kv_bytes_per_token),
    }
    flops = engine.gpu_tflops * 1e12 * engine.tp * engine.prefill_efficiency
    per_gb = model.decode_ms_per_gb / engine.tp / 1e3
    return EngineCost(
        base_s=model.decode_overhead_ms / 1e3 + per_gb * model.weight_gb,
        request_s=model.decode_ms_per_request / engine.tp / 1e3,
        kv_token_s=per_gb * model.kv_bytes_per_token / 1e9,
        token_s=2 * model.parameters / flops,
        attention_s=model.attention_flops / flops,
        load_token_s=model.kv_bytes_per_token / (engine.l2_gb_per_s * 1e9 * engine.tp),
        move_token_s=model.kv_bytes_per_token / (engine.migration_gb_per_s * 1e9),
        kv_tokens=kv_tokens,
        host_tokens=host[engine.l2],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCost:
    """One data-parallel replica of the actor in seconds."""

    token_s: float
    attention_s: float
    optimizer_s: float
    sync_s: float

    def sequence_s(self, tokens: int) -> float:
        """Forward and backward of one sequence."""
        return self.token_s * tokens + self.attention_s * float(tokens) * tokens


def train_cost(config: SimConfig) -> TrainCost:
    """Of one replica: it has its share of the GPUs."""
    trainer: TrainerConfig = config.trainer
    gpu_flops = config.engine.gpu_tflops * 1e12
    flops = gpu_flops * trainer.gpus / trainer.replicas * trainer.efficiency * trainer.speed
    return TrainCost(
        token_s=3 * 2 * config.model.parameters / flops,
        attention_s=3 * config.model.attention_flops / flops,
        optimizer_s=trainer.optimizer_s / trainer.speed,
        sync_s=trainer.sync_s,
    )
