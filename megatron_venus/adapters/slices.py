"""A packed batch as one process of a replica sees it: padded where the layout demands it, cut by context parallelism.

Sequence parallelism needs a number of tokens that its processes divide; context parallelism cuts every sequence into
2·C pieces and gives process c the pieces c and 2·C − 1 − c (causal work is then even, and it is what Megatron's rotary
embedding and Transformer Engine expect of the `thd` layout). Padding follows the real tokens of a sequence, or is a
sequence of its own: causal attention never looks at it, and no loss row stands on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_venus.packing import PackedBatch


@dataclass(kw_only=True)
class PackedParams(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a packed batch, with the padded lengths as plain numbers for `PackedSdpa`."""

    lengths: list[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """This process's tokens, and which of the batch's loss rows are among them."""

    input_ids_t: Tensor
    position_ids_t: Tensor
    params: PackedParams
    rows_n: Tensor
    """Local row whose output predicts the loss token."""
    places_n: Tensor
    """Index of that loss token among the batch's N."""


def slice_of(batch: PackedBatch, *, context: int, context_rank: int, sequence_parts: int) -> Slice:
    """The part of `batch` that process `context_rank` of `context` computes (before sequence parallelism)."""
    unit = 2 * context if context > 1 else 1
    lengths = [-(-length // unit) * unit for length in batch.lengths]
    filler = -sum(lengths) % (unit * sequence_parts)
    if filler:
        lengths.append(filler)
    device = batch.input_ids_T.device
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0, dtype=torch.int32)
    params = PackedParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        lengths=lengths,
    )
    if lengths == batch.lengths and context == 1:
        places = torch.arange(len(batch.rows_N), device=device)
        return Slice(
            input_ids_t=batch.input_ids_T,
            position_ids_t=batch.position_ids_T,
            params=params,
            rows_n=batch.rows_N,
            places_n=places,
        )
    # Where each real token stands in the padded row, and which padded tokens this process holds, in its order.
    padded_of_T = torch.cat(
        [
            start + torch.arange(length, device=device)
            for start, length in zip(offsets.tolist(), batch.lengths, strict=False)
        ]
    )
    held = torch.cat(
        [
            start + pieces(length, context, context_rank).to(device)
            for start, length in zip(offsets.tolist(), lengths, strict=False)
        ]
    )
    total = sum(lengths)
    ids, positions = (torch.zeros(total, dtype=torch.long, device=device) for _ in range(2))
    ids[padded_of_T], positions[padded_of_T] = batch.input_ids_T, batch.position_ids_T
    local_of_padded = torch.full((total,), -1, dtype=torch.long, device=device)
    local_of_padded[held] = torch.arange(len(held), device=device)
    rows = local_of_padded[padded_of_T[batch.rows_N]]
    places = (rows >= 0).nonzero()[:, 0]
    return Slice(
        input_ids_t=ids[held],
        position_ids_t=positions[held],
        params=params,
        rows_n=rows[places],
        places_n=places,
    )


def pieces(length: int, context: int, context_rank: int) -> Tensor:
    """Positions of a sequence of `length` tokens that process `context_rank` of `context` holds, in its order."""
    if context == 1:
        return torch.arange(length)
    size = length // (2 * context)
    first, second = context_rank * size, (2 * context - 1 - context_rank) * size
    return torch.cat([torch.arange(first, first + size), torch.arange(second, second + size)])
