"""Questions to the predictor, asked while tools run; nobody waits for an answer.

The agent loop asks when a turn has ended and goes on to the tool. An answer becomes a LengthEstimated report unless the
trajectory's next turn has ended before it. A predictor that fails is left alone for a while; what is late, lost or not
asked is counted, and changes nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from envclient.base.errors import WireError
from envclient.base.wire import Client
from rollout.predictor.data import window
from rollout.protocol import PredictReply, PredictRequest
from rollout.types import LengthEstimated

log = logging.getLogger("venus.estimates")
_REST_S = 1.0
_LONGEST_REST_S = 30.0
_REMEMBERED = 10_000


@dataclass(slots=True, kw_only=True)
class _Open:
    """A trajectory's present question."""

    asked_at: float = 0.0
    task: asyncio.Task[None] | None = None
    tool_runs: bool = False
    counts: Counter[str] = field(default_factory=Counter)


class Estimates:
    """One worker's questions.

    Args:
        report: takes the answers.
        context_tokens: what the predictor reads at most; of a longer context no more is sent.
        timeout_s: seconds after which an answer counts as failed.
        most: questions under way at once; others are skipped.
    """

    def __init__(
        self,
        predictor: Client,
        report: Callable[[LengthEstimated], None],
        *,
        context_tokens: int,
        timeout_s: float,
        most: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._predictor = predictor
        self._report = report
        self._context_tokens = context_tokens
        self._timeout_s = timeout_s
        self._most = most
        self._clock = clock
        self._open: dict[str, _Open] = {}
        self._under_way = 0
        self._rest_s = _REST_S
        self._resting_until = 0.0
        self._total: Counter[str] = Counter()
        self._latencies_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._tools_s: deque[float] = deque(maxlen=_REMEMBERED)

    def ask(self, trajectory_id: str, turn: int, token_ids: Sequence[int]) -> None:
        """Turn number `turn` has ended; its tool starts now."""
        state = self._open.setdefault(trajectory_id, _Open())
        self._overtake(state)
        state.asked_at, state.tool_runs = self._clock(), True
        if self._under_way >= self._most or state.asked_at < self._resting_until:
            state.counts["skipped"] += 1
            return
        state.counts["asked"] += 1
        text = window(token_ids, self._context_tokens)
        request = PredictRequest(trajectory_id=trajectory_id, turn=turn, token_ids=text)
        self._under_way += 1
        state.task = asyncio.create_task(self._question(request, state))
        state.task.add_done_callback(self._done)

    def tool_returned(self, trajectory_id: str) -> None:
        """The tool that ran since the last question has its result."""
        state = self._open.get(trajectory_id)
        if state is not None and state.tool_runs:
            state.tool_runs = False
            self._tools_s.append(self._clock() - state.asked_at)

    def take(self, trajectory_id: str) -> dict[str, float]:
        """The trajectory ended: its counts, named as in the metrics; all 0 when nothing was asked, so that means over
        trajectories count every one."""
        state = self._open.pop(trajectory_id, None) or _Open()
        self._overtake(state)
        self._total += state.counts
        return {f"estimates_{name}": float(state.counts[name]) for name in ("asked", "used", "in_time", "lost")}

    def statistics(self) -> dict[str, float]:
        """Counts, and seconds of answers and of tools, of the episodes that have ended."""
        numbers = {name: float(count) for name, count in sorted(self._total.items())}
        for name, seconds in (("answer", self._latencies_s), ("tool", self._tools_s)):
            if seconds:
                middle, high = np.quantile(seconds, [0.5, 0.95])
                numbers |= {f"{name}_p50_s": float(middle), f"{name}_p95_s": float(high)}
        return numbers

    def _overtake(self, state: _Open) -> None:
        """An answer that has not come by now is not wanted any more."""
        if state.task is not None and not state.task.done():
            state.task.cancel()
            state.counts["lost"] += 1
        state.task = None

    def _done(self, task: asyncio.Task[None]) -> None:
        self._under_way -= 1

    async def _question(self, request: PredictRequest, state: _Open) -> None:
        try:
            reply: PredictReply = await self._predictor.call(
                "/v1/predict", request, PredictReply, timeout_s=self._timeout_s
            )
        except WireError as error:
            state.counts["lost"] += 1
            self._rest(str(error))
            return
        if reply.remaining_tokens is None:
            state.counts["lost"] += 1
            self._rest("it has no model yet, or more questions than it can answer")
            return
        self._rest_s = _REST_S
        latency_s = self._clock() - state.asked_at
        self._latencies_s.append(latency_s)
        state.counts["used"] += 1
        state.counts["in_time"] += state.tool_runs
        self._report(
            LengthEstimated(
                trajectory_id=request.trajectory_id,
                turn=request.turn,
                remaining_tokens=reply.remaining_tokens,
                latency_s=latency_s,
            )
        )

    def _rest(self, cause: str) -> None:
        now = self._clock()
        if now >= self._resting_until:
            log.warning("predictor: %s; not asked for %.0f s", cause, self._rest_s)
            self._resting_until = now + self._rest_s
            self._rest_s = min(_LONGEST_REST_S, 2 * self._rest_s)
