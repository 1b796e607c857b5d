"""The policy objectives: a loss per token from log-probs and advantages. One small function each, by its name.

Notation: π_θ the policy that learns, π_old the policy at the start of the step, r = π_θ / π_old, A the advantage,
ε_low and ε_high the clip range. Where π_old is the same forward pass, detached, r ≡ 1: the gradient is that of
A · log π and no clip binds; it binds with several updates a batch, or when π_old is the engine's policy (bypass).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_venus.loss.sequences import sequence_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """The bounds of an objective."""

    low: float
    high: float
    dual: float = 0.0
    """c of the dual clip; 0: none."""


Objective = Callable[[Tensor, Tensor, Tensor, Tensor, Clip], tuple[Tensor, Tensor]]
"""(log π_θ, log π_old, A, sequence of each token, clip) → (loss of each token, where the clip binds)."""


def grpo(log_pi: Tensor, log_old: Tensor, advantages: Tensor, sequence_N: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """−min(r·A, clip(r, 1 − ε_low, 1 + ε_high)·A). PPO's clipped surrogate (Schulman et al. 2017) as GRPO uses it
    (Shao et al. 2024, DeepSeekMath).

    Dual clip (Ye et al. 2020): for A < 0 the loss is at most −c·A, so that a huge r cannot dominate.
    """
    ratio = (log_pi - log_old).exp()
    free = ratio * advantages
    clipped = ratio.clamp(1.0 - clip.low, 1.0 + clip.high) * advantages
    objective = torch.minimum(free, clipped)
    binds = clipped < free
    if clip.dual:
        floor = clip.dual * advantages
        below = (advantages < 0) & (objective < floor)
        objective = torch.where(below, floor, objective)
        binds = binds | below
    return -objective, binds.detach()


def dr_grpo(
    log_pi: Tensor, log_old: Tensor, advantages: Tensor, sequence_N: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """GRPO's token loss; Dr.GRPO (Liu et al. 2025) differs in A = R − mean (no std) and a constant length divisor."""
    return grpo(log_pi, log_old, advantages, sequence_N, clip)


def dapo(log_pi: Tensor, log_old: Tensor, advantages: Tensor, sequence_N: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """GRPO's token loss with ε_high > ε_low (clip-higher) and the token mean (Yu et al. 2025, DAPO).

    Its other parts: the dynamic filter (`rollout.group.filter_zero_variance`) and the overlong penalty
    (`rollout.advantage.overlong_tokens`).
    """
    return grpo(log_pi, log_old, advantages, sequence_N, clip)


def reinforce_plus_plus(
    log_pi: Tensor, log_old: Tensor, advantages: Tensor, sequence_N: Tensor, clip: Clip
) -> tuple[Tensor, Tensor]:
    """The clipped token loss over advantages normalised in the global batch (Hu 2025, REINFORCE++)."""
    return grpo(log_pi, log_old, advantages, sequence_N, clip)


def gspo(log_pi: Tensor, log_old: Tensor, advantages: Tensor, sequence_N: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """s = exp(mean_t log r_t) per sequence; −min(s_t·A, clip(s_t, 1 − ε_low, 1 + ε_high)·A) with
    s_t = sg[s]·π_θ / sg[π_θ] (Zheng et al. 2025, GSPO; its token form GSPO-token).

    Summed over a sequence's tokens and divided by their number, the gradient is that of the sequence form.
    """
    log_ratio = (log_pi - log_old).detach()
    log_s = sequence_mean(log_ratio, sequence_N)[sequence_N]
    return grpo(log_s + log_pi - log_pi.detach(), torch.zeros_like(log_pi), advantages, sequence_N, clip)


def cispo(log_pi: Tensor, log_old: Tensor, advantages: Tensor, sequence_N: Tensor, clip: Clip) -> tuple[Tensor, Tensor]:
    """−sg[clip(r, 1 − ε_low, 1 + ε_high)]·A·log π_θ (MiniMax 2025, CISPO): the weight is clipped, no token loses its
    gradient."""
    ratio = (log_pi - log_old).detach().exp()
    weight = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return -weight * advantages * log_pi, weight != ratio


OBJECTIVES: dict[str, Objective] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "dapo": dapo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "gspo": gspo,
    "cispo": cispo,
}
"""By their name in `actor.loss.algorithm`."""
