"""Whole policies as a live run has them: the dispatcher's constants, and what workers and engines are asked to do."""

from __future__ import annotations

import math

import msgspec

from rollout.config import RolloutConfig
from rollout.dispatcher import DispatcherConfig
from rollout.policy.registry import POLICIES, policy_class
from rollout.policy.settings import PolicySettings
from rollout.sim.config import SimConfig
from rollout.types import Record


class WholePolicy(Record, frozen=True, kw_only=True):
    """What the policy means for a worker."""

    slots: str
    """The workers' slot rule."""
    reports_ready: bool
    """TurnReady is reported."""
    priority: bool
    """Classes are obeyed; engines that can serve HIGH before LOW."""
    tiers: bool
    """Engines evict by reference tier."""
    tick_s: float
    """Seconds between the coordinator's ticks."""


def policy_names() -> list[str]:
    """Those that can be simulated."""
    return list(POLICIES)


def whole_policy(config: SimConfig) -> WholePolicy:
    """Of `config.policy`, on engines with the capabilities of `config.engine`."""
    settings = PolicySettings.from_config(config.policy)
    policy = policy_class(settings)
    slots = policy.slot_rule(settings)
    classes = slots in ("priority", "rank")
    return WholePolicy(
        slots=slots,
        reports_ready=policy.wants_turns,
        priority=classes and config.engine.priority,
        tiers=policy.uses_tiers(settings) and config.engine.tiers,
        tick_s=_tick_s(config.tick_s, policy.longest_tick_s(settings)),
    )


def _tick_s(asked_s: float, longest_s: float) -> float:
    """At most what is asked for, and a part of the policy's interval, so that its checks come when they are due."""
    return asked_s if math.isinf(longest_s) else longest_s / math.ceil(longest_s / asked_s)


def dispatcher_config(config: SimConfig) -> DispatcherConfig:
    """The live dispatcher's constants. Raises: ConfigError: a value that cannot work."""
    rollout = RolloutConfig(group=config.group, policy=config.policy)
    rollout.worker.count = config.workers
    rollout.worker.max_trajectories = config.max_trajectories or 1
    constants = DispatcherConfig.from_config(rollout, steps=config.steps)
    if config.max_trajectories:
        return constants
    in_flight = constants.gate_groups * constants.group_size
    return msgspec.structs.replace(constants, max_trajectories=max(1, in_flight))
