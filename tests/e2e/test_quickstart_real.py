"""The main job with all its real parts, small: what a run must leave, and what its numbers must say."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from PIL import Image

from envclient.base.files import read_json, read_jsonl
from tests.e2e.launched import Launched, alive, check_account, wait_until

STEPS = 3
METRICS = [
    "step",
    "weight_version",
    "reward/mean",
    "eval/pass",
    "groups/trained",
    "groups/discarded",
    "staleness/span_max",
    "logprob_gap/mean_abs",
    "kv/hit_rate",
    "turns/mean",
    "sync/seconds",
    "time/step_s",
    "time/rollout_s",
    "time/train_s",
    "loss",
    "grad_norm",
    "entropy",
    "kl",
    "clip_frac",
    "lr",
    "truncated_rate",
    "tool_error_rate",
    "tokens_per_s",
]


@pytest.mark.sglang
@pytest.mark.timeout(400)
def test_the_main_job(tmp_path: Path) -> None:
    overrides = ["async_factor=1.5", "actor.ranks=2", "run.wandb=true", "run.eval_every=2", "run.eval_samples=16"]
    with Launched(tmp_path, f"steps={STEPS}", *overrides, "run.eval_after=true") as run:
        run.wait_steps(1)
        secret = run.secret()
        assert run.wait(360.0) == 0, run.text
        summary, rows, text = run.summary(), run.metrics(), run.text
        here = run.run_dir
    check_account(summary)
    assert summary["steps"] == STEPS and summary["groups_trained"] == 2 * STEPS
    assert summary["eval_after"]["samples"] == 16 and summary["eval_after"]["version"] == STEPS
    assert summary["eval_before"] is None
    for row in rows:
        assert not [name for name in METRICS if name not in row]
        if row["staleness/age_max"] == 0:  # else older weights than the actor's made some of the tokens
            assert row["logprob_gap/mean_abs"] <= 1e-4, "engine and actor disagree"
        assert row["staleness/span_max"] <= 2
        assert 0.0 < row["kv/hit_rate"] <= 1.0
    assert rows[0]["staleness/age_max"] == 0 < max(row["staleness/age_max"] for row in rows)
    assert rows[1]["eval/pass"] is not None and rows[0]["eval/pass"] is None
    for name in (
        "config.yaml",
        "ledger.sqlite",
        "events.jsonl",
        "evals.jsonl",
        "checkpoints/step_000003/manifest.json",
    ):
        assert (here / name).is_file(), name
    for role in ("environment", "coordinator", "worker-w0", "actor"):
        assert (here / f"logs/{role}.log").is_file(), role
    assert len(list(here.glob("wandb/offline-run-*/*.wandb"))) == 1
    with Image.open(here / "reward.png") as plot:
        assert plot.width > 300
    assert [line.split()[1] for line in text.splitlines() if line.startswith("step ") and "reward" in line] == [
        f"{step}/{STEPS}" for step in range(1, STEPS + 1)
    ]
    assert len(secret) >= 32
    assert not [path for path in here.rglob("*") if path.is_file() and secret in path.read_bytes()]
    manifest = read_json(here / "checkpoints/step_000003/manifest.json")
    assert manifest["step"] == STEPS and len(manifest["weights"]) > 10
    assert len(read_jsonl(here / "evals.jsonl")) == 2


@pytest.mark.sglang
@pytest.mark.timeout(400)
def test_a_killed_engine_ends_the_run_and_it_resumes(tmp_path: Path) -> None:
    with Launched(tmp_path, f"steps={STEPS}", "actor.checkpoint.export=false") as run:
        run.wait_steps(1)
        manifest = run.run_dir / "checkpoints/step_000001/manifest.json"
        wait_until(manifest.exists, 30.0, "the checkpoint of step 1")
        processes = run.processes()
        os.kill(run.pid_of("engine"), signal.SIGKILL)
        assert run.wait(30.0) == 2
        wait_until(lambda: not alive(processes), 30.0, "processes are left")
        assert "error: worker-w0 ended with" in run.text and "engine" in run.text
    with Launched(tmp_path, f"steps={STEPS}", "resume=auto") as run:
        assert run.wait(240.0) == 0, run.text
        check_account(run.summary())
        rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert (run.run_dir / "engine_model/model.safetensors").is_file()
    # The engine restarted from weights exported at the resume: it must still agree with the actor.
    assert all(row["logprob_gap/mean_abs"] <= 1e-4 for row in rows)
