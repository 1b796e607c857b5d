"""Simulations of candidates: each configuration once, several at a time where asked, with progress on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import median

import msgspec

from rollout.sim.cluster import Cluster
from rollout.sim.config import SimConfig
from rollout.sim.metrics import Result
from rollout.sim.plan.config import PlanConfig
from rollout.sim.plan.space import Candidate, sim_config
from rollout.sim.plan.waiting import RESOURCES, Waiting
from rollout.sim.report import comparable

Change = Callable[[SimConfig], SimConfig]
"""Of a simulation, for a what-if."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation."""

    tokens_per_hour: float
    """Trained, in the steps that count (without the first and last ones): of a long run."""
    whole_per_hour: float
    """Trained, in all steps: for ratios. Runs of equal length train the same groups, so no border between steps adds
    its luck; but a larger async factor has more to fill and drain, so only equal ones are compared by it."""
    step_s: float
    peak_sandboxes: int
    discarded: int
    recomputed_per_token: float
    """Prompt tokens prefilled a second time, for each token trained."""
    trainer_busy: float
    engine_busy: float
    comparable: bool
    """Whether it trained what was submitted; else its rate is not to be believed."""
    shares: dict[str, float]
    """Of a step's time, by what it waits for."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate's runs, one a seed."""

    candidate: Candidate
    steps: int
    """Of each run."""
    runs: list[Run]

    @property
    def tokens_per_hour(self) -> float:
        """Median over seeds."""
        return median(run.tokens_per_hour for run in self.runs)

    @property
    def step_s(self) -> float:
        return median(run.step_s for run in self.runs)

    def ratios(self, base: Measured) -> list[float]:
        """Its speed in that of `base`, which has the same async factor; one for each seed."""
        return [a.whole_per_hour / b.whole_per_hour for a, b in zip(self.runs, base.runs, strict=True)]

    @property
    def comparable(self) -> bool:
        return all(run.comparable for run in self.runs)

    @property
    def peak_sandboxes(self) -> int:
        return max(run.peak_sandboxes for run in self.runs)

    @property
    def shares(self) -> dict[str, float]:
        """Means over seeds."""
        return {name: sum(run.shares[name] for run in self.runs) / len(self.runs) for name in RESOURCES}


def simulate(config: SimConfig) -> Run:
    """Raises: ConfigError: a value that cannot work; InvariantError: a defect."""
    waiting = Waiting()
    result: Result = Cluster(config, watch=waiting.watch, record=waiting.record).run()
    return Run(
        tokens_per_hour=result.trained_tokens_per_hour,
        whole_per_hour=sum(result.trained_lengths) / result.hours,
        step_s=result.step_s,
        peak_sandboxes=result.peak_sandboxes,
        discarded=result.discarded,
        recomputed_per_token=result.recomputed_tokens / max(1, sum(result.trained_lengths)),
        trainer_busy=result.trainer_busy,
        engine_busy=result.engine_busy,
        comparable=comparable(result),
        shares=waiting.shares(result),
    )


class Simulations:
    """Runs and remembers. Nothing it returns depends on how long anything took."""

    def __init__(self, config: PlanConfig, *, jobs: int = 1, tell: Callable[[str], None] | None = None) -> None:
        self.config = config
        self.simulated_steps = 0
        self.simulated_runs = 0
        self._groups = 0
        """Groups trained in all of them: what an estimate of the time goes by."""
        self._expected_groups = 0
        self._known: dict[bytes, Run] = {}
        self._jobs = jobs
        self._tell = tell or (lambda line: print(line, file=sys.stderr, flush=True))
        self._began_s = time.perf_counter()

    def expect(self, groups: int) -> None:
        """How many groups will be trained in all, about."""
        self._expected_groups = groups

    def _say(self, line: str) -> None:
        """A line of progress: seconds so far, and about how many are left."""
        spent_s = time.perf_counter() - self._began_s
        left = max(0, self._expected_groups - self._groups) / max(1, self._groups)
        ahead = f", about {spent_s * left / 60:.1f} min left" if self._expected_groups else ""
        self._tell(f"[{spent_s:.0f} s] {line}{ahead}")

    def measure(
        self,
        candidates: Sequence[Candidate],
        *,
        steps: int,
        seeds: Sequence[int],
        what: str,
        change: Change | None = None,
    ) -> list[Measured]:
        """Simulate every candidate with every seed, `change` applied to each simulation."""
        wanted = [[self._config(candidate, steps, seed, change) for seed in seeds] for candidate in candidates]
        self._run([config for row in wanted for config in row], what)
        return [
            Measured(candidate=candidate, steps=steps, runs=[self._known[_key(config)] for config in row])
            for candidate, row in zip(candidates, wanted, strict=True)
        ]

    def _config(self, candidate: Candidate, steps: int, seed: int, change: Change | None) -> SimConfig:
        made = sim_config(self.config, candidate, steps=steps, seed=seed)
        return change(made) if change else made

    def _run(self, configs: Sequence[SimConfig], what: str) -> None:
        """Simulate those that are not known yet."""
        new = {_key(config): config for config in configs if _key(config) not in self._known}
        if not new:
            return
        if self._jobs > 1 and len(new) > 1:
            with ProcessPoolExecutor(min(self._jobs, len(new))) as pool:
                found = list(pool.map(simulate, new.values()))
            for key, run in zip(new, found, strict=True):
                self._learn(key, new[key], run)
        else:
            for key, config in new.items():
                self._learn(key, config, simulate(config))
                if self.simulated_runs == 1:
                    self._say("the first simulation")
        self._say(f"{what}: {len(new)} simulations")

    def _learn(self, key: bytes, config: SimConfig, run: Run) -> None:
        self._known[key] = run
        self.simulated_runs += 1
        self.simulated_steps += config.steps
        self._groups += config.steps * config.group.batch


def _key(config: SimConfig) -> bytes:
    return msgspec.json.encode(config)


def scaled_down(config: SimConfig, most_batch: int) -> SimConfig:
    """The same load on fewer workers: batch, workers, replicas and sandboxes shrink together, training speed with them.

    A step's stragglers are then the worst of fewer trajectories, so the result orders candidates and no more.
    """
    batch = config.group.batch
    workers = max(1, round(config.workers * most_batch / batch))
    if batch <= most_batch or workers >= config.workers:
        return config
    share = workers / config.workers
    small = max(1, round(batch * share))
    sandboxes, trainer = config.environment.sandboxes, config.trainer
    replicas = max(1, round(trainer.replicas * share))
    speed = small / batch * trainer.replicas / replicas
    return replace(
        config,
        workers=workers,
        group=replace(config.group, batch=small),
        environment=replace(config.environment, sandboxes=max(1, round(sandboxes * share)) if sandboxes else 0),
        trainer=replace(
            trainer,
            replicas=replicas,
            gpus=trainer.gpus * replicas // trainer.replicas,
            efficiency=trainer.efficiency * speed,
        ),
    )
