"""What the person sees while a run goes on: one line a step, a progress line in between."""

from __future__ import annotations

import sys
import time
from typing import Any, TextIO

from rollout.protocol import Status

WIDTH = 24


def _number(row: dict[str, Any], key: str, form: str) -> str:
    value = row.get(key)
    return "-" if value is None else format(value, form)


def step_line(row: dict[str, Any], steps: int) -> str:
    """The line of a finished step, from its row of metrics.jsonl."""
    return (
        f"step {row['step']:>3}/{steps}  reward {_number(row, 'reward/mean', '.3f')}  "
        f"loss {_number(row, 'loss', '+.4f')}  grad {_number(row, 'grad_norm', '.2f')}  "
        f"entropy {_number(row, 'entropy', '.3f')}  gap {_number(row, 'logprob_gap/mean_abs', '.1e')}  "
        f"turns {_number(row, 'turns/mean', '.1f')}  kv hit {_number(row, 'kv/hit_rate', '.2f')}  "
        f"stale {_number(row, 'staleness/span_max', '.0f')}  "
        f"{_number(row, 'time/step_s', '.1f')} s (rollout {_number(row, 'time/rollout_s', '.1f')}, "
        f"train {_number(row, 'time/train_s', '.1f')}, sync {_number(row, 'sync/seconds', '.1f')})"
    )


def eval_line(row: dict[str, Any]) -> str:
    """The line of a finished evaluation, from its row of evals.jsonl."""
    return (
        f"eval at version {row['version']}: held-out pass {row['pass']:.3f} ± {row['standard_error']:.3f} "
        f"({row['samples']} samples)"
    )


def progress_text(status: Status, batch: int) -> str:
    """One short line: what the run is doing now."""
    done = min(status.groups_ready, batch)
    filled = WIDTH * done // max(1, batch)
    return (
        f"step {min(status.step + 1, status.steps)}/{status.steps} {status.phase:<8} "
        f"[{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{batch} groups  "
        f"trajectories {status.trajectories_running} running {status.trajectories_done} done, {status.turns_done} turns"
    )


class Screen:
    """Writes to a terminal (a progress line that is redrawn) or to a log (a progress line every 15 s)."""

    def __init__(self, out: TextIO = sys.stdout, log_every_s: float = 15.0) -> None:
        self._out = out
        self._live = out.isatty()
        self._log_every_s = log_every_s
        self._last_log = time.monotonic()
        self._drawn = 0

    def line(self, text: str) -> None:
        """A line that stays."""
        self.clear()
        print(text, file=self._out, flush=True)

    def progress(self, text: str) -> None:
        """A line that the next one replaces."""
        if self._live:
            self.clear()
            self._out.write(text)
            self._out.flush()
            self._drawn = len(text)
        elif time.monotonic() - self._last_log >= self._log_every_s:
            self._last_log = time.monotonic()
            print(text, file=self._out, flush=True)

    def clear(self) -> None:
        """Take the progress line away."""
        if self._live and self._drawn:
            self._out.write("\r\x1b[K")
            self._drawn = 0
