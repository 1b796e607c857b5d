"""One trajectory from its prompt to its reward: open, then turn and tool in turn, then score, then close.

Called by the worker for every StartTrajectory; returns the record that goes to the coordinator. Whatever happens, the
sandbox's lease is released and exactly one Trajectory comes back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from envclient.base.errors import ConfigError, InvariantError, VenusError
from rollout.protocol import Agent, Episode, Outcome
from rollout.types import StartTrajectory, Trajectory, TrajectoryStatus, TurnEnded, TurnReady
from rollout.worker.estimates import Estimates
from rollout.worker.record import TokenRecord
from rollout.worker.scheduler import SlotScheduler, Turn

log = logging.getLogger("venus.agent_loop")
_CLOSE_S = 3.0


class EngineFailed(VenusError):
    """The engine did not answer a turn: the worker cannot go on."""


@dataclass(slots=True, kw_only=True)
class _Progress:
    """What is known of a trajectory so far; survives a failure."""

    record: TokenRecord = field(default_factory=lambda: TokenRecord([]))
    turns: int = 0
    stats: dict[str, float] = field(default_factory=dict)

    def add(self, **numbers: float) -> None:
        for name, value in numbers.items():
            self.stats[name] = self.stats.get(name, 0.0) + value


class AgentLoop:
    """Plays trajectories on one worker.

    Args:
        context_length: tokens of prompt and response together, at most.
        report_turn: called after every turn.
        report_ready: called when a turn is wanted, where the scheduling policy follows turns.
        estimates: asks the predictor, where there is one.
    """

    def __init__(
        self,
        agent: Agent,
        slots: SlotScheduler,
        *,
        context_length: int,
        report_turn: Callable[[TurnEnded], None],
        report_ready: Callable[[TurnReady], None] | None = None,
        estimates: Estimates | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._agent = agent
        self._slots = slots
        self._context_length = context_length
        self._report_turn = report_turn
        self._report_ready = report_ready
        self._estimates = estimates
        self._clock = clock

    async def run(self, start: StartTrajectory) -> Trajectory:
        """Play `start` to its end. A failure of the environment or the agent is a FAILED trajectory with its cause.

        Raises:
            CancelledError: cancelled; lease and slot are free. `cancelled` makes the record of it.
            EngineFailed, InvariantError, ConfigError: not this trajectory's fault: the worker must end.
        """
        progress = _Progress()
        try:
            episode = self._agent.episode(start.task_id, start.trajectory_id, start.purpose)
            try:
                outcome = await self._play(episode, start, progress)
            finally:
                self._slots.trajectory_ended(start.trajectory_id)
                if self._estimates is not None:
                    progress.add(**self._estimates.take(start.trajectory_id))
                await self._close(episode, start.trajectory_id)
        except (EngineFailed, InvariantError, ConfigError):
            raise
        except VenusError as error:
            outcome = _failed(str(error))
        except Exception as error:
            log.exception("trajectory %s failed", start.trajectory_id)
            outcome = _failed(f"{type(error).__name__}: {error}")
        return _trajectory(start, progress, outcome)

    async def _play(self, episode: Episode, start: StartTrajectory, progress: _Progress) -> Outcome:
        opened_at = self._clock()
        prompt_ids = await episode.open()
        # A longer prompt is never sent; what is kept of it still fits the trainer.
        record = progress.record = TokenRecord(prompt_ids[: self._context_length])
        progress.add(open_s=self._clock() - opened_at)
        status, stop_reason = TrajectoryStatus.TRUNCATED, "context length"
        while (room := self._context_length - record.context_tokens) > 0:
            turn = await self._turn(start.trajectory_id, progress, min(room, self._agent.max_new_tokens))
            if turn.finish_reason == "length":
                stop_reason = "turn length" if room >= self._agent.max_new_tokens else "context length"
                break
            acted_at = self._clock()
            if self._estimates is not None:
                self._estimates.ask(start.trajectory_id, progress.turns, record.context)
            observation = await episode.act(turn.token_ids)
            if self._estimates is not None:
                self._estimates.tool_returned(start.trajectory_id)
            progress.add(tool_s=self._clock() - acted_at)
            if observation.done:
                status, stop_reason = TrajectoryStatus.FINISHED, "done"
                break
            if record.context_tokens + len(observation.token_ids) >= self._context_length:
                break
            record.observed(observation.token_ids)
        scored_at = self._clock()
        outcome = await episode.score(status, stop_reason)
        progress.add(score_s=self._clock() - scored_at)
        return outcome

    async def _turn(self, trajectory_id: str, progress: _Progress, max_new_tokens: int) -> Turn:
        record = progress.record
        context_tokens = record.context_tokens
        if self._report_ready is not None:
            self._report_ready(
                TurnReady(trajectory_id=trajectory_id, turn=progress.turns + 1, context_tokens=context_tokens)
            )
        try:
            turn = await self._slots.turn(
                trajectory_id,
                record.context,
                max_new_tokens=max_new_tokens,
                stop_token_ids=self._agent.stop_token_ids,
            )
        except InvariantError:
            raise
        except VenusError as error:
            raise EngineFailed(error.message, error.remedy) from error
        for piece in turn.pieces:
            record.sampled(piece.token_ids, piece.logprobs, piece.version)
        progress.turns += 1
        progress.add(
            queue_s=turn.queue_s,
            generate_s=turn.generate_s,
            cached_tokens=turn.cached_tokens,
            sent_tokens=turn.sent_tokens,
            preemptions=len(turn.preempted_by),
        )
        self._report_turn(
            TurnEnded(
                trajectory_id=trajectory_id,
                turn=progress.turns,
                context_tokens=context_tokens,
                output_tokens=record.context_tokens - context_tokens,
                version=record.spans[-1].version if record.spans else self._slots.version,
                preempted_by=turn.preempted_by,
            )
        )
        return turn

    async def _close(self, episode: Episode, trajectory_id: str) -> None:
        """Release the lease, also while being cancelled; a service that does not answer is left to the expiry."""
        try:
            await asyncio.wait_for(episode.close(), _CLOSE_S)
        except Exception as error:
            log.warning("trajectory %s: lease was not released, it will expire: %s", trajectory_id, error)


def cancelled(start: StartTrajectory, status: TrajectoryStatus, cause: str) -> Trajectory:
    """The record of a trajectory that was cancelled by an AbortTrajectory: none of its tokens will be used."""
    return _trajectory(start, _Progress(), Outcome(reward=0.0, status=status, stop_reason=cause, stats={}))


def _failed(cause: str) -> Outcome:
    return Outcome(reward=0.0, status=TrajectoryStatus.FAILED, stop_reason=cause, stats={})


def _trajectory(start: StartTrajectory, progress: _Progress, outcome: Outcome) -> Trajectory:
    record = progress.record
    return Trajectory(
        trajectory_id=start.trajectory_id,
        group_id=start.group_id,
        task_id=start.task_id,
        purpose=start.purpose,
        status=outcome.status,
        stop_reason=outcome.stop_reason,
        prompt_ids=record.prompt_ids,
        response_ids=record.response_ids,
        loss_mask=record.loss_mask,
        logprobs=record.logprobs,
        spans=record.spans,
        turns=progress.turns,
        reward=outcome.reward,
        stats={"turns": float(progress.turns)} | progress.stats | outcome.stats,
    )
