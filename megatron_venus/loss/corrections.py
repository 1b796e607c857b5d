"""Corrections for tokens that another policy sampled: the engine's μ is not exactly the trainer's π_old.

ρ = π_old / μ. A weight multiplies a token's policy loss; a rejection removes a token from the loss altogether (its KL
term too). Both are constants: no gradient flows through them. Denominators count tokens before rejection.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_venus.loss.sequences import sequence_mean, sequence_sum

LOG_LIMIT = 20.0
"""|Σ log ρ| of a sequence above which its exponential would overflow or vanish; every use cuts far below it."""

Weight = Callable[[Tensor, Tensor, float, float], Tensor]
"""(log ρ, sequence of each token, low, high) → weight of each token."""


def tis(log_rho: Tensor, sequence_N: Tensor, low: float, high: float) -> Tensor:
    """w = min(ρ, C), at least `low` (Yao et al. 2025, truncated importance sampling; C = 2)."""
    return log_rho.exp().clamp(low, high)


def icepop(log_rho: Tensor, sequence_N: Tensor, low: float, high: float) -> Tensor:
    """w = ρ if α ≤ ρ ≤ β else 0 (Ling team 2025, IcePop; α = 0.5, β = 2)."""
    rho = log_rho.exp()
    return torch.where((rho >= low) & (rho <= high), rho, torch.zeros_like(rho))


def seq_tis(log_rho: Tensor, sequence_N: Tensor, low: float, high: float) -> Tensor:
    """w = min(Π_t ρ_t, C) for every token of the sequence, at least `low` (Liu, Li et al. 2025, sequence TIS)."""
    return _product(log_rho, sequence_N).clamp(low, high)[sequence_N]


def seq_mis(log_rho: Tensor, sequence_N: Tensor, low: float, high: float) -> Tensor:
    """w = Π_t ρ_t if low ≤ Π_t ρ_t ≤ C else 0 (Liu, Li et al. 2025, masked importance sampling)."""
    rho = _product(log_rho, sequence_N)
    return torch.where((rho >= low) & (rho <= high), rho, torch.zeros_like(rho))[sequence_N]


def _product(log_rho: Tensor, sequence_N: Tensor) -> Tensor:
    return sequence_sum(log_rho, sequence_N).clamp(-LOG_LIMIT, LOG_LIMIT).exp()


def geometric_kept(log_rho: Tensor, sequence_N: Tensor, low: float, high: float) -> Tensor:
    """Keep a sequence where low ≤ exp(mean_t log ρ_t) ≤ high (Liu, Li et al. 2025, geometric mean; 0.99 to 1.01)."""
    mean = sequence_mean(log_rho, sequence_N).exp()
    return ((mean >= low) & (mean <= high))[sequence_N]


def k3_kept(log_rho: Tensor, sequence_N: Tensor, limit: float) -> Tensor:
    """Keep a sequence where mean_t (ρ_t − 1 − log ρ_t) ≤ limit: the k3 estimate of KL(μ ‖ π_old) [R: as a rejection].

    Unlike the geometric mean, where tokens above and below cancel, every term counts.
    """
    k3 = log_rho.exp() - 1.0 - log_rho
    return (sequence_mean(k3, sequence_N) <= limit)[sequence_N]


WEIGHTS: dict[str, Weight] = {"tis": tis, "icepop": icepop, "seq_tis": seq_tis, "seq_mis": seq_mis}
"""By their name in `actor.loss.correction.weight`."""
