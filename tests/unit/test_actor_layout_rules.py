"""Layouts that cannot work are refused by name, before anything is loaded; those that can are let through."""

from __future__ import annotations

from typing import Any

import pytest

from envclient.base.errors import ConfigError
from megatron_venus import layout_rules
from megatron_venus.config import ActorConfig, ParallelConfig

MODEL = {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 25600,
    "vocab_size": 151936,
    "num_hidden_layers": 64,
}
EXPERTS = MODEL | {"num_experts": 128, "moe_intermediate_size": 768}


def check(ranks: int, model: dict[str, Any] = MODEL, **parallel: Any) -> None:
    actor = ActorConfig(ranks=ranks, parallel=ParallelConfig(**parallel))
    layout_rules.check_sizes(actor)
    layout_rules.check_model(actor, model)


def test_whole_layouts_pass() -> None:
    check(1)
    check(16, tensor=8, sequence=True, context=2)
    check(32, tensor=4, pipeline=4, virtual_stages=4, context=2)
    check(8, EXPERTS, expert=8)
    check(16, EXPERTS, expert=8, context=2, tensor=2, sequence=True)
    check(4, EXPERTS, expert=2, tensor=4, sequence=True)


@pytest.mark.parametrize(
    ("ranks", "model", "parallel", "message"),
    [
        (3, MODEL, {"tensor": 3}, r"tensor=3 does not divide the model's 64 attention heads"),
        (16, MODEL, {"tensor": 16}, r"tensor=16 does not divide the model's 8 key-value heads"),
        (2, MODEL | {"vocab_size": 97}, {"tensor": 2}, r"tensor=2 does not divide the model's 97 vocabulary"),
        (5, MODEL, {"pipeline": 5}, r"pipeline=5 does not divide the model's 64 layers"),
        (4, MODEL, {"pipeline": 4, "virtual_stages": 3}, r"pipeline · virtual_stages=12 does not divide .* 64 layers"),
        (2, MODEL, {"expert": 2}, r"expert=2: the model has no experts"),
        (3, EXPERTS, {"expert": 3}, r"expert=3 does not divide the model's 128 experts"),
        (6, EXPERTS, {"expert": 3, "context": 2}, r"neither divides the other"),
        (2, EXPERTS, {"tensor": 2}, r"tensor=2 with experts needs sequence parallelism"),
        (6, MODEL, {"tensor": 4}, r"actor.ranks=6 is no multiple of the 4 processes"),
        (2, MODEL, {"tensor": 0}, r"tensor=0 must be at least 1"),
        (2, MODEL, {"sequence": True}, r"sequence=true with tensor=1"),
        (2, MODEL, {"virtual_stages": 2}, r"virtual_stages=2 with pipeline=1"),
    ],
)
def test_others_are_refused(ranks: int, model: dict[str, Any], parallel: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(ranks, model, **parallel)
