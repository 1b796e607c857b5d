"""The search: closed form first, then rounds of longer simulations of fewer candidates, then trimming the winner.

1. Every feasible split × TP × async factor has bounds (`bounds`); the best by estimate start, and the best of each TP.
2. Successive halving: short simulations (a scaled-down batch in the first round), half of the field dropped, twice the
   steps, until the finalists run at full length with every seed. A candidate whose bound lies below what another was
   simulated to reach is dropped unseen.
3. From the best finalist to a better neighbour (the next split, the next TP) while there is one.
4. Trim: async factor, slots, host cache and sandboxes each become the smallest that loses no more than `search.tie`
   against the best rate seen; what was simulated on the way are the curves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from statistics import median

import msgspec

from rollout.sim.plan.bounds import Bounds, Means, bounds, starting_slots
from rollout.sim.plan.config import PlanConfig
from rollout.sim.plan.measure import Measured, Simulations, scaled_down
from rollout.sim.plan.space import Candidate, candidates, l2_limit_gb, spread, tp_choices
from rollout.sim.plan.waiting import RESOURCES

_CLIMBS = 4
"""Moves to a better neighbour at most."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """Of a curve."""

    x: float
    tokens_per_hour: float
    """Trained; comparable with the best's."""
    measured: Measured
    bounds: Bounds


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the search found."""

    best: Measured
    runners: list[Measured]
    """The best one of every other split and TP that was simulated at full length, best first."""
    curves: dict[str, list[Point]]
    """By what varies: training GPUs, async_factor, slots, l2_gb, sandboxes."""
    feasible: int
    unseen: int
    """Of the feasible ones, those that only the closed form has seen."""


def better(a: Measured) -> tuple[bool, float]:
    """Sort key: runs that trained what was submitted come first."""
    return (a.comparable, a.tokens_per_hour)


class Search:
    """One question's search. Deterministic: it depends on the config alone."""

    def __init__(self, config: PlanConfig, simulations: Simulations, means: Means) -> None:
        self.config = config
        self._simulations = simulations
        self._means = means
        fit, _ = tp_choices(config)
        self._field = candidates(config, {tp: starting_slots(config, tp, means) for tp in fit})
        self._bounds = {candidate: bounds(config, candidate, means) for candidate in self._field}
        self._full: dict[Candidate, Measured] = {}
        """Simulated at full length."""
        self._seen: set[tuple[int, int, float]] = set()
        """Places of the candidates that were simulated, at whatever length."""

    def run(self) -> Found:
        self._simulations.expect(expected_groups(self.config))
        finalists = self._halve(self._starters())
        best = self._climb(max(self._measure(finalists, "finalists"), key=better))
        best, made = self._trim(best)
        made = {"training_gpus": self._split_curve(best.candidate), **made}
        leaders: dict[tuple[int, int], Measured] = {}
        for m in sorted(self._full.values(), key=better):
            leaders[m.candidate.tp, m.candidate.workers] = m
        del leaders[best.candidate.tp, best.candidate.workers]
        return Found(
            best=best,
            runners=sorted(leaders.values(), key=better, reverse=True),
            curves={key: self._points(key, each, best) for key, each in made.items()},
            feasible=len(self._field),
            unseen=sum(1 for c in self._field if _place(c) not in self._seen),
        )

    # ------------------------------------------------------------------------------------------------------- rounds

    def _starters(self) -> list[Candidate]:
        """By estimate; the best of each TP is always among them."""
        ranked = sorted(self._field, key=lambda c: (self._bounds[c].estimate_s / self._bounds[c].tokens, c))
        first = {c.tp: c for c in reversed(ranked)}.values()
        rest = [c for c in ranked if c not in first]
        chosen = {*first, *rest[: max(0, self.config.search.starters - len(first))]}
        return [c for c in ranked if c in chosen]

    def _halve(self, field: list[Candidate]) -> list[Candidate]:
        """Down to the finalists: shorter simulations of more candidates first."""
        search = self.config.search
        self._seen.update(_place(c) for c in field)
        steps = search.screen_steps
        first = True
        while len(field) > search.finalists and steps < search.steps:
            change = partial(scaled_down, most_batch=search.screen_batch) if first else None
            what = f"round of {steps} steps, {len(field)} candidates"
            seeds = self.config.seeds[:1]
            runs = self._simulations.measure(field, steps=steps, seeds=seeds, change=change, what=what)
            rate = {m.candidate: m.tokens_per_hour * self._scale(m.candidate, first) for m in runs}
            field = sorted(field, key=lambda c: (-rate[c], c))
            lead = rate[field[0]]
            # A short simulation can pass its own limit (what was under way when it began counts): its leader stays.
            field = [c for c in field if c is field[0] or self._may_reach(c, lead)]
            field = field[: max(search.finalists, math.ceil(len(field) / 2))]
            steps *= 2
            first = False
        return field[: search.finalists]

    def _may_reach(self, candidate: Candidate, rate: float) -> bool:
        return self._bounds[candidate].tokens_per_hour * self.config.search.slack >= rate

    def _scale(self, candidate: Candidate, scaled: bool) -> float:
        """What a scaled-down simulation's rate is multiplied with: its share of the workers, which rounding varies."""
        batch, most = self.config.sim.group.batch, self.config.search.screen_batch
        workers = max(1, round(candidate.workers * most / batch))
        if not scaled or batch <= most or workers >= candidate.workers:
            return 1.0
        return candidate.workers / workers

    def _measure(self, field: Sequence[Candidate], what: str) -> list[Measured]:
        """At full length with every seed."""
        search = self.config.search
        found = self._simulations.measure(field, steps=search.steps, seeds=self.config.seeds, what=what)
        self._full.update({m.candidate: m for m in found})
        self._seen.update(_place(c) for c in field)
        return found

    # --------------------------------------------------------------------------------------------------- neighbours

    def _climb(self, best: Measured) -> Measured:
        for _ in range(_CLIMBS):
            rate = best.tokens_per_hour
            near = [c for c in self._neighbours(best.candidate) if c not in self._full and self._may_reach(c, rate)]
            if not near:
                return best
            top = max(
                self._measure(near, f"neighbours of TP {best.candidate.tp} × {best.candidate.workers}"), key=better
            )
            if better(top) <= better(best):
                return best
            best = top
        return best

    def _neighbours(self, candidate: Candidate) -> list[Candidate]:
        """The next splits of the same TP and the nearest split of the next TPs, with the same async factor."""
        same = [c for c in self._field if c.async_factor == candidate.async_factor]
        splits = sorted((c for c in same if c.tp == candidate.tp), key=lambda c: c.workers)
        at = next(i for i, c in enumerate(splits) if c.workers == candidate.workers)
        near = splits[max(0, at - 1) : at] + splits[at + 1 : at + 2]
        tps = sorted({c.tp for c in same})
        here = tps.index(candidate.tp)
        for tp in tps[max(0, here - 1) : here] + tps[here + 1 : here + 2]:
            near.append(min((c for c in same if c.tp == tp), key=lambda c: (_gap(c, candidate), c)))
        return near

    # --------------------------------------------------------------------------------------------------------- trim

    def _trim(self, best: Measured) -> tuple[Measured, dict[str, list[Measured]]]:
        """Each setting in turn becomes the smallest one that is as good as the best seen."""
        made: dict[str, list[Measured]] = {}
        for key in ("async_factor", "slots", "l2_gb", "sandboxes"):
            variants = [best.candidate.changed(**{key: x}) for x in self._options(key, best)]
            made[key] = self._measure(variants, f"curve of {key}")
            honest = [m for m in made[key] if m.comparable] or made[key]
            if key == "async_factor":
                speed = [m.tokens_per_hour for m in honest]
                top = max(speed)
            else:
                kin = [m for m in self._full.values() if _place(m.candidate) == _place(best.candidate)]
                base = max((m for m in kin if m.comparable == honest[0].comparable), key=_whole)
                speed, top = [median(m.ratios(base)) for m in honest], 1.0
            enough = [m for m, s in zip(honest, speed, strict=True) if s >= (1 - self.config.search.tie) * top]
            best = enough[0] if enough else honest[speed.index(max(speed))]
        return best, made

    def _points(self, key: str, made: Sequence[Measured], best: Measured) -> list[Point]:
        """Of a curve: rates by their ratio to the best's, or their own where the async factor differs."""
        points = []
        for m in made:
            same = m.candidate.async_factor == best.candidate.async_factor
            rate = best.tokens_per_hour * median(m.ratios(best)) if same else m.tokens_per_hour
            limit = bounds(self.config, m.candidate, self._means)
            points.append(Point(x=getattr(m.candidate, key), tokens_per_hour=rate, measured=m, bounds=limit))
        return points

    def _options(self, key: str, best: Measured) -> Sequence[float]:
        """Values to try, ascending, the present one among them."""
        search, candidate = self.config.search, best.candidate
        match key:
            case "async_factor":
                return sorted({*search.async_factors})
            case "slots":
                group = self.config.sim.group
                groups = int(candidate.async_factor * group.batch + 1e-9)
                most = math.ceil(groups / candidate.workers) * group.size
                below = [s for s in sorted({*search.slots, candidate.slots}) if s < most]
                # Slots beyond the trajectories that the gate lets in are all alike: the first such number will do.
                return [*below, *[s for s in sorted({*search.slots, candidate.slots}) if s >= most][:1]]
            case "l2_gb":
                return sorted({share * l2_limit_gb(self.config) for share in search.l2_shares} | {candidate.l2_gb})
            case _:
                most = best.peak_sandboxes
                return sorted({math.ceil(share * most) for share in search.sandbox_shares} | {most})

    def _split_curve(self, candidate: Candidate) -> list[Measured]:
        """The winner's TP and settings on the other splits, the winner's own among them."""
        splits = sorted({(c.training_gpus, c.replicas, c.workers) for c in self._field if c.tp == candidate.tp})
        own = (candidate.training_gpus, candidate.replicas, candidate.workers)
        splits = sorted({*spread(splits, self.config.search.curve_points), own})
        variants = [
            candidate.changed(
                training_gpus=gpus, replicas=replicas, workers=workers, sandboxes=self.config.cluster.sandboxes
            )
            for gpus, replicas, workers in splits
        ]
        return self._measure(variants, "curve of the split")


def expected_groups(config: PlanConfig) -> int:
    """About how many groups a whole answer trains: for the estimate of its time."""
    search, batch = config.search, config.sim.group.batch
    groups, field, steps, small = 0, search.starters, search.screen_steps, min(batch, search.screen_batch)
    while field > search.finalists and steps < search.steps:
        groups += field * steps * small
        field, steps, small = max(search.finalists, math.ceil(field / 2)), 2 * steps, batch
    # Neighbours, the curves (of which a value each is known already), doublings and purchases.
    curves = len(search.async_factors) + len(search.slots) + len(search.l2_shares) + len(search.sandbox_shares) - 4
    whole = search.finalists + 4 + curves + search.curve_points + len(RESOURCES) + 4
    return groups + whole * search.steps * batch * len(config.seeds)


def _place(candidate: Candidate) -> tuple[int, int, float]:
    """What stays when slots, host cache and sandboxes vary."""
    return candidate.tp, candidate.workers, candidate.async_factor


def _whole(measured: Measured) -> float:
    return median(run.whole_per_hour for run in measured.runs)


def _gap(a: Candidate, b: Candidate) -> int:
    return abs(a.training_gpus - b.training_gpus)
