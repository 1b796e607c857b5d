"""Where a model can place tokens: one answer, from its config.json and `model.yarn`, for engine, actor and export.

YaRN (arXiv 2309.00071) stretches rotary positions: with factor s, slow frequencies are divided by s, fast ones kept,
and queries and keys are scaled by the attention factor, usually 0.1 · ln s + 1. Engines and libraries spell it
differently; `config_fields` writes what all of them read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envclient.base.errors import ConfigError
from rollout.config import YarnConfig

# Parameters of YaRN that are their defaults everywhere in our stack.
_FIXED = {"beta_fast": 32, "beta_slow": 1, "truncate": True, "mscale": None, "mscale_all_dim": None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """Rotary positions of a model."""

    theta: float
    positions: int
    """Tokens of a context, at most."""
    factor: float = 1.0
    """YaRN's s; 1: no scaling."""
    original_length: int = 0
    """Positions that the model was trained with, before scaling."""
    attention_factor: float = 1.0

    def config_fields(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """What to change in the parsed config.json, for transformers, SGLang and our own readers; often nothing."""
        if self.factor == 1.0:
            return {}
        scaling: dict[str, Any] = {
            "rope_type": "yarn",
            "factor": self.factor,
            "original_max_position_embeddings": self.original_length,
            "attention_factor": self.attention_factor,
            # SGLang multiplies the usual factor by its own key, and knows no other.
            "attn_factor": self.attention_factor / usual_attention_factor(self.factor),
        }
        fields: dict[str, Any] = {"max_position_embeddings": self.positions}
        if config.get("rope_theta"):
            return fields | {"rope_scaling": scaling}
        return fields | {"rope_parameters": scaling | {"rope_theta": self.theta}}

    def engine_override(self) -> dict[str, Any]:
        """The same for SGLang's `--json-model-override-args`, whose config object has transformers 5's spelling."""
        return self.config_fields({})


def usual_attention_factor(factor: float) -> float:
    """0.1 · ln s + 1."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def rope_of(config: Mapping[str, Any], yarn: YarnConfig, source: str) -> Rope:
    """Positions of the model whose config.json is `config`, stretched by `yarn` where that is set.

    Raises:
        ConfigError: a scaling that we do not build, or one that differs from what config.json already holds.
    """
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(config.get("rope_theta") or stated.get("rope_theta") or 10000.0)
    positions = int(config.get("max_position_embeddings") or 0)
    kind = stated.get("rope_type", stated.get("type", "default"))
    if kind not in ("default", "yarn"):
        raise ConfigError(f"model {source}: config.json rope type = {kind!r} is not supported", "use default or yarn")
    own = None
    if kind == "yarn":
        for key, fixed in _FIXED.items():
            if stated.get(key, fixed) != fixed:
                raise ConfigError(
                    f"model {source}: config.json yarn {key} = {stated[key]!r} is not supported", "drop it"
                )
        factor = float(stated["factor"])
        length = int(stated.get("original_max_position_embeddings") or positions)
        attention = float(stated.get("attention_factor") or usual_attention_factor(factor))
        own = _scaled(theta, factor, length, attention)
    if yarn.factor == 1.0:
        return own or Rope(theta=theta, positions=positions)
    if yarn.factor < 1.0:
        raise ConfigError(f"model.yarn.factor={yarn.factor} must be above 1.0", "use positions / original_length")
    length = yarn.original_length or (own.original_length if own else positions)
    asked = _scaled(theta, yarn.factor, length, yarn.attention_factor or usual_attention_factor(yarn.factor))
    if own is not None and own != asked:
        raise ConfigError(
            f"model.yarn.factor={yarn.factor}, original_length={length}, attention_factor={asked.attention_factor:g} "
            f"differ from the yarn in config.json of {source} ({own.factor:g}, {own.original_length}, "
            f"{own.attention_factor:g})",
            "leave model.yarn out, or correct it",
        )
    return asked


def _scaled(theta: float, factor: float, length: int, attention: float) -> Rope:
    return Rope(
        theta=theta,
        positions=int(length * factor),
        factor=factor,
        original_length=length,
        attention_factor=attention,
    )


def read_rope(folder: Path, yarn: YarnConfig) -> Rope:
    """Of the checkpoint in `folder`.

    Raises:
        ConfigError: no readable config.json, or as `rope_of`.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError):
        raise ConfigError(f"{path} is missing or no JSON", "see model.path") from None
    return rope_of(config, yarn, str(folder))


def check_context(context_length: int, rope: Rope, source: str) -> None:
    """Refuse a context that the model has no positions for.

    Raises:
        ConfigError: names both lengths.
    """
    if context_length > rope.positions:
        raise ConfigError(
            f"model.context_length={context_length} is beyond the {rope.positions} positions of {source}",
            "lower it, or stretch the positions with model.yarn.factor",
        )
