"""Names and shapes: one Qwen3 model as Hugging Face, Megatron-core and the engine each lay it out.

Enters: a Hugging Face `config.json` or tensors under one layout's names. Leaves: the same tensors under another's.
Called by the actor (load, export, weight sync), by checkpoints and by `ckpt_tools`. Pure torch: no Megatron import, no
process group; a tensor here is always whole, never a parallel rank's part.

Layouts of one dense layer (h hidden, H query heads, G key-value heads, d head size, f feed-forward):
* Hugging Face: q [H·d, h], k and v [G·d, h], gate and up [f, h], every norm by itself.
* Megatron: `linear_qkv` holds, per key-value group, its H/G query heads, then its k, then its v; `linear_fc1` is gate
  over up; Transformer Engine spells the fused norms `linear_qkv.layer_norm_weight` and `linear_fc1.layer_norm_weight`.
* SGLang: `qkv_proj` is q over k over v, `gate_up_proj` is gate over up; zero rows fill the vocabulary up to 64s.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from envclient.base.errors import ConfigError, InvariantError


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shape of a dense Qwen3 model; everything that the three layouts need to know."""

    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int
    rope_theta: float
    norm_eps: float
    tied: bool
    """The output layer is the embedding, transposed; then there is no `lm_head.weight`."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str) -> Architecture:
        """Of the parsed `config.json` of `source`.

        Raises:
            ConfigError: another architecture, or a feature (rope scaling, sliding window, biases) that we do not build.
        """

        def refuse(field: str, value: object) -> ConfigError:
            return ConfigError(
                f"model {source}: config.json {field} = {value!r} is not supported", "use a dense Qwen3 model"
            )

        if config.get("model_type") != "qwen3":
            raise refuse("model_type", config.get("model_type"))
        # transformers 5 moved rope_theta and rope_scaling into rope_parameters.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise refuse("rope type", kind)
        for field in ("attention_bias", "use_sliding_window"):
            if config.get(field):
                raise refuse(field, config[field])
        if config.get("hidden_act", "silu") != "silu":
            raise refuse("hidden_act", config["hidden_act"])
        try:
            return cls(
                layers=config["num_hidden_layers"],
                hidden=config["hidden_size"],
                feed_forward=config["intermediate_size"],
                heads=config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
                vocabulary=config["vocab_size"],
                max_positions=config["max_position_embeddings"],
                rope_theta=float(config.get("rope_theta") or rope["rope_theta"]),
                norm_eps=config["rms_norm_eps"],
                tied=bool(config.get("tie_word_embeddings", False)),
            )
        except KeyError as error:
            raise ConfigError(f"model {source}: config.json has no {error}", "use a complete checkpoint") from None


def read_architecture(folder: Path) -> Architecture:
    """Architecture of the Hugging Face checkpoint in `folder`.

    Raises:
        ConfigError: no such folder or config, or an architecture we do not build.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"model.path {str(folder)!r} has no config.json", "name the folder of a Hugging Face checkpoint"
        )
    return Architecture.from_hf(json.loads(path.read_text()), str(folder))


# (Megatron's name in a layer, Hugging Face's) of the tensors that both hold alike.
_ALIKE = (
    ("input_layernorm.weight", "input_layernorm.weight"),
    ("self_attention.q_layernorm.weight", "self_attn.q_norm.weight"),
    ("self_attention.k_layernorm.weight", "self_attn.k_norm.weight"),
    ("self_attention.linear_proj.weight", "self_attn.o_proj.weight"),
    ("pre_mlp_layernorm.weight", "post_attention_layernorm.weight"),
    ("mlp.linear_fc2.weight", "mlp.down_proj.weight"),
)
_ALIKE_TO_HF = dict(_ALIKE)
_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_TE_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


def _split_name(name: str) -> tuple[str, str]:
    """(Hugging Face prefix of the layer, Megatron's name inside it) of a layer's parameter."""
    match = _LAYER.fullmatch(name)
    if match is None:
        raise InvariantError(f"Megatron parameter {name!r} has no place in the weight map")
    inner = match[2]
    return f"model.layers.{match[1]}.", _TE_NAMES.get(inner, inner)


def hf_from_megatron(name: str, tensor: Tensor, arch: Architecture) -> dict[str, Tensor]:
    """The Hugging Face tensors that Megatron parameter `name` holds (views where the layouts allow).

    Also right for anything shaped like the parameter, such as its gradient.
    """
    if name in _TOP:
        return {_TOP[name]: tensor}
    prefix, inner = _split_name(name)
    if inner == "self_attention.linear_qkv.weight":
        q_rows = arch.heads // arch.kv_heads * arch.head_dim
        grouped = tensor.view(arch.kv_heads, q_rows + 2 * arch.head_dim, arch.hidden)
        parts = grouped.split([q_rows, arch.head_dim, arch.head_dim], dim=1)
        return {
            f"{prefix}self_attn.{letter}_proj.weight": part.reshape(-1, arch.hidden)
            for letter, part in zip("qkv", parts, strict=True)
        }
    if inner == "mlp.linear_fc1.weight":
        gate, up = tensor.chunk(2, dim=0)
        return {f"{prefix}mlp.gate_proj.weight": gate, f"{prefix}mlp.up_proj.weight": up}
    if inner not in _ALIKE_TO_HF:
        raise InvariantError(f"Megatron parameter {name!r} has no place in the weight map")
    return {prefix + _ALIKE_TO_HF[inner]: tensor}


def megatron_from_hf(name: str, weights: Mapping[str, Tensor], arch: Architecture) -> Tensor:
    """Megatron parameter `name` made of the Hugging Face `weights`; the inverse of `hf_from_megatron`."""
    if name in _TOP:
        return weights[_TOP[name]]
    prefix, inner = _split_name(name)
    if inner == "self_attention.linear_qkv.weight":
        q, k, v = (
            weights[f"{prefix}self_attn.{letter}_proj.weight"].view(arch.kv_heads, -1, arch.hidden) for letter in "qkv"
        )
        return torch.cat([q, k, v], dim=1).reshape(-1, arch.hidden)
    if inner == "mlp.linear_fc1.weight":
        return torch.cat([weights[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")])
    return weights[prefix + _ALIKE_TO_HF[inner]]


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face checkpoint with its shape, in the model's order."""
    a = arch
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocabulary, a.hidden)}
    for layer in range(a.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (a.heads * a.head_dim, a.hidden),
            prefix + "self_attn.k_proj.weight": (a.kv_heads * a.head_dim, a.hidden),
            prefix + "self_attn.v_proj.weight": (a.kv_heads * a.head_dim, a.hidden),
            prefix + "self_attn.o_proj.weight": (a.hidden, a.heads * a.head_dim),
            prefix + "self_attn.q_norm.weight": (a.head_dim,),
            prefix + "self_attn.k_norm.weight": (a.head_dim,),
            prefix + "mlp.gate_proj.weight": (a.feed_forward, a.hidden),
            prefix + "mlp.up_proj.weight": (a.feed_forward, a.hidden),
            prefix + "mlp.down_proj.weight": (a.hidden, a.feed_forward),
            prefix + "input_layernorm.weight": (a.hidden,),
            prefix + "post_attention_layernorm.weight": (a.hidden,),
        }
    shapes["model.norm.weight"] = (a.hidden,)
    if not a.tied:
        shapes["lm_head.weight"] = (a.vocabulary, a.hidden)
    return shapes


def check_complete(weights: Mapping[str, Tensor], arch: Architecture, source: str) -> None:
    """Refuse a checkpoint that lacks a tensor, has one too many, or one of another shape.

    A tied checkpoint may carry a copy of the embedding as `lm_head.weight`.

    Raises:
        ConfigError: names the tensor.
    """
    expected = hf_shapes(arch)
    extra = weights.keys() - expected.keys() - ({"lm_head.weight"} if arch.tied else set())
    for name in sorted(extra):
        raise ConfigError(f"model {source}: tensor {name!r} is unknown", "the checkpoint does not fit its config.json")
    for name, shape in expected.items():
        if name not in weights:
            raise ConfigError(f"model {source}: tensor {name!r} is missing", "use a complete checkpoint")
        if tuple(weights[name].shape) != shape:
            raise ConfigError(
                f"model {source}: tensor {name!r} has shape {tuple(weights[name].shape)}, not {shape}",
                "the checkpoint does not fit its config.json",
            )


_ENGINE_VOCABULARY_STEP = 64
"""SGLang's DEFAULT_VOCAB_PADDING_SIZE."""


def engine_name(hf_name: str) -> str:
    """Name of the engine parameter that holds (perhaps as one of several parts) the Hugging Face tensor `hf_name`."""
    for part, fused in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("gate", "gate_up"), ("up", "gate_up")):
        if hf_name.endswith(f".{part}_proj.weight"):
            return hf_name.removesuffix(f"{part}_proj.weight") + f"{fused}_proj.weight"
    return hf_name


def engine_tensors(weights: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """The parameters a one-rank engine must hold after loading Hugging Face `weights`, under the engine's names."""
    parts: dict[str, list[Tensor]] = {}
    order = {"q_proj": 0, "k_proj": 1, "v_proj": 2, "gate_proj": 0, "up_proj": 1}
    for name, tensor in sorted(weights, key=lambda item: order.get(item[0].split(".")[-2], 0)):
        parts.setdefault(engine_name(name), []).append(tensor)
    whole = {name: tensors[0] if len(tensors) == 1 else torch.cat(tensors) for name, tensors in parts.items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in whole and (missing := -len(whole[name]) % _ENGINE_VOCABULARY_STEP):
            whole[name] = torch.nn.functional.pad(whole[name], (0, 0, 0, missing))
    return whole


def checksum(tensor: Tensor) -> str:
    """blake2b (32 bytes) of the tensor's contiguous raw bytes, in hex; equal in actor, engine and manifest."""
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(memoryview(raw), digest_size=32).hexdigest()
