"""Which layouts of the actor over processes a model allows; refused before any weight is loaded.

Called by `preflight` with the model's `config.json`; no torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from envclient.base.errors import ConfigError
from megatron_venus.config import ActorConfig


def check_sizes(actor: ActorConfig) -> None:
    """What `actor.parallel` demands of itself and of `actor.ranks`.

    Raises:
        ConfigError: names the key.
    """
    parallel = actor.parallel
    sizes = {
        "tensor": parallel.tensor,
        "pipeline": parallel.pipeline,
        "virtual_stages": parallel.virtual_stages,
        "context": parallel.context,
        "expert": parallel.expert,
    }
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"actor.parallel.{name}={size} must be at least 1", "raise it")
    if parallel.sequence and parallel.tensor == 1:
        raise ConfigError("actor.parallel.sequence=true with tensor=1 splits nothing", "raise actor.parallel.tensor")
    if parallel.virtual_stages > 1 and parallel.pipeline == 1:
        raise ConfigError(
            f"actor.parallel.virtual_stages={parallel.virtual_stages} with pipeline=1 interleaves nothing",
            "raise actor.parallel.pipeline",
        )
    inner = parallel.tensor * parallel.context
    if max(parallel.expert, inner) % min(parallel.expert, inner):
        raise ConfigError(
            f"actor.parallel.expert={parallel.expert} and tensor · context={inner}: neither divides the other",
            "change one",
        )
    size = parallel.replica_ranks()
    if actor.ranks % size:
        raise ConfigError(
            f"actor.ranks={actor.ranks} is no multiple of the {size} processes of one replica (actor.parallel)",
            f"use a multiple of {size}",
        )


def check_model(actor: ActorConfig, model: Mapping[str, Any]) -> None:
    """What the model's shape allows.

    Raises:
        ConfigError: names the key, the size and what it does not divide.
    """
    parallel = actor.parallel
    experts = int(model.get("num_experts") or model.get("num_local_experts") or 0)
    for field, what in (
        ("num_attention_heads", "attention heads"),
        ("num_key_value_heads", "key-value heads"),
        ("intermediate_size", "feed-forward units"),
        ("vocab_size", "vocabulary entries"),
    ):
        _divides("tensor", parallel.tensor, model.get(field), what)
    layers = model.get("num_hidden_layers")
    if parallel.virtual_stages == 1:
        _divides("pipeline", parallel.pipeline, layers, "layers")
    else:
        _divides("pipeline · virtual_stages", parallel.pipeline * parallel.virtual_stages, layers, "layers")
    if parallel.expert > 1 and not experts:
        raise ConfigError(f"actor.parallel.expert={parallel.expert}: the model has no experts", "use expert=1")
    if experts:
        _divides("expert", parallel.expert, experts, "experts")
        if parallel.tensor > 1 and not parallel.sequence:
            raise ConfigError(
                f"actor.parallel.tensor={parallel.tensor} with experts needs sequence parallelism",
                "set actor.parallel.sequence=true",
            )


def _divides(key: str, size: int, count: int | None, what: str) -> None:
    if count is not None and count % size:
        raise ConfigError(f"actor.parallel.{key}={size} does not divide the model's {count} {what}", "use a divisor")
