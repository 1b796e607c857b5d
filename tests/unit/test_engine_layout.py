"""What every rank of an engine must hold, against tensors put together by hand; the real engine is in numerics."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from envclient.base.errors import InvariantError
from megatron_venus.architecture import Architecture
from megatron_venus.engine_digests import EngineDigests
from megatron_venus.weight_map import checksum, hf_shapes
from rollout.engine_layout import EngineLayout, messages_of, place_of, view_in

DENSE = Architecture(
    layers=1,
    hidden=8,
    feed_forward=16,
    heads=4,
    kv_heads=2,
    head_dim=3,
    vocabulary=70,
    max_positions=64,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=False,
)
EXPERTS = dataclasses.replace(DENSE, family="qwen3_moe", experts=3, experts_per_token=2, expert_feed_forward=4)
LAYER = "model.layers.0."


def random_weights(arch: Architecture) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=random) for name, shape in hf_shapes(arch).items()}


def layout_of(arch: Architecture, ranks: int) -> EngineLayout:
    return EngineLayout(kv_heads=arch.kv_heads, experts=arch.experts, ranks=ranks)


def by_hand(weights: dict[str, Tensor], rank: int, ranks: int) -> dict[str, Tensor]:
    """SGLang's parameters at a rank: heads, features, columns and rows of the vocabulary picked one by one."""

    def rows(name: str, each: int, count: int, first: int) -> Tensor:
        return torch.cat([weights[name][each * index : each * (index + 1)] for index in range(first, first + count)])

    def halves(prefix: str, features: int) -> list[Tensor]:
        mine = features // ranks
        return [rows(f"{prefix}{half}_proj.weight", 1, mine, mine * rank) for half in ("gate", "up")]

    def columns(name: str) -> Tensor:
        width = weights[name].shape[1] // ranks
        return weights[name][:, width * rank : width * (rank + 1)]

    attention = LAYER + "self_attn."
    heads, kv_heads = 4 // ranks, max(1, 2 // ranks)
    kv_first = rank * kv_heads if ranks <= 2 else rank // (ranks // 2)
    held = {
        attention + "qkv_proj.weight": torch.cat(
            [
                rows(attention + "q_proj.weight", 3, heads, heads * rank),
                rows(attention + "k_proj.weight", 3, kv_heads, kv_first),
                rows(attention + "v_proj.weight", 3, kv_heads, kv_first),
            ]
        ),
        attention + "o_proj.weight": columns(attention + "o_proj.weight"),
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        filled = torch.cat([weights[name], torch.zeros(58, 8)])
        held[name] = filled[128 // ranks * rank : 128 // ranks * (rank + 1)]
    if LAYER + "mlp.gate.weight" in weights:
        experts = [f"{LAYER}mlp.experts.{number}." for number in range(3)]
        held[LAYER + "mlp.experts.w13_weight"] = torch.stack([torch.cat(halves(prefix, 4)) for prefix in experts])
        held[LAYER + "mlp.experts.w2_weight"] = torch.stack(
            [columns(prefix + "down_proj.weight") for prefix in experts]
        )
    else:
        held[LAYER + "mlp.gate_up_proj.weight"] = torch.cat(halves(LAYER + "mlp.", 16))
        held[LAYER + "mlp.down_proj.weight"] = columns(LAYER + "mlp.down_proj.weight")
    whole = ["norm", "mlp.gate.weight"]
    return held | {name: tensor for name, tensor in weights.items() if any(part in name for part in whole)}


@pytest.mark.parametrize("arch", [DENSE, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank(arch: Architecture, ranks: int) -> None:
    """With four ranks the two key-value heads are held twice."""
    weights = random_weights(arch)
    layout = layout_of(arch, ranks)
    digests = EngineDigests(layout)
    for name, tensor in weights.items():
        digests.add(name, tensor)
    for rank, found in enumerate(digests.finish()):
        expected = by_hand(weights, rank, ranks)
        assert found == {name: checksum(tensor) for name, tensor in expected.items()}
        shapes = layout.shapes([(name, tuple(tensor.shape)) for name, tensor in weights.items()])
        assert shapes == {name: tuple(tensor.shape) for name, tensor in expected.items()}


def test_order_and_completeness_are_checked() -> None:
    weights = random_weights(EXPERTS)
    digests = EngineDigests(layout_of(EXPERTS, 1))
    up = f"{LAYER}mlp.experts.0.up_proj.weight"
    with pytest.raises(InvariantError, match="out of the order"):
        digests.add(up, weights[up])
    digests.add(up.replace("up_proj", "gate_proj"), weights[up.replace("up_proj", "gate_proj")])
    digests.add(up, weights[up])
    with pytest.raises(InvariantError, match=r"w13_weight' has 6 parts, 2 came"):
        digests.finish()


def test_vocabulary_that_the_ranks_do_not_divide() -> None:
    """SGLang on CPU fills 70 rows up to 192 for three ranks (64 and 128 are no multiples of 3)."""
    layout = layout_of(DENSE, 3)
    assert layout.shapes([("lm_head.weight", (70, 8))]) == {"lm_head.weight": (64, 8)}
    tensor = torch.randn(70, 8)
    assert [len(tensor[layout.part("lm_head.weight", (70, 8), rank)]) for rank in range(3)] == [64, 6, 0]
    assert [layout.filling("lm_head.weight", (70, 8), rank) for rank in range(3)] == [0, 58, 64]


@pytest.mark.parametrize("arch", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_where_a_tensor_lies(arch: Architecture) -> None:
    """In an engine of one rank every tensor can be received in place."""
    weights = random_weights(arch)
    params = by_hand(weights, 0, 1)
    for name, tensor in weights.items():
        view = view_in(params[place_of(name, arch.experts).param], name, tuple(tensor.shape))
        assert torch.equal(view, tensor) and view.is_contiguous(), name


def test_messages() -> None:
    """Large tensors alone, small neighbours together, everything once and in order."""
    large, small = 2_000_000, 10
    assert messages_of([small, small, large, large, small, large, small, small]) == [
        (0, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 8)
    ]  # fmt: skip
