"""What the loss config refuses, in one line with a remedy, and what the dry run says of it."""

from __future__ import annotations

from typing import Any

import pytest

from envclient.base import configs
from envclient.base.errors import ConfigError
from megatron_venus import algorithms
from megatron_venus.config import VenusConfig
from megatron_venus.loss.corrections import WEIGHTS
from megatron_venus.loss.kl import ESTIMATORS
from megatron_venus.loss.objectives import OBJECTIVES
from megatron_venus.preflight import check_values

BASE = ["model.path=x", "rollout.tasks.factory=x:x", "rollout.agent.factory=x:x"]


def config(**keys: Any) -> VenusConfig:
    """Keys are of `actor.loss`, save `advantage__` and `group__`, the rollout's; `__` stands for a dot."""
    overrides = []
    for key, value in keys.items():
        name = key.replace("__", ".")
        prefix = "rollout" if name.startswith(("advantage.", "group.")) else "actor.loss"
        overrides.append(f"{prefix}.{name}={value}")
    return configs.build(VenusConfig, [], [*BASE, *overrides])


GOOD: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {
        "algorithm": "dr_grpo",
        "aggregation": "seq-mean-token-sum-norm",
        "norm_tokens": 640,
        "advantage__normalise_std": False,
    },
    "dapo": {
        "algorithm": "dapo",
        "group__filter_zero_variance": True,
        "advantage__overlong_tokens": 500,
        "advantage__overlong_buffer": 100,
    },
    "gspo": {"algorithm": "gspo", "aggregation": "seq-mean-token-mean", "clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"algorithm": "cispo", "bypass": True, "correction__reject": "geometric"},
    "reinforce_plus_plus": {
        "algorithm": "reinforce_plus_plus",
        "advantage__estimator": "batch",
        "advantage__normalise_std": False,
        "kl__place": "reward",
        "kl__estimator": "k1",
    },
    "baseline": {
        "algorithm": "reinforce_plus_plus",
        "advantage__estimator": "group_batch",
        "advantage__normalise_std": False,
    },
    "corrected": {"correction__weight": "icepop", "correction__low": 0.5, "correction__reject": "k3", "dual_clip": 3},
}


@pytest.mark.parametrize("name", GOOD)
def test_accepted(name: str) -> None:
    check_values(config(**GOOD[name]))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"algorithm": "ppo"}, "actor.loss.algorithm='ppo' is not known .one of: grpo, dr_grpo"),
    ({"aggregation": "mean"}, "actor.loss.aggregation='mean' is not known .one of: token-mean"),
    ({"kl__place": "both"}, "actor.loss.kl.place='both' is not known .one of: none, loss, reward."),
    ({"kl__estimator": "k4"}, "actor.loss.kl.estimator='k4' is not known"),
    ({"correction__weight": "is"}, "actor.loss.correction.weight='is' is not known"),
    ({"correction__reject": "k2"}, "actor.loss.correction.reject='k2' is not known"),
    ({"advantage__estimator": "gae"}, "rollout.advantage.estimator='gae' is not known"),
    ({"clip_low": 1.5}, "actor.loss.clip_low=1.5 is outside"),
    ({"clip_high": -0.1}, "actor.loss.clip_high=-0.1 is below 0"),
    ({"dual_clip": 1.1}, "actor.loss.dual_clip=1.1 is not above 1 . clip_high"),
    ({"dual_clip": 3, "algorithm": "gspo"}, "actor.loss.dual_clip with gspo is not defined"),
    ({"updates_per_batch": 0}, "actor.loss.updates_per_batch=0 must be at least 1"),
    ({"aggregation": "seq-mean-token-sum-norm"}, "actor.loss.norm_tokens=0: seq-mean-token-sum-norm divides by it"),
    ({"norm_tokens": 100}, "actor.loss.norm_tokens=100 is not used by token-mean"),
    ({"kl__place": "loss", "kl__coefficient": 0}, "actor.loss.kl.coefficient=0.0 is not above 0"),
    ({"kl__place": "loss", "kl__estimator": "k1", "kl__weighted": False}, "k1 without weighted"),
    ({"correction__weight": "tis", "correction__low": 3}, "low=3.0 and high=2.0 are no range"),
    ({"correction__weight": "icepop"}, "correction.low=0 with icepop masks nothing below"),
    ({"correction__reject": "geometric", "correction__reject_low": 1.2}, "do not enclose 1"),
    ({"correction__reject": "k3", "correction__reject_k3": 0}, "rejects everything"),
    ({"advantage__overlong_buffer": 10}, "rollout.advantage.overlong_buffer=10 does not fit"),
    ({"advantage__overlong_factor": 0}, "rollout.advantage.overlong_factor=0.0 is no penalty"),
    ({"bypass": True, "correction__weight": "tis"}, "bypass and correction.weight=tis count .* twice"),
    ({"correction__weight": "seq_tis", "correction__reject": "geometric"}, "judge the same ratio twice"),
    ({"algorithm": "reinforce_plus_plus"}, "only REINFORCE.. normalises over the batch"),
    ({"advantage__estimator": "batch", "advantage__normalise_std": False}, "only REINFORCE.. normalises"),
    ({**GOOD["baseline"], "advantage__normalise_std": True}, "divide twice, by two stds"),
    ({"algorithm": "dr_grpo", "aggregation": "seq-mean-token-sum"}, "dr_grpo divides by no std"),
    ({"algorithm": "dr_grpo", "advantage__normalise_std": False}, "constant length divisor, token-mean does not"),
    ({"algorithm": "dapo"}, "dapo filters groups of equal rewards"),
    ({**GOOD["dapo"], "clip_high": 0.2}, "clip_high=0.2 is not above clip_low=0.2"),
    ({**GOOD["dapo"], "aggregation": "seq-mean-token-sum"}, "dapo is a token mean"),
]


@pytest.mark.parametrize(("keys", "message"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_refused_in_one_line(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        check_values(config(**keys))
    assert "\n" not in str(caught.value)


def test_summary_says_whether_the_clip_binds() -> None:
    assert "the clip cannot bind" in algorithms.summary(config())
    assert "gradients stream group by group" in algorithms.summary(config())
    assert "the clip binds (bypass" in algorithms.summary(config(bypass=True))
    two = algorithms.summary(config(updates_per_batch=2))
    assert "binds from update 2 of 2" in two and "gradients wait for the whole batch: the batch is kept" in two
    whole = algorithms.summary(config(**GOOD["reinforce_plus_plus"]))
    assert "gradients wait for the whole batch: advantages are normalised over the batch" in whole
    assert "0.001 · KL to model.path in the reward (k1)" in whole
    assert "mismatch corrected by icepop and k3" in algorithms.summary(config(**GOOD["corrected"]))


def test_every_name_that_is_accepted_is_implemented() -> None:
    """Preflight imports no torch, so it has the names a second time."""
    assert set(algorithms.ALGORITHMS) == set(OBJECTIVES)
    assert set(algorithms._CHOICES["correction.weight"]) == {"none", *WEIGHTS}
    assert set(algorithms._CHOICES["kl.estimator"]) == set(ESTIMATORS)
