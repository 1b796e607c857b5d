"""Local layers for what Megatron's own CPU ones refuse: packed sequences, context and sequence parallelism.

They take the places of `DotProductAttention` and the norms in the local layer spec where Transformer Engine cannot run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from envclient.base.errors import InvariantError
from megatron_venus.adapters.slices import pieces


class PackedSdpa(MegatronModule):  # type: ignore[misc]
    """Core attention on torch's SDPA: one causal block per sequence of a `thd` batch; grouped queries, no dropout.

    Under context parallelism keys and values of all processes are gathered, and each process's queries look at those
    that precede them. Nothing is ever [T, T]: torch's causal kernel works in blocks.
    """

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **kwargs: Any) -> None:
        super().__init__(config=config)
        self.scale = kwargs.get("softmax_scale")
        self.context = config.context_parallel_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query [T, heads, d], key and value [T, kv heads, d] → [T, heads · d]."""
        if packed_seq_params is None or attention_bias is not None:
            raise InvariantError("PackedSdpa takes packed sequences without attention bias")
        lengths = packed_seq_params.lengths
        if self.context > 1:
            return self._across_processes(query, key, value, lengths)
        heads_first = (tensor.transpose(0, 1)[None].split(lengths, dim=2) for tensor in (query, key, value))
        out = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)[0].transpose(
                0, 1
            )
            for q, k, v in zip(*heads_first, strict=True)
        ]
        return torch.cat(out).flatten(1)

    def _across_processes(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        group = parallel_state.get_context_parallel_group()
        # [T, kv heads, 2·d] of all processes, one after the other; the backward pass sums and scatters.
        gathered = gather_from_sequence_parallel_region(torch.cat([key, value], -1), group=group)
        by_process = gathered.view(self.context, -1, *gathered.shape[1:])
        out, start = [], 0
        for length in lengths:
            stop = start + length // self.context
            order = torch.cat([pieces(length, self.context, rank) for rank in range(self.context)])
            # Row i of the gathered sequence stands at position order[i].
            whole = by_process[:, start:stop].flatten(0, 1)[order.argsort()]
            k, v = (part.transpose(0, 1)[None] for part in whole.chunk(2, -1))
            mine = pieces(length, self.context, group.rank()).to(query.device)
            # Queries at their places among empty ones: plain causal attention then, whose memory is linear in the
            # length, where a mask would be [length / C, length]. The empty rows are computed for nothing.
            placed = query.new_zeros(length, *query.shape[1:]).index_copy(0, mine, query[start:stop])
            q = placed.transpose(0, 1)[None]
            done = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            out.append(done[0].transpose(0, 1)[mine])
            start = stop
        return torch.cat(out).flatten(1)


class RmsNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, told about sequence parallelism: its gradient is then a sum over tensor-parallel processes."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
