"""KL in the reward, and advantages normalised over the batch: what the actor does to advantages.

Enters: per-token KL estimates (no gradient) of a micro-batch, or every advantage of the batch. Called by the gradient
stream as groups arrive and when the batch is closed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_venus.loss.sequences import sequence_sum

STD_EPSILON = 1e-6
"""Added to the batch's standard deviation."""


def to_go(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """Σ_{s ≥ t} of each token's sequence, in float64 inside. A sequence's tokens lie in order, side by side."""
    values = values_N.double()
    so_far = values.cumsum(0)
    ends = sequence_sum(values, sequence_N).cumsum(0)
    return (ends[sequence_N] - so_far + values).to(values_N.dtype)


def moments(advantages: Sequence[Tensor]) -> tuple[float, float]:
    """Number and sum of all tokens' advantages."""
    return float(sum(len(part) for part in advantages)), float(sum(part.double().sum().item() for part in advantages))


def squares(advantages: Sequence[Tensor], mean: float) -> float:
    """Σ (A − mean)²."""
    return float(sum(((part.double() - mean) ** 2).sum().item() for part in advantages))


def normalised(advantages: Tensor, mean: float, std: float) -> Tensor:
    """(A − mean) / (std + 1e-6), mean and unbiased std over the batch's loss tokens (Hu 2025, REINFORCE++)."""
    return ((advantages.double() - mean) / (std + STD_EPSILON)).to(torch.float32)
