"""How many parameters one actor process holds, by the layout's cuts.

Matrices are cut by tensor parallelism, layers by pipeline stages, experts by expert parallelism; norms and the router
are whole on every process. The vocabulary is not padded: `layout_rules` demands that `tensor` divides it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_venus.architecture import Architecture
from megatron_venus.config import ParallelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class RankParameters:
    """Numbers of parameters of one process of a stage."""

    dense: int
    """All but experts; the optimizer shards them over data · context parallel processes."""
    expert: int
    """Of the experts held here; the optimizer shards them over the processes that hold the same ones."""

    @property
    def total(self) -> int:
        return self.dense + self.expert


def rank_parameters(arch: Architecture, parallel: ParallelConfig, stage: int) -> RankParameters:
    """Of every process of pipeline stage `stage`."""
    tensor, hidden = parallel.tensor, arch.hidden
    query, key = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    layer = (query + 2 * key) * hidden // tensor + query * hidden // tensor + 2 * hidden
    layer += (query + 2 * key) // tensor if arch.qkv_bias else 0
    layer += 2 * arch.head_dim if arch.qk_norm else 0
    layer_experts = 0
    if arch.experts:
        layer += arch.experts * hidden
        layer_experts = arch.experts // parallel.expert * 3 * hidden * arch.expert_feed_forward
    else:
        layer += 3 * hidden * arch.feed_forward // tensor
    layers = arch.layers // parallel.pipeline
    dense, embedding = layers * layer, arch.vocabulary * hidden // tensor
    if stage == 0:
        dense += embedding
    if stage == parallel.pipeline - 1:
        dense += hidden
        # Tied and in one stage it is the embedding itself; another last stage holds a copy.
        dense += embedding if not arch.tied or parallel.pipeline > 1 else 0
    return RankParameters(dense=dense, expert=layers * layer_experts)


def largest_tensor(arch: Architecture) -> int:
    """Parameters of the largest whole Megatron tensor: what a weight sync gathers at once."""
    query, key = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    feed_forward = arch.expert_feed_forward if arch.experts else arch.feed_forward
    return arch.hidden * max(arch.vocabulary, query + 2 * key, 2 * feed_forward)


def whole_parameters(arch: Architecture) -> int:
    """Of the whole model."""
    return rank_parameters(arch, ParallelConfig(), 0).total
