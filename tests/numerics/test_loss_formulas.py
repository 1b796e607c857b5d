"""Objectives, aggregations, corrections and KL estimators against formulas token by token: value and gradient.

The model is a table of logits, so that each gradient is that of a full softmax. Sequences are ragged and come in any
order and any micro-batches; π, π_old, μ and π_ref all differ, so that clips bind and thresholds part the tokens.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from megatron_venus.config import CorrectionConfig, KlConfig, LossConfig
from megatron_venus.loss import LossTokens, TokenSums, batch_loss, token_log_probs
from megatron_venus.loss.aggregation import denominator
from megatron_venus.loss.objectives import OBJECTIVES
from tests.numerics import loss_reference

VOCABULARY = 11
TOLERANCE = 1e-5
AGGREGATIONS = ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
CORRECTIONS = {
    "none": CorrectionConfig(),
    "tis": CorrectionConfig(weight="tis", high=1.2),
    "tis, clamped below": CorrectionConfig(weight="tis", low=0.9, high=1.2),
    "icepop": CorrectionConfig(weight="icepop", low=0.8, high=1.3),
    "seq_tis": CorrectionConfig(weight="seq_tis", high=1.1),
    "seq_mis": CorrectionConfig(weight="seq_mis", high=1.1),
    "geometric": CorrectionConfig(reject="geometric", reject_low=0.9, reject_high=1.1),
    "tis and k3": CorrectionConfig(weight="tis", high=1.2, reject="k3", reject_k3=0.05),
}


class Batch:
    """Ragged sequences over a table of logits; sequence 0 is nearly on policy, the others are not."""

    def __init__(self, seed: int, *, old: bool) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        self.lengths = torch.randint(1, 10, (6,), generator=generator).tolist()
        total = sum(self.lengths)
        self.logits = normal(total, VOCABULARY).requires_grad_()
        self.targets = torch.randint(0, VOCABULARY, (total,), generator=generator)
        spread = torch.full((total,), 0.4)
        spread[: self.lengths[0]] = 1e-3
        log_pi = self.logits.detach().log_softmax(-1).gather(-1, self.targets[:, None])[:, 0]
        self.old = log_pi + spread * normal(total) if old else None
        self.mu = (log_pi if self.old is None else self.old) + spread * normal(total)
        self.ref = log_pi + 0.5 * normal(total)
        self.advantages = normal(len(self.lengths))

    def pieces(self) -> list[slice]:
        ends = torch.tensor([0, *self.lengths]).cumsum(0).tolist()
        return [slice(first, end) for first, end in pairwise(ends)]

    def members(self, log_pi: Tensor) -> list[loss_reference.Member]:
        return [
            loss_reference.Member(
                log_pi=log_pi[piece],
                log_mu=self.mu[piece],
                log_old=None if self.old is None else self.old[piece],
                log_ref=self.ref[piece],
                advantages=advantage.repeat(piece.stop - piece.start),
            )
            for piece, advantage in zip(self.pieces(), self.advantages, strict=True)
        ]


def ours(batch: Batch, config: LossConfig, micro_batches: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, TokenSums]:
    """Loss, gradient of the logits and sums, streamed in these micro-batches and scaled once."""
    table = batch.logits.detach().clone().requires_grad_()
    sums = TokenSums()
    pieces = batch.pieces()
    for chosen in micro_batches:
        places = torch.cat([torch.arange(pieces[member].start, pieces[member].stop) for member in chosen])
        sequence_N = torch.cat([torch.full((batch.lengths[m],), at) for at, m in enumerate(chosen)])
        log_pi, entropy = token_log_probs(table[places], batch.targets[places], torch.eye(VOCABULARY), 1.0)
        tokens = LossTokens(
            log_pi=log_pi,
            entropy=entropy,
            behaviour=batch.mu[places],
            advantages=batch.advantages[list(chosen)][sequence_N],
            sequence_N=sequence_N,
            log_old=None if batch.old is None else batch.old[places],
            log_ref=batch.ref[places] if config.kl.place != "none" else None,
        )
        loss, part = batch_loss(tokens, config)
        loss.backward()
        sums.add(part)
    assert table.grad is not None
    divisor = denominator(
        config.aggregation, tokens=sum(batch.lengths), sequences=len(batch.lengths), norm_tokens=config.norm_tokens
    )
    return torch.tensor(sums.loss / divisor), table.grad / divisor, sums


def reference(batch: Batch, config: LossConfig) -> tuple[Tensor, Tensor]:
    table = batch.logits.detach().double().requires_grad_()
    log_pi = table.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
    loss = loss_reference.loss_of(
        config, batch.members(log_pi), tokens=sum(batch.lengths), sequences=len(batch.lengths)
    )
    loss.backward()
    assert table.grad is not None
    return loss.detach(), table.grad


def micro_batches(batch: Batch, seed: int) -> list[list[int]]:
    order = list(range(len(batch.lengths)))
    random.Random(seed).shuffle(order)
    cut = random.Random(seed + 1).randint(1, len(order) - 1)
    return [order[:cut], order[cut:]]


def assert_equal(batch: Batch, config: LossConfig, splits: Sequence[Sequence[Sequence[int]]]) -> TokenSums:
    value, gradient = reference(batch, config)
    for split in splits:
        loss, mine, sums = ours(batch, config, split)
        assert loss.item() == pytest.approx(value.item(), rel=TOLERANCE, abs=1e-6), config
        scale = max(gradient.norm().item(), 1e-6)
        assert (mine - gradient).norm().item() <= TOLERANCE * scale, config
    return sums


@pytest.mark.parametrize("algorithm", sorted(OBJECTIVES))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_algorithms(algorithm: str, aggregation: str) -> None:
    """× corrections × how π_old is known, with and without KL and dual clip; one shot and in two parts of any order."""
    clipped = {"own": 0.0, "kept": 0.0, "bypass": 0.0}
    for seed, (name, old) in enumerate(product(CORRECTIONS, clipped)):
        correction = CORRECTIONS[name]
        if old == "bypass" and correction.weight != "none":
            continue
        config = LossConfig(
            algorithm=algorithm,
            aggregation=aggregation,
            norm_tokens=20,
            clip_low=0.1,
            clip_high=0.15,
            dual_clip=1.3 if algorithm not in ("gspo", "cispo") and seed % 2 else 0.0,
            bypass=old == "bypass",
            correction=correction,
            kl=KlConfig(place="loss" if seed % 3 == 0 else "none", coefficient=0.3, estimator=f"k{seed % 2 + 2}"),
        )
        batch = Batch(seed, old=old == "kept")
        whole = [list(range(len(batch.lengths)))]
        clipped[old] += assert_equal(batch, config, [whole, micro_batches(batch, seed)]).clipped
    # The clip was put to the test where it can bind, and does not where the ratio is 1.
    assert clipped["own"] == 0.0 and clipped["kept"] > 0 and clipped["bypass"] > 0


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("weighted", [True, False])
def test_kl_in_the_loss(estimator: str, weighted: bool) -> None:
    for seed, old in product(range(3), (True, False)):
        config = LossConfig(kl=KlConfig(place="loss", estimator=estimator, coefficient=0.7, weighted=weighted))
        batch = Batch(seed, old=old)
        assert_equal(batch, config, [micro_batches(batch, seed)])


def test_gspo_is_its_sequence_form() -> None:
    """(1/G) Σ_i −min(s_i A_i, clip(s_i) A_i) with s_i = (π(y_i) / π_old(y_i))^(1/|y_i|), differentiated through s_i."""
    batch = Batch(3, old=True)
    assert batch.old is not None
    config = LossConfig(algorithm="gspo", aggregation="seq-mean-token-mean", clip_low=0.05, clip_high=0.05)
    table = batch.logits.detach().double().requires_grad_()
    log_pi = table.log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]
    losses = []
    for piece, advantage in zip(batch.pieces(), batch.advantages, strict=True):
        s = (log_pi[piece] - batch.old[piece].double()).mean().exp()
        losses.append(-torch.minimum(s * advantage, s.clamp(0.95, 1.05) * advantage))
    value = torch.stack(losses).mean()
    value.backward()
    assert table.grad is not None
    loss, gradient, sums = ours(batch, config, micro_batches(batch, 0))
    assert loss.item() == pytest.approx(value.item(), rel=TOLERANCE)
    assert (gradient - table.grad).norm() <= TOLERANCE * table.grad.norm()
    assert 0 < sums.clipped < sums.tokens


@pytest.mark.parametrize("name", [name for name in CORRECTIONS if name != "none"])
def test_denominators_count_before_rejection(name: str) -> None:
    """A correction takes gradient away and leaves the divisor: with every weight 1 the rest keeps its size."""
    correction = CORRECTIONS[name]
    for seed in range(3):
        batch = Batch(seed, old=True)
        config = LossConfig(correction=correction, clip_low=1.0, clip_high=100.0)
        _, gradient, sums = ours(batch, config, micro_batches(batch, seed))
        _, plain, _ = ours(batch, LossConfig(clip_low=1.0, clip_high=100.0), micro_batches(batch, seed))
        rejected = 0
        for row, row_plain in zip(gradient, plain, strict=True):
            factor = (row @ row_plain / (row_plain @ row_plain)).item()
            assert torch.allclose(row, factor * row_plain, atol=1e-7)
            rejected += factor == 0.0
        assert rejected == sums.rejected
        assert sums.tokens == sum(batch.lengths)
        if correction.weight == "none":
            # Sequence 0 is nearly on policy and stays, exactly as without the correction.
            assert torch.allclose(gradient[: batch.lengths[0]], plain[: batch.lengths[0]])
            assert 0 < rejected < sum(batch.lengths)


def exact_kl(first: Tensor, second: Tensor) -> Tensor:
    return (first.exp() * (first - second)).sum()


@pytest.mark.parametrize("on_policy", [True, False])
def test_kl_estimators_against_the_exact_kl(on_policy: bool) -> None:
    """Expectation over every token of the vocabulary under the sampling policy: values and gradients."""
    from megatron_venus.loss.kl import ESTIMATORS, kl_loss

    generator = torch.Generator().manual_seed(1)
    theta = torch.randn(VOCABULARY, dtype=torch.float64, generator=generator)
    ref = torch.randn(VOCABULARY, dtype=torch.float64, generator=generator).log_softmax(-1)
    shift = 0.0 if on_policy else 0.3 * torch.randn(VOCABULARY, dtype=torch.float64, generator=generator)
    old = (theta + shift).log_softmax(-1)

    def gradient(loss_of_log_pi: object) -> Tensor:
        logits = theta.clone().requires_grad_()
        loss_of_log_pi(logits.log_softmax(-1)).backward()  # type: ignore[operator]
        assert logits.grad is not None
        return logits.grad

    def expected(estimator: str, weighted: bool) -> Tensor:
        return gradient(lambda log_pi: (old.exp() * kl_loss(log_pi, old, ref, estimator, weighted)).sum())

    kl = exact_kl(theta.log_softmax(-1), ref)
    exact = gradient(lambda log_pi: exact_kl(log_pi, ref))
    for estimator in ("k1", "k3"):
        value = (old.exp() * kl_loss(theta.log_softmax(-1), old, ref, estimator, True)).sum()
        assert value.item() == pytest.approx(kl.item(), rel=1e-9)
        assert (expected(estimator, True) - exact).norm() <= 1e-9 * exact.norm()
    if on_policy:
        pi = theta.log_softmax(-1)
        for weighted in (True, False):
            assert (expected("k2", weighted) - exact).norm() <= 1e-9 * exact.norm()
        assert expected("k1", False).norm() <= 1e-12
        reverse = gradient(lambda log_pi: exact_kl(ref, log_pi))
        assert (expected("k3", False) - reverse).norm() <= 1e-9 * reverse.norm()
        assert (expected("k3", False) - exact).norm() > 0.1 * exact.norm()
        # k2 is biased, little where the policies are near.
        near = pi + 0.02 * torch.randn(VOCABULARY, dtype=torch.float64, generator=generator)
        near = near.log_softmax(-1)
        k2 = (pi.exp() * ESTIMATORS["k2"](near - pi)).sum()
        assert k2.item() == pytest.approx(exact_kl(pi, near).item(), rel=0.05)
        assert k2.item() != pytest.approx(exact_kl(pi, near).item(), rel=1e-9)
        assert bool((ESTIMATORS["k3"](ref - pi) >= 0).all()) and bool((ESTIMATORS["k1"](ref - pi) < 0).any())
    else:
        # π_old weights k2 by sg[r]: Σ π · d²/2, not the KL, with the KL's own gradient.
        assert (expected("k2", True) - exact).norm() <= 1e-9 * exact.norm()
        assert (expected("k3", False) - exact).norm() > 0.1 * exact.norm()
