"""The environment service on a backend that breaks: no place stays taken, nobody waits for ever."""

from __future__ import annotations

import asyncio
import time

import pytest

from envclient.base.errors import VenusError
from envclient.controller.service import EnvService
from envclient.policy.leases import LeaseBook
from envclient.types import ExecResult, Lease, LeaseRef, LeaseRequest, ReadReply, RegisterTemplates, Template


class BrokenBackend:
    """Fails as no backend should: create for sandboxes of template `bad`, destroy always."""

    async def prepare(self, template: Template) -> None:
        pass

    async def create(self, template: str, sandbox: str) -> None:
        if template == "bad":
            raise OSError("too many open files")

    async def destroy(self, sandbox: str) -> None:
        raise RuntimeError("no such process")

    async def exec(
        self, sandbox: str, argv: list[str], timeout_s: float, stdin: bytes, max_output_bytes: int
    ) -> ExecResult:
        raise NotImplementedError

    async def read(self, sandbox: str, path: str, max_bytes: int) -> ReadReply:
        raise NotImplementedError

    async def write(self, sandbox: str, path: str, data: bytes) -> None:
        raise NotImplementedError

    async def twin(self, sandbox: str, new: str) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        pass


def test_whatever_the_backend_raises_the_place_is_free_again() -> None:
    async def run() -> None:
        book = LeaseBook(capacity=1, wait_s=60.0, prefix="t-")
        async with EnvService(BrokenBackend(), book, time.monotonic) as service:
            await service.register(RegisterTemplates(templates=[Template(name="bad"), Template(name="good")]))

            async def lease(template: str, key: str) -> Lease:
                return await service.lease(
                    LeaseRequest(template=template, trajectory="x", lifetime_s=60.0, idempotency_key=key)
                )

            for number in range(2):
                with pytest.raises(VenusError, match="OSError: too many open files"):
                    await lease("bad", "same key")
                good = await lease("good", f"good{number}")
                await service.release(LeaseRef(lease_id=good.lease_id))
            book.check_invariants()
            assert book.statistics().failed == book.statistics().destroyed == 2

    asyncio.run(asyncio.wait_for(run(), 20.0))
