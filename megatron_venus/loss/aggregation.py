"""Token losses become the loss of the *global* batch: a factor per token, one denominator at the end.

Σ_groups Σ_tokens factor · ℓ / denominator. Factors are known when a group arrives, the denominator when the batch is
closed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_venus.loss.sequences import sequence_sum


def token_factors(aggregation: str, sequence_N: Tensor, like_N: Tensor) -> Tensor:
    """[N]: 1 for each token, or 1 / (its sequence's loss tokens) for the mean over sequences of token means."""
    ones = torch.ones_like(like_N)
    if aggregation != "seq-mean-token-mean":
        return ones
    return ones / sequence_sum(ones, sequence_N)[sequence_N]


def denominator(aggregation: str, *, tokens: int, sequences: int, norm_tokens: int) -> int:
    """What a batch's (or a replica's part's) summed loss is divided by; it adds over parts.

    * `token-mean`: Σℓ / Σm (DAPO)
    * `seq-mean-token-sum`: Σ_i Σ_t ℓ / sequences
    * `seq-mean-token-mean`: Σ_i (Σ_t ℓ / |o_i|) / sequences (GRPO's paper, GSPO)
    * `seq-mean-token-sum-norm`: Σ_i Σ_t ℓ / (sequences · `norm_tokens`), a constant length (Dr.GRPO)

    `tokens` and `sequences` are all that were handed out, also those whose gradient is zero or rejected.
    """
    if aggregation == "token-mean":
        return tokens
    return sequences * (norm_tokens if aggregation == "seq-mean-token-sum-norm" else 1)
