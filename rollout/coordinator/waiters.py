"""Callers that wait for a decision: the actor's long polls, syncs and evaluations, by what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Any

from envclient.base.errors import VenusError


class Waiters:
    """One future a key; callers who ask for the same thing (a resent request) share it."""

    def __init__(self) -> None:
        self._futures: dict[Hashable, asyncio.Future[Any]] = {}
        self._broken: VenusError | None = None

    async def wait(self, future: asyncio.Future[Any], timeout_s: float | None = None) -> Any:
        """The answer, or None when `timeout_s` seconds passed without one.

        Raises:
            VenusError: what `fail` was called with, or the answer itself is an error.
        """
        await asyncio.wait({future}, timeout=timeout_s)
        return future.result() if future.done() else None

    def open(self, key: Hashable) -> asyncio.Future[Any]:
        """The future for `key`: open it before submitting the event that causes the answer.

        Raises:
            VenusError: what `fail` was called with.
        """
        self.check()
        if key not in self._futures:
            self._futures[key] = asyncio.get_running_loop().create_future()
        return self._futures[key]

    def resolve(self, key: Hashable, value: Any) -> None:
        """Answer those who wait for `key`; nobody may be waiting any more."""
        future = self._futures.pop(key, None)
        if future is not None:
            future.set_result(value)

    def refuse(self, key: Hashable, error: VenusError) -> None:
        """Answer those who wait for `key` with an error."""
        future = self._futures.pop(key, None)
        if future is not None:
            future.set_exception(error)
            future.exception()  # nobody may be waiting: not a lost exception

    def fail(self, error: VenusError) -> None:
        """The run is over: everyone who waits, or comes later, gets `error`."""
        self._broken = self._broken or error
        for key in list(self._futures):
            self.refuse(key, error)

    def check(self) -> None:
        """Raises what `fail` was called with."""
        if self._broken is not None:
            raise self._broken
