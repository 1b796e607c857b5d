"""Kill any role of a run: it ends with the role's last words, leaves nothing behind, and resumes soundly."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from envclient.base.files import read_jsonl
from envclient.base.processes import processes_of_run
from megatron_venus.checkpoint_index import find_latest
from megatron_venus.hf_folder import read_weights
from tests.e2e.launched import ROOT, SCRIPTED, Launched, alive, check_account, wait_until

STEPS = 3


def mounts() -> list[str]:
    return Path("/proc/self/mounts").read_text().splitlines()


@dataclass(kw_only=True)
class Remains:
    """What a run holds while it lives, to see that none of it is left."""

    processes: set[tuple[int, int]]
    run_id: str
    ports: set[int]
    mounts: list[str]

    @classmethod
    def of(cls, run: Launched, mounted: list[str]) -> Remains:
        return cls(processes=run.processes(), run_id=run.run_id(), ports=run.ports(), mounts=mounted)

    def wait_gone(self) -> None:
        def left() -> list[object]:
            return [*alive(self.processes), *processes_of_run(self.run_id)]

        wait_until(lambda: not left(), 30.0, f"processes are left: {left()}")
        assert len(self.ports) >= 2
        for port in self.ports:
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0, f"port {port} still answers"
        assert mounts() == self.mounts


def finish_after(tmp_path: Path) -> None:
    """Resume the disturbed run to its end: every step is there once and the account is whole."""
    with Launched(tmp_path, *SCRIPTED, f"steps={STEPS}", "resume=auto") as run:
        assert run.wait(150.0) == 0, run.text
        summary = run.summary()
        check_account(summary)
        assert summary["steps"] == STEPS and summary["groups_trained"] == 2 * STEPS
        assert [row["step"] for row in run.metrics()] == list(range(1, STEPS + 1))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("role", ["environment", "coordinator", "worker", "torchrun", "rank"])
def test_a_killed_role_ends_the_run_and_it_resumes(role: str, tmp_path: Path) -> None:
    mounted = mounts()
    with Launched(tmp_path, *SCRIPTED, f"steps={STEPS}") as run:
        run.wait_steps(1)
        remains = Remains.of(run, mounted)
        os.kill(run.pid_of(role), signal.SIGKILL)
        assert run.wait(30.0) == 2
        remains.wait_gone()
        named = {"torchrun": "actor", "rank": "actor", "worker": "worker-w0"}.get(role, role)
        assert f"error: {named} ended with" in run.text and "last log lines" in run.text
    finish_after(tmp_path)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_launcher_leaves_nothing(signum: signal.Signals, tmp_path: Path) -> None:
    mounted = mounts()
    with Launched(tmp_path, *SCRIPTED, "steps=50") as run:
        run.wait_steps(1)
        remains = Remains.of(run, mounted)
        assert len(remains.processes) > 6
        run.process.send_signal(signum)
        assert run.wait(30.0) == (-signal.SIGKILL if signum == signal.SIGKILL else 130)
        remains.wait_gone()
    if signum == signal.SIGKILL:
        assert run.steps_done < STEPS, "the run was killed too late to be resumed"
        finish_after(tmp_path)


def with_kv_heads(model: Path, heads: int, folder: Path) -> Path:
    """A random model of the same shape with more key-value heads (the shipped one has a single one), same tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = AutoConfig.from_pretrained(model)
    config.num_key_value_heads = heads
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("factor", "ranks", "tensor", "workers"), [(1.0, 2, 1, 1), (1.5, 2, 2, 2), (2.0, 2, 1, 2)])
def test_factors_ranks_layouts_and_workers(
    factor: float, ranks: int, tensor: int, workers: int, tmp_path: Path
) -> None:
    model = ROOT / "examples/models/tiny-qwen3-repair"
    if tensor > 1:
        model = with_kv_heads(model, tensor, tmp_path / "model")
    layout = [f"actor.ranks={ranks}", f"actor.parallel.tensor={tensor}", f"actor.parallel.sequence={tensor > 1}"]
    overrides = [f"async_factor={factor}", *layout, f"rollout.worker.count={workers}", f"model.path={model}"]
    with Launched(tmp_path, *SCRIPTED, f"steps={STEPS}", *overrides) as run:
        assert run.wait(200.0) == 0, run.text
        check_account(run.summary())
        rows = run.metrics()
    assert [row["weight_version"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["staleness/span_max"] <= 2 for row in rows)
    if factor == 1.0:
        assert all(row["staleness/span_max"] == 1 for row in rows)
    events = read_jsonl(tmp_path / "quickstart/events.jsonl")
    trained = [c["group_id"] for e in events for c in e["commands"] if c["command"] == "close_prompt"]
    assert len(trained) == len(set(trained)) >= 2 * STEPS
    takers = {e["event"]["replica"] for e in events if e["event"]["event"] == "group_acknowledged"}
    assert takers <= set(range(ranks // tensor))
    # Gathered from all processes the export is the whole model, and it moved if there was anything to learn.
    last = find_latest(tmp_path / "quickstart")
    assert last is not None and last.step == STEPS
    exported, before = read_weights(last.hf_dir), read_weights(model)
    assert {name: t.shape for name, t in exported.items()} == {name: t.shape for name, t in before.items()}
    moved = any(not torch.equal(tensor, before[name]) for name, tensor in exported.items())
    assert moved == any(row["grad_norm"] > 0 for row in rows)
