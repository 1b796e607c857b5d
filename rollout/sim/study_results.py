"""Raw rows of a study, asked for by cell and policy: medians over seeds, ratios, whether a cell counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

import msgspec

from envclient.base.configs import build
from rollout.sim.config import PRESETS, SimConfig
from rollout.sim.cost import EngineCost, engine_cost
from rollout.sim.report import KS_TOLERANCE, LENGTH_TOLERANCE
from rollout.sim.study_cells import FREE_COPIES, NO_LIMITS, ORACLE, OURS, Cell, live
from rollout.sim.study_runs import Row

RATE = "trained_tokens_per_hour"
_MEAN_CONTEXT = 55_000
"""Of the workload's trajectories at their end [AgentCgroup]."""


class Results:
    """Rows of one code. Where a cell has fewer seeds of one policy, only seeds of both are compared."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = list(rows)
        self._found: dict[tuple[Cell, str], dict[int, dict[str, Any]]] = {}
        for row in self.rows:
            self._found.setdefault((row.cell, row.policy), {})[row.seed] = row.result

    @property
    def seeds(self) -> list[int]:
        return sorted({row.seed for row in self.rows})

    def has(self, cell: Cell, policy: str) -> bool:
        return (cell, policy) in self._found

    def seeds_of(self, cell: Cell, policy: str) -> dict[int, dict[str, Any]]:
        """Seed → result."""
        return self._found.get((cell, policy), {})

    def values(self, cell: Cell, policy: str, key: str = RATE) -> list[float]:
        """One a seed, ascending."""
        return sorted(float(result[key]) for result in self.seeds_of(cell, policy).values())

    def middle(self, cell: Cell, policy: str, key: str = RATE) -> float | None:
        """Median over seeds; None when there is none."""
        values = self.values(cell, policy, key)
        return median(values) if values else None

    def ratio(self, cell: Cell, policy: str, other: str) -> float | None:
        """Of the medians of trained tokens per hour, over the seeds that both have."""
        return _ratio(self.seeds_of(cell, policy), self.seeds_of(cell, other))

    def counts(self, cell: Cell, policy: str) -> bool:
        """Whether its runs trained what was submitted: mean length within 2%, KS within 0.05."""
        found = self.seeds_of(cell, policy).values()
        return all(
            abs(result["length_ratio"] - 1.0) <= LENGTH_TOLERANCE and result["length_ks"] <= KS_TOLERANCE
            for result in found
        )

    def rivals(self, cell: Cell) -> list[tuple[float, str]]:
        """(ours ÷ theirs, name) of the live policies whose runs count, worst for us first; none where ours do not."""
        if not self.counts(cell, OURS):
            return []
        ratios = ((self.ratio(cell, OURS, label), name, self.counts(cell, label)) for name, label in live(cell).items())
        return sorted((ratio, name) for ratio, name, counts in ratios if ratio is not None and counts)

    def consumed(self, cell: Cell) -> list[float]:
        """One a seed: tokens of a group in our counted steps ÷ those of the median live policy."""
        theirs = [self.seeds_of(cell, label) for label in live(cell).values()]
        found = []
        for seed, ours in self.seeds_of(cell, OURS).items():
            if others := [_group_tokens(results[seed]) for results in theirs if seed in results]:
                found.append(_group_tokens(ours) / median(others))
        return found

    def bounds(self, cell: Cell) -> tuple[float | None, float | None, float | None]:
        """(oracle, free copies, no limits) ÷ ours: what true lengths, a perfect cache and endless memory would give."""
        # The last two were simulated once for every host cache: theirs is another one.
        elsewhere = msgspec.structs.replace(cell, l2="none")
        ours = self.seeds_of(cell, OURS)
        oracle = _ratio(self.seeds_of(cell, ORACLE), ours)
        copies = _ratio(self.seeds_of(elsewhere, FREE_COPIES), ours)
        limits = [_ratio(self.seeds_of(elsewhere, label), ours) for label in NO_LIMITS]
        return oracle, copies, max((ratio for ratio in limits if ratio is not None), default=None)


def _ratio(mine: Mapping[int, dict[str, Any]], theirs: Mapping[int, dict[str, Any]]) -> float | None:
    """Of the medians of trained tokens per hour, over the seeds that both have."""
    both = mine.keys() & theirs.keys()
    return median(mine[s][RATE] for s in both) / median(theirs[s][RATE] for s in both) if both else None


def _group_tokens(result: Mapping[str, Any]) -> float:
    """Mean over the counted steps."""
    return float(result[RATE] / result["groups_per_hour"])


def kv_demand(cell: Cell) -> float:
    """Contexts in flight, in units of the workers' device and host memory together: above 1 something must give."""
    config, cost = _cluster(cell)
    trajectories = int(cell.async_factor * cell.batch) * config.group.size
    return trajectories * _context_tokens(config) / (config.workers * (cost.kv_tokens + cost.host_tokens))


def contexts_held(cell: Cell) -> float:
    """Trajectories' contexts that a worker's device memory holds."""
    config, cost = _cluster(cell)
    return cost.kv_tokens / _context_tokens(config)


def _cluster(cell: Cell) -> tuple[SimConfig, EngineCost]:
    config = build(SimConfig, [(cell.preset, PRESETS[cell.preset])], cell.overrides())
    return config, engine_cost(config.model, config.engine)


def _context_tokens(config: SimConfig) -> float:
    """Of a trajectory in the mean: half its way from the first to the mean last context, and its part of the prompt."""
    private = (_MEAN_CONTEXT - config.workload.first_context) / 2
    return config.workload.first_context / config.group.size + private
