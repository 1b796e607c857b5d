"""`python -m megatron_venus.train` as the launcher starts it, against a coordinator over HTTP: replicas and layouts."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ckpt_tools import from_hf
from ckpt_tools.layout import Layout
from envclient.base.configs import to_yaml
from megatron_venus.checkpoint_index import find_all, find_latest
from megatron_venus.config import ActorConfig, LossConfig, ParallelConfig, VenusConfig
from megatron_venus.hf_folder import read_weights
from megatron_venus.weight_map import checksum
from rollout.config import FactoryConfig, ModelConfig, RolloutConfig, RunConfig
from tests.numerics import kit
from tests.numerics.fake_coordinator import TOKEN, FakeCoordinator, serving


def run_actor(
    run_dir: Path,
    model: Path,
    coordinator: FakeCoordinator,
    *,
    ranks: int = 1,
    parallel: ParallelConfig | None = None,
    loss: LossConfig | None = None,
    resume_step: int = -1,
    file_bytes: int = resource.RLIM_INFINITY,
    megatron: str = "",
    **run: object,
) -> subprocess.CompletedProcess[str]:
    nothing = FactoryConfig(factory="nothing:nothing")
    config = VenusConfig(
        run=RunConfig(**{"steps": len(coordinator.batches)} | run),  # type: ignore[arg-type]
        model=ModelConfig(path=str(model), megatron=megatron, context_length=128),
        rollout=RolloutConfig(tasks=nothing, agent=nothing),
        actor=ActorConfig(
            ranks=ranks,
            parallel=parallel or ParallelConfig(),
            loss=loss or LossConfig(),
            poll_s=1.0,
            micro_batch_tokens=128,
        ),
    )
    run_dir.mkdir(exist_ok=True)
    (run_dir / "config.yaml").write_text(to_yaml(config))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    with serving(coordinator):
        arguments = ["--run-dir", str(run_dir), "--coordinator", coordinator.url, "--resume-step", str(resume_step)]
        return subprocess.run(
            [*launcher, "-m", "megatron_venus.train", *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1", "VENUS_TOKEN": TOKEN, "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=120,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes)),
        )


def batches(steps: int) -> list[list[kit.TrainGroup]]:
    return [kit.make_groups(4, step=step, seed=step) for step in range(1, steps + 1)]


@pytest.mark.parametrize(
    ("ranks", "steps", "parallel"),
    [(1, 3, ParallelConfig()), (2, 5, ParallelConfig()), (4, 5, ParallelConfig(tensor=2, sequence=True))],
)
def test_loop(ranks: int, steps: int, parallel: ParallelConfig, tied_model: Path, tmp_path: Path) -> None:
    """With `steps` beyond the three batches the tasks are used up: the run ends in order."""
    coordinator = FakeCoordinator(batches=batches(3))
    started = time.monotonic()
    evaluations = {"eval_before": True, "eval_every": 2, "eval_after": True}
    done = run_actor(
        tmp_path / "run", tied_model, coordinator, ranks=ranks, parallel=parallel, steps=steps, **evaluations
    )
    print(f"{ranks} ranks: {time.monotonic() - started:.1f} s")
    assert done.returncode == 0, done.stderr[-3000:]
    per_step = [[f"step {s}", f"sync_begin {s}", f"sync_end {s}"] for s in (1, 2, 3)]
    assert coordinator.log == [
        "evaluate before 0",
        *per_step[0],
        *per_step[1],
        "evaluate step000002 2",
        *per_step[2],
        "evaluate after 3",
    ]
    handed = [group.group_id for batch in coordinator.batches for group in batch]
    assert set(coordinator.shares) <= set(range(ranks // parallel.replica_ranks()))
    trained = [group_id for share in coordinator.shares.values() for group_id in share]
    assert sorted(trained) == sorted(handed)
    for metrics in coordinator.metrics:
        assert {"loss", "grad_norm", "entropy", "kl", "clip_frac", "lr", "logprob_gap/mean_abs"} <= metrics.keys()
        assert {"staleness/span_max", "time/train_s", "time/wait_s", "tokens/trained"} <= metrics.keys()
    latest = find_latest(tmp_path / "run")
    assert latest is not None and latest.step == 3
    exported = read_weights(latest.hf_dir)
    assert {name: checksum(tensor) for name, tensor in exported.items()} == latest.manifest.weights
    before = read_weights(tied_model)
    assert all(not torch.equal(exported[name], before[name]) for name in exported)


def test_resume_equals_undisturbed(tied_model: Path, tmp_path: Path) -> None:
    """2 + 2 steps are 4 steps, to the bit, through a checkpoint; old and broken checkpoints are removed.

    The first two start from what `from_hf` made of the model, the four from the Hugging Face folder.
    """
    whole = run_actor(tmp_path / "whole", tied_model, FakeCoordinator(batches=batches(4)), checkpoint_every=1)
    assert whole.returncode == 0, whole.stderr[-3000:]
    assert [checkpoint.step for checkpoint in find_all(tmp_path / "whole")] == [3, 4]

    run_dir = tmp_path / "parts"
    from_hf.convert(tied_model, tmp_path / "ckpt", layout=Layout(pipeline=2), quiet=True)
    first = run_actor(
        run_dir, tied_model, FakeCoordinator(batches=batches(2)), checkpoint_every=1, megatron=str(tmp_path / "ckpt")
    )
    assert first.returncode == 0, first.stderr[-3000:]
    latest = find_latest(run_dir)
    assert latest is not None and latest.step == 2
    # A kill while saving step 3 left this behind.
    broken = run_dir / "checkpoints" / "step_000003"
    (broken / "megatron").mkdir(parents=True)
    (broken / "megatron" / "__0_0.distcp").write_bytes(b"half")
    assert find_latest(run_dir) == latest

    coordinator = FakeCoordinator(batches=batches(4))
    second = run_actor(run_dir, tied_model, coordinator, resume_step=2, eval_before=True, eval_every=2)
    assert second.returncode == 0, second.stderr[-3000:]
    assert coordinator.log[:2] == ["evaluate step000002 2", "step 3"], "the kill may have come before the evaluation"
    ours, reference = find_latest(run_dir), find_latest(tmp_path / "whole")
    assert ours is not None and reference is not None and ours.step == 4
    assert ours.manifest.weights == reference.manifest.weights
    assert not broken.exists()


def test_incomplete_checkpoint_is_refused(tied_model: Path, tmp_path: Path) -> None:
    done = run_actor(tmp_path / "run", tied_model, FakeCoordinator(batches=[]), resume_step=7)
    assert done.returncode != 0
    assert "step_000007 is not a complete checkpoint" in done.stderr
