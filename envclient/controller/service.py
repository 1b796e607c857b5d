"""The environment service: carries out the lease book's commands on a backend and answers the clients.

Requests enter through the HTTP endpoints of `make_service`, the book (`envclient.policy.leases`) decides, this shell
acts. All of it runs in one event loop, so that the book needs no lock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI

from envclient.base.errors import ConfigError, VenusError
from envclient.base.wire import endpoint, make_app
from envclient.policy.leases import Create, Destroy, Grant, LeaseBook, LeaseCommand, Refuse
from envclient.types import (
    Backend,
    Done,
    EnvStatistics,
    ExecRequest,
    ExecResult,
    Lease,
    LeaseRef,
    LeaseRequest,
    ReadReply,
    ReadRequest,
    RegisterTemplates,
    TwinRequest,
    WriteRequest,
)

log = logging.getLogger("venus.environment")

REAPER_PERIOD_S = 0.5
MAX_TIMEOUT_S = 86400.0


class EnvService:
    """The shell. `clock` is the monotonic clock in seconds. Use as `async with`; leaving destroys everything."""

    def __init__(self, backend: Backend, book: LeaseBook, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._book = book
        self._clock = clock
        self._askers: dict[str, list[asyncio.Future[Lease]]] = {}
        self._destroyed: dict[str, asyncio.Future[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._templates: set[str] = set()
        self._execs = 0
        self._closing = False

    async def __aenter__(self) -> EnvService:
        self._spawn(self._reap())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every sandbox; whoever waits for one or for its answer is refused. Idempotent."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._backend.close()
        for askers in self._askers.values():
            for asker in askers:
                if not asker.done():
                    asker.set_exception(VenusError("the environment service is closing"))
        self._askers.clear()
        for gone in self._destroyed.values():
            gone.set_result(None)
        self._destroyed.clear()

    # --------------------------------------------------------------------------------------------- what clients ask

    async def register(self, request: RegisterTemplates) -> Done:
        """Prepare templates side by side."""
        prepared = await asyncio.gather(
            *(self._backend.prepare(template) for template in request.templates), return_exceptions=True
        )
        for template, outcome in zip(request.templates, prepared, strict=True):
            if outcome is not None:
                raise outcome
            self._templates.add(template.name)
        return Done()

    async def lease(self, request: LeaseRequest) -> Lease:
        _require_seconds("lifetime_s", request.lifetime_s)
        if request.template not in self._templates:
            known = ", ".join(sorted(self._templates)) or "none"
            raise ConfigError(f"template {request.template!r} is not registered", f"known: {known}")
        return await self._ask(
            request.idempotency_key, request.template, request.trajectory, request.lifetime_s, twin_of=""
        )

    async def twin(self, request: TwinRequest) -> Lease:
        _require_seconds("lifetime_s", request.lifetime_s)
        self._require_live(request.lease_id)
        origin = self._book.entry(request.lease_id)
        return await self._ask(
            request.idempotency_key, origin.template, origin.trajectory, request.lifetime_s, twin_of=request.lease_id
        )

    async def exec(self, request: ExecRequest) -> ExecResult:
        _require_seconds("timeout_s", request.timeout_s)
        self._require_live(request.lease_id)
        self._execs += 1
        return await self._backend.exec(
            request.lease_id, request.argv, request.timeout_s, request.stdin, request.max_output_bytes
        )

    async def read(self, request: ReadRequest) -> ReadReply:
        self._require_live(request.lease_id)
        return await self._backend.read(request.lease_id, request.path, request.max_bytes)

    async def write(self, request: WriteRequest) -> Done:
        self._require_live(request.lease_id)
        await self._backend.write(request.lease_id, request.path, request.data)
        return Done()

    async def release(self, request: LeaseRef) -> Done:
        """Returns when the sandbox is gone, also to the second who asks."""
        self._apply(self._book.release(request.lease_id))
        gone = self._destroyed.get(request.lease_id)
        if gone is not None:
            await asyncio.shield(gone)
        return Done()

    async def statistics(self, _request: Done) -> EnvStatistics:
        counts = self._book.statistics()
        return EnvStatistics(
            leases=counts.live,
            created=counts.created,
            released=counts.released,
            expired=counts.expired,
            execs=self._execs,
            templates=len(self._templates),
        )

    # ------------------------------------------------------------------------------------------------------- shell

    async def _ask(self, key: str, template: str, trajectory: str, lifetime_s: float, twin_of: str) -> Lease:
        if self._closing:
            raise VenusError("the environment service is closing")
        commands = self._book.ask(
            key=key,
            template=template,
            trajectory=trajectory,
            lifetime_s=lifetime_s,
            now=self._clock(),
            twin_of=twin_of,
        )
        asker: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        for command in commands:
            if isinstance(command, (Grant, Refuse)):
                self._answer(command, [asker])
                return await asker
        self._askers.setdefault(key, []).append(asker)
        self._apply(commands)
        return await asker

    def _require_live(self, lease_id: str) -> None:
        if not self._book.is_live(lease_id):
            raise VenusError(f"lease {lease_id!r} does not live (any more)", "its lifetime may be over: see lifetime_s")

    def _apply(self, commands: list[LeaseCommand]) -> None:
        for command in commands:
            if isinstance(command, Create):
                self._spawn(self._create(command))
            elif isinstance(command, Destroy):
                self._destroyed[command.lease_id] = asyncio.get_running_loop().create_future()
                self._spawn(self._destroy(command))
            else:
                self._answer(command, self._askers.pop(command.key, []))

    def _answer(self, command: Grant | Refuse, askers: list[asyncio.Future[Lease]]) -> None:
        for asker in askers:
            if asker.done():
                continue
            if isinstance(command, Refuse):
                asker.set_exception(VenusError(command.cause))
                continue
            entry = self._book.entry(command.lease_id)
            asker.set_result(
                Lease(
                    lease_id=entry.lease_id,
                    template=entry.template,
                    trajectory=entry.trajectory,
                    expires_at=entry.expires_at,
                )
            )

    async def _create(self, command: Create) -> None:
        try:
            if command.twin_of:
                await self._backend.twin(command.twin_of, command.lease_id)
            else:
                await self._backend.create(command.template, command.lease_id)
        except Exception as error:  # whatever it is: the place becomes free and the asker has an answer
            known = isinstance(error, VenusError)
            log.warning("lease %s: %s", command.lease_id, error, exc_info=None if known else error)
            cause = str(error) if known else f"{type(error).__name__}: {error}"
            self._apply(self._book.create_failed(command.lease_id, cause))
        else:
            self._apply(self._book.created(command.lease_id, self._clock()))

    async def _destroy(self, command: Destroy) -> None:
        if command.cause != "released":
            log.warning("lease %s ends: %s", command.lease_id, command.cause)
        try:
            await self._backend.destroy(command.lease_id)
        except Exception:  # its place must not stay taken, nor its holder wait
            log.exception("lease %s: its sandbox was not destroyed", command.lease_id)
        gone = self._destroyed.pop(command.lease_id, None)
        if gone is not None:
            gone.set_result(None)
        self._apply(self._book.destroyed(command.lease_id))

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAPER_PERIOD_S)
            self._apply(self._book.tick(self._clock()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("the service's own task failed", exc_info=task.exception())


def _require_seconds(name: str, value: float) -> None:
    if not 0 < value <= MAX_TIMEOUT_S:
        raise ConfigError(f"{name} is {value:g}", f"it must be above 0 and at most {MAX_TIMEOUT_S:g} seconds")


def make_service(service: EnvService, token: str) -> FastAPI:
    """The HTTP side of `service`."""
    app = make_app("environment", token)
    for path, request_type, method in (
        ("/v1/templates", RegisterTemplates, service.register),
        ("/v1/lease", LeaseRequest, service.lease),
        ("/v1/exec", ExecRequest, service.exec),
        ("/v1/read", ReadRequest, service.read),
        ("/v1/write", WriteRequest, service.write),
        ("/v1/twin", TwinRequest, service.twin),
        ("/v1/release", LeaseRef, service.release),
        ("/v1/statistics", Done, service.statistics),
    ):
        endpoint(app, path, request_type)(method)  # type: ignore[arg-type]
    return app
