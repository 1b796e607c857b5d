"""Names and shapes: one model as Hugging Face and Megatron-core lay it out (the engine's: `rollout.engine_layout`).

Enters: a Hugging Face `config.json` or tensors under one layout's names. Leaves: the same tensors under another's.
Called by the actor (load, export, weight sync), by checkpoints and by `ckpt_tools`. Pure torch: no Megatron import, no
process group; a tensor here is always whole, never a parallel rank's part. Known: Qwen3 (dense and MoE), Qwen2.5
(query, key and value biases, no head norms) and Llama 3 (neither).

Layouts of one dense layer (h hidden, H query heads, G key-value heads, d head size, f feed-forward):
* Hugging Face: q [H·d, h], k and v [G·d, h], gate and up [f, h], every norm by itself.
* Megatron: `linear_qkv` holds, per key-value group, its H/G query heads, then its k, then its v; `linear_fc1` is gate
  over up; Transformer Engine spells the fused norms `linear_qkv.layer_norm_weight` and `linear_fc1.layer_norm_weight`.
An expert is a small feed-forward of its own, in both layouts. So every Megatron parameter is a sequence of whole rows
of Hugging Face tensors: `row_runs` says which, and all else follows from it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from envclient.base.checksum import checksum as raw_checksum
from envclient.base.errors import ConfigError, InvariantError
from megatron_venus.architecture import Architecture

# (Megatron's name in a layer, Hugging Face's) of the tensors that both hold alike.
_ALIKE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
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
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12])\.weight")
_GROUPED_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.weight(\d+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """Consecutive rows of a Hugging Face tensor (numbers, where the tensor has one dimension)."""

    tensor: str
    start: int
    rows: int


def row_runs(name: str, arch: Architecture) -> list[Run]:
    """What Megatron parameter `name` holds, from its first row to its last; runs of one tensor ascend."""
    a = arch
    if name in _TOP:
        return [Run(tensor=_TOP[name], start=0, rows=a.hidden if "norm" in name else a.vocabulary)]
    match = _LAYER.fullmatch(name)
    if match is None:
        raise InvariantError(f"Megatron parameter {name!r} has no place in the weight map")
    prefix, inner = f"model.layers.{match[1]}.", _TE_NAMES.get(match[2], match[2])
    inner = _GROUPED_EXPERT.sub(r"mlp.experts.local_experts.\2.\1.weight", inner)
    feed_forward = a.feed_forward
    if a.experts and (expert := _EXPERT.fullmatch(inner)):
        prefix += f"mlp.experts.{expert[1]}."
        inner, feed_forward = f"mlp.{expert[2]}.weight", a.expert_feed_forward
        if expert[2] == "linear_fc2":
            return [Run(tensor=prefix + "down_proj.weight", start=0, rows=a.hidden)]
    elif inner == "mlp.linear_fc1.weight":
        prefix += "mlp."
    if inner in ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.bias"):
        kind = inner.rpartition(".")[2]
        rows = {"q": a.heads // a.kv_heads * a.head_dim, "k": a.head_dim, "v": a.head_dim}
        return [
            Run(tensor=f"{prefix}self_attn.{letter}_proj.{kind}", start=group * rows[letter], rows=rows[letter])
            for group in range(a.kv_heads)
            for letter in "qkv"
        ]
    if inner == "mlp.linear_fc1.weight":
        return [Run(tensor=f"{prefix}{part}_proj.weight", start=0, rows=feed_forward) for part in ("gate", "up")]
    hf_name = prefix + _ALIKE.get(inner, "")
    if inner not in _ALIKE or hf_name not in _shapes(arch):
        raise InvariantError(f"Megatron parameter {name!r} has no place in the weight map")
    return [Run(tensor=hf_name, start=0, rows=_shapes(arch)[hf_name][0])]


def hf_from_megatron(name: str, tensor: Tensor, arch: Architecture) -> dict[str, Tensor]:
    """The Hugging Face tensors that Megatron parameter `name` holds (views where the layouts allow).

    Also right for anything shaped like the parameter, such as its gradient.
    """
    runs = row_runs(name, arch)
    parts: dict[str, list[Tensor]] = {}
    for run, part in zip(runs, tensor.split([run.rows for run in runs]), strict=True):
        parts.setdefault(run.tensor, []).append(part)
    return {hf_name: whole[0] if len(whole) == 1 else torch.cat(whole) for hf_name, whole in parts.items()}


def megatron_from_hf(name: str, weights: Mapping[str, Tensor], arch: Architecture) -> Tensor:
    """Megatron parameter `name` made of the Hugging Face `weights`; the inverse of `hf_from_megatron`."""
    parts = [weights[run.tensor][run.start : run.start + run.rows] for run in row_runs(name, arch)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def megatron_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every Megatron parameter (names of the local layers) with its whole shape, in the model's order."""
    inner = ["input_layernorm.weight", "self_attention.linear_qkv.weight"]
    inner += ["self_attention.linear_qkv.bias"] if arch.qkv_bias else []
    inner += ["self_attention.q_layernorm.weight", "self_attention.k_layernorm.weight"] if arch.qk_norm else []
    inner += ["self_attention.linear_proj.weight", "pre_mlp_layernorm.weight"]
    if arch.experts:
        parts = [f"mlp.experts.local_experts.{n}.linear_fc{i}.weight" for n in range(arch.experts) for i in (1, 2)]
        inner += ["mlp.router.weight", *parts]
    else:
        inner += ["mlp.linear_fc1.weight", "mlp.linear_fc2.weight"]
    names = ["embedding.word_embeddings.weight"]
    names += [f"decoder.layers.{layer}.{part}" for layer in range(arch.layers) for part in inner]
    names += ["decoder.final_layernorm.weight"] + ([] if arch.tied else ["output_layer.weight"])
    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        runs = row_runs(name, arch)
        shapes[name] = (sum(run.rows for run in runs), *_shapes(arch)[runs[0].tensor][1:])
    return shapes


def hf_shapes(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Every tensor of the Hugging Face checkpoint with its shape, in the model's order."""
    return dict(_shapes(arch))


@functools.cache
def _shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocabulary, a.hidden)}
    q_rows, kv_rows = a.heads * a.head_dim, a.kv_heads * a.head_dim

    def feed_forward(prefix: str, size: int) -> None:
        for part in ("gate", "up"):
            shapes[f"{prefix}{part}_proj.weight"] = (size, a.hidden)
        shapes[f"{prefix}down_proj.weight"] = (a.hidden, size)

    for layer in range(a.layers):
        prefix = f"model.layers.{layer}."
        for letter, rows in (("q", q_rows), ("k", kv_rows), ("v", kv_rows)):
            shapes[f"{prefix}self_attn.{letter}_proj.weight"] = (rows, a.hidden)
            if a.qkv_bias:
                shapes[f"{prefix}self_attn.{letter}_proj.bias"] = (rows,)
        shapes[prefix + "self_attn.o_proj.weight"] = (a.hidden, q_rows)
        if a.qk_norm:
            shapes[prefix + "self_attn.q_norm.weight"] = (a.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (a.head_dim,)
        if a.experts:
            shapes[prefix + "mlp.gate.weight"] = (a.experts, a.hidden)
            for expert in range(a.experts):
                feed_forward(f"{prefix}mlp.experts.{expert}.", a.expert_feed_forward)
        else:
            feed_forward(f"{prefix}mlp.", a.feed_forward)
        shapes[prefix + "input_layernorm.weight"] = (a.hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (a.hidden,)
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
    check_shapes({name: tuple(tensor.shape) for name, tensor in weights.items()}, arch, source)


def check_shapes(found: Mapping[str, tuple[int, ...]], arch: Architecture, source: str) -> None:
    """`check_complete` for a checkpoint of which only the shapes are known."""
    expected = _shapes(arch)
    extra = found.keys() - expected.keys() - ({"lm_head.weight"} if arch.tied else set())
    for name in sorted(extra):
        raise ConfigError(f"model {source}: tensor {name!r} is unknown", "the checkpoint does not fit its config.json")
    for name, shape in expected.items():
        if name not in found:
            raise ConfigError(f"model {source}: tensor {name!r} is missing", "use a complete checkpoint")
        if found[name] != shape:
            raise ConfigError(
                f"model {source}: tensor {name!r} has shape {found[name]}, not {shape}",
                "the checkpoint does not fit its config.json",
            )


def raw_bytes(tensor: Tensor) -> memoryview:
    """The tensor's contiguous raw bytes, in host memory (copied only where they are not there, or not contiguous)."""
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def checksum(tensor: Tensor) -> str:
    """Checksum of the tensor's contiguous raw bytes; equal in actor, engine and manifest."""
    return raw_checksum(raw_bytes(tensor))
