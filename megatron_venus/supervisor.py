"""The local supervisor: every role as a child process, watched; whatever ends, all ends, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from envclient.base.errors import VenusError
from envclient.base.processes import RUN_ID_VARIABLE, Child, kill_run, last_lines, start_child
from envclient.base.wire import TOKEN_VARIABLE

GRACE_S = 10.0
SERVICES = ("environment", "coordinator")


class RoleDied(VenusError):
    """A role ended although the run goes on."""


class Supervisor:
    """Owns the run's processes. `async with Supervisor(run_dir) as s: await s.start(...)`."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.run_id = secrets.token_hex(8)
        # A service that runs elsewhere (env.url) has its token already: the caller gives it in the environment.
        self.token = os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(32)
        self._children: list[Child] = []
        self._warden_pipe = -1
        self._warden: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Supervisor:
        (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        read_end, self._warden_pipe = os.pipe()
        environment = {k: v for k, v in os.environ.items() if k != RUN_ID_VARIABLE}
        self._warden = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "envclient.base.warden",
            self.run_id,
            stdin=read_end,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        os.close(read_end)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop_all()
        os.close(self._warden_pipe)
        assert self._warden is not None
        await self._warden.wait()

    def environment(self, extra: Mapping[str, str] = {}) -> dict[str, str]:
        """A role's environment: the caller's, the run's token and id, one thread a process, no model hub."""
        return {
            **os.environ,
            TOKEN_VARIABLE: self.token,
            RUN_ID_VARIABLE: self.run_id,
            "OMP_NUM_THREADS": "1",
            # Weights in huge pages: on CPU a broadcast of them takes less of the processors' time.
            "THP_MEM_ALLOC_ENABLE": "1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # Every role is on this machine: process groups must not listen on its other addresses.
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "PYTHONUNBUFFERED": "1",
            "TORCH_EXTENSIONS_DIR": str((self.run_dir / "torch_extensions").resolve()),
            **extra,
        }

    async def start(
        self, role: str, argv: Sequence[str], *, pass_fds: Sequence[int] = (), extra_env: Mapping[str, str] = {}
    ) -> Child:
        """Start `role`; its output goes to `logs/ROLE.log`."""
        log = self.run_dir / "logs" / f"{role}.log"
        child = await start_child(role, argv, log, env=self.environment(extra_env), pass_fds=pass_fds)
        self._children.append(child)
        return child

    async def wait_exit(self) -> Child:
        """Returns the first child that ends."""
        waits = {asyncio.ensure_future(c.process.wait()): c for c in self._children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return waits[done.pop()]

    def died(self, child: Child) -> RoleDied:
        """The error that tells of a child that should still run, with its last log lines."""
        how = f"exit code {child.returncode}" if (child.returncode or 0) >= 0 else f"signal {-(child.returncode or 0)}"
        return RoleDied(
            f"{child.role} ended with {how}; its last log lines:\n{last_lines(child.log)}\n", f"see {child.log}"
        )

    def forget(self, child: Child) -> None:
        """`child` has ended as it should."""
        self._children.remove(child)

    async def stop_all(self) -> None:
        """End every role, those that use a service before it, then whatever they left behind."""
        children, self._children = self._children, []
        services = [child for child in children if child.role in SERVICES]
        for together in ([child for child in children if child.role not in SERVICES], services):
            await asyncio.gather(*(child.stop(GRACE_S) for child in together))
        left = await asyncio.to_thread(kill_run, self.run_id)
        if left:
            with contextlib.suppress(OSError):
                print(f"warning: processes {left} of this run would not end", file=sys.stderr)
