"""A step's numbers out of the trajectories it trained. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rollout.coordinator.evaluation import stat_means
from rollout.coordinator.shelf import SealedGroup
from rollout.types import Trajectory, TrajectoryStatus


def ratio(part: float, whole: float) -> float | None:
    """`part / whole`; None when there is nothing to divide by."""
    return part / whole if whole else None


def version_span(trajectory: Trajectory) -> int:
    """v_last − v_first + 1 over the generated tokens; 0 when there are none."""
    return trajectory.spans[-1].version - trajectory.spans[0].version + 1 if trajectory.spans else 0


def batch_metrics(groups: Sequence[SealedGroup], step: int) -> dict[str, float | None]:
    """What the trained trajectories of `step` say: rewards, lengths, staleness, cache hits, tools.

    `staleness/span_max` is the largest version span, `staleness/age_max` the largest distance from the version that
    the step trained (step − 1) to the oldest one that a trained token was sampled under.
    """
    members = [t for group in groups for t in group.members]
    if not members:
        return {}
    total = {
        name: sum(t.stats.get(name, 0.0) for t in members)
        for name in ("cached_tokens", "sent_tokens", "tool_errors", "tool_calls")
    }
    count = len(members)
    unequal = sum(len({t.reward for t in group.members}) > 1 for group in groups)
    return {
        **stat_means(members),
        "reward/mean": sum(t.reward for t in members) / count,
        "reward/group_mixed_rate": unequal / len(groups),
        "turns/mean": sum(t.turns for t in members) / count,
        "tokens/mean": sum(t.generated_tokens for t in members) / count,
        "tokens/trained": float(sum(t.generated_tokens for t in members)),
        "sequences/trained": float(count),
        "staleness/span_max": float(max(map(version_span, members))),
        "staleness/age_max": float(max((step - 1 - t.spans[0].version for t in members if t.spans), default=0)),
        "truncated_rate": sum(t.status is TrajectoryStatus.TRUNCATED for t in members) / count,
        "kv/hit_rate": ratio(total["cached_tokens"], total["sent_tokens"]),
        "tool_error_rate": ratio(total["tool_errors"], total["tool_calls"]),
    }
