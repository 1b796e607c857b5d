"""The smallest change of a config that makes its memory plan fit.

The fewest keys win, of as many those that only cost speed before another layout of the same processes; only where
nothing of this fits are there more processes, and last a shorter context.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from envclient.base.errors import ConfigError
from megatron_venus import layout_rules
from megatron_venus.architecture import Architecture
from megatron_venus.config import VenusConfig
from megatron_venus.plan.memory import GB, MemoryPlan, Target, memory_plan

_CONTEXT_STEP = 1024
_SEQUENCE = "actor.parallel.sequence"


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Keys of the config with new values, and the bytes that are needed then."""

    keys: dict[str, Any]
    needed: int

    def __str__(self) -> str:
        keys = " ".join(f"{key}={_text(value)}" for key, value in self.keys.items())
        return f"{keys} ({self.needed / GB:.1f} GB)"


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_fits(config: VenusConfig, arch: Architecture, model: Mapping[str, Any], target: Target) -> MemoryPlan:
    """The plan, if it fits.

    Raises:
        ConfigError: it does not; names the stage, its sum and the smallest change that would fit.
    """
    plan = memory_plan(config, arch, target)
    if plan.fits:
        return plan
    change = smallest_change(config, arch, model, target)
    one = "a trajectory" if plan.tokens == config.model.context_length else "a micro-batch"
    where = f"a GPU of stage {plan.worst.stage}" if target.kind == "GPU" else "the actor"
    raise ConfigError(
        f"the memory plan does not hold {one} of {plan.tokens} tokens: {where} needs {plan.needed / GB:.1f} GB of "
        f"{target.capacity / GB:.1f} GB ({target.source})",
        f"smallest change that fits: {change}" if change else "no layout of this model fits: use more memory",
    )


def smallest_change(config: VenusConfig, arch: Architecture, model: Mapping[str, Any], target: Target) -> Change | None:
    """The first candidate that is a valid layout and fits; None: none of them."""
    for keys in _candidates(config):
        changed = config
        for key, value in keys.items():
            changed = _with(changed, key.split("."), value)
        if not _is_valid(changed, model):
            continue
        plan = memory_plan(changed, arch, target)
        if plan.fits:
            return Change(keys=keys, needed=plan.needed)
    return None


def _candidates(config: VenusConfig) -> Iterator[dict[str, Any]]:
    free = list(_free(config))
    every = {key: value for keys in free for key, value in keys.items()}
    for factor in (1, 2, 4, 8):
        ranks = config.actor.ranks * factor
        more = {"actor.ranks": ranks} if factor > 1 else {}
        subsets = [dict(c) for n in range(len(every) + 1) for c in itertools.combinations(every.items(), n)]
        # Fewest keys first; of as many those that move no process, then the nearest layout.
        options = [
            (len(subset) + len(layout), len(layout), distance, more | subset | layout)
            for distance, layout in _layouts(config, ranks)
            for subset in subsets
        ]
        for keys, *_, changes in sorted(options, key=lambda option: option[:3]):
            if keys:
                yield changes
    actor, length = config.actor, config.model.context_length
    if actor.parallel.tensor == 1:
        every.pop(_SEQUENCE, None)
    for tokens in range(length - _CONTEXT_STEP, 0, -_CONTEXT_STEP):
        shorter = {"model.context_length": tokens}
        if actor.micro_batch_tokens > tokens:
            shorter["actor.micro_batch_tokens"] = tokens
        yield every | shorter


def _free(config: VenusConfig) -> Iterator[dict[str, Any]]:
    """Changes that move no process, from the cheapest on."""
    parallel = config.actor.parallel
    if config.actor.micro_batch_tokens > config.model.context_length:
        yield {"actor.micro_batch_tokens": config.model.context_length}
    if not parallel.sequence:
        yield {_SEQUENCE: True}
    if not parallel.recompute:
        yield {"actor.parallel.recompute": True}


def _layouts(config: VenusConfig, ranks: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """(how far, changed keys): sizes of tensor, context and pipeline parallelism that `ranks` processes can have."""
    parallel = config.actor.parallel
    # The last one varies first: of equally near layouts tensor parallelism comes first, then context parallelism.
    now = {name: getattr(parallel, name) for name in ("pipeline", "context", "tensor")}
    steps = range(-4, 5)
    for powers in itertools.product(steps, repeat=3):
        sizes = {name: int(size * 2.0**power) for (name, size), power in zip(now.items(), powers, strict=True)}
        if any(size * 2.0**power < 1 for size, power in zip(now.values(), powers, strict=True)):
            continue
        if ranks % math.prod(sizes.values()) or sizes["tensor"] > config.actor.gpus_per_machine:
            continue
        changed = {f"actor.parallel.{name}": size for name, size in sizes.items() if size != now[name]}
        yield sum(abs(power) for power in powers), changed


def _with(node: Any, path: Sequence[str], value: Any) -> Any:
    """A copy of the config `node` with another value at `path`."""
    name, *rest = path
    return replace(node, **{name: _with(getattr(node, name), rest, value) if rest else value})


def _is_valid(config: VenusConfig, model: Mapping[str, Any]) -> bool:
    try:
        layout_rules.check_sizes(config.actor)
        layout_rules.check_model(config.actor, model)
    except ConfigError:
        return False
    return True
