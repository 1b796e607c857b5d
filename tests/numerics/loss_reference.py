"""Slow references for the loss tests: each formula written down token by token, in float64, differentiated by autograd.

Nothing here is shared with the code under test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_venus.config import CorrectionConfig, LossConfig


@dataclass(kw_only=True)
class Member:
    """A sequence's loss tokens."""

    log_pi: Tensor
    """With gradient."""
    log_mu: Tensor
    log_old: Tensor | None
    """None: log_pi, detached."""
    log_ref: Tensor | None
    advantages: Tensor
    """One a token."""


def kl_term(estimator: str, weighted: bool, pi: Tensor, old: Tensor, ref: Tensor) -> Tensor:
    d = ref - pi
    value = {"k1": -d, "k2": d**2 / 2, "k3": torch.exp(d) - 1 - d}[estimator]
    if not weighted:
        return value
    r = torch.exp(pi - old)
    return r.detach() * value if estimator == "k2" else r * value


def objective(config: LossConfig, pi: Tensor, old: Tensor, member_log_ratio: Tensor, a: Tensor) -> Tensor:
    low, high = 1 - config.clip_low, 1 + config.clip_high
    if config.algorithm == "cispo":
        return -min(max(torch.exp(pi - old).item(), low), high) * a * pi
    if config.algorithm == "gspo":
        r = torch.exp(member_log_ratio.mean()).detach() * torch.exp(pi - pi.detach())
    else:
        r = torch.exp(pi - old)
    clipped = torch.clamp(r, low, high)
    inner = r * a if (r * a).item() < (clipped * a).item() else clipped * a
    if config.dual_clip and a.item() < 0 and inner.item() < config.dual_clip * a.item():
        inner = config.dual_clip * a
    return -inner


def weight(correction: CorrectionConfig, log_rho: list[float], place: int) -> float:
    rho, whole = math.exp(log_rho[place]), math.exp(sum(log_rho))
    low, high = correction.low, correction.high
    return {
        "none": 1.0,
        "tis": max(low, min(rho, high)),
        "icepop": rho if low <= rho <= high else 0.0,
        "seq_tis": max(low, min(whole, high)),
        "seq_mis": whole if low <= whole <= high else 0.0,
    }[correction.weight]


def kept(correction: CorrectionConfig, log_rho: list[float]) -> bool:
    mean = math.exp(sum(log_rho) / len(log_rho))
    k3 = sum(math.exp(x) - 1 - x for x in log_rho) / len(log_rho)
    return {
        "none": True,
        "geometric": correction.reject_low <= mean <= correction.reject_high,
        "k3": k3 <= correction.reject_k3,
    }[correction.reject]


def loss_of(config: LossConfig, members: list[Member], *, tokens: int, sequences: int) -> Tensor:
    """The batch's loss; `tokens` and `sequences` count the whole batch, also members that are not given."""
    total = torch.zeros((), dtype=torch.float64)
    for member in members:
        pi = member.log_pi.double()
        trainer = pi.detach() if member.log_old is None else member.log_old.double()
        mu = member.log_mu.double()
        old = mu if config.bypass else trainer
        log_rho = ((pi.detach() if config.bypass else trainer) - mu).tolist()
        of_member = torch.zeros((), dtype=torch.float64)
        for place in range(len(pi)):
            if not kept(config.correction, log_rho):
                continue
            a = member.advantages[place].double()
            policy = objective(config, pi[place], old[place], pi - old, a)
            of_member = of_member + weight(config.correction, log_rho, place) * policy
            if config.kl.place == "loss":
                assert member.log_ref is not None
                ref = member.log_ref[place].double()
                kl = kl_term(config.kl.estimator, config.kl.weighted, pi[place], old[place], ref)
                of_member = of_member + config.kl.coefficient * kl
        total = total + of_member / (len(pi) if config.aggregation == "seq-mean-token-mean" else 1)
    divisor = {
        "token-mean": tokens,
        "seq-mean-token-sum": sequences,
        "seq-mean-token-mean": sequences,
        "seq-mean-token-sum-norm": sequences * config.norm_tokens,
    }[config.aggregation]
    return total / divisor
