"""The dispatcher's constants, read once from the run config."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec

from envclient.base.errors import ConfigError
from rollout.policy.advantages import AdvantageRule
from rollout.policy.settings import PolicyLimits, PolicySettings
from rollout.types import Record

if TYPE_CHECKING:
    from rollout.config import RolloutConfig


class DispatcherConfig(Record, frozen=True):
    """What the decisions depend on. Names and meanings are those of `rollout.config`."""

    group_size: int = 8
    batch: int = 16
    async_factor: float = 1.0
    max_version_span: int = 2
    include_promoted: bool = True
    filter_zero_variance: bool = False
    max_refills: int = 512
    max_resamples: int = 2
    on_lost_member: str = "drop"
    deadline_s: float = 600.0
    train_truncated: bool = True
    advantage: AdvantageRule = AdvantageRule()
    workers: int = 1
    """Nothing is admitted before so many workers have joined once: else the first one would get every group."""
    max_trajectories: int = 128
    steps: int = 0
    """Last optimizer step: no group is admitted that no step would train. 0: no end."""
    abort_grace_s: float = 60.0
    """Seconds that a worker may take to report an aborted trajectory before the run stops with a cause."""
    policy: PolicySettings = PolicySettings()

    def __post_init__(self) -> None:
        for name in ("group_size", "batch", "max_version_span", "workers", "max_trajectories"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout: {name} is {getattr(self, name)}", "it must be at least 1")
        for name in ("max_refills", "max_resamples", "steps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"rollout: {name} is {getattr(self, name)}", "it must not be negative")
        if not (self.async_factor >= 1.0 and math.isfinite(self.async_factor)):
            raise ConfigError(f"rollout.group.async_factor is {self.async_factor}", "use 1.0 (on-policy) or more")
        if not self.deadline_s > 0:
            raise ConfigError(f"rollout.group.deadline_s is {self.deadline_s}", "it must be positive")
        if self.on_lost_member not in ("drop", "shrink"):
            raise ConfigError(f"rollout.group.on_lost_member is {self.on_lost_member!r}", "use drop or shrink")
        if self.filter_zero_variance and self.group_size == 1:
            raise ConfigError(
                "rollout.group.filter_zero_variance with size 1 filters every group", "use a larger size or no filter"
            )

    @classmethod
    def from_config(cls, rollout: RolloutConfig, *, steps: int) -> DispatcherConfig:
        """Constants of a run: the built `RolloutConfig` (duck-typed, so that this file stays pure) and `run.steps`.

        Raises:
            ConfigError: a value that cannot work, by name.
        """
        group, worker = rollout.group, rollout.worker
        return cls(
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
            advantage=AdvantageRule.from_config(rollout.advantage),
            workers=worker.count,
            max_trajectories=worker.max_trajectories,
            steps=steps,
            policy=PolicySettings.from_config(rollout.policy),
        )

    def recorded(self) -> dict[str, Any]:
        """The constants as RunStarted carries them: plain values, by the names of the fields."""
        constants: dict[str, Any] = msgspec.to_builtins(self)
        return constants

    @classmethod
    def from_recorded(cls, constants: dict[str, Any]) -> DispatcherConfig:
        """The inverse of `recorded`.

        Raises:
            ConfigError: constants of another version.
        """
        try:
            return msgspec.convert(constants, cls)
        except msgspec.ValidationError as error:
            raise ConfigError(f"run_started: constants: {error}", "was it written by this version?") from None

    @property
    def policy_limits(self) -> PolicyLimits:
        return PolicyLimits(
            batch=self.batch, max_version_span=self.max_version_span, max_trajectories=self.max_trajectories
        )

    @property
    def gate_groups(self) -> int:
        """floor(async_factor · B); the small term undoes binary rounding (1.15 · 20 is 22.999… in floats)."""
        return math.floor(self.async_factor * self.batch + 1e-9)
