"""What rollout workers and agents call: sandboxes leased, used and released through the environment service.

    async with EnvClient(url, token) as environment:
        await environment.register([template])
        lease = await environment.lease("toolz", "p000012.0.3.0", 600.0, "p000012.0.3.0")
        result = await environment.exec(lease.lease_id, ["venus-test"], 10.0, stdin=request)
        await environment.release(lease.lease_id)

Every method raises WireError with one clear line when the service refuses or cannot be reached: that is a failed
environment, never a reward of 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from envclient.base.wire import Client
from envclient.types import (
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
    Template,
    TwinRequest,
    WriteRequest,
)

MARGIN_S = 60.0
"""What the service may take beyond a command's own timeout: killing what hangs, queueing behind others."""
LEASE_TIMEOUT_S = 300.0
"""A lease may wait for room (the service's own `lease_wait_s` ends it first)."""


class EnvClient:
    """Caller of one environment service. Use as `async with EnvClient(...)`, or close with `aclose`."""

    def __init__(self, url: str, token: str, *, connections: int = 512) -> None:
        self._wire = Client(url, token, timeout_s=MARGIN_S, connections=connections)

    async def __aenter__(self) -> EnvClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._wire.aclose()

    async def register(self, templates: Sequence[Template]) -> None:
        """Make `templates` known and warm; returns when all are ready. An equal template is a no-op."""
        timeout_s = MARGIN_S + sum(template.warmup_timeout_s for template in templates)
        await self._wire.call("/v1/templates", RegisterTemplates(templates=list(templates)), Done, timeout_s=timeout_s)

    async def lease(self, template: str, trajectory: str, lifetime_s: float, idempotency_key: str) -> Lease:
        """A sandbox of `template` for `lifetime_s` from now; waits for room. The same key gets the same lease."""
        request = LeaseRequest(
            template=template, trajectory=trajectory, lifetime_s=lifetime_s, idempotency_key=idempotency_key
        )
        lease: Lease = await self._wire.call("/v1/lease", request, Lease, timeout_s=LEASE_TIMEOUT_S)
        return lease

    async def exec(
        self,
        lease_id: str,
        argv: Sequence[str],
        timeout_s: float,
        stdin: bytes = b"",
        max_output_bytes: int = 65536,
    ) -> ExecResult:
        """Run `argv` in the sandbox: an applet of its template when argv[0] names one, else a program."""
        request = ExecRequest(
            lease_id=lease_id, argv=list(argv), timeout_s=timeout_s, stdin=stdin, max_output_bytes=max_output_bytes
        )
        result: ExecResult = await self._wire.call("/v1/exec", request, ExecResult, timeout_s=timeout_s + MARGIN_S)
        return result

    async def read(self, lease_id: str, path: str, max_bytes: int = 1 << 20) -> ReadReply:
        """The first `max_bytes` of a regular file in the sandbox."""
        request = ReadRequest(lease_id=lease_id, path=path, max_bytes=max_bytes)
        reply: ReadReply = await self._wire.call("/v1/read", request, ReadReply)
        return reply

    async def write(self, lease_id: str, path: str, data: bytes) -> None:
        """Replace the file at `path` in the sandbox, making its parent folders."""
        await self._wire.call("/v1/write", WriteRequest(lease_id=lease_id, path=path, data=data), Done)

    async def twin(self, lease_id: str, lifetime_s: float, idempotency_key: str) -> Lease:
        """A second sandbox with a copy of this one's files (workdir and /tmp), not of its processes."""
        request = TwinRequest(lease_id=lease_id, lifetime_s=lifetime_s, idempotency_key=idempotency_key)
        lease: Lease = await self._wire.call("/v1/twin", request, Lease, timeout_s=LEASE_TIMEOUT_S)
        return lease

    async def release(self, lease_id: str) -> None:
        """End the lease; returns when its sandbox is gone. Idempotent, also for a lease that has expired."""
        await self._wire.call("/v1/release", LeaseRef(lease_id=lease_id), Done)

    async def statistics(self) -> EnvStatistics:
        """Counts since the service started."""
        statistics: EnvStatistics = await self._wire.call("/v1/statistics", Done(), EnvStatistics)
        return statistics
