"""A simulated engine: iterations of prefill before decode, KV admission, chunks, retraction, aborts.

It follows SGLang's scheduler: at every iteration boundary waiting requests are admitted in order (HIGH before LOW where
priorities are on) while their KV fits; admitted prompts are prefilled in batches of at most `chunk_tokens`, during
which decoding stands still; else all running requests decode one token a step. Many equal steps are one call of the
clock: a boundary is only visited where something happens.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, fields

from envclient.base.errors import InvariantError
from rollout.policy.tiers import HIGH_REF, evicts_up_to
from rollout.sim.clock import Clock
from rollout.sim.config import EngineConfig
from rollout.sim.cost import EngineCost
from rollout.sim.kv import KvMemory, Node


class Request:
    """One turn, or the rest of it after an abort."""

    __slots__ = (
        "arrival",
        "computed",
        "context",
        "finish_at",
        "high",
        "joined_at",
        "prompt_tokens",
        "remaining",
        "sent",
        "state",
        "tail",
        "trajectory",
        "wanted_s",
    )

    def __init__(
        self, trajectory: str, tail: Node, *, prompt_tokens: int, context: int, output: int, high: bool, wanted_s: float
    ) -> None:
        self.trajectory = trajectory
        self.tail = tail
        self.prompt_tokens = prompt_tokens
        self.context = context
        """Tokens sent, and generated since."""
        self.sent = context
        self.remaining = output
        """Tokens still to generate."""
        self.high = high
        self.arrival = 0
        self.computed = 0
        """Context whose KV is there, while it is prefilled."""
        self.joined_at = 0
        """Decode step count at which it joined the batch."""
        self.finish_at = 0
        """Decode step count at which it is done."""
        self.state = WAITING
        self.wanted_s = wanted_s
        """Since when it waits, for its slot or for the engine."""

    @property
    def generated(self) -> bool:
        """Whether it has tokens (those of the segment under way are counted at its end)."""
        return self.state == DECODE or self.context > self.sent


WAITING, PREFILL, DECODE, GONE = range(4)


@dataclass(kw_only=True, eq=False)
class EngineStatistics:
    """Sums over an engine's life; tokens and seconds."""

    sent_tokens: int = 0
    device_hit_tokens: int = 0
    host_hit_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    batch_s: float = 0.0
    """Integral of the number of requests in the engine (not waiting)."""
    retractions: int = 0
    aborts: int = 0
    admissions: int = 0
    """Turns, and rests of turns, that came into the batch."""
    wait_s: float = 0.0
    """Their time in the queues for a slot and for KV memory."""


ENGINE_SUMS = tuple(field.name for field in fields(EngineStatistics))


class SimEngine:
    """One engine. `on_finish` and `on_abort` are called at the boundary where a request leaves it."""

    def __init__(
        self,
        clock: Clock,
        cost: EngineCost,
        config: EngineConfig,
        *,
        priority: bool,
        tiers: bool,
        on_finish: Callable[[Request], None],
        on_abort: Callable[[Request], None],
    ) -> None:
        self.clock = clock
        self.cost = cost
        self.kv = KvMemory(cost.kv_tokens, cost.host_tokens)
        self.statistics = EngineStatistics()
        self._chunk_tokens = config.chunk_tokens
        self._reserve = config.reserve_tokens
        self._priority = priority
        self._tiers = tiers
        self._on_finish = on_finish
        self._on_abort = on_abort
        self._arrivals = 0
        self._waiting: list[tuple[int, int, Request]] = []
        """Heap of (rank, arrival, request); the entry of a request whose rank changed is dropped when met."""
        self.waiting = 0
        self._prefilling: list[Request] = []
        self._decoding: dict[str, Request] = {}
        self._decoding_context = 0
        """Tokens that the decoding requests attend to."""
        self._finishing: list[tuple[int, int, Request]] = []
        self._steps = 0
        """Decode steps since the start."""
        self._ticket = 0
        """Number of the planned boundary; an older plan that comes up is void."""
        self._segment: tuple[float, int] | None = None
        """Start and planned steps of the decode segment under way."""
        self._prefill_chunk: list[tuple[Request, int]] = []
        """What the batch under way computes of each request."""
        self._load_tokens = 0
        """Of the batch being formed: copied from the host."""
        self._busy = False
        self._aborting: dict[str, Request] = {}
        self._held = False
        """No request starts, running ones keep their place (weights are being loaded)."""
        self._stopped = False

    # -------------------------------------------------------------------------------------------------- requests

    @property
    def running(self) -> int:
        return len(self._decoding) + len(self._prefilling)

    @property
    def empty(self) -> bool:
        return not self.running and not self.waiting

    def submit(self, request: Request) -> None:
        self._arrivals += 1
        request.arrival = self._arrivals
        self._queue(request)
        self._visit()

    def _queue(self, request: Request) -> None:
        request.state = WAITING
        self.waiting += 1
        heapq.heappush(self._waiting, (self._rank(request), request.arrival, request))

    def _rank(self, request: Request) -> int:
        return 0 if request.high or not self._priority else 1

    def set_high(self, request: Request, high: bool) -> None:
        """Its class changed, from the next boundary on."""
        if request.high is not high:
            request.high = high
            if request.state == WAITING:
                heapq.heappush(self._waiting, (self._rank(request), request.arrival, request))
                self._visit()

    def set_tier(self, tail: Node, tier: int) -> None:
        """A trajectory's reference on its KV changed; what waits may fit now."""
        self.kv.set_tier(tail, tier)
        if self.waiting:
            self._visit()

    def abort(self, request: Request) -> None:
        """Take it out at the next boundary, its tokens so far kept; `on_abort` tells."""
        if request.state != GONE:
            self._aborting[request.trajectory] = request
            self._visit()

    def abort_all(self) -> None:
        for request in [*self._decoding.values(), *self._prefilling]:
            self._aborting[request.trajectory] = request
        for _, _, request in sorted(self._waiting):
            if request.state == WAITING:
                self._aborting[request.trajectory] = request
        self._visit()

    def hold(self) -> None:
        """Stand still after the iteration under way, until `go_on`."""
        self._held = True
        self._visit()

    def go_on(self) -> None:
        self._held = False
        self._visit()

    def stop(self) -> None:
        """It died: nothing comes back any more."""
        self._stopped = True

    # ------------------------------------------------------------------------------------------------ iterations

    def _visit(self) -> None:
        """Something changed: come to the next boundary. A prefill batch ends at one by itself."""
        if self._stopped:
            return
        if not self._busy:
            self._busy = True
            self._plan(self.clock.now)
        elif self._segment is not None:
            start, steps = self._segment
            elapsed = self.clock.now - start
            sooner = self.cost.decode_steps(elapsed, len(self._decoding), self._decoding_context)
            if sooner < steps:
                self._plan_segment(start, sooner)

    def _plan(self, time_s: float) -> None:
        self._ticket += 1
        ticket = self._ticket
        self.clock.at(time_s, lambda: self._boundary(ticket))

    def _plan_segment(self, start: float, steps: int) -> None:
        self._segment = (start, steps)
        end = start + self.cost.decode_s(steps, len(self._decoding), self._decoding_context)
        self._plan(max(end, self.clock.now))

    def _boundary(self, ticket: int) -> None:
        if ticket != self._ticket or self._stopped:
            return
        if self._segment is not None:
            self._end_segment()
        elif self._prefill_chunk:
            self._end_prefill()
        if self._aborting:
            self._take_out()
        if self._stopped:
            return
        if self._held or not (self._begin_prefill() or self._begin_decode()):
            self._busy = False

    # ---------------------------------------------------------------------------------------------------- decode

    def _begin_decode(self) -> bool:
        while self._decoding:
            batch = len(self._decoding)
            room = self.kv.budget(HIGH_REF) // batch
            if room < 1:
                self._retract()
                continue
            steps = min(self._finishing[0][0] - self._steps, room)
            self._plan_segment(self.clock.now, steps)
            return True
        # Retraction has emptied the batch: what waits fits now.
        return bool(self.waiting) and self._begin_prefill()

    def _end_segment(self) -> None:
        assert self._segment is not None
        start, steps = self._segment
        self._segment = None
        batch = len(self._decoding)
        grown = steps * batch
        self._steps += steps
        self._decoding_context += grown
        self.kv.grow(grown)
        self.kv.reclaim()
        stats = self.statistics
        stats.decode_s += self.clock.now - start
        stats.batch_s += (self.clock.now - start) * batch
        stats.decode_tokens += grown
        while self._finishing and self._finishing[0][0] <= self._steps:
            request = heapq.heappop(self._finishing)[2]
            if request.state == DECODE and request.finish_at <= self._steps:
                self._leave(request)
                self._on_finish(request)

    def _leave(self, request: Request) -> None:
        """Out of the batch; its KV stays as cache."""
        self._settle(request)
        del self._decoding[request.trajectory]
        self._decoding_context -= request.context
        request.state = GONE
        self._aborting.pop(request.trajectory, None)
        self.kv.unlock(request.tail, request.context, request.prompt_tokens, request.context)

    def _settle(self, request: Request) -> None:
        made = self._steps - request.joined_at
        request.context += made
        request.remaining -= made
        request.joined_at = self._steps

    def _retract(self) -> None:
        """Out of KV: the request that lost least goes back to the queue (LOW first), its KV is freed."""
        victim = min(self._decoding.values(), key=self._retract_key)
        self._settle(victim)
        del self._decoding[victim.trajectory]
        self._decoding_context -= victim.context
        self._drop_finishing(victim)
        self.kv.drop(victim.tail, victim.context, victim.prompt_tokens)
        self.statistics.retractions += 1
        victim.wanted_s = self.clock.now
        self._queue(victim)

    def _retract_key(self, request: Request) -> tuple[bool, int, int]:
        # SGLang retracts the fewest generated tokens, then the longest prompt.
        made = self._steps - request.joined_at
        return (self._priority and request.high, made, -request.context)

    def _drop_finishing(self, request: Request) -> None:
        self._finishing = [entry for entry in self._finishing if entry[2] is not request]
        heapq.heapify(self._finishing)

    # --------------------------------------------------------------------------------------------------- prefill

    def _next_waiting(self) -> Request | None:
        while self._waiting:
            rank, _, request = self._waiting[0]
            if request.state == WAITING and rank == self._rank(request) and request.trajectory not in self._aborting:
                return request
            heapq.heappop(self._waiting)
            # An entry of a request that is being aborted comes back if the abort is withdrawn: it never is.
        return None

    def _admit(self) -> Request | None:
        """The next waiting request, if its KV fits."""
        request = self._next_waiting()
        if request is None:
            return None
        if not self._fits(request):
            if request.context + 1 > self.kv.capacity:
                size = f"{request.trajectory} has {request.context} tokens of context"
                raise InvariantError(f"{size}, more than the engine's KV memory of {self.kv.capacity}")
            return None
        tail, prompt = request.tail, request.prompt_tokens
        device, known = self.kv.match(tail, prompt, request.context)
        heapq.heappop(self._waiting)
        self.waiting -= 1
        self.kv.lock(tail, prompt, request.context)
        self.kv.reclaim()
        self.statistics.sent_tokens += request.context
        self.statistics.device_hit_tokens += device
        self.statistics.host_hit_tokens += known - device
        self.statistics.admissions += 1
        self.statistics.wait_s += self.clock.now - request.wanted_s
        # The last token is always computed: its logits are wanted.
        request.computed = min(known, request.context - 1)
        request.state = PREFILL
        self._load_tokens += known - device
        return request

    def _fits(self, request: Request) -> bool:
        """Whether what its KV still needs, and a reserve for the running ones, is free or may be evicted for it."""
        limit = evicts_up_to(request.high, self._tiers)
        budget = self.kv.budget(limit)
        parent = request.tail.parent
        assert parent is not None
        need = request.context + 1 + self._reserve * self.running
        if need - request.context > budget:
            return False
        tail = request.tail
        # Its own cached pages are about to be in use.
        if tail.locks == 0 and tail.tier <= limit:
            budget -= tail.resident
        if parent.locks == 0 and parent.tier <= limit:
            budget -= parent.resident
        device, _ = self.kv.match(tail, request.prompt_tokens, request.context)
        return need - device <= budget

    def _begin_prefill(self) -> bool:
        if not self.waiting and not self._prefilling:
            return False
        left = self._chunk_tokens
        self._load_tokens = 0
        chunk: list[tuple[Request, int]] = []
        compute_s = 0.0
        index = 0
        while left > 0:
            if index < len(self._prefilling):
                request: Request | None = self._prefilling[index]
            else:
                request = self._admit()
                if request is not None:
                    self._prefilling.append(request)
            if request is None:
                break
            index += 1
            count = min(left, request.context - request.computed)
            compute_s += self.cost.prefill_s(request.computed, request.computed + count)
            chunk.append((request, count))
            left -= count
        if not chunk:
            return False
        self._prefill_chunk = chunk
        # Host copies are overlapped layer by layer with the compute.
        seconds = max(self.cost.base_s, compute_s, self._load_tokens * self.cost.load_token_s)
        self.statistics.prefill_s += seconds
        self.statistics.batch_s += seconds * self.running
        self.statistics.prefill_tokens += self._chunk_tokens - left
        self._plan(self.clock.now + seconds)
        return True

    def _end_prefill(self) -> None:
        chunk, self._prefill_chunk = self._prefill_chunk, []
        for request, count in chunk:
            request.computed += count
        done = [request for request, _ in chunk if request.computed >= request.context]
        self._prefilling = [request for request in self._prefilling if request.computed < request.context]
        for request in done:
            # The prefill's logits give the first token; its KV is made by the next step.
            request.context += 1
            request.remaining -= 1
            request.state = DECODE
            self.kv.grow(1)
            self._decoding[request.trajectory] = request
            self._decoding_context += request.context
            request.joined_at = self._steps
            request.finish_at = self._steps + request.remaining
            self.statistics.decode_tokens += 1
            if request.remaining > 0:
                heapq.heappush(self._finishing, (request.finish_at, request.arrival, request))
        self.kv.reclaim()
        for request in done:
            if request.remaining <= 0:
                self._leave(request)
                self._on_finish(request)

    # ---------------------------------------------------------------------------------------------------- aborts

    def _take_out(self) -> None:
        aborting, self._aborting = self._aborting, {}
        for request in aborting.values():
            if request.state == WAITING:
                self.waiting -= 1
                request.state = GONE
            elif request.state == PREFILL:
                # A part-computed prefill is kept as cache as far as it got.
                self._prefilling.remove(request)
                request.state = GONE
                self.kv.unlock(request.tail, request.context, request.prompt_tokens, request.computed)
            elif request.state == DECODE:
                self._drop_finishing(request)
                self._leave(request)
            else:
                continue
            self.statistics.aborts += 1
            self._on_abort(request)

    def check_invariants(self) -> None:
        """Raises InvariantError: KV or counts that do not add up, or a request that waits though it could run."""
        self.kv.check_invariants()
        if not self._busy and not self._held and not self._stopped:
            if self.running:
                raise InvariantError(f"the engine stands still with {self.running} requests")
            request = self._next_waiting()
            if request is not None and self._fits(request):
                raise InvariantError(f"{request.trajectory} waits though the engine is idle and its KV fits")
