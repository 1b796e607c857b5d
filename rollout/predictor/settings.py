"""`rollout.predictor` of the run config, checked before anything is started. Imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

from envclient.base.errors import ConfigError
from rollout.config import PredictorConfig

ENGINES = ("sglang", "torch")


def check_settings(config: PredictorConfig) -> None:
    """Raises ConfigError: names the key, its value and the remedy."""
    if not (config.enabled or config.record):
        return
    if config.record_steps < 0:
        raise ConfigError(f"rollout.predictor.record_steps={config.record_steps} is negative", "use 0 to keep all")
    if not config.enabled:
        return
    for key, allowed in (("engine", ENGINES), ("dtype", ("float32", "bfloat16"))):
        if getattr(config, key) not in allowed:
            raise ConfigError(
                f"rollout.predictor.{key}={getattr(config, key)!r} is not known", f"one of: {', '.join(allowed)}"
            )
    for key in ("context_tokens", "slots", "kv_tokens", "max_questions", "timeout_s", "refresh_minutes"):
        if not getattr(config, key) > 0:
            raise ConfigError(f"rollout.predictor.{key}={getattr(config, key)} must be above 0", "raise it")
    if config.kv_tokens < config.context_tokens:
        raise ConfigError(
            f"rollout.predictor.kv_tokens={config.kv_tokens} cannot hold one input of {config.context_tokens}",
            "raise it to at least rollout.predictor.context_tokens",
        )
    if not config.model and not (config.refresh and config.trunk):
        raise ConfigError(
            "rollout.predictor.model is empty, and nothing would make one",
            "name a trained predictor, or set refresh=true and trunk to a Qwen3 folder",
        )
    for key, kinds in (("model", ["Qwen3ForSequenceClassification"]), ("trunk", ["Qwen3ForCausalLM"])):
        if path := getattr(config, key):
            _check_folder(key, Path(path), kinds, config.context_tokens)


def _check_folder(key: str, folder: Path, kinds: list[str], context_tokens: int) -> None:
    try:
        model = json.loads((folder / "config.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ConfigError(f"rollout.predictor.{key}={str(folder)!r}: {error}", "name a model's folder") from None
    if model.get("architectures") != kinds:
        raise ConfigError(
            f"rollout.predictor.{key}={str(folder)!r} is {model.get('architectures')}", f"it must be {kinds[0]}"
        )
    positions = int(model.get("max_position_embeddings", 0))
    if context_tokens > positions:
        raise ConfigError(
            f"rollout.predictor.context_tokens={context_tokens} is beyond the {positions} positions of {folder}",
            "lower it",
        )
