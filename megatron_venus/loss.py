"""GRPO's clipped token loss and the log-probs it needs: sums and counts only, the mean is taken once per batch.

Enters: output rows of the model and the packed batch's targets. Leaves: the summed loss to run backward from, and
`TokenSums` that add over micro-batches, groups and replicas. Pure torch; called by the gradient stream.

The denominators of a batch are unknown while its groups stream in, so nothing here divides: Σ gradient and counts are
kept, and scaled once before clipping and stepping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LogitsOf = Callable[[Tensor], Tensor]
"""Output rows [n, h] → logits [n, vocabulary]."""

CHUNK_LOGITS = 1 << 24
"""Logits held at once: 64 MiB of float32. More rows are computed in chunks, and again in the backward pass."""


@dataclass(kw_only=True, slots=True)
class TokenSums:
    """Sums over the loss tokens that went through the model (each divided by `tokens` gives the batch's mean)."""

    tokens: float = 0.0
    loss: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    clipped: float = 0.0
    gap: float = 0.0
    """Σ |log μ − log π|."""
    gap_max: float = 0.0
    """max |log μ − log π|: the one entry that is a maximum."""

    def add(self, other: TokenSums) -> None:
        for entry in fields(self):
            mine, theirs = getattr(self, entry.name), getattr(other, entry.name)
            setattr(self, entry.name, max(mine, theirs) if entry.name == "gap_max" else mine + theirs)


def token_log_probs(
    rows_Nh: Tensor, targets_N: Tensor, logits_of: LogitsOf, vocabulary: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """log π of each target under the tempered distribution, and that distribution's entropy (detached); both [N].

    The temperature divides the logits, as the engine does it before it samples and reports log-probs.
    """
    chunk = max(1, CHUNK_LOGITS // vocabulary)

    def of_chunk(rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = logits_of(rows).float()
        # A division by 1.0 changes nothing but costs a pass over all logits, forward and backward.
        log_p = torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)
        with torch.no_grad():
            entropy = -(log_p.exp() * log_p).sum(-1)
        return log_p.gather(-1, targets[:, None]).squeeze(-1), entropy

    if len(rows_Nh) <= chunk:
        return of_chunk(rows_Nh, targets_N)
    parts = [
        checkpoint(of_chunk, rows, targets, use_reentrant=False)
        for rows, targets in zip(rows_Nh.split(chunk), targets_N.split(chunk), strict=True)
    ]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


def clipped_objective(
    log_pi: Tensor, log_old: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """GRPO's per-token loss −min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A) with r = π/π_old, and where the clip binds.

    With one optimizer step per batch π_old is the same forward pass, detached: r ≡ 1, its gradient is that of log π,
    and the clip never binds.
    """
    ratio = (log_pi - log_old).exp()
    free = ratio * advantages
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return -torch.minimum(free, clipped), (clipped < free).detach()


def batch_loss(
    log_pi: Tensor, entropy: Tensor, behaviour: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, TokenSums]:
    """Summed loss of a micro-batch (backward starts here) and its sums.

    `kl` is the k3 estimate of KL(μ ‖ π) from tokens that μ sampled: exp(d) − 1 − d with d = log π − log μ (never
    negative, unbiased). `behaviour` (log μ) is measured against, and never part of the gradient.
    """
    losses, clipped = clipped_objective(log_pi, log_pi.detach(), advantages, clip_low, clip_high)
    total = losses.sum()
    with torch.no_grad():
        difference = log_pi.detach() - behaviour
        gap = difference.abs()
        sums = torch.stack(
            [
                total.detach(),
                entropy.sum(),
                (difference.exp() - 1.0 - difference).sum(),
                clipped.sum().to(total.dtype),
                gap.sum(),
                gap.max(),
            ]
        ).tolist()
    loss, entropy_sum, kl, clipped_sum, gap_sum, gap_max = sums
    return total, TokenSums(
        tokens=float(len(log_pi)),
        loss=loss,
        entropy=entropy_sum,
        kl=kl,
        clipped=clipped_sum,
        gap=gap_sum,
        gap_max=gap_max,
    )
