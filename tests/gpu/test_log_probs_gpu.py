"""Log-probs over a 151,936-token vocabulary on a GPU: right, and of a peak that does not grow with the tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_venus.loss import log_probs
from megatron_venus.loss.log_probs import token_log_probs

VOCABULARY, HIDDEN = 151_936, 16


def peak_bytes(tokens: int) -> int:
    """Device memory beyond inputs and gradients, forward and backward."""
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(tokens, HIDDEN, device="cuda", generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, device="cuda", generator=generator).requires_grad_()
    rows.grad, weight.grad = torch.zeros_like(rows), torch.zeros_like(weight)
    targets = torch.randint(0, VOCABULARY, (tokens,), device="cuda", generator=generator)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    chosen, entropy = token_log_probs(rows, targets, weight, 1.0)
    chosen.sum().backward()
    torch.cuda.synchronize()
    assert 0.0 < entropy.mean().item() < 12.0
    with torch.no_grad():
        few = (rows[:64] @ weight.T).log_softmax(-1).gather(-1, targets[:64, None])[:, 0]
    assert (chosen[:64] - few).abs().max().item() <= 1e-4
    return torch.cuda.max_memory_allocated() - before


def test_peak_is_flat_in_tokens() -> None:
    assert peak_bytes(131_072) <= 1.1 * peak_bytes(8_192)


def main_grad(chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Of a bfloat16 output matrix."""
    tokens, vocabulary, hidden = 4096, 512, 64
    monkeypatch.setattr(log_probs, "CHUNK_LOGITS", chunk_rows * vocabulary)
    generator = torch.Generator("cuda").manual_seed(0)
    rows = torch.randn(tokens, hidden, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = torch.randn(vocabulary, hidden, device="cuda", generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device="cuda", generator=generator)
    summed = torch.zeros(vocabulary, hidden, device="cuda")
    weight.main_grad = summed  # type: ignore[attr-defined]
    token_log_probs(rows, targets, weight, 1.0)[0].sum().backward()
    assert weight.grad is None
    # The same in float32: three roundings to bfloat16 of 2⁻⁹ each lie between.
    exact_rows, exact = rows.detach().float(), weight.detach().float().requires_grad_()
    token_log_probs(exact_rows, targets, exact, 1.0)[0].sum().backward()
    assert exact.grad is not None
    assert (summed - exact.grad).norm() <= 0.02 * exact.grad.norm()
    return summed


def test_half_precision_sums_the_matrixs_gradient_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any chunk leaves the same; summed in bfloat16 it would not."""
    whole, chunked = main_grad(10_000, monkeypatch), main_grad(16, monkeypatch)
    assert (chunked - whole).norm() <= 1e-4 * whole.norm()
