"""A coordinator for the actor alone: hands prepared groups to whoever asks, over real HTTP, and takes notes."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from envclient.base.ports import listen, port_of
from envclient.base.wire import endpoint, make_app
from rollout.protocol import (
    AckRequest,
    Empty,
    EngineAddress,
    EvaluateReply,
    EvaluateRequest,
    NextGroupRequest,
    StepRequest,
    SyncBeginReply,
    SyncBeginRequest,
    SyncEndRequest,
)
from rollout.types import BatchClosed, BatchCounts, NextGroup, NoGroupYet, TrainGroup
from tests.numerics import kit

TOKEN = "token-of-the-test"
POLL_S = 0.005


@dataclass
class FakeCoordinator:
    """`batches[s]` are the groups of step s + 1. Groups are dealt in order to the replicas that ask."""

    batches: list[list[TrainGroup]]
    engines: list[EngineAddress] = field(default_factory=list)
    shares: dict[int, list[str]] = field(default_factory=dict)
    """Replica → ids of the groups it acknowledged."""
    log: list[str] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)
    url: str = ""

    def __post_init__(self) -> None:
        self._taken: dict[tuple[int, int], TrainGroup] = {}
        self._waiting = [list(batch) for batch in self.batches]
        self._acknowledged: dict[int, int] = {}

    def next_group(self, request: NextGroupRequest) -> NextGroup:
        if request.step > len(self.batches):
            return BatchClosed(step=request.step, counts=BatchCounts(groups=0, sequences=0, tokens=0))
        key = (request.step, request.replica)
        if key not in self._taken and (group := self.take(request.step)) is not None:
            self._taken[key] = group
        if key in self._taken:
            return self._taken[key]
        batch = self.batches[request.step - 1]
        if self._acknowledged.get(request.step, 0) == len(batch):
            return BatchClosed(step=request.step, counts=kit.counts_of(batch))
        return NoGroupYet(step=request.step)

    def take(self, step: int) -> TrainGroup | None:
        """The next group of `step`, which is handed out; None when there is none now."""
        waiting = self._waiting[step - 1]
        return waiting.pop(0) if waiting else None

    def acknowledge(self, request: AckRequest) -> Empty:
        group = self._taken.pop((request.step, request.replica))
        assert group.group_id == request.group_id
        assert request.tokens == kit.counts_of([group]).tokens
        self._acknowledged[request.step] = self._acknowledged.get(request.step, 0) + 1
        self.shares.setdefault(request.replica, []).append(group.group_id)
        return Empty()

    def app(self) -> Any:
        app = make_app("coordinator", TOKEN)

        @endpoint(app, "/v1/actor/next_group", NextGroupRequest)
        async def next_group(request: NextGroupRequest) -> NextGroup:
            deadline = time.monotonic() + request.wait_s
            # Time alone may make a group ready: there is no event to wait for.
            while isinstance(answer := self.next_group(request), NoGroupYet) and time.monotonic() < deadline:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            return answer

        @endpoint(app, "/v1/actor/ack", AckRequest)
        async def ack(request: AckRequest) -> Empty:
            return self.acknowledge(request)

        @endpoint(app, "/v1/actor/step", StepRequest)
        async def step(request: StepRequest) -> Empty:
            self.log.append(f"step {request.step}")
            self.metrics.append(request.metrics)
            return Empty()

        @endpoint(app, "/v1/actor/sync_begin", SyncBeginRequest)
        async def sync_begin(request: SyncBeginRequest) -> SyncBeginReply:
            self.log.append(f"sync_begin {request.version}")
            return SyncBeginReply(engines=self.engines)

        @endpoint(app, "/v1/actor/sync_end", SyncEndRequest)
        async def sync_end(request: SyncEndRequest) -> Empty:
            self.log.append(f"sync_end {request.version}")
            assert request.seconds["total"] >= 0
            return Empty()

        @endpoint(app, "/v1/actor/evaluate", EvaluateRequest)
        async def evaluate(request: EvaluateRequest) -> EvaluateReply:
            self.log.append(f"evaluate {request.eval_id} {request.version}")
            return EvaluateReply(
                eval_id=request.eval_id, version=request.version, samples=1, pass_rate=0.0, standard_error=0.0
            )

        return app


@contextmanager
def serving(coordinator: FakeCoordinator) -> Iterator[FakeCoordinator]:
    """The coordinator's HTTP server in a thread of this process."""
    sock: socket.socket = listen("127.0.0.1")
    server = uvicorn.Server(uvicorn.Config(coordinator.app(), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    coordinator.url = f"http://127.0.0.1:{port_of(sock)}"
    try:
        yield coordinator
    finally:
        server.should_exit = True
        thread.join(10)
