"""Questions to the planner whose answer is known: small clusters on which one thing binds, simulated in a second."""

from __future__ import annotations

from typing import Any

from rollout.sim.plan.answer import Answer, answer
from rollout.sim.plan.config import PlanConfig, plan_config
from rollout.sim.plan.measure import Simulations
from tests.sim import kit

SMALL: dict[str, Any] = {
    "seeds": [0],
    "cluster": {"gpus": 8, "gpus_per_node": 4, "host_gb_per_node": 64.0, "l2_fraction": 0.5},
    "training": {"min_gpus": 1},
    "search": {
        "tp": [2],
        "async_factors": [1.5],
        "slots": [8],
        "l2_shares": [0.0, 1.0],
        "sandbox_shares": [0.5, 1.0],
        "starters": 3,
        "finalists": 2,
        "screen_steps": 2,
        "steps": 4,
        "skip_steps": 1,
        "sample_groups": 16,
    },
    "sim": {
        "policy": {"name": "action"},
        "group": {"batch": 4, "size": 4},
        "engine": {"kv_tokens": 60000, "chunk_tokens": 4096},
        **{key: kit.SMALL[key] for key in ("workload", "environment", "trainer")},
    },
}


def small_plan(*overrides: str) -> PlanConfig:
    return plan_config("32b", layers=[("small", SMALL)], overrides=overrides)


def ask(*overrides: str, jobs: int = 1) -> Answer:
    config = small_plan(*overrides)
    return answer(config, Simulations(config, jobs=jobs, tell=lambda line: None))
