"""Whole policies by name: the dispatcher, the workers' slot rule, and what the engines are asked to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from envclient.base.errors import ConfigError
from rollout.dispatcher import Dispatcher, DispatcherConfig
from rollout.policy.slots import POLICIES
from rollout.sim.config import SimConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePolicy:
    """What `name` means for each part of the cluster."""

    name: str
    config: DispatcherConfig
    slots: str
    """The workers' slot rule."""
    priority: bool = False
    """Engines serve HIGH before LOW."""
    tiers: bool = False
    """Engines evict by reference tier."""

    def dispatcher(self, truth: Callable[[str], tuple[int, int]]) -> Dispatcher:
        return Dispatcher(self.config)


def policy_names() -> list[str]:
    return list(POLICIES)


def whole_policy(config: SimConfig) -> WholePolicy:
    """Raises: ConfigError: no such policy."""
    if config.policy not in POLICIES:
        raise ConfigError(f"policy {config.policy!r} is unknown", f"choose one of {', '.join(POLICIES)}")
    return WholePolicy(name=config.policy, config=dispatcher_config(config), slots=config.policy)


def dispatcher_config(config: SimConfig) -> DispatcherConfig:
    group = config.group
    gate = int(group.async_factor * group.batch) * group.size
    return DispatcherConfig(
        group_size=group.size,
        batch=group.batch,
        async_factor=group.async_factor,
        max_version_span=group.max_version_span,
        include_promoted=group.include_promoted,
        filter_zero_variance=group.filter_zero_variance,
        max_refills=group.max_refills,
        max_resamples=group.max_resamples,
        on_lost_member=group.on_lost_member,
        deadline_s=group.deadline_s,
        train_truncated=group.train_truncated,
        workers=config.workers,
        max_trajectories=config.max_trajectories or max(1, 2 * gate),
        steps=config.steps,
    )
