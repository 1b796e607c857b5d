"""Which algorithm a config asks for: refusals of what does not go together, and one line that says what it does.

Called by preflight (refusals), by the dry run and by the actor's log. Imports no torch: a mistake is answered at once.
"""

from __future__ import annotations

import math

from envclient.base.errors import ConfigError
from megatron_venus.config import LossConfig, VenusConfig
from rollout.policy.advantages import ESTIMATORS

ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "reinforce_plus_plus")
AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
_CHOICES = {
    "algorithm": ALGORITHMS,
    "aggregation": AGGREGATIONS,
    "kl.place": ("none", "loss", "reward"),
    "kl.estimator": ("k1", "k2", "k3"),
    "correction.weight": ("none", "tis", "icepop", "seq_tis", "seq_mis"),
    "correction.reject": ("none", "geometric", "k3"),
}


def check(config: VenusConfig) -> None:
    """Refuse values that mean nothing, and combinations that count something twice.

    Raises:
        ConfigError: one line with the key, its value and the remedy.
    """
    loss = config.actor.loss
    for key, allowed in _CHOICES.items():
        value = getattr(getattr(loss, key.split(".")[0]), key.split(".")[1]) if "." in key else getattr(loss, key)
        if value not in allowed:
            raise ConfigError(f"actor.loss.{key}={value!r} is not known", f"one of: {', '.join(allowed)}")
    _check_numbers(loss)
    _check_advantage(config)
    _check_names(config)
    _check_double_counting(config)


def _check_numbers(loss: LossConfig) -> None:
    correction = loss.correction
    if not 0.0 <= loss.clip_low <= 1.0:
        raise ConfigError(f"actor.loss.clip_low={loss.clip_low} is outside [0, 1]", "0.2 is common, 3e-4 with gspo")
    if not (loss.clip_high >= 0.0 and math.isfinite(loss.clip_high)):
        raise ConfigError(f"actor.loss.clip_high={loss.clip_high} is below 0", "0.28 is common, 4e-4 with gspo")
    if loss.dual_clip and not loss.dual_clip > 1.0 + loss.clip_high:
        raise ConfigError(
            f"actor.loss.dual_clip={loss.dual_clip} is not above 1 + clip_high: it would cut what the clip allows",
            "use 3, or 0 for none",
        )
    if loss.dual_clip and loss.algorithm in ("gspo", "cispo"):
        raise ConfigError(f"actor.loss.dual_clip with {loss.algorithm} is not defined", "set it to 0")
    if loss.updates_per_batch < 1:
        raise ConfigError(f"actor.loss.updates_per_batch={loss.updates_per_batch} must be at least 1", "raise it")
    normed = loss.aggregation == "seq-mean-token-sum-norm"
    if normed and loss.norm_tokens < 1:
        raise ConfigError(
            f"actor.loss.norm_tokens={loss.norm_tokens}: seq-mean-token-sum-norm divides by it",
            "set it to a constant length, for example the longest response",
        )
    if loss.norm_tokens and not normed:
        raise ConfigError(
            f"actor.loss.norm_tokens={loss.norm_tokens} is not used by {loss.aggregation}",
            "remove it, or use actor.loss.aggregation=seq-mean-token-sum-norm",
        )
    if loss.kl.place != "none" and not loss.kl.coefficient > 0.0:
        raise ConfigError(f"actor.loss.kl.coefficient={loss.kl.coefficient} is not above 0", "use kl.place=none")
    if loss.kl.place == "loss" and loss.kl.estimator == "k1" and not loss.kl.weighted:
        raise ConfigError(
            "actor.loss.kl.estimator=k1 without weighted has a gradient of zero mean: it would do nothing",
            "use kl.weighted=true, or k2 or k3",
        )
    if not 0.0 <= correction.low < correction.high:
        raise ConfigError(
            f"actor.loss.correction: low={correction.low} and high={correction.high} are no range", "0 <= low < high"
        )
    if correction.weight == "icepop" and correction.low == 0.0:
        raise ConfigError(
            "actor.loss.correction.low=0 with icepop masks nothing below", "0.5 is IcePop's, or use weight=tis"
        )
    if not 0.0 < correction.reject_low < 1.0 < correction.reject_high:
        raise ConfigError(
            f"actor.loss.correction: reject_low={correction.reject_low} and reject_high={correction.reject_high} do "
            "not enclose 1",
            "0.99 and 1.01 are common",
        )
    if not correction.reject_k3 > 0.0:
        raise ConfigError(f"actor.loss.correction.reject_k3={correction.reject_k3} rejects everything", "use 0.01")


def _check_advantage(config: VenusConfig) -> None:
    advantage = config.rollout.advantage
    if advantage.estimator not in ESTIMATORS:
        raise ConfigError(
            f"rollout.advantage.estimator={advantage.estimator!r} is not known", f"one of: {', '.join(ESTIMATORS)}"
        )
    if advantage.overlong_tokens < 0 or not 0 <= advantage.overlong_buffer <= advantage.overlong_tokens:
        raise ConfigError(
            f"rollout.advantage.overlong_buffer={advantage.overlong_buffer} does not fit into overlong_tokens="
            f"{advantage.overlong_tokens}",
            "0 <= overlong_buffer <= overlong_tokens",
        )
    if not advantage.overlong_factor > 0.0:
        raise ConfigError(
            f"rollout.advantage.overlong_factor={advantage.overlong_factor} is no penalty", "use a value above 0"
        )
    if advantage.estimator != "group" and advantage.normalise_std:
        raise ConfigError(
            f"rollout.advantage: estimator={advantage.estimator} and normalise_std divide twice, by two stds",
            "set rollout.advantage.normalise_std=false",
        )


def _check_names(config: VenusConfig) -> None:
    """An algorithm's name promises its parts: a config that says one and does another is refused."""
    loss, advantage, name = config.actor.loss, config.rollout.advantage, config.actor.loss.algorithm
    batch_wide = advantage.estimator != "group"
    if (name == "reinforce_plus_plus") != batch_wide:
        raise ConfigError(
            f"actor.loss.algorithm={name} with rollout.advantage.estimator={advantage.estimator}: only REINFORCE++ "
            "normalises over the batch",
            "use reinforce_plus_plus with batch or group_batch, every other algorithm with group",
        )
    if name == "dr_grpo" and advantage.normalise_std:
        raise ConfigError(
            "actor.loss.algorithm=dr_grpo divides by no std", "set rollout.advantage.normalise_std=false, or use grpo"
        )
    if name == "dr_grpo" and loss.aggregation in ("token-mean", "seq-mean-token-mean"):
        raise ConfigError(
            f"actor.loss.algorithm=dr_grpo has a constant length divisor, {loss.aggregation} does not",
            "use actor.loss.aggregation=seq-mean-token-sum-norm and norm_tokens",
        )
    if name == "dapo" and loss.aggregation != "token-mean":
        raise ConfigError(f"actor.loss.algorithm=dapo is a token mean, not {loss.aggregation}", "use token-mean")
    if name == "dapo" and not loss.clip_high > loss.clip_low:
        raise ConfigError(
            f"actor.loss.algorithm=dapo clips higher: clip_high={loss.clip_high} is not above clip_low={loss.clip_low}",
            "use 0.28 and 0.2",
        )
    if name == "dapo" and not config.rollout.group.filter_zero_variance:
        raise ConfigError(
            "actor.loss.algorithm=dapo filters groups of equal rewards",
            "set rollout.group.filter_zero_variance=true, or use grpo (same loss)",
        )


def _check_double_counting(config: VenusConfig) -> None:
    loss = config.actor.loss
    if loss.bypass and loss.correction.weight != "none":
        raise ConfigError(
            f"actor.loss: bypass and correction.weight={loss.correction.weight} count the engine's mismatch twice",
            "use one of them",
        )
    if loss.correction.weight in ("seq_tis", "seq_mis") and loss.correction.reject == "geometric":
        raise ConfigError(
            f"actor.loss.correction: weight={loss.correction.weight} and reject=geometric judge the same ratio twice",
            "use one of them",
        )


def needs_batch(config: VenusConfig) -> str:
    """Why no backward pass can start before the batch is closed; empty when groups stream."""
    if config.rollout.advantage.estimator != "group":
        return f"advantages are normalised over the batch (estimator={config.rollout.advantage.estimator})"
    if config.actor.loss.updates_per_batch > 1:
        return f"the batch is kept for {config.actor.loss.updates_per_batch} updates"
    return ""


def summary(config: VenusConfig) -> str:
    """One line for a person: the loss, whether its clip can bind, and whether groups stream."""
    loss = config.actor.loss
    parts = [f"{loss.algorithm}, {loss.aggregation}"]
    if loss.bypass:
        parts.append("the clip binds (bypass: ratios are against the engine's log-probs)")
    elif loss.updates_per_batch > 1:
        parts.append(f"the clip binds from update 2 of {loss.updates_per_batch} a batch on")
    else:
        parts.append("the clip cannot bind (one update a batch: the ratio is 1)")
    if loss.kl.place != "none":
        parts.append(f"{loss.kl.coefficient:g} · KL to model.path in the {loss.kl.place} ({loss.kl.estimator})")
    chosen = [name for name in (loss.correction.weight, loss.correction.reject) if name != "none"]
    if chosen:
        parts.append(f"mismatch corrected by {' and '.join(chosen)}")
    waits = needs_batch(config)
    parts.append(f"gradients wait for the whole batch: {waits}" if waits else "gradients stream group by group")
    return "; ".join(parts)
