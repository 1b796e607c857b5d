"""Log-probs and entropies in chunks, and over a vocabulary split between processes, against the full log-softmax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_venus.loss import log_probs

ROWS, HIDDEN, VOCABULARY = 23, 6, 50


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, output weights, targets, and the factors of the loss Σ factor · log π."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(ROWS, HIDDEN, generator=generator)
    weight = 2 * torch.randn(VOCABULARY, HIDDEN, generator=generator)
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    return rows, weight, targets, torch.randn(ROWS, generator=generator)


def expected(temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """log π, entropy, gradients of rows and weights."""
    rows, weight, targets, factors = problem()
    rows, weight = rows.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (rows @ weight.T / temperature).log_softmax(-1)
    chosen = log_p.gather(-1, targets[:, None])[:, 0]
    (factors.double() * chosen).sum().backward()
    assert rows.grad is not None and weight.grad is not None
    return chosen.detach(), -(log_p.exp() * log_p).sum(-1).detach(), rows.grad, weight.grad


def near(ours: Tensor, reference: Tensor) -> bool:
    return bool((ours - reference).norm() <= 1e-6 * reference.norm())


class LogitsHeld(TorchDispatchMode):
    """Most rows of logits that one matrix product made."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "mm" in str(func) and result.shape[-1] == VOCABULARY:
            self.rows = max(self.rows, len(result))
        return result


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_rows", [100, 23, 5, 1])
@pytest.mark.parametrize("shift", [0.0, 300.0])
def test_chunks(temperature: float, chunk_rows: int, shift: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any chunk gives the same, also where exponentials of the logits themselves would overflow."""
    monkeypatch.setattr(log_probs, "CHUNK_LOGITS", chunk_rows * VOCABULARY)
    rows, weight, targets, factors = problem()
    # One more column adds the shift to every logit.
    rows = torch.cat([rows, torch.full((ROWS, 1), shift)], 1).requires_grad_()
    weight = torch.cat([weight, torch.ones(VOCABULARY, 1)], 1).requires_grad_()
    with LogitsHeld() as held:
        chosen, entropy = log_probs.token_log_probs(rows, targets, weight, temperature)
        assert not entropy.requires_grad
        (factors * chosen).sum().backward()
    assert held.rows == min(chunk_rows, ROWS)
    assert rows.grad is not None and weight.grad is not None
    tolerance = 1e-6 if not shift else 1e-4  # float32 keeps 3e-5 of a logit near 300
    ours = chosen.detach(), entropy, rows.grad[:, :HIDDEN], weight.grad[:, :HIDDEN]
    for mine, reference in zip(ours, expected(temperature), strict=True):
        assert (mine - reference).norm() <= tolerance * reference.norm()


@pytest.mark.parametrize("factor", [0.0, float("nan")])
def test_factors_that_are_zero_or_not_finite(factor: float) -> None:
    """A token without weight adds nothing, and one whose weight is not a number must show."""
    rows, weight, targets, factors = problem()
    factors[3] = factor
    rows.requires_grad_()
    weight.requires_grad_()
    chosen, _ = log_probs.token_log_probs(rows, targets, weight, 1.0)
    (factors * chosen).sum().backward()
    assert rows.grad is not None and weight.grad is not None
    assert torch.equal(rows.grad[3].isnan(), torch.full((HIDDEN,), factor != 0.0))
    assert rows.grad[3].nansum() == 0.0
    assert bool(weight.grad.isnan().all()) == (factor != 0.0)


@pytest.mark.parametrize("megatron", [True, False])
def test_bfloat16_sums_the_matrixs_gradient_in_float32(megatron: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One large term, then many of less than half the sum's last bit in bfloat16: there each would be lost."""
    tokens, vocabulary = 4000, 8
    monkeypatch.setattr(log_probs, "CHUNK_LOGITS", 4 * vocabulary)
    rows = torch.ones(tokens, 1, dtype=torch.bfloat16)
    weight = torch.zeros(vocabulary, 1, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(tokens, dtype=torch.long)
    factors = torch.full((tokens,), 2.0**-10)
    factors[-4:] = 1.0
    if megatron:
        weight.main_grad = torch.full((vocabulary, 1), 0.5)  # type: ignore[attr-defined]
    chosen, _ = log_probs.token_log_probs(rows, targets, weight, 1.0)
    (factors * chosen).sum().backward()
    # Equal logits: (1[target] − 1/8) of all factors.
    expected = (torch.eye(vocabulary)[:, :1] - 1 / vocabulary) * factors.sum()
    if megatron:
        assert weight.grad is None
        ours = weight.main_grad - 0.5  # type: ignore[attr-defined]
        assert (ours - expected).norm() <= 1e-6 * expected.norm()
    else:
        assert weight.grad is not None and weight.grad.dtype == torch.bfloat16
        assert (weight.grad.float() - expected).norm() <= 2**-8 * expected.norm()


def test_a_second_backward_pass_adds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one uses up what the forward pass has left it."""
    monkeypatch.setattr(log_probs, "CHUNK_LOGITS", 7 * VOCABULARY)
    rows, weight, targets, factors = problem()
    rows.requires_grad_()
    weight.requires_grad_()
    chosen, _ = log_probs.token_log_probs(rows, targets, weight, 0.6)
    for _ in range(2):
        (factors * chosen).sum().backward(retain_graph=True)
    assert rows.grad is not None and weight.grad is not None
    assert near(rows.grad / 2, expected(0.6)[2]) and near(weight.grad / 2, expected(0.6)[3])


def test_without_gradient() -> None:
    rows, weight, targets, _ = problem()
    with torch.no_grad():
        chosen, entropy = log_probs.token_log_probs(rows, targets, weight, 0.7)
    assert near(chosen, expected(0.7)[0]) and near(entropy, expected(0.7)[1])


def test_bfloat16_logits_are_summed_in_float32() -> None:
    rows, weight, targets, _ = problem()
    logits = (rows @ weight.T).bfloat16()
    chosen, _ = log_probs.token_log_probs(logits, targets, torch.eye(VOCABULARY).bfloat16(), 1.0)
    assert chosen.dtype == torch.float32
    assert near(chosen, logits.double().log_softmax(-1).gather(-1, targets[:, None])[:, 0])


def part_of_vocabulary(rank: int, ranks: int, store: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    log_probs.CHUNK_LOGITS = 7 * VOCABULARY // ranks
    group: Any = dist.group.WORLD
    results = []
    for temperature in (1.0, 0.6):
        rows, weight, targets, factors = problem()
        rows.requires_grad_()
        mine = weight.chunk(ranks)[rank].clone().requires_grad_()
        chosen, entropy = log_probs.token_log_probs(rows, targets, mine, temperature, group)
        (factors * chosen).sum().backward()
        assert rows.grad is not None and mine.grad is not None
        # Each rank's rows get the gradient of its own part.
        dist.all_reduce(rows.grad)
        results.append((chosen.detach(), entropy, rows.grad, mine.grad))
    torch.save(results, f"{out}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


def test_vocabulary_in_two_parts(tmp_path: Path) -> None:
    mp.spawn(part_of_vocabulary, (2, str(tmp_path / "store"), str(tmp_path / "out")), nprocs=2)
    ranks = [torch.load(f"{tmp_path}/out.{rank}") for rank in range(2)]
    for at, temperature in enumerate((1.0, 0.6)):
        chosen, entropy, rows_grad, weight_grad = expected(temperature)
        for rank in ranks:
            assert near(rank[at][0], chosen) and near(rank[at][1], entropy) and near(rank[at][2], rows_grad)
        assert near(torch.cat([rank[at][3] for rank in ranks]), weight_grad)
