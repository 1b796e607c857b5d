"""The offline W&B run in the run's folder. Never touches the network, never stops the training.

W&B's calls may block (it starts a helper process), so they run in order on one thread of their own. After a resume the
run goes on under the same id: `wandb sync` joins the parts.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

log = logging.getLogger("venus.wandb")


class WandbRun:
    """One offline run; after its first error it says so once and does nothing more."""

    def __init__(self, run_dir: Path, run_id: str, name: str, config: Mapping[str, Any]) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wandb")
        self._run: Any = None
        self._broken = False
        self._submit(lambda: self._open(run_dir, run_id, name, config))

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """Numbers of `step`; missing ones are left out."""
        values = {k: v for k, v in row.items() if v is not None}
        self._submit(lambda: self._run.log(values, step=step))

    def finish(self, timeout_s: float) -> None:
        """Write what is left; gives up after `timeout_s` seconds."""
        done = self._thread.submit(self._guarded(lambda: self._run.finish(exit_code=0)))
        with contextlib.suppress(TimeoutError):
            done.result(timeout_s)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _open(self, run_dir: Path, run_id: str, name: str, config: Mapping[str, Any]) -> None:
        import wandb

        settings = wandb.Settings(
            mode="offline",
            silent=True,
            console="off",
            x_disable_stats=True,
            x_disable_meta=True,
            disable_git=True,
            disable_code=True,
        )
        self._run = wandb.init(
            project="venusrl", id=run_id, name=name, dir=str(run_dir), config=dict(config), settings=settings
        )

    def _submit(self, work: Callable[[], object]) -> None:
        self._thread.submit(self._guarded(work))

    def _guarded(self, work: Callable[[], object]) -> Callable[[], None]:
        def call() -> None:
            if self._broken:
                return
            try:
                work()
            except Exception as error:  # whatever W&B does, the run goes on
                self._broken = True
                log.warning("W&B is off for this run: %s: %s", type(error).__name__, error)

        return call
