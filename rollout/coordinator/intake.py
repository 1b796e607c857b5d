"""The door for trajectories: what a worker reports is checked before it can be trained.

A report that contradicts itself or what was ordered becomes a FAILED trajectory with the reason as its cause: it stays
out of the loss and the baseline, is sampled anew, and its rate shows in the metrics.
"""

from __future__ import annotations

import math

import msgspec

from rollout.types import StartTrajectory, Trajectory, TrajectoryEnded, TrajectoryStatus

SCORED = (TrajectoryStatus.FINISHED, TrajectoryStatus.TRUNCATED)
"""Statuses with a reward."""
_LOGPROB_SLACK = 1e-3
"""Log-probs of near-certain tokens come out a rounding error above zero."""


def find_fault(trajectory: Trajectory, order: StartTrajectory | None, version: int) -> str:
    """Why `trajectory` must not be trained; empty when it may.

    Args:
        order: the command that started it; None when it is unknown here.
        version: newest weight version that any engine holds.
    """
    if order is not None and (order.group_id, order.task_id, order.purpose) != (
        trajectory.group_id,
        trajectory.task_id,
        trajectory.purpose,
    ):
        return "it names another group, task or purpose than was ordered"
    length = len(trajectory.response_ids)
    if len(trajectory.loss_mask) != length or len(trajectory.logprobs) != length:
        return (
            f"lengths differ: response {length}, loss mask {len(trajectory.loss_mask)}, "
            f"log-probs {len(trajectory.logprobs)}"
        )
    covered = [0] * length
    end, newest = 0, 0
    for span in trajectory.spans:
        if not end <= span.start < span.end <= length:
            return f"span [{span.start}, {span.end}) is empty, out of order or out of range"
        if not newest <= span.version <= version:
            return f"span version {span.version} is not in [{newest}, {version}]"
        if any(trajectory.logprobs[end : span.start]):
            return "a token outside the loss mask has a log-prob"
        covered[span.start : span.end] = [1] * (span.end - span.start)
        end, newest = span.end, span.version
    if any(trajectory.logprobs[end:]):
        return "a token outside the loss mask has a log-prob"
    if covered != trajectory.loss_mask:
        return "spans do not cover exactly the tokens of the loss mask"
    if trajectory.status in SCORED:
        # A prompt that fills the context leaves no room for a response: truncated before its first token.
        full = trajectory.status is TrajectoryStatus.TRUNCATED and not trajectory.response_ids
        if not trajectory.prompt_ids or not (trajectory.spans or full):
            return "it is scored but has no prompt or no generated token"
        if not math.isfinite(trajectory.reward):
            return f"its reward is {trajectory.reward}"
        if not all(map(math.isfinite, trajectory.logprobs)):
            return "a log-prob is not finite"
        if max(trajectory.logprobs, default=0.0) > _LOGPROB_SLACK:
            return f"a log-prob is {max(trajectory.logprobs)}, above 0"
        if min(trajectory.prompt_ids + trajectory.response_ids) < 0:
            return "a token id is negative"
    return ""


def admit(trajectory: Trajectory, order: StartTrajectory | None, version: int) -> Trajectory:
    """`trajectory` itself, or, when it has a fault, as FAILED with the fault as its stop reason and no tokens."""
    fault = find_fault(trajectory, order, version)
    if not fault:
        return trajectory
    return msgspec.structs.replace(
        trajectory,
        status=TrajectoryStatus.FAILED,
        stop_reason=f"malformed: {fault}",
        response_ids=[],
        loss_mask=[],
        logprobs=[],
        spans=[],
        reward=0.0,
        stats={},
    )


def as_event(trajectory: Trajectory, worker: str) -> TrajectoryEnded:
    """The dispatcher's view of `trajectory`."""
    scored = trajectory.status in SCORED
    return TrajectoryEnded(
        trajectory_id=trajectory.trajectory_id,
        worker=worker,
        status=trajectory.status,
        reward=trajectory.reward if scored else 0.0,
        first_version=trajectory.spans[0].version if trajectory.spans else -1,
        last_version=trajectory.spans[-1].version if trajectory.spans else -1,
        generated_tokens=trajectory.generated_tokens,
        context_tokens=len(trajectory.prompt_ids) + len(trajectory.response_ids),
        turns=trajectory.turns,
        cause="" if scored else trajectory.stop_reason,
    )
