"""Backend `process`: sandboxes are namespaced forks of a template's warm process on this machine.

Keeps the contract of `envclient.types.Backend`. Called by the controller; owns the containers (one a template), the
links to the sandboxes' guest agents, and, when root, the pool of host uids of which every living sandbox has one to
itself.
"""

from __future__ import annotations

import asyncio
import heapq
import os
import shutil
import socket
import subprocess
from dataclasses import dataclass

from envclient.base.errors import ConfigError, PreflightError, VenusError
from envclient.node import guest
from envclient.node.container import READY_TIMEOUT_S, Container
from envclient.node.link import GuestLink
from envclient.types import ExecResult, ExecStatus, ReadReply, Template

UID_BASE = 1_879_048_192
"""0x70000000: far from users, service accounts, and the ranges that container managers hand out."""
UIDS = 4096
ANSWER_TIMEOUT_S = 30.0
"""Beyond a command's own timeout: what a guest agent may need to kill, reap and reply on a loaded machine."""
TWIN_TIMEOUT_S = 60.0
MAX_PAYLOAD_BYTES = 256 << 20
PROBE_TIMEOUT_S = 20.0


def preflight() -> None:
    """Check that bubblewrap is there and may make namespaces.

    Raises:
        PreflightError: it is not installed, or the machine forbids it.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise PreflightError("program 'bwrap' is not installed: sandboxes need it", "apt-get install bubblewrap")
    argv = [bwrap, "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "--", "/bin/true"]
    try:
        probe = subprocess.run(argv, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise PreflightError("bwrap does not return from a trial run", "is the machine overloaded?") from None
    if probe.returncode != 0:
        reason = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
        raise PreflightError(
            f"bwrap cannot make a sandbox on this machine: {reason}",
            "allow user namespaces (sysctl user.max_user_namespaces), or run as root with CAP_SYS_ADMIN",
        )


@dataclass(kw_only=True)
class _Sandbox:
    container: Container
    link: GuestLink
    uid: int


class ProcessBackend:
    """See the module. Construct and use inside one running event loop, on the main thread."""

    def __init__(self) -> None:
        self._root = os.getuid() == 0
        self._templates: dict[str, Template] = {}
        self._containers: dict[str, Container] = {}
        self._starting: dict[str, asyncio.Lock] = {}
        self._sandboxes: dict[str, _Sandbox] = {}
        self._closed = False
        self._free_uids = list(range(UID_BASE, UID_BASE + UIDS)) if self._root else []

    async def prepare(self, template: Template) -> None:
        """Start the template's container, unless an equal one runs.

        Raises:
            VenusError: the name is taken by a different template, or its warm-up fails.
        """
        known = self._templates.setdefault(template.name, template)
        if known != template:
            raise ConfigError(
                f"template {template.name!r} is known with other contents", "give the new one another name"
            )
        if os.path.normpath(template.workdir) in ("/", "/tmp") or not os.path.isabs(template.workdir):
            del self._templates[template.name]
            raise ConfigError(f"template {template.name!r}: workdir {template.workdir!r}", "choose an absolute folder")
        try:
            await self._container(template.name)
        except VenusError:
            self._templates.pop(template.name, None)
            raise

    async def _container(self, name: str) -> Container:
        """The template's container, started again when its zygote has died."""
        template = self._templates.get(name)
        if template is None:
            raise ConfigError(
                f"template {name!r} is not registered", f"known: {', '.join(sorted(self._templates)) or 'none'}"
            )
        async with self._starting.setdefault(name, asyncio.Lock()):
            container = self._containers.get(name)
            if container is None or not container.alive:
                container = self._containers[name] = await Container.start(template, root=self._root)
            if self._closed:
                await container.close()
                raise VenusError("the sandbox backend is closed")
            return container

    async def create(self, template: str, sandbox: str) -> None:
        container = await self._container(template)
        if self._root and not self._free_uids:
            raise VenusError(f"all {UIDS} sandbox uids are taken", "lower env.max_sandboxes")
        uid = heapq.heappop(self._free_uids) if self._root else 0
        try:
            link, guest_end = await self._connect(sandbox)
        except BaseException:
            self._give_back(uid)
            raise
        self._sandboxes[sandbox] = _Sandbox(container=container, link=link, uid=uid)
        try:
            await container.create(sandbox, uid, guest_end, own_uid=self._root)
            await link.wait_ready(READY_TIMEOUT_S)
        except BaseException:
            await self.destroy(sandbox)
            raise

    async def exec(
        self, sandbox: str, argv: list[str], timeout_s: float, stdin: bytes, max_output_bytes: int
    ) -> ExecResult:
        if not argv:
            raise ConfigError("exec: argv is empty", "its first item names an applet or a program")
        request = {"op": "exec", "argv": argv, "timeout_s": timeout_s, "max_output_bytes": max_output_bytes}
        reply, output = await self._link(sandbox).request(request, stdin, timeout_s + ANSWER_TIMEOUT_S)
        try:
            return ExecResult(
                status=ExecStatus(reply["status"]),
                exit_code=int(reply["exit_code"]),
                output=output,
                truncated=bool(reply["truncated"]),
                duration_s=float(reply["duration_s"]),
            )
        except (KeyError, ValueError, TypeError):
            raise VenusError(f"sandbox {sandbox}: its guest agent gave a malformed reply") from None

    async def read(self, sandbox: str, path: str, max_bytes: int) -> ReadReply:
        request = {"op": "read", "path": path, "max_bytes": min(max_bytes, MAX_PAYLOAD_BYTES)}
        reply, data = await self._link(sandbox).request(request, b"", ANSWER_TIMEOUT_S)
        return ReadReply(data=data, truncated=bool(reply.get("truncated")))

    async def write(self, sandbox: str, path: str, data: bytes) -> None:
        await self._link(sandbox).request({"op": "write", "path": path}, data, ANSWER_TIMEOUT_S)

    async def twin(self, sandbox: str, new: str) -> None:
        template = self._sandbox(sandbox).container.template
        folders = [template.workdir, "/tmp"]
        packed = await self.exec(sandbox, [guest.PACK, *folders], TWIN_TIMEOUT_S, b"", MAX_PAYLOAD_BYTES - 4096)
        if packed.status is not ExecStatus.EXITED or packed.exit_code != 0 or packed.truncated:
            raise VenusError(f"sandbox {sandbox}: its files cannot be copied: {packed.output[-200:]!r}")
        await self.create(template.name, new)
        try:
            unpacked = await self.exec(new, [guest.UNPACK, *folders], TWIN_TIMEOUT_S, packed.output, 4096)
            if unpacked.status is not ExecStatus.EXITED or unpacked.exit_code != 0:
                raise VenusError(f"sandbox {new}: the copied files cannot be unpacked: {unpacked.output[-200:]!r}")
        except BaseException:
            await self.destroy(new)
            raise

    async def destroy(self, sandbox: str) -> None:
        found = self._sandboxes.pop(sandbox, None)
        if found is None:
            return
        found.link.close("the sandbox has ended")
        await found.container.destroy(sandbox)
        self._give_back(found.uid)

    async def close(self) -> None:
        self._closed = True
        for sandbox in self._sandboxes.values():
            sandbox.link.close("the service is closing")
        self._sandboxes.clear()
        await asyncio.gather(*(container.close() for container in self._containers.values()))
        self._containers.clear()

    async def _connect(self, sandbox: str) -> tuple[GuestLink, socket.socket]:
        """A link to a sandbox that is yet to come, and the end of it that is the guest's."""
        node_end, guest_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            return await GuestLink.connect(sandbox, node_end, MAX_PAYLOAD_BYTES), guest_end
        except BaseException:
            node_end.close()
            guest_end.close()
            raise

    def _give_back(self, uid: int) -> None:
        if self._root:
            heapq.heappush(self._free_uids, uid)

    def _sandbox(self, sandbox: str) -> _Sandbox:
        found = self._sandboxes.get(sandbox)
        if found is None:
            raise VenusError(f"sandbox {sandbox} does not exist (any more)")
        return found

    def _link(self, sandbox: str) -> GuestLink:
        return self._sandbox(sandbox).link
