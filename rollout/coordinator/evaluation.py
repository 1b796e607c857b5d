"""Evaluations: which tasks are played how often, and what came out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from envclient.base.errors import ConfigError, VenusError
from rollout.coordinator.intake import SCORED
from rollout.types import Trajectory


def spread(eval_ids: Sequence[str], samples: int) -> list[str]:
    """`samples` task ids, spread evenly and in order over `eval_ids`: counts of two tasks differ by at most one."""
    if not eval_ids:
        raise ConfigError(
            "rollout.tasks names no evaluation task", "check rollout.tasks.args, or switch run.eval_* off"
        )
    return [eval_ids[i * len(eval_ids) // samples] for i in range(samples)]


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and its standard error from the unbiased standard deviation (0 for one value)."""
    count = len(values)
    mean = sum(values) / count
    if count == 1:
        return mean, 0.0
    variance = sum((v - mean) ** 2 for v in values) / (count - 1)
    return mean, math.sqrt(variance / count)


def judge(eval_id: str, version: int, trajectories: Sequence[Trajectory], ordered: int) -> dict[str, Any]:
    """The row of `evals.jsonl`. Trajectories that failed have no reward and stay out of the mean; they are counted.

    Raises:
        VenusError: not a single trajectory was scored.
    """
    scored = [t for t in trajectories if t.status in SCORED]
    if not scored:
        raise VenusError(
            f"evaluation {eval_id}: none of {ordered} trajectories could be scored",
            "look for the cause in the worker's and the environment's logs",
        )
    mean, error = mean_and_error([t.reward for t in scored])
    return {
        "eval_id": eval_id,
        "version": version,
        "step": version,
        "samples": len(scored),
        "failed": ordered - len(scored),
        "pass": mean,
        "standard_error": error,
        "turns/mean": sum(t.turns for t in scored) / len(scored),
        "tokens/mean": sum(t.generated_tokens for t in scored) / len(scored),
        **stat_means(scored),
    }


def stat_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`NAME/mean` of every number in the trajectories' stats, over those that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    for trajectory in trajectories:
        for name, value in trajectory.stats.items():
            values[name].append(value)
    return {f"{name}/mean": sum(v) / len(v) for name, v in sorted(values.items())}
