"""Saving beside training: the copy is the step's, a kill or a failure leaves the checkpoint before, and is named."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from pathlib import Path

import pytest

from envclient.base.errors import PreflightError, VenusError
from megatron_venus.checkpoint_index import checkpoint_dir, find_all, find_latest
from megatron_venus.config import CheckpointConfig
from megatron_venus.hf_folder import read_weights
from tests.numerics import kit
from tests.numerics.fake_coordinator import FakeCoordinator
from tests.numerics.test_checkpoint import SETTINGS, adam_state, assert_same, train
from tests.numerics.test_train_loop import batches, run_actor


def test_training_goes_on_meanwhile(tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps are made while nothing is written yet: what is written then is the state before them, to the bit."""
    from megatron_venus import checkpoint
    from megatron_venus.checkpoint_saver import CheckpointSaver
    from megatron_venus.checkpoint_snapshot import Snapshot

    may_write = threading.Event()
    write = Snapshot.write

    def write_late(snapshot: Snapshot) -> list[object]:
        assert may_write.wait(60)
        return write(snapshot)

    monkeypatch.setattr(Snapshot, "write", write_late)
    actor = kit.make_actor(tied_model, SETTINGS)
    train(actor, range(1, 3))
    with CheckpointSaver(tmp_path, actor, CheckpointConfig(), hf_source=tied_model) as saver:
        weights = {name: tensor.clone() for name, tensor in actor.hf_tensors()}
        moments = adam_state(actor)
        saver.save(2, 0)
        train(actor, range(3, 5))
        saver.check()
        assert find_latest(tmp_path) is None
        assert not list(checkpoint_dir(tmp_path, 2).rglob("*.distcp"))
        may_write.set()
        saver.save(4, 0)  # waits for the one in flight
        assert find_all(tmp_path)[0].step == 2
    before, after = find_all(tmp_path)
    changed = dict(actor.hf_tensors())
    assert not any(changed[name].equal(tensor) for name, tensor in weights.items())
    assert_same(read_weights(before.hf_dir), weights)
    assert_same(read_weights(after.hf_dir), changed)
    other = kit.make_actor(tied_model, SETTINGS)
    checkpoint.load(before, other)
    assert_same(adam_state(other), moments)
    train(other, range(3, 5))
    assert_same(dict(other.hf_tensors()), changed)


def test_killed_at_any_point(tied_model: Path, tmp_path: Path) -> None:
    """Whatever the save of step 2 was doing: step 1 loads until step 2's manifest is there; the half folder goes."""
    results = json.loads(
        kit.run_python("-m", "tests.numerics.kill_kit", str(tied_model), str(tmp_path)).splitlines()[-1]
    )
    events = [result["event"] for result in results]
    for part in (".distcp", ".metadata.tmp", "metadata.json", "hf/config.json", "os.rename step_000002/.manifest"):
        assert any(part in event for event in events), (part, events)
    for result in results:
        # Retention, after the manifest; and the kernel's SIGXFSZ in the middle of a file.
        done = result["event"] == "shutil.rmtree step_000001"
        assert result["signal"] == (25 if result["event"] == "half a file" else 9), result
        assert result["complete"] == ([1, 2] if done else [1]), result
        assert result["after"] == ["step_000001"] + (["step_000002"] if done else []), result
    assert sum("step_000002" in result["before"] for result in results) >= 8


def test_one_of_two_ranks_killed(tied_model: Path, tmp_path: Path) -> None:
    """Tensor parallel, in the save of step 2: no manifest comes, and step 1 loads, in one process too."""
    from megatron_venus import checkpoint

    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.numerics.kill_kit"]
    done = subprocess.run(
        [sys.executable, "-m", *launcher, str(tied_model), str(tmp_path), "1"],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0 and "Signal 9 (SIGKILL)" in done.stderr, done.stderr[-3000:]
    assert checkpoint_dir(tmp_path, 2).is_dir()
    [found] = find_all(tmp_path)
    assert found.step == 1
    actor = kit.make_actor(tied_model, SETTINGS)
    assert checkpoint.load(found, actor) == 0
    assert_same(dict(actor.hf_tensors()), read_weights(found.hf_dir))
    train(actor, range(2, 3))
    kit.save_checkpoint(tmp_path, 2, actor, hf_source=tied_model)
    assert [found.step for found in find_all(tmp_path)] == [1, 2]


def test_export_only_on_request(tied_model: Path, tmp_path: Path) -> None:
    """Without it: config and tokenizer, the same checksums, and `to_hf` makes the same weights later."""
    from ckpt_tools import to_hf
    from megatron_venus import checkpoint

    actor = kit.make_actor(tied_model, SETTINGS)
    train(actor, range(1, 2))
    kit.save_checkpoint(tmp_path, 1, actor, hf_source=tied_model, export=False)
    kit.save_checkpoint(tmp_path, 2, actor, hf_source=tied_model, background=False)
    bare, exported = find_all(tmp_path)
    assert not bare.exported and exported.exported
    assert not list(bare.hf_dir.glob("*.safetensors")) and (bare.hf_dir / "config.json").is_file()
    assert bare.manifest.weights == exported.manifest.weights
    to_hf.convert(bare.path, tmp_path / "made", quiet=True)
    assert_same(read_weights(tmp_path / "made"), read_weights(exported.hf_dir))
    other = kit.make_actor(tied_model, SETTINGS)
    checkpoint.load(bare, other)
    assert_same(adam_state(other), adam_state(actor))


def test_before_the_first_step(tied_model: Path, tmp_path: Path) -> None:
    """A run whose steps were all skipped so far: there is nothing of Adam's yet, and it goes on as if undisturbed."""
    from megatron_venus import checkpoint

    first = kit.make_actor(tied_model, SETTINGS)
    kit.save_checkpoint(tmp_path, 1, first, hf_source=tied_model, nonfinite_steps=1)
    second, undisturbed = kit.make_actor(tied_model, SETTINGS), kit.make_actor(tied_model, SETTINGS)
    found = find_latest(tmp_path)
    assert found is not None
    assert checkpoint.load(found, second) == 1
    for actor in (first, second, undisturbed):
        train(actor, range(2, 4))
    for actor in (first, second):
        assert_same(adam_state(actor), adam_state(undisturbed))
        assert_same(dict(actor.hf_tensors()), dict(undisturbed.hf_tensors()))


def test_no_room(tied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before a file is written; the checkpoint before stays."""
    from megatron_venus.checkpoint_saver import CheckpointSaver

    actor = kit.make_actor(tied_model, SETTINGS)
    kit.save_checkpoint(tmp_path, 1, actor, hf_source=tied_model)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 64_000_000))
    with CheckpointSaver(tmp_path, actor, CheckpointConfig(), hf_source=tied_model) as saver:
        with pytest.raises(PreflightError, match=r"step 2 needs 0\.06 GB, .*checkpoints has 0\.06 GB free .*keep=2"):
            saver.save(2, 0)
        assert not checkpoint_dir(tmp_path, 2).exists()
    assert [found.step for found in find_all(tmp_path)] == [1]


def test_failed_write_is_named(tied_model: Path, tmp_path: Path) -> None:
    """The kernel refuses a file above 50 kB: the error stays with the saver, and its block."""
    from megatron_venus.checkpoint_saver import CheckpointSaver

    actor = kit.make_actor(tied_model, SETTINGS)
    kit.save_checkpoint(tmp_path, 1, actor, hf_source=tied_model)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with (
            pytest.raises(VenusError, match=r"rank 0: OSError.*File too large"),
            CheckpointSaver(tmp_path, actor, CheckpointConfig(), hf_source=tied_model) as saver,
        ):
            saver.save(2, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(VenusError, match="File too large"):
        saver.check()
    assert [found.step for found in find_all(tmp_path)] == [1]


def test_failed_save_ends_the_run(tied_model: Path, tmp_path: Path) -> None:
    """In the background of a run under torchrun: exit code, and the reason in the log."""
    done = run_actor(
        tmp_path / "run", tied_model, FakeCoordinator(batches=batches(3)), checkpoint_every=1, file_bytes=50_000
    )
    assert done.returncode != 0
    assert "VenusError: a checkpoint was not finished: rank 0: OSError: [Errno 27] File too large" in done.stderr
    assert find_latest(tmp_path / "run") is None
