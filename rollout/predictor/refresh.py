"""The predictor follows the policy: trained again on the run's newest episodes at every checkpoint, meanwhile.

Training is a process of its own at the lowest priority, with a bound on its minutes. What it made is served only when
its loss on held-back tasks is below that of what it began from; the swap is the scorer's, and the pointer
`current.json` is replaced after it, so that a resumed run begins with the newest.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from envclient.base.errors import VenusError, WireError
from envclient.base.files import read_json, write_json_atomic
from envclient.base.processes import last_lines, start_child
from rollout.config import PredictorConfig
from rollout.predictor.episodes import FOLDER

log = logging.getLogger("venus.predictor")
POINTER = "current.json"
_KEPT = 2
_POLL_S = 1.0
_START_S = 120.0
"""Seconds beyond its minutes that a training may take to read, judge and write."""


def newest_checkpoint(run_dir: Path) -> int:
    """Step of the newest whole checkpoint; −1: none. Its manifest is written last."""
    found = (run_dir / "checkpoints").glob("step_*/manifest.json")
    return max((int(path.parent.name.removeprefix("step_")) for path in found), default=-1)


def current_model(run_dir: Path, config: PredictorConfig) -> Path | None:
    """What a run's predictor answers with: the newest it has made, else the configured one, else nothing."""
    pointer = run_dir / FOLDER / POINTER
    if pointer.is_file():
        return run_dir / FOLDER / str(read_json(pointer)["model"])
    return Path(config.model) if config.model else None


class Refresher:
    """Watches a run's checkpoints.

    Args:
        serve: makes the scorer answer with a new folder.
    """

    def __init__(self, run_dir: Path, config: PredictorConfig, serve: Callable[[Path], Awaitable[None]]) -> None:
        self._run_dir = run_dir
        self._folder = run_dir / FOLDER
        self._config = config
        self._serve = serve
        self._seen = newest_checkpoint(run_dir)
        self.made = 0
        """Models trained and served."""

    async def run(self) -> None:
        """Until cancelled. A training that fails is logged, and the next checkpoint tries again."""
        while True:
            await asyncio.sleep(_POLL_S)
            step = newest_checkpoint(self._run_dir)
            if step > self._seen:
                self._seen = step
                try:
                    await self.refresh(step)
                except VenusError as error:
                    log.warning("the refresh at step %d failed: %s", step, error)

    async def refresh(self, step: int) -> bool:
        """Train on what is recorded; whether the new model answers now.

        Raises:
            VenusError: training failed or took too long, or the scorer refused its model.
        """
        serving = current_model(self._run_dir, self._config)
        target = self._folder / f"model-{step:06d}"
        shutil.rmtree(target, ignore_errors=True)
        await self._train(serving or Path(self._config.trunk), target)
        report = read_json(target / "train.json")
        log.info("refreshed at step %d: %s", step, {k: v for k, v in report.items() if k != "losses"})
        if serving is not None and report["loss_after"] >= report["loss_before"]:
            shutil.rmtree(target)
            return False
        await self._serve(target)
        write_json_atomic(self._folder / POINTER, {"model": target.name, "step": step})
        self.made += 1
        for old in sorted(self._folder.glob("model-*"))[:-_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
        return True

    async def _train(self, begin: Path, target: Path) -> None:
        config = self._config
        argv = ["nice", "-n", "19", sys.executable, "-m", "rollout.predictor.train", "--run", str(self._run_dir)]
        argv += ["--init", str(begin), "--out", str(target), "--minutes", str(config.refresh_minutes)]
        argv += ["--context-tokens", str(config.context_tokens)]
        output = self._run_dir / "logs" / "predictor-train.log"
        child = await start_child("predictor training", argv, output, env=os.environ)
        try:
            await asyncio.wait_for(child.process.wait(), config.refresh_minutes * 60 + _START_S)
        except TimeoutError:
            raise WireError(f"training took more than {config.refresh_minutes:g} minutes", f"see {output}") from None
        finally:
            await child.stop(grace_s=0.0)
        if child.returncode != 0:
            raise VenusError(f"training ended with {child.returncode}: {last_lines(output, 3)}")
