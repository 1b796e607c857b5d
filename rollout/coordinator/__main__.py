"""The coordinator's process: `python -m rollout.coordinator --run-dir DIR --fd N --resume-step S`.

Started by the launcher with an open listening socket. It ends with 0 on SIGTERM, and with 1 when the run stopped with a
cause, which is the last line of its log.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import json
import logging
import secrets
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from omegaconf import OmegaConf

from envclient.base.configs import read_yaml, section
from envclient.base.errors import ConfigError, VenusError, main_guard
from envclient.base.files import JsonlWriter
from envclient.base.processes import die_with_parent, log_to_stderr
from envclient.base.server import RoleServer
from envclient.base.wire import token_from_environment
from rollout.config import FactoryConfig, RolloutConfig, RunConfig
from rollout.coordinator.ledger import Ledger, RunKey
from rollout.coordinator.service import Service, build_app
from rollout.coordinator.shell import Shell
from rollout.coordinator.source import TaskOrder
from rollout.coordinator.tracker import Tracker
from rollout.coordinator.wandb_run import WandbRun
from rollout.dispatcher import Dispatcher, DispatcherConfig
from rollout.predictor.episodes import EpisodeLog
from rollout.protocol import TaskSource
from rollout.types import RunStarted

log = logging.getLogger("venus.coordinator")
LAST_WORDS_S = 2.0
"""Seconds that a stopped coordinator still answers with the cause, so that everyone who asks is told."""


def load_tasks(config: FactoryConfig) -> TaskSource:
    """The task source that `rollout.tasks` names."""
    module_name, _, function_name = config.factory.partition(":")
    try:
        factory: Callable[..., TaskSource] = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"rollout.tasks.factory={config.factory!r}: {error}",
            "write package.module:function of something importable",
        ) from None
    try:
        return factory(**config.args)
    except TypeError as error:
        raise ConfigError(f"rollout.tasks.args={dict(config.args)}: {error}", "see the factory's arguments") from None


def open_events(path: Path) -> tuple[JsonlWriter, int]:
    """`events.jsonl` for appending, and the number after its last row; a torn last line is removed."""
    following = 0
    if path.exists():
        with open(path, "rb+") as file:
            whole = 0
            last = b""
            for line in file:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                last = line
            file.truncate(whole)
        if last:
            following = int(json.loads(last)["seq"]) + 1
    return JsonlWriter(path), following


def open_run(run_dir: Path, resume_step: int) -> tuple[Service, RunStarted]:
    """Everything the coordinator is made of, and the event it begins with."""
    config_path = run_dir / "config.yaml"
    run = section(config_path, "run", RunConfig)
    config = section(config_path, "rollout", RolloutConfig)
    tasks = load_tasks(config.tasks)
    source = TaskOrder(tasks.train_ids(), run.seed, run.epochs)
    if resume_step < 0 and (run_dir / "ledger.sqlite").exists():
        raise ConfigError(f"{run_dir} already holds a run", "use run.resume=auto or overwrite")
    ledger = Ledger(run_dir / "ledger.sqlite", RunKey(seed=run.seed, tasks=source.digest), secrets.token_hex(4))
    constants = DispatcherConfig.from_config(config, steps=run.steps)
    started = msgspec.structs.replace(ledger.resume(max(0, resume_step)), constants=constants.recorded())
    events, following = open_events(run_dir / "events.jsonl")
    wandb_run = None
    if run.wandb:
        whole: Any = OmegaConf.to_container(read_yaml(config_path), resolve=True)
        wandb_run = WandbRun(run_dir, ledger.run_id, run.name, whole)
    tracker = Tracker(
        run_dir,
        resume_step=started.version,
        identity=ledger.identity,
        now=time.monotonic(),
        wandb_run=wandb_run,
    )
    shell = Shell(
        dispatcher=Dispatcher(constants),
        ledger=ledger,
        source=source,
        tracker=tracker,
        events=events,
        next_event=max(following, ledger.last_event + 1),
        clock=time.monotonic,
        episodes=EpisodeLog(run_dir, config.predictor.record_steps) if config.predictor.records else None,
    )
    shell.loaded(started.version)
    log.info("run %s from step %d: %s", run.name, started.version, {k: v for k, v in ledger.counts.items() if v})
    return Service(shell=shell, run=run, config=config.coordinator, eval_ids=tasks.eval_ids()), started


async def serve(service: Service, started: RunStarted, sock: socket.socket, token: str) -> int:
    """Serve until SIGTERM (0) or until the run stops with a cause (1)."""
    shell = service.shell
    settings = uvicorn.Config(
        build_app(service, token),
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        timeout_keep_alive=120,
        timeout_graceful_shutdown=1,
    )
    server = RoleServer(settings)
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, asked.set)

    async def tick() -> None:
        while True:
            await asyncio.sleep(service.config.tick_s)
            await shell.submit(*shell.tick(service.config.worker_timeout_s))

    deciding = asyncio.create_task(shell.run(), name="shell")
    await shell.submit(started)
    serving = asyncio.create_task(server.serve(sockets=[sock]), name="server")
    ticking = asyncio.create_task(tick(), name="ticks")
    waits = [asyncio.create_task(asked.wait()), asyncio.create_task(shell.stopped.wait())]
    await asyncio.wait([deciding, serving, ticking, *waits], return_when=asyncio.FIRST_COMPLETED)
    if shell.stopped.is_set() and not asked.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asked.wait(), LAST_WORDS_S)
    cause = shell.failure
    shell.stop("the coordinator was told to end")
    server.should_exit = True
    for task in (deciding, ticking, *waits):
        task.cancel()
    results = await asyncio.gather(deciding, serving, ticking, *waits, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception) and not isinstance(result, VenusError):
            log.error("unexpected", exc_info=result)
            cause = cause or f"coordinator: {type(result).__name__}: {result}"
    return close(service, cause)


def close(service: Service, cause: str) -> int:
    """Write what is left and name the reason of the end."""
    shell = service.shell
    if cause:
        reason = cause
    elif shell.ledger.last_step >= service.run.steps:
        reason = "done"
    else:
        reason = "the source is drained" if shell.dispatcher.stopped == "" else "ended from outside"
    shell.tracker.close(reason)
    if shell.episodes is not None:
        shell.episodes.close()
    shell.ledger.close()
    if cause:
        log.error("the run stopped: %s", cause)
    return 1 if cause else 0


def main() -> int:
    """Entry point; returns the exit code."""
    die_with_parent()
    log_to_stderr("coordinator")
    parser = argparse.ArgumentParser(prog="python -m rollout.coordinator")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run, with its config.yaml")
    parser.add_argument("--fd", type=int, required=True, help="inherited listening socket")
    parser.add_argument("--resume-step", type=int, default=-1, help="step of the manifest to resume from; -1: fresh")
    arguments = parser.parse_args()
    token = token_from_environment()
    sock = socket.socket(fileno=arguments.fd)
    sock.setblocking(False)
    service, started = open_run(arguments.run_dir, arguments.resume_step)
    return asyncio.run(serve(service, started, sock, token))


if __name__ == "__main__":
    main_guard(main)
