"""A run with a predictor: it is trained at a checkpoint, its answers are events, and when it dies the run goes on."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from envclient.base.configs import section
from envclient.base.files import read_json
from rollout.config import RolloutConfig, RunConfig
from rollout.dispatcher import DispatcherConfig
from rollout.replay import first_difference, read_rows
from rollout.types import LengthEstimated, TurnEnded
from tests.e2e.launched import SCRIPTED, Launched, check_account, wait_until

STEPS = 500
"""More than are made: the test ends the run."""


def estimates(run: Launched) -> list[LengthEstimated]:
    path = run.run_dir / "events.jsonl"
    rows = read_rows(path) if path.exists() else ()
    return [row.event for row in rows if isinstance(row.event, LengthEstimated)]


def report(run: Launched) -> dict[str, float]:
    """How the model that answers was trained; empty: none does yet."""
    current = run.run_dir / "predictor" / "current.json"
    return read_json(current.parent / read_json(current)["model"] / "train.json") if current.exists() else {}


def has_learned(run: Launched) -> bool:
    """The first model may have had too few episodes to become better than it was made."""
    found = report(run)
    return bool(found) and found["loss_after"] < found["loss_before"]


@pytest.mark.timeout(400)
def test_a_run_trains_its_predictor_asks_it_and_outlives_it(tmp_path: Path) -> None:
    predictor = {"enabled": "true", "engine": "torch", "refresh_minutes": "0.03"}
    overrides = [*SCRIPTED, "policy=venus", f"steps={STEPS}", "async_factor=1.5"]
    overrides += [f"rollout.predictor.{key}={value}" for key, value in predictor.items()]
    with Launched(tmp_path, *overrides) as run:
        wait_until(
            lambda: run.process.poll() is not None or (len(estimates(run)) >= 3 and has_learned(run)),
            240.0,
            f"answers of a model that has learned; {run.text}",
        )
        assert run.process.poll() is None, run.text
        os.kill(run.pid_of("predictor"), signal.SIGKILL)
        run.wait_steps(run.steps_done + 3)
        assert "the run goes on without its predictor" in run.text
        run.process.send_signal(signal.SIGINT)
        run.wait(60.0)
        check_account(run.summary())
        answers, metrics = estimates(run), run.metrics()
    folder = tmp_path / "quickstart"
    # Each answer is about a turn that had ended before it.
    seen: set[tuple[str, int]] = set()
    for row in read_rows(folder / "events.jsonl"):
        if isinstance(row.event, TurnEnded):
            seen.add((row.event.trajectory_id, row.event.turn))
        elif isinstance(row.event, LengthEstimated):
            assert (row.event.trajectory_id, row.event.turn) in seen
            assert row.event.remaining_tokens >= 1.0
    counted = sum(row["estimates_used/mean"] * row["sequences/trained"] for row in metrics)
    assert 0 < counted <= len(answers) + 1e-6
    assert metrics[-1]["estimates_used/mean"] == 0.0, "it is dead"
    config = folder / "config.yaml"
    constants = DispatcherConfig.from_config(
        section(config, "rollout", RolloutConfig), steps=section(config, "run", RunConfig).steps
    )
    agreed, difference = first_difference(read_rows(folder / "events.jsonl"), constants)
    assert difference is None and agreed > 100
    assert read_json(folder / "predictor" / "worker-w0.json")["used"] >= counted
