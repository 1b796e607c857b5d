"""Core attention on torch's SDPA that accepts packed sequences: what Megatron's own CPU attention refuses.

Takes the place of `DotProductAttention` in the local layer spec where Transformer Engine cannot run. Causal, grouped
queries, no dropout, no context parallelism.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from envclient.base.errors import InvariantError


class PackedSdpa(MegatronModule):  # type: ignore[misc]
    """One causal block per sequence of a `thd` batch."""

    def __init__(self, config: Any, layer_number: int, attn_mask_type: Any, attention_type: str, **kwargs: Any) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise InvariantError("PackedSdpa does not run under context parallelism")
        self.scale = kwargs.get("softmax_scale")

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
        heads_first = (tensor.transpose(0, 1)[None].split(lengths, dim=2) for tensor in (query, key, value))
        out = [
            F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)[0].transpose(
                0, 1
            )
            for q, k, v in zip(*heads_first, strict=True)
        ]
        return torch.cat(out).flatten(1)
