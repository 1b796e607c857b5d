"""An engine without a model: tokens are a pure function of the context and a seed. For tests of everything around it.

It keeps the engine's contract (same suite as SGLang): counts, stop, length and abort with partial tokens, and a turn
resubmitted as prompt + tokens goes on exactly as if it had never been aborted. Weights do not matter to it.
"""

from __future__ import annotations

import asyncio
import hashlib
from array import array
from collections.abc import Awaitable, Callable

from envclient.base.errors import WireError
from rollout.protocol import GenerateRequest, Generation
from rollout.types import Capabilities

NextToken = Callable[[GenerateRequest, list[int]], int]


class ScriptedEngine:
    """Deterministic engine in the caller's process.

    Args:
        slots: requests generated at once; more wait.
        vocabulary: token ids are below it.
        stop_every: a stop token comes after this many tokens on average.
        token_s: seconds a token takes, by `sleep`.
        next_token: a script: the token after the given request and context; instead of the seeded function.
        sleep: takes the place of asyncio.sleep where time is virtual.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        slots: int = 32,
        vocabulary: int = 256,
        stop_every: int = 8,
        token_s: float = 0.0,
        next_token: NextToken | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._seed = seed
        self._vocabulary = vocabulary
        self._stop_every = stop_every
        self._token_s = token_s
        self._script = next_token
        self._sleep = sleep
        self._slots = asyncio.Semaphore(slots)
        self._running: dict[str, asyncio.Event] = {}
        """Abort flag of each request in the engine."""
        self._cached: dict[str, list[int]] = {}
        """Context last seen of each trajectory."""
        self._death: asyncio.Future[str] | None = None

    @property
    def url(self) -> str:
        return "scripted:"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    async def start(self) -> None:
        self._death = asyncio.get_running_loop().create_future()

    async def wait_dead(self) -> str:
        if self._death is None:
            return "the engine was never started"
        return await asyncio.shield(self._death)

    def die(self, reason: str) -> None:
        """End as an engine does that crashes."""
        if self._death is not None and not self._death.done():
            self._death.set_result(reason)
        for aborted in self._running.values():
            aborted.set()

    async def stop(self) -> None:
        self.die("stopped")

    async def generate(self, request: GenerateRequest) -> Generation:
        """As the protocol says; tokens appear one by one with a scheduling point between."""
        self._check_alive()
        if request.request_id in self._running:
            raise WireError(f"engine: request {request.request_id} is already running")
        aborted = self._running[request.request_id] = asyncio.Event()
        try:
            async with self._slots:
                return await self._generate(request, aborted)
        finally:
            del self._running[request.request_id]

    async def _generate(self, request: GenerateRequest, aborted: asyncio.Event) -> Generation:
        context = list(request.input_ids)
        cached = _common_prefix(self._cached.get(request.trajectory_id, []), context[:-1])
        logprobs: list[float] = []
        reason = "length"
        while len(logprobs) < request.max_new_tokens:
            await self._sleep(self._token_s)
            if aborted.is_set():
                reason = "abort"
                break
            token, logprob = self._next(request, context)
            context.append(token)
            logprobs.append(logprob)
            if token in request.stop_token_ids:
                reason = "stop"
                break
        self._check_alive()
        self._cached[request.trajectory_id] = context
        return Generation(
            token_ids=context[len(request.input_ids) :], logprobs=logprobs, finish_reason=reason, cached_tokens=cached
        )

    def _next(self, request: GenerateRequest, context: list[int]) -> tuple[int, float]:
        """Token after `context` and its log-prob; greedy requests of all trajectories agree, sampled ones differ."""
        salt = "" if request.temperature == 0 else request.trajectory_id
        key = f"{self._seed}/{salt}".encode()[-64:]
        dice = hashlib.blake2b(array("q", context).tobytes(), key=key, digest_size=12).digest()
        logprob = -int.from_bytes(dice[8:], "big") / 2**30
        if self._script is not None:
            return self._script(request, context), logprob
        if request.stop_token_ids and int.from_bytes(dice[:4], "big") % self._stop_every == 0:
            return request.stop_token_ids[dice[4] % len(request.stop_token_ids)], logprob
        token = int.from_bytes(dice[4:8], "big") % self._vocabulary
        while token in request.stop_token_ids:
            token = (token + 1) % self._vocabulary
        return token, logprob

    async def abort_all(self) -> None:
        for request_id in list(self._running):
            await self.abort(request_id)

    async def abort(self, request_id: str) -> None:
        self._check_alive()
        if request_id in self._running:
            self._running[request_id].set()

    async def flush(self) -> None:
        self._check_alive()
        if self._running:
            raise WireError(f"engine: {len(self._running)} requests are running, the cache cannot be flushed")
        self._cached.clear()

    def _check_alive(self) -> None:
        if self._death is None or self._death.done():
            raise WireError("engine is gone")


def _common_prefix(a: list[int], b: list[int]) -> int:
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])
