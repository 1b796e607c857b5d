"""The layouts of one model: round trips, and checkpoints that are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from envclient.base.errors import ConfigError, InvariantError
from megatron_venus import architecture, weight_map
from megatron_venus.architecture import Architecture

ARCH = Architecture(
    layers=2,
    hidden=8,
    feed_forward=12,
    heads=4,
    kv_heads=2,
    head_dim=3,
    vocabulary=70,
    max_positions=64,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=False,
)
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "vocab_size": 70,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
INNER = [
    "input_layernorm.weight",
    "self_attention.linear_qkv.weight",
    "self_attention.q_layernorm.weight",
    "self_attention.k_layernorm.weight",
    "self_attention.linear_proj.weight",
    "pre_mlp_layernorm.weight",
    "mlp.linear_fc1.weight",
    "mlp.linear_fc2.weight",
]
FUSED_NORMS = {
    "input_layernorm.weight": "self_attention.linear_qkv.layer_norm_weight",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.layer_norm_weight",
}


def random_weights(arch: Architecture) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(shape) for name, shape in weight_map.hf_shapes(arch).items()}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("transformer_engine", [True, False])
def test_round_trip(tied: bool, transformer_engine: bool) -> None:
    arch = dataclasses.replace(ARCH, tied=tied)
    weights = random_weights(arch)
    inner = [FUSED_NORMS.get(name, name) if transformer_engine else name for name in INNER]
    names = [f"decoder.layers.{layer}.{name}" for layer in range(2) for name in inner]
    names += ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight"]
    names += [] if tied else ["output_layer.weight"]
    back: dict[str, torch.Tensor] = {}
    for name in names:
        back |= weight_map.hf_from_megatron(name, weight_map.megatron_from_hf(name, weights, arch), arch)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


def test_query_heads_stand_with_their_key_and_value() -> None:
    weights = random_weights(ARCH)
    fused = weight_map.megatron_from_hf("decoder.layers.1.self_attention.linear_qkv.weight", weights, ARCH)
    q, k, v = (weights[f"model.layers.1.self_attn.{letter}_proj.weight"] for letter in "qkv")
    expected = torch.cat([q[:6], k[:3], v[:3], q[6:], k[3:], v[3:]])
    assert torch.equal(fused, expected)


def test_checksum_sees_every_bit_and_no_stride() -> None:
    tensor = torch.randn(6, 4)
    value = weight_map.checksum(tensor)
    assert weight_map.checksum(tensor.t().contiguous().t()) == value
    assert weight_map.checksum(tensor.to(torch.bfloat16)) != value
    changed = tensor.clone()
    changed[3, 1] = torch.nextafter(changed[3, 1], torch.tensor(9.0))
    assert weight_map.checksum(changed) != value


def test_reads_both_spellings_of_rope(tmp_path: Path) -> None:
    old = {key: value for key, value in CONFIG.items() if key != "rope_parameters"} | {"rope_theta": 1e4}
    for config in (CONFIG, old):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert architecture.read_architecture(tmp_path) == ARCH


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type = 'llama'"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "llama3"}}, "rope type = 'llama3'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_other_architectures_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ConfigError, match=message):
        architecture.read_architecture(tmp_path)


def test_incomplete_checkpoints_are_refused(tmp_path: Path) -> None:
    weights = random_weights(ARCH)
    weight_map.check_complete(weights, ARCH, "x")
    lacking = {name: tensor for name, tensor in weights.items() if name != "model.norm.weight"}
    with pytest.raises(ConfigError, match=r"'model\.norm\.weight' is missing"):
        weight_map.check_complete(lacking, ARCH, "x")
    with pytest.raises(ConfigError, match="'stranger' is unknown"):
        weight_map.check_complete(weights | {"stranger": torch.zeros(1)}, ARCH, "x")
    with pytest.raises(ConfigError, match=r"has shape \(9,\), not \(8,\)"):
        weight_map.check_complete(weights | {"model.norm.weight": torch.zeros(9)}, ARCH, "x")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        architecture.read_architecture(tmp_path)
    with pytest.raises(InvariantError, match="no place"):
        weight_map.hf_from_megatron("decoder.layers.0.mlp.router.weight", torch.zeros(1), ARCH)
