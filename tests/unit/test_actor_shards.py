"""What every tensor-parallel process holds, piece by piece, is together the Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron_venus.adapters import shards
from megatron_venus.weight_map import Architecture, hf_shapes, megatron_from_hf, megatron_shapes

DENSE = Architecture(
    family="qwen2",
    layers=2,
    hidden=8,
    feed_forward=16,
    heads=8,
    kv_heads=4,
    head_dim=3,
    vocabulary=32,
    max_positions=64,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=False,
    qk_norm=False,
    qkv_bias=True,
)
EXPERTS = dataclasses.replace(
    DENSE,
    family="qwen3_moe",
    qk_norm=True,
    qkv_bias=False,
    experts=3,
    experts_per_token=2,
    expert_feed_forward=4,
)


@pytest.mark.parametrize("arch", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_pieces_make_the_checkpoint(arch: Architecture, size: int) -> None:
    weights = {name: torch.randn(shape) for name, shape in hf_shapes(arch).items()}
    made = {name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()}
    for name in megatron_shapes(arch):
        whole = megatron_from_hf(name, weights, arch)
        cut = shards.cut_dim(name) is not None
        for rank in range(size if cut else 1):
            part = shards.part_of(name, whole, rank, size)
            pieces = shards.pieces_of(name, arch, rank, size if cut else 1)
            assert sum(piece.of_part(part).numel() for piece in pieces) == part.numel()
            for piece in pieces:
                target = piece.of_whole(made[piece.tensor])
                assert target.isnan().all(), "nothing is sent twice"
                target.copy_(piece.of_part(part))
    for name, tensor in weights.items():
        assert torch.equal(made[name], tensor), name
