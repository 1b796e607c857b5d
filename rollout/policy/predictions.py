"""PURE: a predictor's answers beside the embedded estimate: both are kept to account, and weighed by what it shows.

Without an answer the embedded estimate stands alone, so a predictor that is off, late or dead changes nothing. Between
answers a prediction falls by the tokens generated, floor 1 (paper §4.1's estimate, our rule for the time between). Its
weight is its share of precision, 1 / mean squared error in log(1 + tokens), over the episodes that ended lately. [R]
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from rollout.policy.jobs import Job
from rollout.policy.lengths import Lengths

_PRIOR_ERROR = 1.0
"""Mean squared error that both are taken to have before anything has ended."""
_PRIOR_SAMPLES = 8
_MOST_TOKENS = math.exp(16.0)
"""No answer counts for more, as no embedded estimate does: sums of KV tokens would lose what is small beside it."""
_LONGEST_MEMORY = 400
"""Ends that a running mean remembers: policy and predictor change."""


@dataclass(slots=True)
class _Prediction:
    tokens: float
    """Remaining tokens as last predicted."""
    at: int
    """Output tokens of the job then."""
    record: list[tuple[int, float, float]] = field(default_factory=list)
    """(output tokens, log of the embedded estimate, log of the prediction), to be judged at the end."""


class PredictedLengths:
    """`Lengths` that weighs the predictor's answers against those of `embedded`."""

    def __init__(self, embedded: Lengths) -> None:
        self.embedded = embedded
        self.embedded_error = _PRIOR_ERROR
        self.predictor_error = _PRIOR_ERROR
        """Mean squared errors in log(1 + tokens), where both have answered."""
        self._judged = _PRIOR_SAMPLES
        self._open: dict[str, _Prediction] = {}

    @property
    def samples(self) -> int:
        return self.embedded.samples

    def estimate(self, job: Job) -> tuple[float, float]:
        tokens, context = self.embedded.estimate(job)
        prediction = self._open.get(job.trajectory_id)
        if prediction is None:
            return tokens, context
        own = max(1.0, prediction.tokens - (job.output_tokens - prediction.at))
        share = self.embedded_error / (self.embedded_error + self.predictor_error)
        mixed = math.expm1((1.0 - share) * math.log1p(tokens) + share * math.log1p(own))
        # What is appended by tools grows with the turns, and these with the tokens.
        return mixed, job.context_tokens + (context - job.context_tokens) * mixed / tokens

    def observe(self, job: Job) -> None:
        self.embedded.observe(job)

    def predicted(self, job: Job, remaining_tokens: float) -> None:
        tokens = min(max(1.0, remaining_tokens), _MOST_TOKENS)
        prediction = self._open.setdefault(job.trajectory_id, _Prediction(tokens, job.output_tokens))
        prediction.tokens, prediction.at = tokens, job.output_tokens
        if job.turns & (job.turns - 1) == 0:
            # At turns 1, 2, 4, 8, …, as the embedded estimate learns: long trajectories would outweigh all others.
            own = self.embedded.estimate(job)[0]
            prediction.record.append((job.output_tokens, math.log1p(own), math.log1p(tokens)))

    def finished(self, job: Job, output_tokens: int) -> None:
        prediction = self._open.pop(job.trajectory_id, None)
        for done, embedded, predicted in prediction.record if prediction is not None else ():
            truth = math.log1p(max(0, output_tokens - done))
            self._judged += 1
            share = 1.0 / min(self._judged, _LONGEST_MEMORY)
            self.embedded_error += share * ((embedded - truth) ** 2 - self.embedded_error)
            self.predictor_error += share * ((predicted - truth) ** 2 - self.predictor_error)
        self.embedded.finished(job, output_tokens)

    def dropped(self, job: Job) -> None:
        self._open.pop(job.trajectory_id, None)
        self.embedded.dropped(job)
