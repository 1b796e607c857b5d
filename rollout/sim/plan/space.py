"""Candidates: the ways to split a cluster that fit its memory, and the simulation that each of them means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from envclient.base.errors import ConfigError
from rollout.sim.config import SimConfig
from rollout.sim.cost import engine_cost
from rollout.sim.plan.config import PlanConfig

T = TypeVar("T")


class Candidate(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """One way to use the cluster."""

    training_gpus: int
    replicas: int
    """Of the actor, which take groups by themselves."""
    tp: int
    """GPUs of a rollout worker."""
    workers: int
    slots: int
    """Turns generated at once on a worker."""
    async_factor: float
    l2_gb: float
    """Host memory of a node that holds KV, GB; 0: no host cache."""
    sandboxes: int
    """Sandboxes at once, over the cluster; 0: as many as asked for."""

    @property
    def rollout_gpus(self) -> int:
        return self.workers * self.tp

    @property
    def gpus(self) -> int:
        return self.training_gpus + self.rollout_gpus

    def changed(self, **keys: float) -> Candidate:
        return msgspec.structs.replace(self, **keys)


def replica_gpus(config: PlanConfig, training_gpus: int) -> int | None:
    """GPUs of a replica, by the memory rule of `TrainingConfig`; None: training does not fit on so many.

    The smallest power of two that divides them, fits, and leaves no replica without a group of the batch. Where the
    fewest GPUs are given, they are believed: a replica begins with the largest power of two that divides them. Larger
    replicas would finish a group sooner in this model, which knows no loss by splitting it: none is tried.
    """
    rule = config.training
    parameters, batch = config.sim.model.parameters, config.sim.group.batch
    if rule.gpus_per_replica:
        return rule.gpus_per_replica if training_gpus % rule.gpus_per_replica == 0 else None
    gpus = rule.min_gpus & -rule.min_gpus or 1
    while gpus <= training_gpus and training_gpus % gpus == 0:
        used = parameters * (rule.sharded_bytes / gpus + rule.spread_bytes / training_gpus)
        fits = used <= rule.memory_fraction * config.cluster.hbm_gb * 1e9
        if (fits or rule.min_gpus) and training_gpus // gpus <= batch:
            return gpus
        gpus *= 2
    return None


def min_training_gpus(config: PlanConfig) -> int:
    """Fewest GPUs that training fits on: `training.min_gpus`, else by the rule."""
    if config.training.min_gpus:
        return config.training.min_gpus
    for gpus in range(1, 100_000):
        if replica_gpus(config, gpus) is not None:
            return gpus
    raise ConfigError(
        f"sim.model.parameters is {config.sim.model.parameters:g}: no number of GPUs of {config.cluster.hbm_gb:g} GB "
        "holds its training",
        "raise cluster.hbm_gb",
    )


def training_choices(config: PlanConfig, most: int) -> list[tuple[int, int]]:
    """(GPUs, replicas) of training up to `most` GPUs."""
    found = []
    for gpus in range(min_training_gpus(config), most + 1):
        each = replica_gpus(config, gpus)
        if each is not None:
            found.append((gpus, gpus // each))
    return found


def l2_limit_gb(config: PlanConfig) -> float:
    """Host memory of a node that may hold KV."""
    return config.cluster.host_gb_per_node * config.cluster.l2_fraction


def sim_config(config: PlanConfig, candidate: Candidate, *, steps: int, seed: int) -> SimConfig:
    """The simulation of `candidate`."""
    base = config.sim
    return replace(
        base,
        seed=seed,
        steps=steps,
        skip_steps=config.search.skip_steps,
        workers=candidate.workers,
        group=replace(base.group, async_factor=candidate.async_factor),
        engine=replace(
            base.engine,
            tp=candidate.tp,
            slots=candidate.slots,
            hbm_gb=config.cluster.hbm_gb,
            gpus_per_node=config.cluster.gpus_per_node,
            l2="large" if candidate.l2_gb else "none",
            l2_node_gb=candidate.l2_gb,
        ),
        environment=replace(base.environment, sandboxes=candidate.sandboxes),
        trainer=replace(base.trainer, gpus=candidate.training_gpus, replicas=candidate.replicas),
    )


def tp_choices(config: PlanConfig) -> tuple[dict[int, int], list[str]]:
    """KV tokens of a worker by TP where the model fits, and a line for each TP where it does not."""
    fit: dict[int, int] = {}
    why_not: list[str] = []
    limit = config.sim.workload.context_limit
    for tp in sorted(set(config.search.tp)):
        if tp > config.cluster.gpus_per_node or config.cluster.gpus_per_node % tp:
            why_not.append(f"TP {tp} does not divide cluster.gpus_per_node {config.cluster.gpus_per_node}")
            continue
        engine = replace(config.sim.engine, tp=tp, hbm_gb=config.cluster.hbm_gb, l2="none")
        try:
            tokens = engine_cost(config.sim.model, engine).kv_tokens
        except ConfigError:
            why_not.append(f"TP {tp}: {config.sim.model.weight_gb:g} GB of weights leave no KV memory")
            continue
        if tokens <= limit:
            why_not.append(f"TP {tp}: {tokens} tokens of KV, less than sim.workload.context_limit {limit}")
            continue
        fit[tp] = tokens
    return fit, why_not


def spread(items: Sequence[T], most: int) -> list[T]:
    """At most `most` (≥ 2) of them, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[i] for i in sorted({round(n * (len(items) - 1) / (most - 1)) for n in range(most)})]


def candidates(config: PlanConfig, slots_of: dict[int, int]) -> list[Candidate]:
    """Every feasible split × TP × async factor, with all the host memory and sandboxes there are.

    Args:
        slots_of: slots to begin with, by TP.

    Raises:
        ConfigError: the cluster is too small for the model; says what is missing.
    """
    gpus = config.cluster.gpus
    fit, why_not = tp_choices(config)
    if not fit:
        raise ConfigError(f"no search.tp of {list(config.search.tp)} fits: {'; '.join(why_not)}", "raise hbm_gb or tp")
    least = min_training_gpus(config)
    splits: list[tuple[int, int, int, int]] = []
    for tp in sorted(fit):
        # Of the splits with as many workers the one that leaves the fewest GPUs idle.
        by_workers = {(gpus - training) // tp: (training, n) for training, n in training_choices(config, gpus - tp)}
        rows = [(tp, workers, *by_workers[workers]) for workers in sorted(by_workers)]
        splits += spread(rows, config.search.splits)
    if not splits:
        raise ConfigError(
            f"cluster.gpus is {gpus}: training needs {least} and a rollout worker {min(fit)}",
            f"give at least {least + min(fit)}, or set training.min_gpus and training.gpus_per_replica",
        )
    return [
        Candidate(
            training_gpus=training,
            replicas=replicas,
            tp=tp,
            workers=workers,
            slots=slots_of[tp],
            async_factor=factor,
            l2_gb=l2_limit_gb(config) * max(config.search.l2_shares),
            sandboxes=config.cluster.sandboxes,
        )
        for tp, workers, training, replicas in splits
        for factor in sorted(set(config.search.async_factors))
    ]


def month_cost(config: PlanConfig, candidate: Candidate) -> float:
    """Euro a month: its GPUs, the host cache of the nodes that the rollout fills, its sandboxes (0 where unlimited)."""
    nodes = candidate.rollout_gpus / config.cluster.gpus_per_node
    prices = config.prices
    host = nodes * candidate.l2_gb / (config.cluster.l2_fraction or 1.0)
    return candidate.gpus * prices.gpu + host * prices.host_gb + candidate.sandboxes * prices.sandbox
