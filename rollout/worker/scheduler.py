"""The async shell of the slot policy: agent loops ask for turns here, and the engine gets as many as it has slots.

A turn waits for its slot, is generated, and is handed back whole. An abort in between (a pause for new weights, or a
turn of a higher class that needs the slot) keeps the tokens so far: the turn waits at its old place and goes on from
prompt + tokens, so nothing is sampled twice. The weight version is a constant while any request is in the engine,
because it changes only between `pause` and `resume`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from envclient.base.errors import VenusError, WireError
from rollout.policy.slots import SlotPolicy
from rollout.protocol import Engine, GenerateRequest, Generation
from rollout.types import PriorityClass

log = logging.getLogger("venus.slots")
_ABORT_AGAIN_S = 0.5
_WITHDRAW_S = 2.0
_MAX_UNASKED_ABORTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Tokens of a turn that came back at once, all sampled under one version."""

    token_ids: list[int]
    logprobs: list[float]
    version: int


@dataclass(slots=True, kw_only=True)
class Turn:
    """A finished turn."""

    pieces: list[Piece] = field(default_factory=list)
    finish_reason: str = ""
    """`stop` or `length`."""
    queue_s: float = 0.0
    generate_s: float = 0.0
    cached_tokens: int = 0
    """Prompt tokens found in the engine's cache, over all its requests."""
    sent_tokens: int = 0
    """Prompt tokens sent to the engine, over all its requests."""
    preempted_by: list[str] = field(default_factory=list)
    """Trajectories of a better class or rank for whose sake it gave its slot up, one entry each time."""

    @property
    def token_ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]


class SlotScheduler:
    """Shares one engine between agent loops.

    Args:
        version: weight version that the engine holds.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        engine: Engine,
        policy: SlotPolicy,
        *,
        version: int,
        temperature: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._policy = policy
        self._temperature = temperature
        self._clock = clock
        self.version = version
        self._paused = False
        self._waiting: dict[str, asyncio.Future[None]] = {}
        self._in_engine: set[str] = set()
        self._engine_empty = asyncio.Event()
        self._engine_empty.set()
        self._requests = 0
        self._generating: dict[str, str] = {}
        """Trajectory → its request in the engine."""
        self._preempted: dict[str, str] = {}
        """Trajectories whose running turn gives its slot up → the one for whose sake."""
        self._aborting: set[asyncio.Task[None]] = set()

    # ----------------------------------------------------------------------------------------------- agent loop

    async def turn(
        self, trajectory_id: str, context: Sequence[int], *, max_new_tokens: int, stop_token_ids: list[int]
    ) -> Turn:
        """Generate until a stop token or `max_new_tokens`, across any number of pauses.

        Cancelling it takes the request out of the engine; the caller then reports `trajectory_ended`.

        Raises:
            WireError: the engine is gone, or keeps aborting without being asked to.
        """
        turn = Turn()
        unasked = 0
        asked_at = self._clock()
        started = self._policy.turn_ready(trajectory_id, len(context))
        while True:
            await self._wait_slot(trajectory_id, started)
            if self._paused or trajectory_id in self._preempted:
                # Granted just before the pause began, or before it was wanted for another.
                self._preempted.pop(trajectory_id, None)
                started = self._policy.turn_preempted(trajectory_id)
                continue
            started_at = self._clock()
            turn.queue_s += started_at - asked_at
            request = self._request(trajectory_id, [*context, *turn.token_ids], max_new_tokens, turn, stop_token_ids)
            generation = await self._generate(request)
            preempted_by = self._preempted.pop(trajectory_id, None)
            asked_at = self._clock()
            turn.generate_s += asked_at - started_at
            turn.cached_tokens += generation.cached_tokens
            turn.sent_tokens += len(request.input_ids)
            if generation.token_ids:
                turn.pieces.append(
                    Piece(token_ids=generation.token_ids, logprobs=generation.logprobs, version=self.version)
                )
            turn.finish_reason = _finish_reason(generation, request)
            if turn.finish_reason != "abort":
                self._grant(self._policy.turn_ended(trajectory_id))
                return turn
            if preempted_by is not None:
                turn.preempted_by.append(preempted_by)
            elif not self._paused:
                unasked += 1
                if unasked > _MAX_UNASKED_ABORTS:
                    raise WireError(f"engine aborted {request.request_id} {unasked} times unasked", "see its log")
            started = self._policy.turn_preempted(trajectory_id)

    def trajectory_ended(self, trajectory_id: str) -> None:
        """The trajectory takes no more turns, whatever it was doing; idempotent."""
        self._waiting.pop(trajectory_id, None)
        self._preempted.pop(trajectory_id, None)
        self._grant(self._policy.trajectory_ended(trajectory_id))

    def set_class(self, trajectory_id: str, priority: PriorityClass, rank: int) -> None:
        """The dispatcher decided; known before the trajectory's first turn or not, forgotten at its end."""
        self._grant(self._policy.set_class(trajectory_id, priority, rank))

    def _request(
        self, trajectory_id: str, input_ids: list[int], max_new_tokens: int, turn: Turn, stop_token_ids: list[int]
    ) -> GenerateRequest:
        self._requests += 1
        return GenerateRequest(
            request_id=f"{trajectory_id}/{self._requests}",
            trajectory_id=trajectory_id,
            input_ids=input_ids,
            max_new_tokens=max_new_tokens - len(turn.token_ids),
            temperature=self._temperature,
            stop_token_ids=stop_token_ids,
        )

    async def _wait_slot(self, trajectory_id: str, started: list[str]) -> None:
        self._waiting[trajectory_id] = asyncio.get_running_loop().create_future()
        self._grant(started)
        try:
            await self._waiting[trajectory_id]
        finally:
            self._waiting.pop(trajectory_id, None)

    def _grant(self, started: list[str]) -> None:
        for trajectory_id in started:
            waiting = self._waiting[trajectory_id]
            if not waiting.done():
                waiting.set_result(None)
        for victim, waiting_one in self._policy.take_victims().items():
            self._preempted[victim] = waiting_one
            if victim in self._generating:
                aborting = asyncio.ensure_future(self._preempt(victim, self._generating[victim]))
                self._aborting.add(aborting)
                aborting.add_done_callback(self._aborting.discard)

    async def _preempt(self, trajectory_id: str, request_id: str) -> None:
        """Take a turn out of the engine for another's sake; it may overtake the request on its way in."""
        while self._generating.get(trajectory_id) == request_id:
            try:
                await self._engine.abort(request_id)
            except VenusError as error:
                log.warning("request %s was not preempted: %s", request_id, error)
                return  # an engine that is gone ends the turn itself
            await asyncio.sleep(_ABORT_AGAIN_S if self._generating.get(trajectory_id) == request_id else 0)

    async def _generate(self, request: GenerateRequest) -> Generation:
        self._in_engine.add(request.request_id)
        self._generating[request.trajectory_id] = request.request_id
        self._engine_empty.clear()
        answer = asyncio.ensure_future(self._engine.generate(request))
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            await self._withdraw(request.request_id, answer)
            raise
        finally:
            self._in_engine.discard(request.request_id)
            self._generating.pop(request.trajectory_id, None)
            if not self._in_engine:
                self._engine_empty.set()

    async def _withdraw(self, request_id: str, answer: asyncio.Future[Generation]) -> None:
        """Take a request out of the engine, so that its slot is really free."""
        try:
            async with asyncio.timeout(_WITHDRAW_S):
                while not answer.done():
                    await self._engine.abort(request_id)
                    await asyncio.wait([answer], timeout=_ABORT_AGAIN_S)
        except (TimeoutError, VenusError) as error:
            log.warning("request %s was not withdrawn: %s", request_id, error)
        finally:
            answer.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await answer

    # ------------------------------------------------------------------------------------------------- updates

    async def pause(self) -> None:
        """Abort what runs, keep its tokens, start nothing; returns with an empty engine and an empty cache."""
        self._paused = True
        self._policy.pause()
        while self._in_engine:
            await self._engine.abort_all()
            # An abort can overtake a request on its way into the engine: it is asked again until none is left.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._engine_empty.wait(), _ABORT_AGAIN_S)
        await self._engine.flush()

    def resume(self, version: int) -> None:
        """Go on under weights `version`."""
        self.version = version
        self._paused = False
        self._grant(self._policy.resume())

    def statistics(self) -> dict[str, int]:
        return self._policy.statistics() | {"in_engine": len(self._in_engine), "version": self.version}


def _finish_reason(generation: Generation, request: GenerateRequest) -> str:
    """`stop`, `length` or `abort`; an abort that came with the turn's last token is no abort."""
    if generation.finish_reason != "abort" or not generation.token_ids:
        return generation.finish_reason
    if generation.token_ids[-1] in request.stop_token_ids:
        return "stop"
    return "length" if len(generation.token_ids) >= request.max_new_tokens else "abort"
