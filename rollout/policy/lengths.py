"""PURE: how much a trajectory has still to generate, estimated online (the embedded predictor, always on).

Fed by every turn's end and every trajectory's end; asked at every turn's end (paper §4.1: "in parallel with the tool
call"). `OnlineLengths` is recursive least squares in log space on the turn, the tokens so far, the context, what tools
returned, how many siblings have finished and at what length; `TrueLengths` knows the truth (a simulation's oracle).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

from rollout.policy.jobs import Job

FEATURES = 8
_PRIOR_VARIANCE = 10.0
_FORGETTING = 0.9995
"""Weight of a sample after 1,400 more is a half: the policy model changes, and so do its lengths."""
_TRUSTED_SAMPLES = 24
_LOG_MOST = 16.0


class Lengths(Protocol):
    """An estimate of what is left of a job."""

    @property
    def samples(self) -> int:
        """Number learnt from: estimates that are much older than it are worth renewing."""

    def estimate(self, job: Job) -> tuple[float, float]:
        """(remaining output tokens ≥ 1, context tokens at its end ≥ the present ones)."""

    def observe(self, job: Job) -> None:
        """The job's numbers are those before its first turn, or after its latest."""

    def predicted(self, job: Job, remaining_tokens: float) -> None:
        """The predictor's own estimate after the job's latest turn."""

    def finished(self, job: Job, output_tokens: int) -> None:
        """The job ended well, with so many generated tokens in all."""

    def dropped(self, job: Job) -> None:
        """The job ended otherwise: nothing is learnt from it. Follows `finished` too."""


class TrueLengths:
    """Remaining lengths as they will be.

    Args:
        truth: trajectory id → (output tokens in all, context tokens at its end).
    """

    def __init__(self, truth: Callable[[str], tuple[int, int]]) -> None:
        self._truth = truth
        self.samples = 0

    def estimate(self, job: Job) -> tuple[float, float]:
        output, context = self._truth(job.trajectory_id)
        return max(1.0, float(output - job.output_tokens)), float(max(context, job.context_tokens))

    def observe(self, job: Job) -> None: ...

    def predicted(self, job: Job, remaining_tokens: float) -> None: ...

    def finished(self, job: Job, output_tokens: int) -> None: ...

    def dropped(self, job: Job) -> None: ...


class OnlineLengths:
    """Ridge regression of log(1 + remaining) and log(1 + growth of the context), updated trajectory by trajectory.

    A trajectory gives one sample at each of its turns 0, 1, 2, 4, 8, … : long ones would else outweigh all others, and
    cost of an end grow with their turns. Before enough samples have come all are taken to be `growth_tokens` long.
    """

    def __init__(self, *, growth_tokens: int) -> None:
        self._growth_tokens = growth_tokens
        self._regression = _Regression()
        self._open: dict[str, list[tuple[int, int, list[float]]]] = {}
        """Trajectory → (output tokens, context tokens, features) at the turns that count."""
        self.samples = 0
        self._finished = 0
        self._mean_log = 0.0

    def estimate(self, job: Job) -> tuple[float, float]:
        if self.samples < _TRUSTED_SAMPLES:
            left = max(1.0, float(self._growth_tokens - job.output_tokens))
            return left, job.context_tokens + left
        tokens, growth = self._regression.predict(self._features(job))
        return max(1.0, math.expm1(tokens)), job.context_tokens + max(0.0, math.expm1(growth))

    def observe(self, job: Job) -> None:
        turns = job.turns
        if turns & (turns - 1) == 0:
            snapshots = self._open.setdefault(job.trajectory_id, [])
            snapshots.append((job.output_tokens, job.context_tokens, self._features(job)))

    def predicted(self, job: Job, remaining_tokens: float) -> None:
        """Not used here: see `rollout.policy.predictions`."""

    def finished(self, job: Job, output_tokens: int) -> None:
        self._finished += 1
        share = max(1.0 / self._finished, 0.01)
        self._mean_log += share * (math.log1p(output_tokens) - self._mean_log)
        for done, context, features in self._open.pop(job.trajectory_id, ()):
            left = math.log1p(max(0, output_tokens - done))
            growth = math.log1p(max(0, job.context_tokens - context))
            self._regression.learn(features, (left, growth))
            self.samples += 1

    def dropped(self, job: Job) -> None:
        self._open.pop(job.trajectory_id, None)

    def _features(self, job: Job) -> list[float]:
        group = job.group
        done = group.finished_tokens
        # Of logs, drawn to the overall mean as if that were one more sibling: few siblings say little.
        apart = (sum(map(math.log1p, done)) - len(done) * self._mean_log) / (len(done) + 1)
        typical = math.expm1(self._mean_log + apart)
        tools = max(0, job.context_tokens - job.output_tokens - group.prompt_tokens) if job.turns else 0
        return [
            1.0,
            math.log1p(job.turns),
            math.log1p(job.output_tokens),
            math.log1p(job.context_tokens),
            math.log1p(tools),
            # That none has finished by now tells of a long group, where the mean length of none tells nothing. Each
            # counts as far as this one has come of its length: a late starter has all of its own before it.
            sum([min(1.0, job.output_tokens / max(1, tokens)) for tokens in done]) / group.size,
            apart,
            math.log1p(max(typical - job.output_tokens, 0.25 * typical)),
        ]


class _Regression:
    """Recursive least squares with forgetting: two targets, one covariance."""

    def __init__(self) -> None:
        self._weights = ([0.0] * FEATURES, [0.0] * FEATURES)
        self._covariance = [[_PRIOR_VARIANCE if i == j else 0.0 for j in range(FEATURES)] for i in range(FEATURES)]

    def predict(self, x: list[float]) -> tuple[float, float]:
        a, b, c, d, e, f, g, h = x  # at every turn's end: a loop takes three times as long
        tokens, growth = (
            w[0] * a + w[1] * b + w[2] * c + w[3] * d + w[4] * e + w[5] * f + w[6] * g + w[7] * h for w in self._weights
        )
        return min(_LOG_MOST, tokens), min(_LOG_MOST, growth)

    def learn(self, x: list[float], targets: tuple[float, float]) -> None:
        covariance = self._covariance
        px = [sum(row[j] * x[j] for j in range(FEATURES)) for row in covariance]
        scale = _FORGETTING + sum(a * b for a, b in zip(x, px, strict=True))
        gain = [value / scale for value in px]
        for weights, target in zip(self._weights, targets, strict=True):
            error = target - sum(a * b for a, b in zip(weights, x, strict=True))
            for i in range(FEATURES):
                weights[i] += gain[i] * error
        # Without the bound the directions that no sample excites would grow without end (wind-up).
        forget = _FORGETTING if max(row[i] for i, row in enumerate(covariance)) < _PRIOR_VARIANCE else 1.0
        for i in range(FEATURES):
            for j in range(i, FEATURES):
                covariance[i][j] = covariance[j][i] = (covariance[i][j] - gain[i] * px[j]) / forget
