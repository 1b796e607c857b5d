"""Log-probs over a 151,936-token vocabulary on a GPU: right, and of a peak that does not grow with the tokens."""

from __future__ import annotations

import torch

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
    chosen, entropy = token_log_probs(rows, targets, lambda part: part @ weight.T, VOCABULARY, 1.0)
    chosen.sum().backward()
    torch.cuda.synchronize()
    assert 0.0 < entropy.mean().item() < 12.0
    with torch.no_grad():
        few = (rows[:64] @ weight.T).log_softmax(-1).gather(-1, targets[:64, None])[:, 0]
    assert (chosen[:64] - few).abs().max().item() <= 1e-4
    return torch.cuda.max_memory_allocated() - before


def test_peak_is_flat_in_tokens() -> None:
    assert peak_bytes(131_072) <= 1.1 * peak_bytes(8_192)
