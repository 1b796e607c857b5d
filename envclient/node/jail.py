"""Inside a template's container: the zygote, and what turns a fork of it into a sandbox.

Standard library only; bound into the container beside `guest.py`. The zygote is the template's warm-up process, pid 1
of the container and trusted: no sandbox's code ever runs in it. On the node's word it forks; the child is pid 1 of its
own pid namespace and gives up, in this order: the zygote's descriptors, its view of files and network, its uid, every
capability, the right to gain any, and a list of system calls. What is left runs the guest agent.

Control channel (SOCK_SEQPACKET, one JSON object a message): `create` carries the sandbox's end of its own socket as a
descriptor; `destroy` kills pid 1, and with it the kernel kills the rest. Answers: `ready`, `created`, `ended`.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import json
import os
import resource
import selectors
import signal
import socket
import stat
import struct
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import guest
import syscalls

Serve = Callable[[socket.socket, str], NoReturn]

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 4, 22, 24, 38, 47
PR_CAP_AMBIENT_CLEAR_ALL, SECCOMP_MODE_FILTER = 4, 2
CAPABILITY_VERSION_3 = 0x20080522
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
MESSAGE_BYTES = 65536
AGENT_FD = 3
PLAIN_UID = 1000
"""What a sandbox calls its uid where the service is not root."""
MAX_OPEN_FILES = 1024
BYTES_A_FILE = 4096
"""One inode is allowed for so many bytes of disk: inodes are kernel memory too."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: Any) -> None:
    """A libc function that returns 0, or OSError naming it."""
    if getattr(_libc, name)(*args) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _prctl(option: int, *args: Any) -> None:
    _call("prctl", option, *(args + (0,) * (4 - len(args))))


def _mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    _call("mount", source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode())


def look_ordinary() -> None:
    """In an applet's process: its own /proc/self is readable again, which leaving the zygote's uid had switched off."""
    _prctl(PR_SET_DUMPABLE, 1)


# ------------------------------------------------------------------------------------------------------- the zygote


def zygote(control_fd: int, serve: Serve) -> NoReturn:
    """Fork sandboxes on the node's word until it closes the channel; `serve(socket, workdir)` is what each one runs."""
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    own_pids = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    wake_r, wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_w, warn_on_full_buffer=False)
    sandboxes: dict[int, str] = {}
    selector = selectors.DefaultSelector()
    selector.register(control, selectors.EVENT_READ)
    selector.register(wake_r, selectors.EVENT_READ)
    filter_program = syscalls.program()
    gc.collect()
    gc.freeze()  # a collection in a fork would touch, and so copy, every object's page
    _say(control, {"op": "ready"})
    while True:
        for key, _ in selector.select():
            if key.fileobj is control:
                _obey(control, own_pids, sandboxes, filter_program, serve)
            else:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_r, 4096)
                _report_ended(control, sandboxes)


def _say(control: socket.socket, message: dict[str, Any]) -> None:
    try:
        control.send(json.dumps(message).encode())
    except OSError:
        os._exit(0)  # the node is gone; every sandbox dies with this process


def _obey(
    control: socket.socket, own_pids: int, sandboxes: dict[int, str], filter_program: syscalls.Program, serve: Serve
) -> None:
    data, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 1)
    if not data:
        os._exit(0)
    request = json.loads(data)
    name = request["sandbox"]
    if request["op"] == "destroy":
        for pid in [pid for pid, known in sandboxes.items() if known == name]:
            os.kill(pid, signal.SIGKILL)
        return
    error = ""
    try:
        _call("unshare", CLONE_NEWPID)  # for the next child only: setns takes it back
        pid = os.fork()
        if pid == 0:
            _become_sandbox(fds[0], request, filter_program, serve)
        sandboxes[pid] = name
    except OSError as failure:
        error = str(failure)
    _call("setns", own_pids, CLONE_NEWPID)
    os.close(fds[0])
    _say(control, {"op": "created", "sandbox": name, "error": error})


def _report_ended(control: socket.socket, sandboxes: dict[int, str]) -> None:
    """Reap; a pid 1 is reaped only after the kernel has ended every process of its namespace."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        name = sandboxes.pop(pid, None)
        if name is not None:
            _say(control, {"op": "ended", "sandbox": name})


# ------------------------------------------------------------------------------------------------------ the sandbox


def _become_sandbox(agent_fd: int, request: dict[str, Any], filter_program: syscalls.Program, serve: Serve) -> NoReturn:
    """In the fork: shut every door, then serve. What fails is told to the node in a frame with id 0."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        sock = _keep_only(agent_fd)
        try:
            _enter(request)
            _drop(request, filter_program)
            serve(sock, request["workdir"])
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            reason = f"{error!r} in {place.name}, line {place.lineno}"
            sock.sendall(guest.frame({"id": 0, "ready": False, "error": reason}))
    finally:
        os._exit(1)


def _keep_only(agent_fd: int) -> socket.socket:
    """Nothing of the zygote's stays open: its control channel above all."""
    null = os.open("/dev/null", os.O_RDWR)
    if agent_fd != AGENT_FD:
        os.dup2(agent_fd, AGENT_FD, inheritable=False)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    guest.close_from(AGENT_FD + 1)
    return socket.socket(fileno=AGENT_FD)


def _enter(request: dict[str, Any]) -> None:
    """Own mounts, IPC and network; a private tmpfs behind workdir, /tmp and /dev/shm; own /proc; loopback up.

    `keep` are folders of the template that lie under workdir or /tmp (a checkout there, say): bound again on top.
    """
    uid, disk_bytes, workdir = request["uid"], request["disk_bytes"], request["workdir"]
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # when the machine runs out of memory, a sandbox dies and not the service
    _call("unshare", CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWNET)
    _mount("none", "/", "", MS_REC | MS_PRIVATE)
    _mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    kept = [(path, os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in request["keep"]]
    options = f"size={disk_bytes},nr_inodes={max(1024, disk_bytes // BYTES_A_FILE)},mode=755"
    _mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, options)
    for folder, target in (("work", workdir), ("shm", "/dev/shm"), ("tmp", "/tmp")):
        source = f"/tmp/{folder}"
        os.mkdir(source)
        os.chmod(source, 0o755 if folder == "work" else 0o1777)
        _mount(source, target, "", MS_BIND)
    own = [workdir, "/dev/shm", "/tmp"]
    for path, fd in kept:
        own += _make_place(path, is_folder=stat.S_ISDIR(os.fstat(fd).st_mode))
        _mount(f"/proc/self/fd/{fd}", path, "", MS_BIND)
        os.close(fd)
    for folder in own:  # last: uid 0 without its capabilities may not write in a folder of another
        os.chown(folder, uid, uid)
    os.chdir(workdir)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


def _make_place(path: str, *, is_folder: bool) -> list[str]:
    """Something to bind on at `path`; returns the folders made on the way there, which are the sandbox's own."""
    way = path.split("/")
    folders = ["/".join(way[:depth]) for depth in range(2, len(way))]
    made = [folder for folder in folders if not os.path.exists(folder)]
    for folder in made:
        os.mkdir(folder, 0o755)
    if not os.path.exists(path):
        if is_folder:
            os.mkdir(path, 0o755)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_CLOEXEC, 0o444))
    return made


def _drop(request: dict[str, Any], filter_program: syscalls.Program) -> None:
    """Uid, limits, capabilities, new privileges, system calls: in this order, each needs what the next takes."""
    if request["own_uid"]:
        _drop_bounding_set()
        os.setgroups([])
        os.setresgid(request["uid"], request["uid"], request["uid"])
        os.setresuid(request["uid"], request["uid"], request["uid"])
    else:
        # Not root: all sandboxes share a uid. A user namespace each counts its processes apart and bars ptrace.
        _call("unshare", CLONE_NEWUSER)
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{PLAIN_UID} {request['uid']} 1"),
            ("gid_map", f"{PLAIN_UID} {request['uid']} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
        _drop_bounding_set()
    # After the user namespace, which keeps the process limit of its maker for the processes of all sandboxes together.
    for limit, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, request["disk_bytes"]),
        (resource.RLIMIT_NPROC, request["max_processes"]),
        (resource.RLIMIT_NOFILE, MAX_OPEN_FILES),
        (resource.RLIMIT_AS, request["memory_bytes"]),
    ):
        resource.setrlimit(limit, (value, value))
    _prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    _call("capset", struct.pack("Ii", CAPABILITY_VERSION_3, 0), struct.pack("6I", 0, 0, 0, 0, 0, 0))
    _prctl(PR_SET_DUMPABLE, 0)  # sandboxed code of the same uid cannot look into the agent
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    _prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(filter_program))


def _drop_bounding_set() -> None:
    with open("/proc/sys/kernel/cap_last_cap") as file:
        last = int(file.read())
    for capability in range(last + 1):
        _prctl(PR_CAPBSET_DROP, capability)
