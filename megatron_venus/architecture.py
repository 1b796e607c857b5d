"""Shape of a model, read from its `config.json`: what every layout, plan and check starts from.

No torch here, so that the launcher can ask before anything heavy is imported. `weight_map` names the tensors that
follow from it, `plan` counts their bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envclient.base.errors import ConfigError

FAMILIES = ("qwen3", "qwen3_moe", "qwen2", "llama")
"""Values of `model_type` in config.json that the map knows."""


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Shape of a decoder-only model; everything that the three layouts need to know."""

    family: str = "qwen3"
    """One of `FAMILIES`."""
    layers: int
    hidden: int
    feed_forward: int
    """Of a dense layer; an expert's is `expert_feed_forward`."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_positions: int
    rope_theta: float
    rope_type: str = "default"
    """`default`, or the kind of scaling in config.json (`llama3`, `yarn`, …), which only concerns the forward pass."""
    norm_eps: float
    tied: bool
    """The output layer is the embedding, transposed; then there is no `lm_head.weight`."""
    qk_norm: bool = True
    """Queries and keys are normalised per head."""
    qkv_bias: bool = False
    experts: int = 0
    """Of every layer; 0: dense."""
    experts_per_token: int = 0
    expert_feed_forward: int = 0
    router_normalised: bool = True
    """The weights of a token's experts sum to 1."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: str) -> Architecture:
        """Of the parsed `config.json` of `source`.

        Raises:
            ConfigError: another architecture, or a feature (sliding window, other biases) that the map does not know.
        """

        def refuse(field: str, value: object, remedy: str = "") -> ConfigError:
            return ConfigError(
                f"model {source}: config.json {field} = {value!r} is not supported",
                remedy or f"use one of the families {', '.join(FAMILIES)}",
            )

        family = config.get("model_type")
        if family not in FAMILIES:
            raise refuse("model_type", family)
        # transformers 5 moved rope_theta and rope_scaling into rope_parameters.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        for field in ("attention_bias", "mlp_bias", "use_sliding_window", "mlp_only_layers", "quantization_config"):
            if config.get(field):
                raise refuse(field, config[field], "use a plain checkpoint of that family")
        if config.get("hidden_act", "silu") != "silu":
            raise refuse("hidden_act", config["hidden_act"])
        moe = family == "qwen3_moe"
        if moe and config.get("decoder_sparse_step", 1) != 1:
            raise refuse("decoder_sparse_step", config["decoder_sparse_step"], "every layer must have experts")
        try:
            return cls(
                family=family,
                layers=config["num_hidden_layers"],
                hidden=config["hidden_size"],
                feed_forward=config["intermediate_size"],
                heads=config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
                vocabulary=config["vocab_size"],
                max_positions=config["max_position_embeddings"],
                rope_theta=float(config.get("rope_theta") or rope["rope_theta"]),
                rope_type=rope.get("rope_type", rope.get("type", "default")),
                norm_eps=config["rms_norm_eps"],
                tied=bool(config.get("tie_word_embeddings", False)),
                qk_norm=family in ("qwen3", "qwen3_moe"),
                qkv_bias=family == "qwen2",
                # transformers 5 writes num_local_experts, the models' own configs num_experts.
                experts=(config.get("num_experts") or config["num_local_experts"]) if moe else 0,
                experts_per_token=config["num_experts_per_tok"] if moe else 0,
                expert_feed_forward=config["moe_intermediate_size"] if moe else 0,
                router_normalised=bool(config.get("norm_topk_prob", False)) if moe else True,
            )
        except KeyError as error:
            raise ConfigError(f"model {source}: config.json has no {error}", "use a complete checkpoint") from None

    def check_actor(self, source: str) -> None:
        """Refuse what the actor does not build, though the map knows its weights.

        Raises:
            ConfigError: names the field of config.json.
        """
        built = {
            "model_type": (self.family, ("qwen3", "qwen3_moe")),
            # `rollout.rope` reads the numbers of a scaling.
            "rope type": (self.rope_type, ("default", "yarn")),
        }
        for field, (value, known) in built.items():
            if value not in known:
                raise ConfigError(
                    f"model {source}: config.json {field} = {value!r} is not supported", "use a Qwen3 model"
                )


def read_architecture(folder: Path) -> Architecture:
    """Architecture of the Hugging Face checkpoint in `folder`, for the actor.

    Raises:
        ConfigError: no such folder or config, or an architecture that the actor does not build.
    """
    arch = architecture_in(folder, "model.path")
    arch.check_actor(str(folder))
    return arch


def architecture_in(folder: Path, option: str) -> Architecture:
    """Architecture of any known checkpoint in `folder`, which the user named by `option`.

    Raises:
        ConfigError: no such folder or config, or an architecture that the map does not know.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"{option} {str(folder)!r} has no config.json", "name the folder of a Hugging Face checkpoint"
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}", "use a complete checkpoint") from None
    return Architecture.from_hf(config, str(folder))
