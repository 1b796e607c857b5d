"""Real parts for the tests of tasks and agent: the environment service over HTTP, and the shipped model's folder."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import uvicorn

from envclient.base.ports import listen, port_of
from envclient.client import EnvClient
from envclient.controller.service import EnvService, make_service
from envclient.node.process import ProcessBackend
from envclient.policy.leases import LeaseBook
from examples.model.make import DEFAULT_FOLDER
from examples.tasks.records import DEFAULT_RECORDS, RepairRecord, load_records

TOKEN = "token-of-the-tests"
MODEL = str(DEFAULT_FOLDER)


@contextlib.asynccontextmanager
async def environment() -> AsyncIterator[EnvClient]:
    """A client of a service with the process backend, both in this event loop."""
    # Made again from its descriptor it knows that it is TCP, and asyncio switches Nagle's 40 ms off.
    sock = socket.socket(fileno=listen("127.0.0.1").detach())
    async with EnvService(
        ProcessBackend(), LeaseBook(capacity=64, wait_s=60.0, prefix="t-"), time.monotonic
    ) as service:
        settings = uvicorn.Config(make_service(service, TOKEN), log_config=None, access_log=False, lifespan="off")
        server = uvicorn.Server(settings)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            async with EnvClient(f"http://127.0.0.1:{port_of(sock)}", TOKEN) as client:
                yield client
        finally:
            server.should_exit = True
            await serving


def records_of(library: str, count: int) -> list[RepairRecord]:
    """The first `count` shipped records of a library."""
    return [record for record in load_records(DEFAULT_RECORDS) if record.library == library][:count]
