"""The worker's side of the mail with the coordinator: numbered reports go up, numbered commands come down, each once.

One poll is always waiting at the coordinator. Reports do not wait for it to end: a newer poll that carries them makes
the coordinator answer the older one. Any poll may be lost or repeated; numbers make that harmless.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from envclient.base.errors import WireError
from envclient.base.wire import Client
from rollout.protocol import PollReply, PollRequest, WorkerReport
from rollout.types import LengthEstimated, TurnEnded, TurnReady, WorkerCommand

log = logging.getLogger("venus.mail")
_URGENT_S = 0.01
_CASUAL_S = 0.25


class Mail:
    """Outbox, inbox and the loop between.

    Args:
        deliver: called with each new command, once and in order.
        wait_s: how long the coordinator may hold a poll.
        patience_s: how long the coordinator may be out of reach.
    """

    def __init__(
        self,
        client: Client,
        worker: str,
        deliver: Callable[[WorkerCommand], None],
        *,
        wait_s: float = 20.0,
        patience_s: float = 20.0,
    ) -> None:
        self._client = client
        self._worker = worker
        self._deliver = deliver
        self._wait_s = wait_s
        self._patience_s = patience_s
        self._outbox: list[WorkerReport] = []
        self._first_report = 0
        self._taken_commands = 0
        self._fresh = asyncio.Event()
        self._urgent = asyncio.Event()

    def report(self, report: WorkerReport) -> None:
        """Send `report`; turns and estimates may wait a little for company, everything else goes at once."""
        self._outbox.append(report)
        self._fresh.set()
        if not isinstance(report, (TurnReady, TurnEnded, LengthEstimated)):
            self._urgent.set()

    @property
    def unacknowledged(self) -> int:
        """Reports that the coordinator has not yet made durable."""
        return len(self._outbox)

    async def run(self) -> None:
        """Exchange mail until cancelled.

        Raises:
            WireError: the coordinator refused a poll, or was out of reach for `patience_s` seconds.
        """
        older: asyncio.Task[PollReply] | None = None
        waiting: asyncio.Task[PollReply] | None = None
        try:
            while True:
                older, waiting = waiting, asyncio.ensure_future(self._poll())
                if older is not None:
                    self._take(await older)
                    older = None
                await self._wait_report_or_reply(waiting)
                if waiting.done():
                    self._take(await waiting)
                    waiting = None
        finally:
            for task in (older, waiting):
                if task is not None:
                    task.cancel()

    async def _poll(self) -> PollReply:
        self._fresh.clear()
        self._urgent.clear()
        request = PollRequest(
            worker=self._worker,
            first_report=self._first_report,
            reports=list(self._outbox),
            acked_command=self._taken_commands,
            wait_s=self._wait_s,
        )
        loop = asyncio.get_running_loop()
        give_up = loop.time() + self._patience_s
        pause_s = 0.05
        while True:
            try:
                reply: PollReply = await self._client.call(
                    "/v1/worker/poll", request, PollReply, timeout_s=self._wait_s + self._patience_s
                )
                return reply
            except WireError as error:
                if loop.time() > give_up:
                    raise WireError(f"coordinator is gone: {error.message}", error.remedy) from None
                log.warning("poll failed, trying again: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(1.0, pause_s * 2)

    async def _wait_report_or_reply(self, reply: asyncio.Task[PollReply]) -> None:
        """Returns when `reply` is there, or when reports have gathered that should not wait for it."""
        fresh = asyncio.ensure_future(self._gathered())
        try:
            await asyncio.wait([reply, fresh], return_when=asyncio.FIRST_COMPLETED)
        finally:
            fresh.cancel()

    async def _gathered(self) -> None:
        await self._fresh.wait()
        try:
            await asyncio.wait_for(self._urgent.wait(), _CASUAL_S)
        except TimeoutError:
            return
        await asyncio.sleep(_URGENT_S)

    def _take(self, reply: PollReply) -> None:
        acknowledged = reply.acked_report - self._first_report
        if acknowledged > 0:
            del self._outbox[:acknowledged]
            self._first_report = reply.acked_report
        for number, command in enumerate(reply.commands, reply.first_command):
            if number == self._taken_commands:
                self._taken_commands += 1
                self._deliver(command)
