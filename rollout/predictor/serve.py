"""`python -m rollout.predictor.serve --run-dir DIR`: the predictor's service, a role of the run.

Workers ask it at every turn's end, with the context's tokens; it answers with the remaining tokens that its scorer
sees in them. At checkpoints it is trained anew (`refresh`) and goes on answering meanwhile. When it dies the run goes
on without it.

The launcher starts it on a socket of its own (`--fd`). By hand, with VENUS_TOKEN set, it answers about a run that has
ended, for whoever asks `/v1/predict`: a run asks the launcher's alone.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import signal
import socket
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from envclient.base.configs import section
from envclient.base.errors import VenusError, main_guard
from envclient.base.ports import listen
from envclient.base.processes import die_with_parent, log_to_stderr
from envclient.base.server import RoleServer
from envclient.base.wire import endpoint, make_app, token_from_environment
from rollout.config import PredictorConfig, RolloutConfig
from rollout.predictor.data import window
from rollout.predictor.questions import Questions
from rollout.predictor.refresh import Refresher, current_model
from rollout.predictor.scorer import Scorer, make_scorer
from rollout.predictor.settings import check_settings
from rollout.protocol import PredictReply, PredictRequest

log = logging.getLogger("venus.predictor")
_MOST_LOG = 16.0


class Predictor:
    """Answers workers; owner of the scorer."""

    def __init__(self, run_dir: Path, config: PredictorConfig, token: str) -> None:
        self._run_dir = run_dir
        self._config = config
        self._token = token
        self._scorer: Scorer | None = None
        self._questions: Questions | None = None
        self._lost = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self.failure = ""

    async def predict(self, request: PredictRequest) -> PredictReply:
        """Remaining output tokens, at least 1; None while there is no model, or when it comes too late."""
        if self._questions is None:
            return PredictReply(remaining_tokens=None)
        text = window(request.token_ids, self._config.context_tokens)
        score = await self._questions.ask(request.trajectory_id, request.turn, text)
        if score is None:
            return PredictReply(remaining_tokens=None)
        return PredictReply(remaining_tokens=max(1.0, math.expm1(min(_MOST_LOG, score))))

    async def use(self, folder: Path) -> None:
        """Answer with the model in `folder` from now on."""
        if self._scorer is not None:
            await self._scorer.load(folder)
            log.info("answering with %s", folder)
            return
        scorer_log = self._run_dir / "logs" / "predictor-engine.log"
        scorer = make_scorer(self._config, folder, log=scorer_log, token=self._token)
        try:
            await scorer.start()
        except BaseException:
            await scorer.stop()
            raise
        self._scorer = scorer
        self._questions = Questions(scorer.score, most=self._config.slots, patience_s=self._config.timeout_s)
        self._watch = asyncio.create_task(self._watch_scorer(scorer))
        log.info("answering with %s", folder)

    async def _watch_scorer(self, scorer: Scorer) -> None:
        self.failure = await scorer.wait_dead()
        self._lost.set()

    async def wait_lost(self) -> None:
        """Returns when the scorer has died; `failure` says why."""
        await self._lost.wait()

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._questions is not None:
            self._questions.stop()
        if self._scorer is not None:
            await self._scorer.stop()


def build_app(predictor: Predictor, token: str) -> FastAPI:
    """The service's HTTP app."""
    app = make_app("predictor", token)
    endpoint(app, "/v1/predict", PredictRequest)(predictor.predict)
    return app


async def serve(run_dir: Path, config: PredictorConfig, sock: socket.socket, token: str) -> None:
    """Until SIGTERM. Raises VenusError: the scorer did not come up, or died."""
    predictor = Predictor(run_dir, config, token)
    settings = uvicorn.Config(
        build_app(predictor, token), lifespan="off", access_log=False, log_config=None, timeout_graceful_shutdown=1
    )
    server = RoleServer(settings)
    asked = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, asked.set)

    async def work() -> None:
        model = current_model(run_dir, config)
        if model is not None:
            await predictor.use(model)
        if config.refresh:
            await Refresher(run_dir, config, predictor.use).run()
        await asyncio.Event().wait()

    working = asyncio.create_task(work())
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    waits: list[asyncio.Task[Any]] = [asyncio.create_task(w) for w in (asked.wait(), predictor.wait_lost())]
    try:
        await asyncio.wait([working, serving, *waits], return_when=asyncio.FIRST_COMPLETED)
        if asked.is_set():
            return
        if predictor.failure:
            raise VenusError(f"predictor: {predictor.failure}")
        for task in (working, serving):
            if task.done():
                task.result()
    finally:
        server.should_exit = True
        for task in (working, *waits):
            task.cancel()
        await asyncio.gather(working, serving, *waits, return_exceptions=True)
        await predictor.stop()


def listening(fd: int | None, config: PredictorConfig) -> socket.socket:
    """The inherited socket, or one of its own where the config says, which is logged."""
    sock = listen(config.host, config.port) if fd is None else socket.socket(fileno=fd)
    sock.setblocking(False)
    if fd is None:
        log.info("listening on %s:%d", *sock.getsockname()[:2])
    return sock


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m rollout.predictor.serve")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run, with its config.yaml")
    parser.add_argument(
        "--fd", type=int, help="inherited listening socket; default: one of rollout.predictor.host and port"
    )
    arguments = parser.parse_args()
    if arguments.fd is not None:
        die_with_parent()
    log_to_stderr("predictor")
    config = section(arguments.run_dir / "config.yaml", "rollout", RolloutConfig).predictor
    check_settings(config)
    token = token_from_environment()
    sock = listening(arguments.fd, config)
    asyncio.run(serve(arguments.run_dir, config, sock, token))


if __name__ == "__main__":
    main_guard(main)
