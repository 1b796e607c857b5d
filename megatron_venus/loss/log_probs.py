"""Log-probs and entropies of loss tokens, in chunks of response positions: [T, vocabulary] never exists whole.

Enters: the model's last hidden states at the rows that predict a loss token, and a function from rows to logits.
Leaves: log π of each target and the distribution's entropy. The vocabulary may be split over a process group: then
`logits_of` gives this rank's contiguous part, and only three numbers a token are exchanged. Logits of one chunk are
alive at a time and are computed again in the backward pass, so the peak does not grow with the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_venus.config import CHUNK_LOGITS

LogitsOf = Callable[[Tensor], Tensor]
"""Output rows [n, h] → logits [n, vocabulary], or this rank's part of the vocabulary."""


def token_log_probs(
    rows_Nh: Tensor,
    targets_N: Tensor,
    logits_of: LogitsOf,
    vocabulary: int,
    temperature: float,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor]:
    """log π of each target under the tempered distribution, and that distribution's entropy (detached); both [N].

    The temperature divides the logits, as the engine does it before it samples and reports log-probs. `vocabulary` is
    the width of what `logits_of` returns on this rank; `group` holds the ranks that share the vocabulary, in order.
    """
    chunk = max(1, CHUNK_LOGITS // vocabulary)

    def of_chunk(rows: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        log_p, entropy = _TargetLogProb.apply(logits_of(rows), targets, temperature, group)
        return log_p, entropy

    if len(rows_Nh) <= chunk:
        return of_chunk(rows_Nh, targets_N)
    pieces = zip(rows_Nh.split(chunk), targets_N.split(chunk), strict=True)
    if torch.is_grad_enabled():
        parts = [checkpoint(of_chunk, rows, targets, use_reentrant=False) for rows, targets in pieces]
    else:
        parts = [of_chunk(rows, targets) for rows, targets in pieces]
    return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])


class _TargetLogProb(torch.autograd.Function):
    """log softmax(x / τ)[target] = x_target / τ − log Z and H = log Z − Σ p · x / τ, in float32.

    The gradient is (1[target] − p) / τ. One float32 copy of the chunk is alive in either direction.
    """

    @staticmethod
    def forward(
        ctx: Any, logits_nV: Tensor, targets_n: Tensor, temperature: float, group: dist.ProcessGroup | None
    ) -> tuple[Tensor, Tensor]:
        width = logits_nV.shape[-1]
        first = width * dist.get_rank(group) if group is not None else 0
        local = targets_n - first
        elsewhere = (local < 0) | (local >= width)
        local = local.masked_fill(elsewhere, 0)
        chosen = logits_nV.gather(-1, local[:, None]).squeeze(-1).float().masked_fill(elsewhere, 0.0)
        largest = logits_nV.amax(-1).float()
        if group is not None:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        # x / τ − max / τ, exponentiated in the same buffer; Σ e · x is a product without another [n, V].
        scaled = logits_nV.float() - largest[:, None]
        if temperature != 1.0:
            scaled.div_(temperature)
        weighted = scaled.exp()
        total = weighted.sum(-1)
        mean = torch.bmm(weighted[:, None], scaled[:, :, None]).flatten()
        if group is not None:
            sums = torch.stack([total, mean, chosen])
            dist.all_reduce(sums, group=group)
            total, mean, chosen = sums
        log_z = total.log()
        log_p = (chosen - largest) / temperature - log_z
        ctx.save_for_backward(logits_nV, local, elsewhere, largest / temperature + log_z)
        ctx.temperature = temperature
        entropy = log_z - mean / total
        ctx.mark_non_differentiable(entropy)
        return log_p, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        logits_nV, local, elsewhere, log_z = ctx.saved_tensors
        factor = gradients[0] / ctx.temperature
        gradient = logits_nV.float() if logits_nV.dtype != torch.float32 else logits_nV.clone()
        if ctx.temperature != 1.0:
            gradient.div_(ctx.temperature)
        gradient.sub_(log_z[:, None]).exp_().mul_(-factor[:, None])
        gradient.scatter_add_(-1, local[:, None], factor.masked_fill(elsewhere, 0.0)[:, None])
        return gradient.to(logits_nV.dtype), None, None, None
