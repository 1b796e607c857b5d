"""Questions that wait for the scorer. While it computes, what comes is gathered and asked together, newest first.

More questions than it can answer would otherwise queue up, and every answer be late: the newest one's tool still runs,
the oldest one's has most likely returned. For the same reason no more are asked together than it computes in a moment.
A trajectory that has gone on is not asked about any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

_CALLS = 2
"""Of the scorer at once: one is computed while the next one is on its way."""
_CALL_S = 0.05
"""Seconds that a call should take: the newest question waits for those under way."""
_NEWEST = 0.2
"""Weight of the newest call in a running mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    turn: int
    token_ids: Sequence[int]
    answer: asyncio.Future[float | None]


class Questions:
    """One queue before a scorer.

    Args:
        score: answers many inputs at once.
        most: inputs that it computes together, where these take no longer than `_CALL_S`.
    """

    def __init__(
        self,
        score: Callable[[Sequence[Sequence[int]]], Awaitable[list[float]]],
        *,
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._score = score
        self._most = most
        self._clock = clock
        self._input_s = 0.0
        """Seconds of a call for each of its inputs; 0: not known."""
        self._waiting: dict[str, _Question] = {}
        """By trajectory, oldest first."""
        self._calls: set[asyncio.Task[None]] = set()

    async def ask(self, trajectory_id: str, turn: int, token_ids: Sequence[int]) -> float | None:
        """The score of `token_ids`; None when the trajectory asked about a later turn before it was computed.

        Raises:
            VenusError: what the scorer raised.
        """
        answer: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        question = _Question(turn=turn, token_ids=token_ids, answer=answer)
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
        if self._waiting and len(self._calls) < _CALLS:
            most = self._most
            if self._input_s * most > _CALL_S:
                most = max(1, int(_CALL_S / self._input_s))
            batch = [self._waiting.popitem()[1] for _ in range(min(most, len(self._waiting)))]
            call = asyncio.create_task(self._call(batch))
            self._calls.add(call)
            call.add_done_callback(self._ended)

    def _ended(self, call: asyncio.Task[None]) -> None:
        self._calls.discard(call)
        if not call.cancelled():
            self._go_on()

    async def _call(self, batch: Sequence[_Question]) -> None:
        begun_s = self._clock()
        try:
            scores = await self._score([question.token_ids for question in batch])
        except Exception as error:
            for question in batch:
                if not question.answer.done():
                    question.answer.set_exception(error)
            return
        input_s = (self._clock() - begun_s) / len(batch)
        self._input_s += (_NEWEST if self._input_s else 1.0) * (input_s - self._input_s)
        for question, score in zip(batch, scores, strict=True):
            if not question.answer.done():
                question.answer.set_result(score)

    def stop(self) -> None:
        """Nothing is asked any more."""
        for call in self._calls:
            call.cancel()
