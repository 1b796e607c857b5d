"""What a run leaves for people: `metrics.jsonl`, `evals.jsonl`, `summary.json`, and an offline W&B run.

The shell tells what happened; a step's row is written once its optimizer step is made and its weights are synced, so
that every checkpoint's row is on the disk. A later step or the end writes it as it stands. An evaluation of the newest
step is filled in.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from envclient.base.files import JsonlWriter, read_jsonl, write_atomic, write_json_atomic
from rollout.coordinator.ledger import Identity
from rollout.coordinator.metrics import batch_metrics, ratio
from rollout.coordinator.shelf import SealedGroup
from rollout.coordinator.wandb_run import WandbRun
from rollout.types import PromptStatus, TrajectoryEnded, TrajectoryStatus

log = logging.getLogger("venus.tracker")
REPORTED_BY_ACTOR = ("loss", "grad_norm", "entropy", "kl", "clip_frac", "lr", "logprob_gap/mean_abs", "time/train_s")
FINISH_TIMEOUT_S = 5.0


class Tracker:
    """Owner of the run's result files."""

    def __init__(
        self,
        run_dir: Path,
        *,
        resume_step: int,
        identity: Callable[[], Identity],
        now: float,
        wandb_run: WandbRun | None = None,
    ) -> None:
        """Rows of steps and evaluations after `resume_step` are removed: their weights are lost."""
        self._identity = identity
        self._wandb = wandb_run
        self._summary = run_dir / "summary.json"
        self._step = resume_step
        self._last = _keep(run_dir / "metrics.jsonl", "step", resume_step)[-1:]
        self.evaluations = _keep(run_dir / "evals.jsonl", "version", resume_step)
        self._metrics = run_dir / "metrics.jsonl"
        self._metrics_file = JsonlWriter(self._metrics)
        self._evals_file = JsonlWriter(run_dir / "evals.jsonl")
        self._pending: dict[str, Any] | None = None
        self._begun = False
        self._step_start = now
        self._eval_start: float | None = None
        self._eval_s = 0.0
        self._reported: dict[int, dict[str, float]] = {}
        self._ended = {status: 0 for status in TrajectoryStatus}
        self._write_summary("running")

    # ------------------------------------------------------------------------------------------- what happened

    def worker_joined(self, now: float) -> None:
        """A worker is there. Until the first trajectory ends, the first step is not said to have begun."""
        if not self._begun:
            self._step_start = now

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """The actor's own numbers of `step`, before its StepFinished is handled."""
        if step > self._step:
            self._reported[step] = metrics

    def trajectory_ended(self, event: TrajectoryEnded) -> None:
        """A training trajectory was reported."""
        self._begun = True
        self._ended[event.status] += 1

    def step_finished(self, step: int, skipped: bool, groups: Sequence[SealedGroup], now: float) -> None:
        """The optimizer made `step` out of `groups`."""
        if step <= self._step:
            return
        self.flush()
        identity = self._identity()
        judged = sum(count for status, count in self._ended.items() if status is not TrajectoryStatus.ABORTED)
        sealed_at = max((g.sealed_at for g in groups), default=self._step_start)
        self._step = step
        self._pending = {
            "step": step,
            "weight_version": step,
            "skipped": skipped,
            **{name: None for name in REPORTED_BY_ACTOR},
            **self._reported.pop(step, {}),
            **batch_metrics(groups, step),
            "env_failure_rate": ratio(self._ended[TrajectoryStatus.FAILED], judged),
            "eval/pass": None,
            "eval/standard_error": None,
            "groups/trained": identity.counts[PromptStatus.ACCEPTED.value],
            **{f"groups/{s.value}": identity.counts[s.value] for s in _UNTRAINED},
            "sync/seconds": None,
            "time/eval_s": self._eval_s,
            "time/rollout_s": max(0.0, sealed_at - self._step_start),
        }
        self._ended = {status: 0 for status in TrajectoryStatus}
        self._eval_s = 0.0
        self._measure(now)

    def sync_finished(self, version: int, seconds: dict[str, float], now: float) -> None:
        """Every worker samples under `version`; `seconds` by phase, `total` among them or their sum."""
        row = self._pending
        if row is not None and row["step"] == version:
            row["sync/seconds"] = seconds.get("total", sum(seconds.values()))
            row.update({f"sync/{name}_s": value for name, value in seconds.items() if name != "total"})
            self._measure(now)
            self.flush()
        self._step_start = now

    def eval_requested(self, now: float) -> None:
        """An evaluation begins. Its time is part of the step that is being made meanwhile, and told in its row."""
        self._begun = True
        self._eval_start = now

    def evaluated(self, row: dict[str, Any], now: float) -> None:
        """An evaluation ended; `row` is its row of evals.jsonl."""
        values = {"eval/pass": row["pass"], "eval/standard_error": row["standard_error"]}
        if self._pending is not None and self._pending["step"] == row["version"]:
            self._pending.update(values)
        elif self._last and self._last[0]["step"] == row["version"]:
            self._last[0].update(values)
            self._rewrite_last()  # before the evaluation's own row: after a kill in between it is made again
        self.evaluations.append(row)
        self._evals_file.write(row)
        if self._wandb is not None:
            self._wandb.log(values, row["version"])
        if self._eval_start is not None:
            self._eval_s += now - self._eval_start
            self._eval_start = None
        self._write_summary("running")

    def flush(self) -> None:
        """Write the pending step's row as it stands."""
        row, self._pending = self._pending, None
        if row is None:
            return
        self._metrics_file.write(json.dumps(_finite(row)).encode())
        self._last = [row]
        if self._wandb is not None:
            self._wandb.log(row, row["step"])
        self._write_summary("running")

    def close(self, reason: str) -> None:
        """Write everything that is left."""
        self.flush()
        self._write_summary(reason)
        self._metrics_file.close()
        self._evals_file.close()
        if self._wandb is not None:
            self._wandb.finish(FINISH_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------------- plumbing

    def _measure(self, now: float) -> None:
        row = self._pending
        assert row is not None
        row["time/step_s"] = now - self._step_start
        row["tokens_per_s"] = ratio(row.get("tokens/trained") or 0.0, row["time/step_s"])

    def _rewrite_last(self) -> None:
        """Replace the newest row of metrics.jsonl."""
        rows = [*read_jsonl(self._metrics)[:-1], *map(_finite, self._last)]
        self._metrics_file.close()
        write_atomic(self._metrics, "".join(json.dumps(row) + "\n" for row in rows))
        self._metrics_file = JsonlWriter(self._metrics)

    def _write_summary(self, reason: str) -> None:
        identity = self._identity()
        before = [e for e in self.evaluations if e["version"] == 0]
        after = [e for e in self.evaluations if e["version"] == self._step > 0]
        summary = {
            "steps": self._step,
            "groups_trained": identity.counts[PromptStatus.ACCEPTED.value],
            "ledger_ok": identity.ledger_ok,
            "ledger_faults": list(identity.faults),
            "counts": identity.counts,
            "eval_before": _brief(before[0]) if before else None,
            "eval_after": _brief(after[-1]) if after else None,
            "last": _finite(self._last[0]) if self._last else None,
            "reason": reason,
        }
        write_json_atomic(self._summary, summary)


_UNTRAINED = (PromptStatus.DISCARDED, PromptStatus.FILTERED, PromptStatus.FAILED)


def _brief(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("pass", "standard_error", "samples", "version")}


def _finite(row: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN and no infinity: null."""
    return {k: None if isinstance(v, float) and (v != v or abs(v) == float("inf")) else v for k, v in row.items()}


def _keep(path: Path, name: str, newest: int) -> list[dict[str, Any]]:
    """Rows of `path` whose `name` is at most `newest`; the file is rewritten when others stood in it."""
    rows = read_jsonl(path)
    kept = [row for row in rows if row[name] <= newest]
    if path.exists():
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
    return kept
