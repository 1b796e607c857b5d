"""One micro-batch's summed loss and its sums: objective, correction, KL and aggregation put together.

Enters: log-probs under the learning policy and what they are measured against. Leaves: the summed loss to run backward
from, and `TokenSums` that add over micro-batches, groups and replicas.

    Σ_t factor_t · kept_t · (w_t · ℓ_t + β · KL_t)

The denominators of a batch are unknown while its groups stream in, so nothing here divides by them: Σ gradient and
counts are kept, and scaled once before clipping and stepping.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from megatron_venus.config import CorrectionConfig, LossConfig
from megatron_venus.loss.aggregation import token_factors
from megatron_venus.loss.corrections import WEIGHTS, geometric_kept, k3_kept
from megatron_venus.loss.kl import ESTIMATORS, kl_loss
from megatron_venus.loss.objectives import OBJECTIVES, Clip


@dataclass(frozen=True, kw_only=True, slots=True)
class LossTokens:
    """The N loss tokens of a micro-batch, its sequences whole."""

    log_pi: Tensor
    """log π_θ, with gradient."""
    entropy: Tensor
    behaviour: Tensor
    """log μ, the engine's; never part of the gradient."""
    advantages: Tensor
    sequence_N: Tensor
    """Each token's sequence, numbered from 0 in this micro-batch."""
    log_old: Tensor | None = None
    """log π_old; None: this same forward pass, detached (one update a batch)."""
    log_ref: Tensor | None = None
    """log π_ref, where KL is asked for."""


@dataclass(kw_only=True, slots=True)
class TokenSums:
    """Sums over the loss tokens that went through the model (each divided by `tokens` gives the batch's mean)."""

    tokens: float = 0.0
    loss: float = 0.0
    """Aggregated with the factors of the config; its denominator is the batch's."""
    entropy: float = 0.0
    kl: float = 0.0
    """k3 estimate of KL(μ ‖ π): exp(d) − 1 − d with d = log π − log μ."""
    kl_ref: float = 0.0
    """The chosen estimate of KL(π ‖ π_ref)."""
    clipped: float = 0.0
    weight: float = 0.0
    """Σ of the correction's weights (1 each without one)."""
    rejected: float = 0.0
    """Tokens with weight 0 or in a rejected sequence."""
    gap: float = 0.0
    """Σ |log μ − log π_old|, π_old being this forward pass with one update a batch."""
    gap_max: float = 0.0
    """The largest |log μ − log π_old|: the one entry that is a maximum."""

    def add(self, other: TokenSums) -> None:
        for entry in fields(self):
            mine, theirs = getattr(self, entry.name), getattr(other, entry.name)
            setattr(self, entry.name, max(mine, theirs) if entry.name == "gap_max" else mine + theirs)


def batch_loss(tokens: LossTokens, config: LossConfig) -> tuple[Tensor, TokenSums]:
    """Summed loss of a micro-batch (backward starts here) and its sums."""
    log_pi, now = tokens.log_pi, tokens.log_pi.detach()
    trainer_old = now if tokens.log_old is None else tokens.log_old
    log_old = tokens.behaviour if config.bypass else trainer_old
    clip = Clip(low=config.clip_low, high=config.clip_high, dual=config.dual_clip)
    policy, binds = OBJECTIVES[config.algorithm](log_pi, log_old, tokens.advantages, tokens.sequence_N, clip)
    # In bypass mode π_old is μ itself: what can be rejected is how far π has moved from it.
    log_rho = (now if config.bypass else trainer_old) - tokens.behaviour
    weight, kept = _correction(log_rho, tokens.sequence_N, config.correction)
    losses = policy if weight is None else policy * weight
    if tokens.log_ref is not None and config.kl.place == "loss":
        kl = kl_loss(log_pi, log_old, tokens.log_ref, config.kl.estimator, config.kl.weighted)
        losses = losses + config.kl.coefficient * kl
    if kept is not None:
        losses = torch.where(kept, losses, torch.zeros_like(losses))
    total = (losses * token_factors(config.aggregation, tokens.sequence_N, now)).sum()
    with torch.no_grad():
        ones = torch.ones_like(now)
        applied = ones if weight is None else weight
        if kept is not None:
            applied = applied * kept
        moved, gap = now - tokens.behaviour, (trainer_old - tokens.behaviour).abs()
        kl_ref = ESTIMATORS[config.kl.estimator](tokens.log_ref - now) if tokens.log_ref is not None else 0.0 * ones
        sums = {
            "loss": total.detach(),
            "entropy": tokens.entropy.sum(),
            "kl": (moved.exp() - 1.0 - moved).sum(),
            "kl_ref": kl_ref.sum(),
            "clipped": (binds * ones).sum(),
            "weight": applied.sum(),
            "rejected": ((applied == 0.0) * ones).sum(),
            "gap": gap.sum(),
            "gap_max": gap.max() if len(gap) else gap.sum(),
        }
        values = torch.stack(list(sums.values())).tolist()
    return total, TokenSums(tokens=float(len(now)), **dict(zip(sums, values, strict=True)))


def _correction(log_rho: Tensor, sequence_N: Tensor, config: CorrectionConfig) -> tuple[Tensor | None, Tensor | None]:
    """Weight of each token and whether it is kept; None where the config asks for none."""
    weight = kept = None
    if config.weight != "none":
        weight = WEIGHTS[config.weight](log_rho, sequence_N, config.low, config.high)
    if config.reject == "geometric":
        kept = geometric_kept(log_rho, sequence_N, config.reject_low, config.reject_high)
    elif config.reject == "k3":
        kept = k3_kept(log_rho, sequence_N, config.reject_k3)
    return weight, kept
