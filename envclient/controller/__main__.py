"""Role `environment`: `python -m envclient.controller --run-dir DIR --fd N` (N: inherited listening socket).

Reads section `env` of the run's config, serves until SIGTERM, leaves no sandbox behind.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import secrets
import signal
import socket
import time
from collections.abc import Generator
from pathlib import Path

import uvicorn

from envclient.base.configs import section
from envclient.base.errors import ConfigError, main_guard
from envclient.base.processes import die_with_parent, log_to_stderr
from envclient.base.wire import token_from_environment
from envclient.config import EnvConfig
from envclient.controller.service import EnvService, make_service
from envclient.node.process import ProcessBackend, preflight
from envclient.policy.leases import LeaseBook

GRACE_S = 3
"""Requests on their way get this long after SIGTERM."""


class Server(uvicorn.Server):
    """uvicorn, but SIGTERM ends the sandboxes first: commands on their way are answered, then connections close."""

    def __init__(self, config: uvicorn.Config, service: EnvService) -> None:
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        # uvicorn's own version raises the signal again at the end, which would end the process there and then.
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self.handle_exit, signum, None)
        yield

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._service.close()
        await super().shutdown(sockets)


async def serve(config: EnvConfig, listening: socket.socket, token: str) -> None:
    """Serve on `listening` until a signal says stop."""
    book = LeaseBook(capacity=config.max_sandboxes, wait_s=config.lease_wait_s, prefix=f"{secrets.token_hex(4)}-")
    async with EnvService(ProcessBackend(), book, time.monotonic) as service:
        settings = uvicorn.Config(
            make_service(service, token),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=120,  # longer than a client keeps an idle connection: no request meets a closing one
            timeout_graceful_shutdown=GRACE_S,
        )
        await Server(settings, service).serve(sockets=[listening])


def main() -> int:
    die_with_parent()
    log_to_stderr("environment")
    parser = argparse.ArgumentParser(prog="python -m envclient.controller", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="folder with the run's config.yaml")
    parser.add_argument("--fd", type=int, required=True, help="inherited listening socket")
    args = parser.parse_args()
    config = section(args.run_dir / "config.yaml", "env", EnvConfig)
    if config.backend != "process":
        raise ConfigError(f"env.backend is {config.backend!r}", "known: process")
    preflight()
    # As a socket and not by uvicorn's `fd`, which takes it for AF_UNIX and so leaves Nagle's 40 ms in every reply.
    with socket.socket(fileno=args.fd) as listening:
        asyncio.run(serve(config, listening, token_from_environment()))
    return 0


if __name__ == "__main__":
    main_guard(main)
