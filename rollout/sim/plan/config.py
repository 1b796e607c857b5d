"""Keys of the planner: the cluster, prices, the training side's memory, the search, and the simulation under it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from envclient.base.configs import build
from envclient.base.errors import ConfigError
from rollout.config import PolicyConfig
from rollout.sim.config import PRESETS, SimConfig


@dataclass(kw_only=True)
class ClusterConfig:
    """What there is."""

    gpus: int = 32
    """GPUs, for training and rollout together [paper: 32]."""
    gpus_per_node: int = 8
    """GPUs that share a node's host memory; a worker stays within a node."""
    hbm_gb: float = 80.0
    """Memory of a GPU, GB (10⁹ bytes)."""
    host_gb_per_node: float = 2000.0
    """Host memory of a node, GB."""
    l2_fraction: float = 0.9
    """Of the host memory that may hold KV (L2); the rest is the system's."""
    sandboxes: int = 0
    """Sandboxes at once that the environment nodes can hold; 0: as many as asked for."""


@dataclass(kw_only=True)
class PricesConfig:
    """Euro per month. Rough rental prices [R]: put your own."""

    gpu: float = 1500.0
    """Of a GPU (about 2 an hour), with its share of the node but without the host memory below."""
    host_gb: float = 2.0
    """Of a GB of host memory."""
    sandbox: float = 5.0
    """Of a place for a sandbox: a share of a CPU and a few hundred MB."""
    host_step_gb: float = 512.0
    """Host memory of a node that is bought at once, GB."""
    sandbox_step: float = 0.25
    """Share by which the sandboxes grow in one purchase."""


@dataclass(kw_only=True)
class TrainingConfig:
    """Memory of the training side: a stated rule, not a measurement.

    A replica of g GPUs out of t holds on each GPU P · (sharded_bytes / g + spread_bytes / t) bytes: weights and
    gradients are split over the replica's GPUs, the optimizer's state over all of them (distributed optimizer).
    """

    sharded_bytes: float = 6.0
    """Bytes a parameter, split over a replica: 2 for bf16 weights, 4 for fp32 gradients."""
    spread_bytes: float = 12.0
    """Bytes a parameter, split over all training GPUs: fp32 weights and Adam's two moments."""
    memory_fraction: float = 0.65
    """Of a GPU's memory that may hold them; the rest is for activations."""
    min_gpus: int = 0
    """Fewest GPUs that training fits on; 0: from the rule (16 for 32B, 2 for 4B at 80 GB)."""
    gpus_per_replica: int = 0
    """GPUs of a data-parallel replica; 0: the smallest power of two by the rule (8 for 32B); with `min_gpus` given the
    largest power of two that divides it."""


@dataclass(kw_only=True)
class SearchConfig:
    """What is tried, and how long."""

    tp: list[int] = field(default_factory=lambda: [1, 2, 4, 8])
    """GPUs of a rollout worker."""
    async_factors: list[float] = field(default_factory=lambda: [1.0, 1.5, 2.0])
    """Groups in flight, in batches. Above 1 samples are staler: whether that learns as well is not the planner's to
    say."""
    slots: list[int] = field(default_factory=lambda: [16, 32, 64, 128, 256])
    """Turns generated at once on a worker."""
    l2_shares: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 1.0])
    """Sizes of the host cache, shares of what the cluster allows."""
    sandbox_shares: list[float] = field(default_factory=lambda: [0.5, 0.625, 0.75, 0.875, 1.0])
    """Numbers of sandboxes, shares of what is needed and there."""
    splits: int = 24
    """Splits of the GPUs for each TP, at most: evenly spread where there are more."""
    starters: int = 16
    """Candidates that the closed form lets into the first round."""
    finalists: int = 4
    """Candidates that are simulated at full length."""
    screen_steps: int = 6
    """Optimizer steps of a simulation in the first round; doubled in each following one up to `steps`."""
    screen_batch: int = 16
    """Groups of a batch in the first round, at most: a larger cluster is scaled down with its batch."""
    steps: int = 20
    """Optimizer steps of a simulation at full length."""
    skip_steps: int = 2
    """First steps left out of the rates."""
    tie: float = 0.01
    """Rates within this share are equal: the smaller slots, L2, sandboxes and async factor win."""
    slack: float = 1.1
    """A candidate is dropped unseen when its bound is below the best simulated rate divided by this (the bound is a
    mean over `sample_groups` groups, not over those that are simulated)."""
    sample_groups: int = 64
    """Groups of the workload whose means the closed form uses."""
    curve_points: int = 7
    """Splits of the GPUs that are simulated for the curve."""


@dataclass(kw_only=True)
class PlanConfig:
    """A question to the planner."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    prices: PricesConfig = field(default_factory=PricesConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    """Of the workload; rates are medians over them."""
    sim: SimConfig = field(default_factory=lambda: SimConfig(policy=PolicyConfig(name="venus")))
    """What does not change between candidates: model, workload, batch, policy, costs."""


QUICK: dict[str, Any] = {
    "seeds": [0],
    "search": {
        "starters": 8,
        "finalists": 2,
        "screen_steps": 4,
        "steps": 8,
        "skip_steps": 1,
        "slots": [32, 64, 128],
        "sandbox_shares": [0.5, 0.75, 1.0],
        "curve_points": 5,
    },
}
"""One seed and short runs: finds the region, not the last per cent."""

_DECIDED = {
    "sim.seed": "use --seeds",
    "sim.steps": "use search.steps",
    "sim.skip_steps": "use search.skip_steps",
    "sim.workers": "use cluster.gpus and search.tp",
    "sim.engine.tp": "use search.tp",
    "sim.engine.slots": "use search.slots",
    "sim.engine.hbm_gb": "use cluster.hbm_gb",
    "sim.engine.gpus_per_node": "use cluster.gpus_per_node",
    "sim.engine.l2": "use cluster.host_gb_per_node and search.l2_shares",
    "sim.engine.l2_ratio": "use cluster.host_gb_per_node and search.l2_shares",
    "sim.engine.l2_node_gb": "use cluster.host_gb_per_node and search.l2_shares",
    "sim.trainer.gpus": "use cluster.gpus and training.min_gpus",
    "sim.trainer.replicas": "use training.gpus_per_replica",
    "sim.group.async_factor": "use search.async_factors",
    "sim.environment.sandboxes": "use cluster.sandboxes",
}
"""Keys that the planner sets itself, and what stands for them."""


def _keys(value: Any, prefix: str = "") -> list[str]:
    if not hasattr(value, "items"):
        return [prefix]
    return [key for name, part in value.items() for key in _keys(part, f"{prefix}.{name}" if prefix else str(name))]


def plan_config(
    preset: str, *, quick: bool = False, layers: Sequence[tuple[str, Any]] = (), overrides: Sequence[str] = ()
) -> PlanConfig:
    """The question: preset, `QUICK` over it, then `layers` (name, mapping) and `key=value` overrides.

    Raises:
        ConfigError: an unknown key, a value that cannot work, or a key that is the planner's to decide.
    """
    given = [(name, key) for name, layer in layers for key in _keys(layer)]
    given += [(f"command line {item!r}", item.partition("=")[0]) for item in overrides]
    for source, key in given:
        if key in _DECIDED:
            raise ConfigError(f"{source}: {key} is what the planner decides", _DECIDED[key])
    first = [(f"preset {preset}", {"sim": PRESETS[preset]}), *([("--quick", QUICK)] if quick else [])]
    config = build(PlanConfig, [*first, *layers], overrides)
    check(config)
    return config


def check(config: PlanConfig) -> None:
    """Raises: ConfigError: the first value that cannot work."""
    cluster, search, training, prices = config.cluster, config.search, config.training, config.prices
    at_least: list[tuple[str, float, float]] = [
        ("cluster.gpus", cluster.gpus, 2),
        ("cluster.gpus_per_node", cluster.gpus_per_node, 1),
        ("cluster.hbm_gb", cluster.hbm_gb, 1),
        ("cluster.host_gb_per_node", cluster.host_gb_per_node, 0),
        ("cluster.sandboxes", cluster.sandboxes, 0),
        ("prices.gpu", prices.gpu, 0),
        ("prices.host_gb", prices.host_gb, 0),
        ("prices.sandbox", prices.sandbox, 0),
        ("prices.host_step_gb", prices.host_step_gb, 1),
        ("prices.sandbox_step", prices.sandbox_step, 0.01),
        ("training.sharded_bytes", training.sharded_bytes, 0),
        ("training.spread_bytes", training.spread_bytes, 0),
        ("training.min_gpus", training.min_gpus, 0),
        ("training.gpus_per_replica", training.gpus_per_replica, 0),
        ("search.splits", search.splits, 2),
        ("search.starters", search.starters, 1),
        ("search.finalists", search.finalists, 1),
        ("search.screen_steps", search.screen_steps, 2),
        ("search.screen_batch", search.screen_batch, 1),
        ("search.steps", search.steps, search.screen_steps),
        ("search.skip_steps", search.skip_steps, 0),
        ("search.tie", search.tie, 0),
        ("search.slack", search.slack, 1),
        ("search.sample_groups", search.sample_groups, 1),
        ("search.curve_points", search.curve_points, 2),
    ]
    for key, value, least in at_least:
        if value < least:
            raise ConfigError(f"{key} is {value:g}", f"give at least {least:g}")
    for key, part in (
        ("cluster.l2_fraction", cluster.l2_fraction),
        ("training.memory_fraction", training.memory_fraction),
    ):
        if not 0 <= part <= 1:
            raise ConfigError(f"{key} is {part:g}", "it is a share: give 0 to 1")
    lists: list[tuple[str, Sequence[float], float, float]] = [
        ("search.tp", search.tp, 1, 1e6),
        ("search.async_factors", search.async_factors, 1, 16),
        ("search.slots", search.slots, 1, 1e6),
        ("search.l2_shares", search.l2_shares, 0, 1),
        ("search.sandbox_shares", search.sandbox_shares, 0.01, 1),
        ("seeds", config.seeds, 0, 2**31),
    ]
    for key, values, least, most in lists:
        if not values:
            raise ConfigError(f"{key} is empty", "give at least one value")
        for value in values:
            if not least <= value <= most:
                raise ConfigError(f"{key} has {value:g}", f"give {least:g} to {most:g}")
