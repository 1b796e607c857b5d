"""The actor as a process with a loss that keeps a reference and the batch: its log, its metrics, its resume."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_venus.checkpoint_index import find_latest
from megatron_venus.config import KlConfig, LossConfig
from tests.numerics.fake_coordinator import FakeCoordinator
from tests.numerics.test_train_loop import batches, run_actor

LOSS = LossConfig(updates_per_batch=2, kl=KlConfig(place="loss", coefficient=0.5))


def test_resume_keeps_the_reference(tied_model: Path, tmp_path: Path) -> None:
    """1 + 1 steps are 2 steps, to the bit: the reference is what the run started from, not what it resumed from."""
    whole = FakeCoordinator(batches=batches(2))
    done = run_actor(tmp_path / "whole", tied_model, whole, loss=LOSS)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the clip binds from update 2 of 2" in done.stderr
    assert "gradients wait for the whole batch: the batch is kept for 2 updates" in done.stderr

    first = run_actor(tmp_path / "parts", tied_model, FakeCoordinator(batches=batches(1)), loss=LOSS)
    assert first.returncode == 0, first.stderr[-3000:]
    parts = FakeCoordinator(batches=batches(2))
    second = run_actor(tmp_path / "parts", tied_model, parts, loss=LOSS, resume_step=1)
    assert second.returncode == 0, second.stderr[-3000:]
    ours, reference = find_latest(tmp_path / "parts"), find_latest(tmp_path / "whole")
    assert ours is not None and reference is not None and ours.step == reference.step == 2
    assert ours.manifest.weights == reference.manifest.weights
    # At the start of step 1 policy and reference are one; at step 2 they are not.
    assert parts.metrics[-1]["kl_ref"] == pytest.approx(whole.metrics[-1]["kl_ref"], rel=1e-6)
    assert whole.metrics[-1]["kl_ref"] > whole.metrics[0]["kl_ref"] > 0.0
    assert all(metrics["updates"] == 2 for metrics in whole.metrics)
