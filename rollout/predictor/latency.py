"""Seconds of the answers against those of the tools that run meanwhile, each by its name.

Answers: of the embedded estimate (timed here, it is computed inside the coordinator) and of the predictor (as a run's
workers measured them, queue and wire included). Tools: those of that run, and those of agents that work on real
repositories, as 111 of them were measured [AgentCgroup, see `rollout.sim.config`] and as the simulator draws them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from envclient.base.errors import ConfigError
from envclient.base.files import read_json
from rollout.policy.jobs import Job, JobGroup
from rollout.policy.lengths import OnlineLengths
from rollout.policy.predictions import PredictedLengths
from rollout.predictor.data import EpisodeSamples
from rollout.predictor.episodes import FOLDER
from rollout.sim.config import FailureConfig, WorkloadConfig
from rollout.sim.workload import Dice

MEASURED_SWE_TOOL_S = 0.035
"""Median tool call of AgentCgroup's runs."""
_DRAWS = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One kind of answer against one kind of tool."""

    answers: str
    tools: str
    p95_s: float
    """Of the answers."""
    tool_median_s: float
    outlasting: float | None = None
    """Share of the tools that take longer than `p95_s`, where they are known."""

    @property
    def met(self) -> bool:
        """p95 below the median tool."""
        return self.p95_s < self.tool_median_s

    def __str__(self) -> str:
        state = "below" if self.met else "NOT below"
        share = "" if self.outlasting is None else f"; {100 * self.outlasting:.0f}% of them take longer"
        return (
            f"{self.answers}: p95 {1e3 * self.p95_s:.3g} ms is {state} the median of {self.tools}, "
            f"{1e3 * self.tool_median_s:.3g} ms{share}"
        )


def embedded_seconds(samples: Sequence[EpisodeSamples]) -> list[float]:
    """What the embedded estimate takes at each turn's end, by this machine's clock."""
    lengths = PredictedLengths(OnlineLengths(growth_tokens=1000))
    groups: dict[str, JobGroup] = {}
    seconds = []
    for sample in samples:
        group = groups.setdefault(sample.group_id, JobGroup(order=len(groups), group_id=sample.group_id))
        job = Job(trajectory_id=sample.trajectory_id, group=group, member=0, worker="")
        for turn in sample.turns:
            job.turns, job.context_tokens, job.output_tokens = turn.turn, turn.context_tokens, turn.generated_tokens
            begun = time.perf_counter()
            lengths.observe(job)
            lengths.estimate(job)
            seconds.append(time.perf_counter() - begun)
        group.finished_tokens.append(job.output_tokens)
        lengths.finished(job, job.output_tokens)
        lengths.dropped(job)
    return seconds


def modelled_tools_s() -> NDArray[np.float64]:
    """Tool calls as the simulator draws them."""
    dice = Dice(WorkloadConfig(), FailureConfig(), seed=0)
    return np.asarray(dice.tools_s(dice.of(0), _DRAWS))


def workers(run_dir: Path) -> dict[str, dict[str, float]]:
    """Worker → its counts and seconds. Raises: ConfigError: the run had no predictor."""
    paths = sorted((run_dir / FOLDER).glob("worker-*.json"))
    if not paths:
        raise ConfigError(f"{run_dir} has no predictor/worker-*.json", "run with rollout.predictor.enabled=true")
    return {path.stem.removeprefix("worker-"): read_json(path) for path in paths}


def worker_line(worker: str, numbers: dict[str, float]) -> str:
    """One worker's seconds for people."""
    if "answer_p95_s" not in numbers:
        return f"worker {worker}: no answer in {numbers.get('asked', 0):.0f} questions"
    return (
        f"worker {worker}: answers p50 {1e3 * numbers['answer_p50_s']:.1f} ms, p95 {1e3 * numbers['answer_p95_s']:.1f} "
        f"ms; tools p50 {1e3 * numbers['tool_p50_s']:.1f} ms; of {numbers['asked']:.0f} questions "
        f"{numbers.get('in_time', 0):.0f} answered before the tool returned, {numbers.get('used', 0):.0f} in all"
    )


def verdicts(samples: Sequence[EpisodeSamples], measured: dict[str, dict[str, float]]) -> list[Verdict]:
    """Both kinds of answers against every kind of tool; the predictor's by worker."""
    answers = {"embedded estimate": float(np.quantile(embedded_seconds(samples), 0.95))}
    tools: dict[str, float] = {}
    for worker, numbers in measured.items():
        if "answer_p95_s" in numbers:
            answers[f"predictor of worker {worker}"] = numbers["answer_p95_s"]
        if "tool_p50_s" in numbers:
            tools[f"worker {worker}'s tools"] = numbers["tool_p50_s"]
    tools["SWE tools as measured"] = MEASURED_SWE_TOOL_S
    modelled = modelled_tools_s()
    found = []
    for name, p95_s in answers.items():
        found += [
            Verdict(answers=name, tools=kind, p95_s=p95_s, tool_median_s=median_s) for kind, median_s in tools.items()
        ]
        found.append(
            Verdict(
                answers=name,
                tools="SWE tools as simulated",
                p95_s=p95_s,
                tool_median_s=float(np.median(modelled)),
                outlasting=float((modelled > p95_s).mean()),
            )
        )
    return found
