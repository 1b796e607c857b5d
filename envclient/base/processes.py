"""Processes that end when they should: with their parent, by a bounded stop, or by a warden once the launcher is gone.

Three nets, each enough alone: (1) every role asks the kernel for SIGKILL when its parent dies; (2) the launcher stops
its children in order, first politely, then not; (3) the warden, a tiny process holding the read end of a pipe, kills
whatever still carries the run's id in its environment once the launcher is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from envclient.base.errors import VenusError

RUN_ID_VARIABLE = "VENUS_RUN_ID"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `signum` to this process when the thread that started it ends."""
    _libc.prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)


def log_to_stderr(role: str, level: int = logging.INFO) -> None:
    """Plain log lines on stderr, which the launcher sends to `logs/ROLE.log`."""
    logging.basicConfig(
        level=level, stream=sys.stderr, force=True, format=f"%(asctime)s {role} %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)


def last_lines(path: Path, count: int = 15) -> str:
    """The last `count` lines of a log, for the screen."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return "(no log)"
    return "\n".join(text.rstrip().splitlines()[-count:]) or "(empty log)"


class Child:
    """One child process in a session of its own, its output in a log file."""

    def __init__(self, role: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.role = role
        self.process = process
        self.log = log

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    def signal_group(self, signum: int) -> None:
        """Send `signum` to the child and all of its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signum)

    async def stop(self, grace_s: float = 10.0) -> None:
        """SIGTERM, then after `grace_s` seconds SIGKILL to the whole process group; returns when it is gone."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), grace_s)
        self.signal_group(signal.SIGKILL)
        await self.process.wait()


async def start_child(
    role: str,
    argv: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str],
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> Child:
    """Start `argv` as a child that dies with this process; stdout and stderr are appended to `log`.

    Must be called from the main thread: the kernel ties the death signal to the thread that forks.
    """
    with open(log, "ab") as out:
        try:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=dict(env),
                cwd=cwd,
                pass_fds=tuple(pass_fds),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as error:
            raise VenusError(f"{role}: cannot start {argv[0]!r}: {error}", "run the set-up script again") from None
    return Child(role, process, log)


def processes_of_run(run_id: str) -> list[int]:
    """Ids of all processes but this one whose environment carries `run_id`."""
    wanted = f"{RUN_ID_VARIABLE}={run_id}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{entry}/environ").read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0"):
            found.append(int(entry))
    return found


def kill_run(run_id: str, within_s: float = 15.0) -> list[int]:
    """SIGKILL every process of the run until none is left; returns those that would not go in `within_s` seconds."""
    deadline = time.monotonic() + within_s
    while left := processes_of_run(run_id):
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return left
        time.sleep(0.1)
    return []
