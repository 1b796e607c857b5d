"""The guest agent: runs inside a sandbox of any backend and carries out exec, read and write for the node.

Standard library only: this one file is bound into the sandbox (`/venus/guest.py`, module `guest`). A template's
warm-up process loads what its applets need and then calls `serve`, which never returns:

    import guest
    guest.serve({"venus-test": run_tests})

An applet is `(argv, stdin, stdout_fd) -> exit code`; it runs in a fork of the warm process, so nothing is imported
again. What it writes to `stdout_fd` is the command's output; descriptors 0, 1 and 2 are /dev/null there, so that prints
of tested code do not mix with it (an applet that wants them does `os.dup2(stdout_fd, 1)`). An exception becomes its
traceback on `stdout_fd` and exit code 1.

Wire: frames of `header length, payload length` (two big-endian u32), a JSON header, raw payload. A request has `id` and
`op`; its reply has the same `id`. Replies come in the order in which requests end.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import os
import selectors
import signal
import socket
import stat
import struct
import subprocess
import tarfile
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

Applet = Callable[[list[str], bytes, int], int]

FRAME = struct.Struct(">II")
AGENT_FD_VARIABLE = "VENUS_AGENT_FD"
"""Set by a backend whose warm-up process is itself the agent (one sandbox a process)."""
ZYGOTE_FD_VARIABLE = "VENUS_ZYGOTE_FD"
"""Set by the process backend: every sandbox is a fork of the warm-up process."""
PACK, UNPACK = "venus-pack", "venus-unpack"
"""Built-in applets behind `twin`: argv[1:] are folders; a tar of their files goes out, or comes in."""
CHUNK = 65536
KILL_ROUNDS, KILL_PAUSE_S = 500, 0.002


def serve(applets: dict[str, Applet]) -> NoReturn:
    """Serve requests for ever, with `applets` by name. Call it last, from the main thread, with no other thread alive.

    Descriptors above 2 that the warm-up left open are closed in every sandbox.

    Raises:
        SystemExit: the process has other threads (a fork would lose them), or was not started by a backend.
    """
    every = {PACK: pack, UNPACK: unpack, **applets}
    threads = len(os.listdir("/proc/self/task"))
    if threads != 1:
        raise SystemExit(f"guest.serve: the warm-up process has {threads} threads; stop them before serving")
    if ZYGOTE_FD_VARIABLE in os.environ:
        import jail

        def agent(sock: socket.socket, workdir: str) -> NoReturn:
            Agent(sock, every, workdir, jail.look_ordinary).run()

        jail.zygote(int(os.environ.pop(ZYGOTE_FD_VARIABLE)), agent)
    if AGENT_FD_VARIABLE in os.environ:
        Agent(socket.socket(fileno=int(os.environ.pop(AGENT_FD_VARIABLE))), every, os.getcwd()).run()
    raise SystemExit("guest.serve: not started by a backend of the environment service")


def frame(header: dict[str, Any], payload: bytes = b"") -> bytes:
    """One message as bytes."""
    head = json.dumps(header).encode()
    return FRAME.pack(len(head), len(payload)) + head + payload


class Running:
    """One exec on its way."""

    def __init__(self, request_id: int, pid: int, output_fd: int, deadline_s: float, limit: int) -> None:
        self.request_id = request_id
        self.pid = pid
        self.output_fd = output_fd
        self.started_s = time.monotonic()
        self.deadline_s = deadline_s
        self.limit = limit
        self.kept = bytearray()
        self.dropped = 0
        self.timed_out = False
        self.popen: subprocess.Popen[bytes] | None = None

    def take(self) -> bool:
        """Read what is there, keep the beginning; False at the end of the output."""
        try:
            data = os.read(self.output_fd, CHUNK)
        except BlockingIOError:
            return True
        room = max(0, self.limit - len(self.kept))
        self.kept += data[:room]
        self.dropped += len(data) - min(room, len(data))
        return bool(data)

    def drain(self) -> None:
        """Read what the ended command left in the pipe; a background child may go on writing, so only so much."""
        for _ in range(64):
            before = len(self.kept) + self.dropped
            if not self.take() or len(self.kept) + self.dropped == before:
                return

    def output(self) -> bytes:
        mark = f"\n[output cut here: {self.dropped} more bytes]\n".encode() if self.dropped else b""
        return bytes(self.kept) + mark


class Agent:
    """Pid 1 of a sandbox: one thread, one selector; owns the sandbox's end of the node's socket."""

    def __init__(
        self, sock: socket.socket, applets: dict[str, Applet], workdir: str, on_fork: Callable[[], None] | None = None
    ) -> None:
        self._sock = sock
        self._on_fork = on_fork
        """Called in every applet's process."""
        self._applets = applets
        self._workdir = workdir
        self._buffer = bytearray()
        self._running: dict[int, Running] = {}
        """By pid of the command's first process."""
        self._selector = selectors.DefaultSelector()

    def run(self) -> NoReturn:
        """Serve until the node closes the socket."""
        wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
        self._selector.register(self._sock, selectors.EVENT_READ)
        self._selector.register(wake_r, selectors.EVENT_READ)
        self._send({"id": 0, "ready": True})
        while True:
            now = time.monotonic()
            nearest = min((run.deadline_s for run in self._running.values() if not run.timed_out), default=now + 3600)
            for key, _ in self._selector.select(max(0.0, nearest - now)):
                if key.fileobj is self._sock:
                    self._receive()
                elif key.fileobj == wake_r:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake_r, 4096)
                    self._reap()
                else:
                    self._take_output(key.data)
            self._judge_deadlines(time.monotonic())

    # ------------------------------------------------------------------------------------------------- the socket

    def _receive(self) -> None:
        data = self._sock.recv(1 << 20)
        if not data:
            os._exit(0)
        self._buffer += data
        while len(self._buffer) >= FRAME.size:
            head_bytes, payload_bytes = FRAME.unpack_from(self._buffer)
            end = FRAME.size + head_bytes + payload_bytes
            if len(self._buffer) < end:
                return
            header = json.loads(self._buffer[FRAME.size : FRAME.size + head_bytes])
            payload = bytes(self._buffer[FRAME.size + head_bytes : end])
            del self._buffer[:end]
            self._handle(header, payload)

    def _send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        try:
            self._sock.sendall(frame(header, payload))
        except OSError:
            os._exit(0)

    def _handle(self, header: dict[str, Any], payload: bytes) -> None:
        request_id = header["id"]
        try:
            if header["op"] == "exec":
                self._start(request_id, header, payload)
            elif header["op"] == "read":
                data, truncated = read_file(self._path(header["path"]), header["max_bytes"])
                self._send({"id": request_id, "truncated": truncated}, data)
            elif header["op"] == "write":
                write_file(self._path(header["path"]), payload)
                self._send({"id": request_id})
            else:
                self._send({"id": request_id, "error": f"unknown op {header['op']!r}"})
        except (OSError, ValueError, MemoryError) as error:  # ValueError: a NUL byte or a half character in a path
            self._send({"id": request_id, "error": reason_of(error)})

    def _path(self, path: str) -> str:
        return os.path.join(self._workdir, path)

    # --------------------------------------------------------------------------------------------------- commands

    def _start(self, request_id: int, header: dict[str, Any], stdin: bytes) -> None:
        argv: list[str] = header["argv"]
        applet = self._applets.get(argv[0])
        started_s = time.monotonic()
        output_r, output_w = os.pipe2(os.O_CLOEXEC)
        popen = None
        try:
            if applet is not None:
                pid = os.fork()
                if pid == 0:
                    self._become(applet, argv, stdin, output_w)
            else:
                popen = start_program(argv, stdin, output_w, self._workdir)
                pid = popen.pid
        except (OSError, ValueError, MemoryError) as error:
            os.close(output_r)
            self._refuse(request_id, argv[0], error)
            return
        finally:
            os.close(output_w)
        fcntl.fcntl(output_r, fcntl.F_SETFL, os.O_NONBLOCK)
        run = Running(request_id, pid, output_r, started_s + header["timeout_s"], header["max_output_bytes"])
        run.started_s = started_s
        run.popen = popen
        self._running[pid] = run
        self._selector.register(output_r, selectors.EVENT_READ, run)

    def _refuse(self, request_id: int, name: str, error: Exception) -> None:
        """The command could not start: as a shell says it, or as a limit of the sandbox."""
        limits = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
        number = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
        code = 127 if number in (errno.ENOENT, errno.ENOTDIR) else 126
        reply = {
            "id": request_id,
            "status": "killed" if number in limits else "exited",
            "exit_code": code,
            "truncated": False,
            "duration_s": 0.0,
        }
        self._send(reply, f"{name}: {reason_of(error)}\n".encode(errors="replace"))

    def _become(self, applet: Applet, argv: list[str], stdin: bytes, output_fd: int) -> NoReturn:
        """In the fork: leave everything of the agent behind, run the applet, end."""
        code = 1
        try:
            os.setsid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.dup2(output_fd, 3)
            close_from(4)
            if self._on_fork is not None:
                self._on_fork()
            code = applet(argv, stdin, 3)
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        except BaseException:
            with contextlib.suppress(OSError):
                os.write(3, traceback.format_exc().encode())
        finally:
            os._exit(code & 0xFF)

    def _take_output(self, run: Running) -> None:
        if self._running.get(run.pid) is not run:
            return  # ended in this very round of the selector
        if not run.take():
            self._selector.unregister(run.output_fd)

    def _judge_deadlines(self, now: float) -> None:
        for run in list(self._running.values()):
            if not run.timed_out and now >= run.deadline_s:
                run.timed_out = True
                self._kill(run)

    def _kill(self, run: Running) -> None:
        """Kill the command's group and everything it left, and see it dead; daemons of earlier commands die with it.

        With no other command running, that is every process but this one, in one call that no fork can outrun.
        """
        others = {other.pid for other in self._running.values() if other is not run and not other.timed_out}
        for _ in range(KILL_ROUNDS):
            victims = [pid for pid, session in processes() if session not in others and pid != os.getpid()]
            if not victims:
                return
            for pid in victims if others else [-1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(KILL_PAUSE_S)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            run = self._running.pop(pid, None)
            if run is not None:
                self._finish(run, status)

    def _finish(self, run: Running, status: int) -> None:
        run.drain()
        with contextlib.suppress(KeyError):
            self._selector.unregister(run.output_fd)
        os.close(run.output_fd)
        code = os.waitstatus_to_exitcode(status)
        if run.popen is not None:
            run.popen.returncode = code
        reply = {
            "id": run.request_id,
            "status": "timed_out" if run.timed_out else "killed" if code < 0 else "exited",
            "exit_code": code if code >= 0 else 128 - code,
            "truncated": run.dropped > 0,
            "duration_s": time.monotonic() - run.started_s,
        }
        self._send(reply, run.output())


# ------------------------------------------------------------------------------------------------------------ parts


def reason_of(error: Exception) -> str:
    """What to tell of it, never empty."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def start_program(argv: list[str], stdin: bytes, output_fd: int, workdir: str) -> subprocess.Popen[bytes]:
    """Start a program in a session of its own; stdin is a file, so nobody has to feed it."""
    source = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if stdin:
            os.close(source)
            source = os.memfd_create("stdin", os.MFD_CLOEXEC)
            os.write(source, stdin)
            os.lseek(source, 0, os.SEEK_SET)
        return subprocess.Popen(
            argv, stdin=source, stdout=output_fd, stderr=output_fd, cwd=workdir, start_new_session=True
        )
    finally:
        os.close(source)


def processes() -> list[tuple[int, int]]:
    """(pid, session) of every live process of this pid namespace."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if fields[0] not in (b"Z", b"X"):
            found.append((int(name), int(fields[3])))
    return found


def read_file(path: str, max_bytes: int) -> tuple[bytes, bool]:
    """The beginning of a regular file, and whether there is more."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        require_regular(fd)
        data = file.read(max_bytes + 1)
    return data[:max_bytes], len(data) > max_bytes


def write_file(path: str, data: bytes) -> None:
    """Replace a file's content, making its parent folders."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    with open(fd, "wb") as file:
        require_regular(fd)
        file.truncate(0)
        file.write(data)


def require_regular(fd: int) -> None:
    """A pipe or a device could block the agent for ever."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "not a regular file")


def pack(argv: list[str], _stdin: bytes, stdout_fd: int) -> int:
    """Applet: a tar of the folders argv[1:], members named by the folder's number."""
    with open(stdout_fd, "wb", closefd=False) as out, tarfile.open(fileobj=out, mode="w|") as tar:
        for number, folder in enumerate(argv[1:]):
            device = os.stat(folder).st_dev
            for here, folders, files in os.walk(folder):
                for name in folders + files:
                    path = os.path.join(here, name)
                    if os.lstat(path).st_dev == device:
                        member = f"{number}/{os.path.relpath(path, folder)}"
                        tar.add(path, member, recursive=False, filter=plain_member)
                    elif name in folders:
                        folders.remove(name)  # bound in by the template, so in the other sandbox already
    return 0


def plain_member(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Files, folders and links, owned by whoever unpacks; no devices, pipes or sockets."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member if member.isreg() or member.isdir() or member.issym() or member.islnk() else None


def unpack(argv: list[str], stdin: bytes, _stdout_fd: int) -> int:
    """Applet: the reverse of `pack`. Links stay as they were: they lead nowhere but into this sandbox."""
    with tarfile.open(fileobj=io.BytesIO(stdin)) as tar:
        for member in tar:
            number, _, name = member.name.partition("/")
            member.name = name
            if member.islnk():
                member.linkname = member.linkname.partition("/")[2]
            tar.extract(member, argv[1 + int(number)])  # no filter: Python 3.11 before 3.11.4 knows none
    return 0


def close_from(first: int) -> None:
    """Close every descriptor from `first` on."""
    os.closerange(first, max(map(int, os.listdir("/proc/self/fd"))) + 1)


if __name__ == "__main__":
    # A template without a warm-up process: the bare agent. Imported under its own name, so that it exists only once.
    import guest

    guest.serve({})
