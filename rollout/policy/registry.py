"""Whole policies by the name that `rollout.policy.name` gives them."""

from __future__ import annotations

from envclient.base.errors import ConfigError
from rollout.policy.base import ActionPolicy, Policy, TrajectoryPolicy
from rollout.policy.lengths import Lengths, OnlineLengths
from rollout.policy.paper import FcfsPriorityPolicy, LongestFirstPolicy, PaperPolicy
from rollout.policy.predictions import PredictedLengths
from rollout.policy.program_aware import ProgramAwarePlusPolicy, ProgramAwarePolicy
from rollout.policy.settings import PolicyLimits, PolicySettings
from rollout.policy.venus import OraclePolicy, VenusPolicy

POLICIES: dict[str, type[Policy]] = {
    "action": ActionPolicy,
    "trajectory": TrajectoryPolicy,
    "fcfs_priority": FcfsPriorityPolicy,
    "longest_first": LongestFirstPolicy,
    "program_aware": ProgramAwarePolicy,
    "program_aware_plus": ProgramAwarePlusPolicy,
    "paper": PaperPolicy,
    "venus": VenusPolicy,
    "oracle": OraclePolicy,
}


def policy_class(settings: PolicySettings) -> type[Policy]:
    """The class that `settings.name` names; its `slot_rule`, `wants_turns` and `uses_tiers` say what workers do."""
    return POLICIES[settings.name]


def make_policy(settings: PolicySettings, limits: PolicyLimits, truth: Lengths | None = None) -> Policy:
    """A fresh policy.

    Args:
        truth: true lengths, which only a simulation has; `oracle` needs them.

    Raises:
        ConfigError: `oracle` without the truth.
    """
    if settings.name == "oracle" and truth is None:
        raise ConfigError("rollout.policy.name=oracle needs true lengths", "it exists in simulations only")
    lengths = truth if truth is not None and settings.name == "oracle" else None
    lengths = lengths or PredictedLengths(OnlineLengths(growth_tokens=settings.growth_tokens))
    return policy_class(settings)(settings, limits, lengths)
