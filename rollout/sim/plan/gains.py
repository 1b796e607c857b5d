"""What more of each resource would give: twice as much of everything (which is the bottleneck), and what money buys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import msgspec

from rollout.sim.config import SimConfig
from rollout.sim.cost import engine_cost
from rollout.sim.plan.config import PlanConfig
from rollout.sim.plan.measure import Measured, Simulations
from rollout.sim.plan.space import Candidate, month_cost, training_choices


class Gain(msgspec.Struct, frozen=True, kw_only=True):
    """Of one change, against the plan with the same seeds."""

    name: str
    words: str
    """What changes."""
    gain: float
    """Share of the plan's trained tokens per hour; median over seeds of each seed's own ratio."""
    low: float
    high: float
    """The same ratio's smallest and largest."""
    tokens_per_hour: float
    """More of them, by `gain`."""
    month_cost: float = 0.0
    """Euro a month; 0: not for sale."""

    @property
    def per_1000(self) -> float:
        """More trained tokens per hour for 1,000 euro a month."""
        return self.tokens_per_hour / self.month_cost * 1000 if self.month_cost else 0.0


def _training(sim: SimConfig) -> SimConfig:
    return replace(sim, trainer=replace(sim.trainer, speed=2 * sim.trainer.speed))


def _sync(sim: SimConfig) -> SimConfig:
    return replace(sim, trainer=replace(sim.trainer, sync_s=sim.trainer.sync_s / 2))


def _sandboxes(sim: SimConfig) -> SimConfig:
    return replace(sim, environment=replace(sim.environment, sandboxes=2 * sim.environment.sandboxes))


def _slots(sim: SimConfig) -> SimConfig:
    return replace(sim, engine=replace(sim.engine, slots=2 * sim.engine.slots))


def _kv(sim: SimConfig) -> SimConfig:
    return replace(sim, engine=replace(sim.engine, kv_tokens=2 * engine_cost(sim.model, sim.engine).kv_tokens))


def _engines(sim: SimConfig) -> SimConfig:
    model = replace(
        sim.model,
        decode_overhead_ms=sim.model.decode_overhead_ms / 2,
        decode_ms_per_gb=sim.model.decode_ms_per_gb / 2,
        decode_ms_per_request=sim.model.decode_ms_per_request / 2,
    )
    return replace(sim, model=model, engine=replace(sim.engine, prefill_efficiency=2 * sim.engine.prefill_efficiency))


def _environment(sim: SimConfig) -> SimConfig:
    environment = replace(sim.environment, open_s=sim.environment.open_s / 2, score_s=sim.environment.score_s / 2)
    return replace(
        sim, environment=environment, workload=replace(sim.workload, scale_tools=sim.workload.scale_tools / 2)
    )


_TWICE: dict[str, tuple[str, Callable[[SimConfig], SimConfig]]] = {
    "training": ("training twice as fast", _training),
    "sync": ("weight sync twice as fast", _sync),
    "sandboxes": ("twice the sandboxes", _sandboxes),
    "slots": ("twice the slots", _slots),
    "kv": ("twice the KV memory of a worker", _kv),
    "engines": ("prefill and decode twice as fast", _engines),
    "environment": ("tools, opening and scoring twice as fast", _environment),
}


_CAPACITIES = ("training", "sandboxes", "slots", "kv")
"""What is waited for where it is short. The others only take time."""


def bottleneck(gains: Sequence[Gain]) -> Gain:
    """Of doublings: the largest gain, or the largest of a capacity that has at least half of it.

    Faster tools and engines also free sandboxes and KV memory sooner, so where one of these is short they gain about as
    much as twice of it would: the cause is what is short.
    """
    top = max(gains, key=lambda gain: gain.gain)
    short = max((gain for gain in gains if gain.name in _CAPACITIES), key=lambda gain: gain.gain)
    return short if short.gain >= top.gain / 2 else top


def _gain(name: str, words: str, base: Measured, other: Measured, cost: float = 0.0) -> Gain:
    ratios = [ratio - 1 for ratio in other.ratios(base)]
    middle = median(ratios)
    return Gain(
        name=name,
        words=words,
        gain=middle,
        low=min(ratios),
        high=max(ratios),
        tokens_per_hour=middle * base.tokens_per_hour,
        month_cost=cost,
    )


def doublings(config: PlanConfig, simulations: Simulations, base: Measured) -> list[Gain]:
    """Twice as much of each resource, one at a time; largest gain first."""
    field, steps = [base.candidate], base.steps
    made = {
        name: simulations.measure(field, steps=steps, seeds=config.seeds, change=change, what=words)[0]
        for name, (words, change) in _TWICE.items()
    }
    found = [_gain(name, words, base, made[name]) for name, (words, _) in _TWICE.items()]
    return sorted(found, key=lambda gain: -gain.gain)


def offers(config: PlanConfig, candidate: Candidate) -> list[tuple[str, str, Candidate]]:
    """(name, words, the candidate with it): what can be bought next."""
    found = [
        (
            "worker",
            f"one more rollout worker ({candidate.tp} GPUs)",
            candidate.changed(workers=candidate.workers + 1),
        )
    ]
    most = candidate.training_gpus + config.cluster.gpus_per_node * 8
    larger = [choice for choice in training_choices(config, most) if choice[0] > candidate.training_gpus]
    if larger:
        gpus, replicas = larger[0]
        more = gpus - candidate.training_gpus
        found.append(
            (
                "training",
                f"{more} more training GPUs ({gpus} in {replicas} replicas)",
                candidate.changed(training_gpus=gpus, replicas=replicas),
            )
        )
    host_gb = config.prices.host_step_gb * config.cluster.l2_fraction
    if host_gb:
        words = f"{config.prices.host_step_gb:g} GB more host memory on each rollout node"
        found.append(("host", words, candidate.changed(l2_gb=candidate.l2_gb + host_gb)))
    if candidate.sandboxes:
        more = max(1, round(config.prices.sandbox_step * candidate.sandboxes))
        found.append(("sandboxes", f"{more} more sandboxes", candidate.changed(sandboxes=candidate.sandboxes + more)))
    return found


def purchases(config: PlanConfig, simulations: Simulations, base: Measured) -> list[Gain]:
    """The largest gain for 1,000 euro a month first, those within `search.tie` of none last."""
    choices = offers(config, base.candidate)
    made = simulations.measure(
        [candidate for _, _, candidate in choices], steps=base.steps, seeds=config.seeds, what="purchases"
    )
    owned = month_cost(config, base.candidate)
    found = [
        _gain(name, words, base, measured, month_cost(config, candidate) - owned)
        for (name, words, candidate), measured in zip(choices, made, strict=True)
    ]
    return sorted(found, key=lambda gain: (gain.gain <= config.search.tie, -gain.per_1000))
