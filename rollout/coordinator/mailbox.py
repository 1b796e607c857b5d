"""One worker's mail: numbered reports come up, numbered commands go down, each taken exactly once.

The wire may lose or repeat any poll. A report below the number already taken is a repeat; a command stays here until
the worker says that it has it. A newer poll releases an older one that still waits, so that a worker can bring a report
without waiting for its own long poll to end.
"""

from __future__ import annotations

import asyncio
from collections import deque

from envclient.base.errors import WireError
from rollout.protocol import JoinRequest, PollReply, PollRequest, WorkerReport
from rollout.types import WorkerCommand


class Mailbox:
    """Mail of one joined worker process."""

    def __init__(self, join: JoinRequest, now: float) -> None:
        self.join = join
        self.last_poll = now
        """When the worker was last heard of."""
        self.taken = 0
        """Reports taken."""
        self.durable = 0
        """Reports whose transaction is on disk: only these are acknowledged."""
        self._outbox: deque[WorkerCommand] = deque()
        self._first = 0
        self._poll = 0
        self._changed = asyncio.Event()

    @property
    def untouched(self) -> bool:
        """No poll has moved anything yet: a repeated join is a repeat, not a restarted worker."""
        return self.taken == 0 and self._first == 0

    def post(self, command: WorkerCommand) -> None:
        """Queue a command for the worker."""
        self._outbox.append(command)
        self._changed.set()

    def take(self, request: PollRequest) -> list[WorkerReport]:
        """The reports in `request` that are new; forgets commands that the worker has acknowledged.

        Raises:
            WireError: a report or a command was skipped: this is not the process that joined.
        """
        if request.first_report > self.taken or request.acked_command > self._first + len(self._outbox):
            raise WireError(
                f"worker {request.worker}: reports from {request.first_report} on ({self.taken} taken), "
                f"{request.acked_command} commands acknowledged ({self._first + len(self._outbox)} sent)",
                "restart the worker",
            )
        while self._first < request.acked_command:
            self._outbox.popleft()
            self._first += 1
        fresh = request.reports[self.taken - request.first_report :]
        self.taken += len(fresh)
        return fresh

    async def wait_commands(self, wait_s: float) -> None:
        """Returns when a command waits for the worker, a newer poll came, or `wait_s` seconds have passed."""
        self.release()
        mine = self._poll
        try:
            async with asyncio.timeout(wait_s):
                while not self._outbox and self._poll == mine:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return

    def release(self) -> None:
        """Answer a poll that waits."""
        self._poll += 1
        self._changed.set()

    def reply(self) -> PollReply:
        """What the worker has not acknowledged."""
        return PollReply(first_command=self._first, commands=list(self._outbox), acked_report=self.durable)
