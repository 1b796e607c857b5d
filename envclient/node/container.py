"""A template's container on this machine: one bubblewrap process and, as its pid 1, the template's zygote.

The container sees read-only binds, no network and no environment but its own. Sandboxes are forks of the zygote
(`jail.py`); this file starts the container and speaks on the zygote's control channel. It dies with the service: the
kernel kills bubblewrap with its parent, the zygote with bubblewrap, and every sandbox with the zygote.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from envclient.base.errors import VenusError
from envclient.node import guest
from envclient.types import Template

log = logging.getLogger("venus.node")

INSIDE = "/venus"
MODULES = ("guest.py", "jail.py", "syscalls.py")
ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "localtime", "ssl/certs", "mime.types")
SYSTEM_FOLDERS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
CAPABILITIES = ("SYS_ADMIN", "NET_ADMIN", "SETUID", "SETGID", "SETPCAP", "CHOWN", "KILL", "SETFCAP")
"""Of the zygote only: what making and ending a sandbox takes (SETFCAP: to map its uid 0 into a namespace below)."""
MESSAGE_BYTES = 65536
READY_TIMEOUT_S = 60.0
DESTROY_TIMEOUT_S = 15.0
CLOSE_TIMEOUT_S = 5.0


def interpreter_folders() -> list[str]:
    """Folders that hold this Python and its packages, by their real paths and by the paths they are called by."""
    folders: list[str] = []
    for prefix in (sys.prefix, sys.base_prefix):
        for path in (prefix, os.path.realpath(prefix)):
            if path not in folders and not Path(path).is_relative_to("/usr"):
                folders.append(path)
    return folders


def environment(template: Template) -> dict[str, str]:
    """All variables that exist inside: none of the service's."""
    variables = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        "HOME": template.workdir,
        "USER": "sandbox",
        "LOGNAME": "sandbox",
        "TMPDIR": "/tmp",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        **template.env,
    }
    variables["PYTHONPATH"] = ":".join(filter(None, (INSIDE, template.env.get("PYTHONPATH", ""))))
    return variables


def container_argv(template: Template, control_fd: int, *, root: bool) -> list[str]:
    """The bubblewrap command line that runs `template`'s warm-up process as a zygote.

    Raises:
        VenusError: a mount that is not absolute, does not exist, or that only its owner may read.
    """
    argv = ["bwrap", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--die-with-parent"]
    argv += ["--new-session", "--as-pid-1", "--hostname", "sandbox", "--clearenv", "--cap-drop", "ALL"]
    for capability in CAPABILITIES:
        argv += ["--cap-add", f"CAP_{capability}"]
    if not root:
        # As uid 0 of its own user namespace: for another uid bubblewrap nests a second one, without rights on mounts.
        argv += ["--unshare-user", "--uid", "0", "--gid", "0"]
    argv += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", template.workdir]
    for folder in _parents(template):
        argv += ["--dir", folder]
    argv += ["--ro-bind", "/usr", "/usr"]
    for name in SYSTEM_FOLDERS:
        path = Path("/") / name
        if path.is_symlink():
            argv += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            argv += ["--ro-bind", str(path), str(path)]
    for name in ETC:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for folder in interpreter_folders():
        argv += ["--ro-bind", folder, folder]
    for module in MODULES:
        argv += ["--ro-bind", str(Path(guest.__file__).with_name(module)), f"{INSIDE}/{module}"]
    for outside, inside in template.mounts:
        if not (os.path.isabs(outside) and os.path.isabs(inside) and os.path.exists(outside)):
            raise VenusError(
                f"template {template.name!r}: mount ({outside!r}, {inside!r}) cannot be bound",
                "both paths must be absolute and the first must exist on the node",
            )
        if root and not os.stat(outside).st_mode & 0o004:
            raise VenusError(
                f"template {template.name!r}: {outside!r} is closed to the unprivileged uids of sandboxes",
                f"chmod -R o+rX {outside}",
            )
        argv += ["--ro-bind", outside, inside]
    argv += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", template.workdir]
    for name, value in environment(template).items():
        argv += ["--setenv", name, value]
    argv += ["--setenv", guest.ZYGOTE_FD_VARIABLE, str(control_fd), "--"]
    return argv + (template.warmup or [sys.executable, f"{INSIDE}/guest.py"])


def hidden_folders(template: Template) -> list[str]:
    """Bound folders that a sandbox's own workdir or /tmp would hide."""
    bound = interpreter_folders() + [inside for _, inside in template.mounts]
    private = (template.workdir, "/tmp")
    return [path for path in bound if any(Path(path).is_relative_to(folder) for folder in private)]


def _parents(template: Template) -> list[str]:
    """Folders that bubblewrap would make on the way to a bind, readable by its own uid only."""
    targets = [*interpreter_folders(), *(inside for _, inside in template.mounts)]
    targets += [f"{INSIDE}/module", *(f"/etc/{name}" for name in ETC)]
    parents = {parent for path in targets for parent in Path(path).parents}
    given = {"usr", "tmp", *SYSTEM_FOLDERS}
    return sorted(str(parent) for parent in parents if len(parent.parts) > 1 and parent.parts[1] not in given)


class Container:
    """A running template. Made by `start`; dead once its zygote is."""

    def __init__(
        self, template: Template, process: asyncio.subprocess.Process, control: socket.socket, errors: IO[bytes]
    ) -> None:
        self.template = template
        self._process = process
        self._control = control
        self._errors = errors
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._dead: asyncio.Future[None] = loop.create_future()
        self._created: dict[str, asyncio.Future[str]] = {}
        self._ended: dict[str, asyncio.Future[None]] = {}
        """Of every sandbox that was asked for and not yet destroyed."""
        loop.add_reader(control, self._on_readable)

    @classmethod
    async def start(cls, template: Template, *, root: bool) -> Container:
        """Start the container and wait until its warm-up process serves.

        Raises:
            VenusError: it ended or was not ready in `warmup_timeout_s`; tells its last line.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the container
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *container_argv(template, theirs.fileno(), root=root),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env={"PATH": os.environ.get("PATH", os.defpath)},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        ours.setblocking(False)
        container = cls(template, process, ours, errors)
        try:
            done, _ = await asyncio.wait(
                {container._ready, container._dead},
                timeout=template.warmup_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if container._ready not in done:
                how = "ended" if done else f"was not ready after {template.warmup_timeout_s:g} s"
                raise VenusError(
                    f"template {template.name!r}: its warm-up process {how}: {container._last_words()}",
                    "run its warm-up command by hand",
                )
        except BaseException:
            await container.close()
            raise
        return container

    @property
    def alive(self) -> bool:
        return not self._dead.done()

    async def create(self, sandbox: str, uid: int, agent: socket.socket, *, own_uid: bool) -> None:
        """Fork a sandbox that serves on `agent` (closed here). The caller waits on its link for readiness.

        Raises:
            VenusError: the zygote has ended or cannot fork.
        """
        loop = asyncio.get_running_loop()
        created = self._created[sandbox] = loop.create_future()
        self._ended[sandbox] = loop.create_future()
        request = {
            "op": "create",
            "sandbox": sandbox,
            "uid": uid,
            "own_uid": own_uid,
            "workdir": self.template.workdir,
            "keep": hidden_folders(self.template),
            "memory_bytes": self.template.memory_bytes,
            "disk_bytes": self.template.disk_bytes,
            "max_processes": self.template.max_processes,
        }
        try:
            with agent:
                await self._send(request, [agent.fileno()])
            error = await asyncio.wait_for(created, READY_TIMEOUT_S)
        except TimeoutError:
            error = "no answer"
        finally:
            self._created.pop(sandbox, None)
        if error:
            self._ended.pop(sandbox, None)
            raise VenusError(f"template {self.template.name!r}: cannot fork a sandbox: {error}")

    async def destroy(self, sandbox: str) -> None:
        """Kill the sandbox; returns when the kernel has ended all of it. Idempotent.

        A zygote that does not answer is killed with everything in it.
        """
        ended = self._ended.get(sandbox)
        if ended is None:
            return
        if not ended.done() and self.alive:
            with contextlib.suppress(VenusError):
                await self._send({"op": "destroy", "sandbox": sandbox}, [])
            try:
                await asyncio.wait_for(asyncio.shield(ended), DESTROY_TIMEOUT_S)
            except TimeoutError:
                log.error("template %s: its zygote does not answer; it is killed", self.template.name)
                await self.close()
        if not self.alive:
            await self.close()
        self._ended.pop(sandbox, None)

    async def close(self) -> None:
        """End the zygote and with it every sandbox; returns when they are gone. Idempotent."""
        self._on_dead()
        try:
            serving = self._ready.done()  # one that still warms up does not read the channel
            await asyncio.wait_for(self._process.wait(), CLOSE_TIMEOUT_S if serving else 0)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        self._errors.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        for line in lines[-30:]:
            log.error("template %s: %s", self.template.name, line)
        return lines[-1] if lines else "it said nothing"

    # ------------------------------------------------------------------------------------------- control channel

    async def _send(self, message: dict[str, Any], fds: list[int]) -> None:
        data = json.dumps(message).encode()
        while True:
            if not self.alive:
                raise VenusError(f"template {self.template.name!r}: its warm-up process has ended")
            try:
                socket.send_fds(self._control, [data], fds)
                return
            except BlockingIOError:
                await asyncio.sleep(0.005)  # the zygote is behind with its queue
            except OSError:
                self._on_dead()

    def _on_readable(self) -> None:
        while self.alive:
            try:
                data = self._control.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._on_dead()
                return
            self._on_message(json.loads(data))

    def _on_message(self, message: dict[str, Any]) -> None:
        if message["op"] == "ready" and not self._ready.done():
            self._ready.set_result(None)
        elif message["op"] == "created":
            created = self._created.get(message["sandbox"])
            if created is not None and not created.done():
                created.set_result(message["error"])
        elif message["op"] == "ended":
            ended = self._ended.get(message["sandbox"])
            if ended is not None and not ended.done():
                ended.set_result(None)

    def _on_dead(self) -> None:
        """Our end is closed: the zygote leaves when it reads that, if it has not already."""
        if not self.alive:
            return
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._dead.set_result(None)
        for created in self._created.values():
            if not created.done():
                created.set_result("its warm-up process has ended")
        for ended in self._ended.values():
            if not ended.done():
                ended.set_result(None)
