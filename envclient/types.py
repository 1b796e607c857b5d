"""Records of the environment contract: what a sandbox is asked and what it answers.

Pure. Every backend (process, and later QEMU and Firecracker) keeps the same contract, checked by one suite in
`tests/contract/`.
"""

from __future__ import annotations

from enum import Enum
from typing import Protocol

import msgspec


class EnvRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the environment's records."""


class ExecStatus(str, Enum):
    """How a command ended. Only EXITED has an exit code that means something."""

    EXITED = "exited"
    TIMED_OUT = "timed_out"
    """Killed with all its children when its time was up."""
    KILLED = "killed"
    """Ended by a signal or by a limit of the sandbox (memory, processes)."""


class ExecResult(EnvRecord, frozen=True, kw_only=True):
    """Outcome of `exec`. `output` is stdout and stderr together, in the order written."""

    status: ExecStatus
    exit_code: int
    output: bytes
    truncated: bool
    """Output was longer than `max_output_bytes`: its beginning is kept and the cut is marked in `output`."""
    duration_s: float


class Template(EnvRecord, frozen=True, kw_only=True):
    """Immutable sandbox image plus, where the backend can, the state of its warm-up process.

    `mounts` are (host path, path inside, both absolute) bound read-only. `warmup` is argv of the template's warm-up
    process: it starts the guest agent (`envclient.node.guest`) after loading what its applets need; sandboxes start as
    copies of it. An `exec` whose argv[0] names an applet runs in a fork of the warm process; any other argv is an
    ordinary program.
    """

    name: str
    mounts: list[tuple[str, str]] = []
    warmup: list[str] = []
    env: dict[str, str] = {}
    workdir: str = "/workspace"
    """The only writable folder besides /tmp; private to a sandbox."""
    warmup_timeout_s: float = 60.0
    memory_bytes: int = 2 << 30
    """Address space of one process inside."""
    disk_bytes: int = 64 << 20
    """Size of the private writable file systems."""
    max_processes: int = 64


class Lease(EnvRecord, frozen=True, kw_only=True):
    """A sandbox that lives until it is released or its lifetime ends."""

    lease_id: str
    template: str
    trajectory: str
    expires_at: float
    """Seconds on the service's monotonic clock, for statistics; clients use lifetime_s."""


# ------------------------------------------------------------------------------------------------------ requests


class LeaseRequest(EnvRecord, frozen=True, kw_only=True):
    """`idempotency_key`: a repeated request with the same key gets the same lease, not a second sandbox."""

    template: str
    trajectory: str
    lifetime_s: float
    idempotency_key: str


class ExecRequest(EnvRecord, frozen=True, kw_only=True):
    lease_id: str
    argv: list[str]
    timeout_s: float
    stdin: bytes = b""
    max_output_bytes: int = 65536


class ReadRequest(EnvRecord, frozen=True, kw_only=True):
    lease_id: str
    path: str
    """Absolute, or relative to the template's workdir. Never follows a link out of the sandbox."""
    max_bytes: int = 1 << 20


class ReadReply(EnvRecord, frozen=True, kw_only=True):
    data: bytes
    truncated: bool


class WriteRequest(EnvRecord, frozen=True, kw_only=True):
    lease_id: str
    path: str
    data: bytes


class LeaseRef(EnvRecord, frozen=True, kw_only=True):
    lease_id: str


class TwinRequest(EnvRecord, frozen=True, kw_only=True):
    """A second sandbox with a copy of this one's files, for a grader that must not be disturbed by the agent."""

    lease_id: str
    lifetime_s: float
    idempotency_key: str


class Done(EnvRecord, frozen=True, kw_only=True):
    """Nothing to say."""


class RegisterTemplates(EnvRecord, frozen=True, kw_only=True):
    """Make these templates known and warm; answered when all are ready. Re-registering an equal one is a no-op."""

    templates: list[Template]


class EnvStatistics(EnvRecord, frozen=True, kw_only=True):
    leases: int
    created: int
    released: int
    expired: int
    execs: int
    templates: int


class Backend(Protocol):
    """One way to run sandboxes. All methods raise VenusError with one clear line when they cannot."""

    async def prepare(self, template: Template) -> None:
        """Make `template` ready (its warm-up process runs); idempotent for an equal template."""

    async def create(self, template: str, sandbox: str) -> None: ...

    async def exec(
        self, sandbox: str, argv: list[str], timeout_s: float, stdin: bytes, max_output_bytes: int
    ) -> ExecResult: ...

    async def read(self, sandbox: str, path: str, max_bytes: int) -> ReadReply: ...

    async def write(self, sandbox: str, path: str, data: bytes) -> None: ...

    async def twin(self, sandbox: str, new: str) -> None: ...

    async def destroy(self, sandbox: str) -> None:
        """Idempotent; afterwards no process, mount or file of the sandbox is left."""

    async def close(self) -> None:
        """Destroy everything, templates included."""
