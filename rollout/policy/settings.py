"""The scheduling policy's constants: `rollout.policy` of the run config, checked, and what it knows of the groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

from envclient.base.errors import ConfigError
from rollout.types import POLICY_NAMES, POLICY_ORDERS, POLICY_RANGES, Record

if TYPE_CHECKING:
    from rollout.config import PolicyConfig


class PolicySettings(Record, frozen=True):
    """Names and meanings are those of `rollout.config.PolicyConfig`."""

    name: str = "action"
    order: str = "auto"
    hysteresis: float = 0.95
    tool_time: bool = False
    priority: bool = True
    residency: bool = True
    demotion: bool = True
    migration: bool = True
    fill: float = 0.0
    reserve: float = -1.0
    growth_tokens: int = 1000
    move_gap: float = 0.1
    move_recompute: float = 64.0
    interval_s: float = 5.0
    buffer_tokens: int = 100
    acting_decay: bool = False
    longest_wait_s: float = 1800.0

    def __post_init__(self) -> None:
        if self.name not in POLICY_NAMES:
            raise ConfigError(f"rollout.policy.name={self.name!r} is not known", f"one of: {', '.join(POLICY_NAMES)}")
        if self.order not in POLICY_ORDERS:
            raise ConfigError(
                f"rollout.policy.order={self.order!r} is not known", f"one of: {', '.join(POLICY_ORDERS)}"
            )
        for key, (low, high) in POLICY_RANGES.items():
            value = getattr(self, key)
            if not low <= value <= high:
                raise ConfigError(f"rollout.policy.{key}={value} is out of range", f"use {low} to {high}")

    @classmethod
    def from_config(cls, policy: PolicyConfig) -> PolicySettings:
        """Settings of a run, from the built config.

        Raises:
            ConfigError: a value that cannot work, by name.
        """
        return cls(**{name: getattr(policy, name) for name in cls.__struct_fields__})


class PolicyLimits(Record, frozen=True):
    """What a policy must know of groups and workers."""

    batch: int = 16
    max_version_span: int = 2
    max_trajectories: int = 128
    """Episodes open at once on one worker: a parked one still holds its place."""
