"""The planner's answer, as data: what `--json` holds and what report and page tell."""

from __future__ import annotations

import msgspec

from rollout.sim.plan.bounds import Bounds, bounds, means
from rollout.sim.plan.config import PlanConfig
from rollout.sim.plan.gains import Gain, bottleneck, doublings, purchases
from rollout.sim.plan.measure import Measured, Simulations
from rollout.sim.plan.search import Found, Point, Search
from rollout.sim.plan.space import month_cost


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """To one question."""

    config: PlanConfig
    best: Measured
    bounds: Bounds
    """Of the best."""
    bottleneck: str
    """By the doublings: a key of `waiting.RESOURCES`."""
    month_cost: float
    """Euro."""
    runners: list[Measured]
    curves: dict[str, list[Point]]
    doublings: list[Gain]
    purchases: list[Gain]
    feasible: int
    unseen: int
    simulated_runs: int
    simulated_steps: int

    @property
    def euro_per_million(self) -> float:
        """Trained tokens; a month has 730 hours."""
        return self.month_cost / (self.best.tokens_per_hour * 730 / 1e6)


def answer(config: PlanConfig, simulations: Simulations) -> Answer:
    """Search, then ask what more would give.

    Raises:
        ConfigError: a question without a feasible candidate, or a workload that does not exist.
    """
    m = means(config)
    found: Found = Search(config, simulations, m).run()
    best = found.best
    twice = doublings(config, simulations, best)
    return Answer(
        config=config,
        best=best,
        bounds=bounds(config, best.candidate, m),
        bottleneck=bottleneck(twice).name,
        month_cost=month_cost(config, best.candidate),
        runners=found.runners,
        curves=found.curves,
        doublings=twice,
        purchases=purchases(config, simulations, best),
        feasible=found.feasible,
        unseen=found.unseen,
        simulated_runs=simulations.simulated_runs,
        simulated_steps=simulations.simulated_steps,
    )


def as_json(found: Answer) -> bytes:
    """The answer with its derived numbers, indented."""
    document = msgspec.to_builtins(found)
    document["euro_per_million_trained_tokens"] = found.euro_per_million
    for plain, gain in zip(document["purchases"], found.purchases, strict=True):
        plain["tokens_per_hour_for_1000_euro_a_month"] = gain.per_1000
    for plain, measured in [(document["best"], found.best), *zip(document["runners"], found.runners, strict=True)]:
        plain |= {
            "tokens_per_hour": measured.tokens_per_hour,
            "step_s": measured.step_s,
            "shares": measured.shares,
            "comparable": measured.comparable,
        }
    return msgspec.json.format(msgspec.json.encode(document)) + b"\n"
