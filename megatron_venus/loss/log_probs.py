"""Log-probs and entropies of loss tokens, in chunks of response positions: [N, vocabulary] never exists whole.

Enters: the model's last hidden states at the rows that predict a loss token, and the output matrix. Leaves: log π of
each target and the distribution's entropy. The vocabulary may be split over a process group: every rank then has its
contiguous part of the matrix, and only four numbers a token are exchanged. Logits of one chunk are alive at a time, in
buffers that all chunks share, and are computed again in the backward pass, save for the last chunk's: the peak does not
grow with the tokens, and what fits in one chunk is computed once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_venus.config import CHUNK_LOGITS


def token_log_probs(
    rows_Nh: Tensor,
    targets_N: Tensor,
    weight_Vh: Tensor,
    temperature: float,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """log π of each target under the tempered distribution, and that distribution's entropy (detached); both [N].

    Logits are `rows_Nh @ weight_Vh.T`, in their dtype. The temperature divides them, as the engine does it before it
    samples and reports log-probs. `group` holds the ranks that share the vocabulary, in order; `weight_Vh` is then this
    rank's part. The rows' gradient is that of this rank's part only: the caller sums it over the ranks.

    The matrix's gradient is summed over the chunks in float32: in `weight_Vh.main_grad`, where Megatron has given the
    parameter one (autograd then gets none), or else in a tensor that is rounded to the matrix's dtype once.
    """
    log_p, entropy = _TokenLogProbs.apply(rows_Nh, targets_N, weight_Vh, temperature, group)
    return log_p, entropy


class _TokenLogProbs(torch.autograd.Function):
    """log softmax(x / τ)[target] = x_target / τ − log Z and H = log Z − Σ p · x / τ, in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        rows_Nh: Tensor,
        targets_N: Tensor,
        weight_Vh: Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
    ) -> tuple[Tensor, Tensor]:
        width = len(weight_Vh)
        local = targets_N - (width * dist.get_rank(group) if group is not None else 0)
        elsewhere = (local < 0) | (local >= width)
        local = local.masked_fill(elsewhere, 0)
        # Of this rank's part, with y = (x − largest) / τ: y_target, Σ e^y and Σ e^y · y.
        largest, chosen, total, mean = torch.empty(4, len(rows_Nh), dtype=torch.float32, device=rows_Nh.device)
        weighted_nV = _buffer(len(rows_Nh), weight_Vh, torch.float32)
        logits_nV = _buffer(len(rows_Nh), weight_Vh, weight_Vh.dtype)
        shifted_nV = logits_nV if logits_nV.dtype == torch.float32 else torch.empty_like(weighted_nV)
        for at, n in _chunks(len(rows_Nh), width):
            logits = torch.mm(rows_Nh[at], weight_Vh.T, out=logits_nV[:n])
            largest[at] = logits.amax(-1)
            shifted = torch.sub(logits, largest[at, None], out=shifted_nV[:n])
            if temperature != 1.0:
                shifted.div_(temperature)
            chosen[at] = shifted.gather(-1, local[at, None])[:, 0]
            total[at] = torch.exp(shifted, out=weighted_nV[:n]).sum(-1)
            mean[at] = shifted.mul_(weighted_nV[:n]).sum(-1)
        largest /= temperature
        top = largest
        if group is not None:
            top = largest.clone()
            dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
            lower = largest - top
            scale = lower.exp()
            chosen = (chosen + lower).masked_fill(elsewhere, 0.0)
            sums = torch.stack([chosen, scale * total, scale * (mean + lower * total)])
            dist.all_reduce(sums, group=group)
            chosen, total, mean = sums
        log_total = total.log()
        ctx.save_for_backward(rows_Nh, weight_Vh, local, elsewhere, largest, top + log_total)
        ctx.weighted_nV = weighted_nV
        ctx.temperature, ctx.main_grad = temperature, getattr(weight_Vh, "main_grad", None)
        entropy = log_total - mean / total
        ctx.mark_non_differentiable(entropy)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None, None]:
        """d log π / dx = (1[target] − p) / τ, times the factor that arrives for the token."""
        rows_Nh, weight_Vh, local, elsewhere, largest, log_z = ctx.saved_tensors
        wants_rows, _, wants_weight, *_ = ctx.needs_input_grad
        rows_grad = torch.empty_like(rows_Nh) if wants_rows else None
        main_grad: Tensor | None = ctx.main_grad
        weight_grad = None
        if wants_weight:
            weight_grad = torch.zeros_like(weight_Vh, dtype=torch.float32) if main_grad is None else main_grad
        factor = gradients[0].float() / ctx.temperature
        targeted = factor.masked_fill(elsewhere, 0.0)
        # As a tensor it widens logits in half precision.
        temperature = factor.new_full((1, 1), ctx.temperature)
        # The last chunk's exponentials, which are overwritten: a second backward pass computes them again.
        gradient_nV, ctx.weighted_nV = ctx.weighted_nV, None
        known = gradient_nV is not None
        if gradient_nV is None:
            gradient_nV = _buffer(len(rows_Nh), weight_Vh, torch.float32)
        half = weight_Vh.dtype != torch.float32
        logits_nV = torch.empty_like(gradient_nV, dtype=weight_Vh.dtype) if half else gradient_nV
        for at, n in reversed(_chunks(len(rows_Nh), len(weight_Vh))):
            logits, gradient = logits_nV[:n], gradient_nV[:n]
            if known:
                gradient.mul_((largest[at, None] - log_z[at, None]).exp())
                known = False
            else:
                tempered = torch.mm(rows_Nh[at], weight_Vh.T, out=logits)
                if ctx.temperature != 1.0:
                    tempered = torch.div(logits, temperature, out=gradient)
                torch.sub(tempered, log_z[at, None], out=gradient).exp_()
            gradient.mul_(-factor[at, None])
            gradient.scatter_add_(-1, local[at, None], targeted[at, None])
            if half:
                logits.copy_(gradient)  # in half precision, as the factors of both products
            if rows_grad is not None:
                torch.mm(logits, weight_Vh, out=rows_grad[at])
            if weight_grad is not None:
                _add_product(weight_grad, logits, gradient, rows_Nh[at])
        if weight_grad is not None:
            weight_grad = weight_grad.to(weight_Vh.dtype) if main_grad is None else None
        return rows_grad, None, weight_grad, None, None


def _chunks(tokens: int, vocabulary: int) -> list[tuple[slice, int]]:
    """Slices of the tokens, and their lengths."""
    step = _chunk_rows(vocabulary)
    return [(slice(start, start + step), min(step, tokens - start)) for start in range(0, tokens, step)]


def _chunk_rows(vocabulary: int) -> int:
    return max(1, CHUNK_LOGITS // vocabulary)


def _buffer(tokens: int, weight_Vh: Tensor, dtype: torch.dtype) -> Tensor:
    """For one chunk."""
    shape = min(tokens, _chunk_rows(len(weight_Vh))), len(weight_Vh)
    return torch.empty(shape, dtype=dtype, device=weight_Vh.device)


def _add_product(total_Vh: Tensor, rounded_nV: Tensor, gradient_nV: Tensor, rows_nh: Tensor) -> None:
    """total += gradientᵀ · rows, in float32. Half precision's factors are `rounded_nV` where the device multiplies them
    into float32, which only CUDA does."""
    if rows_nh.is_cuda and rows_nh.dtype != torch.float32:
        torch.addmm(total_Vh, rounded_nV.T, rows_nh, out_dtype=torch.float32, out=total_Vh)
    else:
        total_Vh.addmm_(gradient_nV.T, rows_nh.float())
