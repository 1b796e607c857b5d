"""Small clusters for the simulator's tests: a few seconds of work that still bind where they should."""

from __future__ import annotations

from typing import Any

from envclient.base.configs import build
from rollout.sim.cluster import Cluster
from rollout.sim.config import SimConfig
from rollout.sim.metrics import Result

SMALL: dict[str, Any] = {
    "steps": 5,
    "skip_steps": 1,
    "workers": 2,
    "group": {"batch": 4, "size": 4, "deadline_s": 36000.0},
    "engine": {"slots": 8, "kv_tokens": 60000, "l2_ratio": 1.0, "tp": 4, "chunk_tokens": 4096},
    "workload": {
        "turns_mu": 2.3,
        "first_context": 2000,
        "context_limit": 20000,
        "output_mu": 4.0,
        "appended_mu": 4.5,
        "max_turns": 60,
    },
    "environment": {"score_s": 1.0},
    "trainer": {"optimizer_s": 1.0, "sync_s": 1.0},
}


def small(*overrides: str) -> SimConfig:
    return build(SimConfig, [("small", SMALL)], list(overrides))


def run(*overrides: str) -> Result:
    return Cluster(small(*overrides)).run()


class Watch:
    """Checks every promise of the cluster after every `every`-th event."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.events = 0

    def __call__(self, cluster: Cluster) -> None:
        self.events += 1
        if self.events % self.every:
            return
        cluster.dispatcher.audit()
        for worker in cluster.workers.values():
            worker.check_invariants()
            assert worker.engine.running + worker.engine.waiting <= cluster.config.engine.slots
        limit = cluster.config.environment.sandboxes
        assert not limit or cluster.sandboxes.used <= limit
        numbers = cluster.dispatcher.statistics()
        live = numbers["groups_running"] + numbers["groups_ready"] + numbers["groups_taken"]
        assert live <= numbers["gate_held"] <= int(cluster.config.group.async_factor * cluster.config.group.batch)
