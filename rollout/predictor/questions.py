"""Questions that wait for the scorer. While it computes, what comes is gathered and asked together, newest first.

More questions than it can answer would otherwise queue up, and every answer be late: the newest one's tool still runs,
the oldest one's has most likely returned. For the same reason no more are asked together than it computes in a moment.
A trajectory that has gone on is not asked about any more, nor one whose asker has given up.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from envclient.base.errors import InvariantError

_CALLS = 2
"""Of the scorer at once: one is computed while the next one is on its way."""
_CALL_S = 0.05
"""Seconds that a call may take: the newest question waits for those under way."""
_LEAST = 4
"""Inputs of a call that takes longer: what every call costs, however small, is not saved by smaller ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    asked_s: float
    turn: int
    token_ids: Sequence[int]
    answer: asyncio.Future[float | None]


class Questions:
    """One queue before a scorer.

    Args:
        score: answers many inputs at once.
        most: inputs that it computes together, where these do not take too long.
        patience_s: seconds after which nobody waits for an answer any more.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Sequence[int]]], Awaitable[list[float]]],
        *,
        most: int,
        patience_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._score = score
        self._most = most
        self._patience_s = patience_s
        self._clock = clock
        self._size = most
        """Inputs of a call now."""
        self._last_end_s = -math.inf
        self._waiting: dict[str, _Question] = {}
        """By trajectory, oldest first."""
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, trajectory_id: str, turn: int, token_ids: Sequence[int]) -> float | None:
        """The score of `token_ids`; None when it comes too late: the trajectory has asked about a later turn, or
        `patience_s` is over.

        Raises:
            VenusError: what the scorer raised.
        """
        answer: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        question = _Question(asked_s=self._clock(), turn=turn, token_ids=token_ids, answer=answer)
        other = self._waiting.pop(trajectory_id, None)
        if other is not None and other.turn > turn:
            # On connections of their own questions may arrive in any order.
            question, other = other, question
        if other is not None and not other.answer.done():
            other.answer.set_result(None)
        self._waiting[trajectory_id] = question
        self._go_on()
        return await answer

    def _go_on(self) -> None:
        self._give_up()
        if self._waiting and len(self._calls) < _CALLS:
            batch = [self._waiting.popitem()[1] for _ in range(min(self._size, len(self._waiting)))]
            call = asyncio.create_task(self._call(batch))
            self._calls.add(call)
            call.add_done_callback(self._ended)

    def _give_up(self) -> None:
        """The oldest wait longest: without this they would pile up under what is always newer."""
        asked_before = self._clock() - self._patience_s
        while self._waiting:
            trajectory_id, question = next(iter(self._waiting.items()))
            if question.asked_s >= asked_before:
                return
            del self._waiting[trajectory_id]
            if not question.answer.done():
                question.answer.set_result(None)

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            self._go_on()

    async def _call(self, batch: Sequence[_Question]) -> None:
        begun_s = self._clock()
        try:
            scores = await self._score([question.token_ids for question in batch])
            if len(scores) != len(batch):
                raise InvariantError(f"the scorer has {len(scores)} answers to {len(batch)} inputs")
        except Exception as error:
            for question in batch:
                if not question.answer.done():
                    question.answer.set_exception(error)
            return
        self._learn(begun_s, len(batch))
        for question, score in zip(batch, scores, strict=True):
            if not question.answer.done():
                question.answer.set_result(score)

    def _learn(self, begun_s: float, inputs: int) -> None:
        """Larger calls while they are quick, smaller ones when they are not."""
        ended_s = self._clock()
        # One that waited behind the other call in the scorer began when that one ended.
        took_s = ended_s - max(begun_s, self._last_end_s)
        self._last_end_s = ended_s
        if took_s > _CALL_S:
            self._size = min(self._most, max(_LEAST, inputs // 2))
        elif inputs >= self._size:
            self._size = min(self._most, 2 * self._size)

    def stop(self) -> None:
        """Nothing is asked any more."""
        for call in self._calls:
            call.cancel()
