"""Sums and means over the loss tokens of each sequence of a micro-batch (sequences are never split over two)."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_sum(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """[N] → [S]: Σ over each sequence's loss tokens. `sequence_N` numbers sequences from 0 without a gap."""
    sequences = int(sequence_N.max()) + 1 if len(sequence_N) else 0
    return torch.zeros(sequences, dtype=values_N.dtype, device=values_N.device).index_add(0, sequence_N, values_N)


def sequence_mean(values_N: Tensor, sequence_N: Tensor) -> Tensor:
    """[N] → [S]: mean over each sequence's loss tokens."""
    return sequence_sum(values_N, sequence_N) / sequence_sum(torch.ones_like(values_N), sequence_N)
