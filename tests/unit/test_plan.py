"""The plan of a run: counts against independent ones, refusals with the smallest change that helps, the dry run."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from envclient.base.errors import ConfigError, PreflightError
from envclient.base.wire import TOKEN_VARIABLE
from megatron_venus import layout_rules, machine, preflight
from megatron_venus.adapters import shards
from megatron_venus.architecture import Architecture, architecture_in
from megatron_venus.config import ParallelConfig, VenusConfig
from megatron_venus.launch import dry_run, main, resolve
from megatron_venus.plan import GB, Target, check_fits, memory_plan
from megatron_venus.plan.activations import in_flight
from megatron_venus.plan.devices import device_shares, needed_gpus
from megatron_venus.plan.engine import engine_memory
from megatron_venus.plan.parameters import rank_parameters, whole_parameters
from megatron_venus.weight_map import hf_shapes, megatron_shapes

ROOT = Path(__file__).parents[2]
SWE = ROOT / "examples/configs/qwen3_32b_swe.yaml"
QUICKSTART = ROOT / "examples/configs/quickstart.yaml"
FOLDER = ROOT / "examples/models/qwen3-32b"
MODEL: dict[str, Any] = json.loads((FOLDER / "config.json").read_text())
EXPERTS = {
    **MODEL,
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
}


def swe(*overrides: str) -> VenusConfig:
    return resolve(SWE, [f"model.path={FOLDER}", *overrides])


def arch_of(model: dict[str, Any], **changes: Any) -> Architecture:
    return Architecture.from_hf({**model, **changes}, "test")


def fits(config: VenusConfig, model: dict[str, Any] = MODEL) -> Any:
    return check_fits(config, arch_of(model), model, preflight.memory_target(config))


# ------------------------------------------------------------------------------------------------------------ counts


def test_a_32b_model_has_the_parameters_of_its_checkpoint() -> None:
    arch = arch_of(MODEL)
    assert whole_parameters(arch) == sum(math.prod(shape) for shape in hf_shapes(arch).values())
    # The model card: 32.8B parameters, 31.2B of them not embeddings.
    assert whole_parameters(arch) == pytest.approx(32.8e9, rel=0.002)
    assert whole_parameters(arch) - 2 * arch.vocabulary * arch.hidden == pytest.approx(31.2e9, rel=0.002)


@pytest.mark.parametrize(
    ("model", "parallel"),
    [
        (MODEL, ParallelConfig(tensor=8, context=2)),
        (MODEL, ParallelConfig(tensor=4, pipeline=4)),
        ({**MODEL, "tie_word_embeddings": True}, ParallelConfig(tensor=2, pipeline=2)),
        ({**MODEL, "tie_word_embeddings": True}, ParallelConfig(tensor=2)),
        (EXPERTS, ParallelConfig(tensor=2, pipeline=2, expert=8)),
    ],
)
def test_a_process_holds_what_the_actor_would_cut_for_it(model: dict[str, Any], parallel: ParallelConfig) -> None:
    """Counted by the actor's own cutting of every named parameter, on tensors without memory."""
    arch = arch_of({**model, "num_hidden_layers": 4})
    per_stage = arch.layers // parallel.pipeline
    for stage in range(parallel.pipeline):
        dense = expert = 0
        for name, shape in megatron_shapes(arch).items():
            layer = shards.layer_of(name)
            last = stage == parallel.pipeline - 1
            here = layer // per_stage == stage if layer is not None else last
            if name.startswith("embedding."):
                # The last stage has a copy of a tied one, for its output.
                here = stage == 0 or (last and arch.tied)
            if not here:
                continue
            if shards.is_expert(name):
                expert += math.prod(shape) if shards.expert_of(name) < arch.experts // parallel.expert else 0
            else:
                dense += shards.part_of(name, torch.empty(shape, device="meta"), 0, parallel.tensor).numel()
        held = rank_parameters(arch, parallel, stage)
        assert (held.dense, held.expert) == (dense, expert)


def test_the_shipped_plans_sums_follow_from_the_models_config() -> None:
    """By hand, for both sizes of GPU; activations as Korthikanti et al. count them, of what fused kernels keep."""
    hidden, layers, heads, kv_heads, head, feed, vocabulary = 5120, 64, 64, 8, 128, 25600, 151936
    attention = hidden * head * (2 * heads + 2 * kv_heads)
    count = layers * (attention + 3 * hidden * feed) + 2 * vocabulary * hidden
    tokens, tensor = 131072, 8
    for overrides, context in ((), 2), (("mode=gpu141",), 1):
        stage = fits(swe(*overrides)).worst
        here = tokens // context
        assert stage.weights == pytest.approx(2 * count / tensor, rel=0.02)
        assert stage.gradients == pytest.approx(4 * count / tensor, rel=0.02)
        assert stage.optimizer == pytest.approx(12 * count / 16, rel=0.02)
        assert stage.activations == pytest.approx(layers * 2 * hidden * here / tensor, rel=0.02)
        # A layer again: 3 more hidden states that its norms read and wrote, q k v twice (before and after rotation,
        # v once), attention's output, 3 widths of SwiGLU; then the gathered gradient and that of SwiGLU's output, the
        # second matrix's gradient, the layer's output and its gradient.
        widths = 3 * hidden + head * (heads + 2 * kv_heads + heads + kv_heads + heads) + 3 * feed
        again = 2 * here * (widths / tensor + hidden + feed / tensor + 2 * hidden / tensor)
        assert stage.layer == pytest.approx(again + 2 * hidden * feed / tensor, rel=0.02)
        assert stage.logits == pytest.approx(10 * (1 << 24), rel=0.02)
        assert stage.sync == pytest.approx(4 * 2 * vocabulary * hidden, rel=0.02)


def test_one_trajectory_that_is_longer_than_the_budget_counts_whole() -> None:
    assert fits(swe("actor.micro_batch_tokens=8192")).tokens == 131072


def test_micro_batches_in_flight_follow_the_schedules() -> None:
    assert [in_flight(ParallelConfig(pipeline=4), stage) for stage in range(4)] == [4, 3, 2, 1]
    # Interleaved, Narayanan et al. (arXiv 2104.04473): 1 + (p − 1) / (p · v) times the first stage of plain 1F1B.
    assert in_flight(ParallelConfig(pipeline=4, virtual_stages=2), 0) == pytest.approx(4 * (1 + 3 / 8), rel=0.03)


def test_a_reference_for_kl_is_one_more_copy_of_the_weights() -> None:
    stage = fits(swe("mode=gpu141", "actor.loss.kl.place=loss")).worst
    assert stage.reference == stage.weights > 0


def test_processes_of_a_host_share_its_memory() -> None:
    config = resolve(QUICKSTART, ["actor.ranks=2"])
    arch = architecture_in(ROOT / config.model.path, "model.path")
    plan = memory_plan(config, arch, Target(kind="host", capacity=8 * GB, source="test"))
    assert plan.needed == 2 * plan.worst.peak and plan.fits


def test_an_engines_kv_is_the_models() -> None:
    memory = engine_memory(swe(), arch_of(MODEL))
    assert memory.kv == 786432 * 262144 // 4
    assert memory.weights == pytest.approx(65.5e9 / 4, rel=0.01)


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["actor.parallel.recompute=false"], "actor.parallel.recompute=true ("),
        (["actor.parallel.sequence=false", "actor.gpu_memory_gb=70"], "actor.parallel.sequence=true ("),
        (["actor.micro_batch_tokens=1048576"], "actor.micro_batch_tokens=131072 ("),
        (["actor.parallel.context=1", "actor.gpu_memory_gb=65"], "actor.parallel.context=2 ("),
        (["actor.parallel.tensor=4"], "actor.parallel.tensor=8 ("),
        (["actor.parallel.tensor=4", "actor.parallel.context=4"], "actor.parallel.context=2 actor.parallel.tensor=8 ("),
        (["actor.parallel.tensor=1", "actor.parallel.sequence=false"], "actor.parallel.tensor=8"),
        (["actor.ranks=8", "actor.parallel.context=1", "actor.gpu_memory_gb=64"], "actor.ranks=16 actor.parallel."),
        (["actor.gpu_memory_gb=1000", "actor.ranks=1"], ""),
    ],
)
def test_a_plan_that_does_not_fit_names_the_smallest_change_that_would(overrides: list[str], words: str) -> None:
    small = ["rollout.worker.kv_tokens=131072"]
    if not words:
        parallel = [f"actor.parallel.{name}" for name in ("tensor=1", "sequence=false", "context=1")]
        assert fits(swe(*overrides, *parallel, *small)).fits
        return
    config = swe(*overrides, *small)
    with pytest.raises(ConfigError) as raised:
        fits(config)
    line = str(raised.value)
    assert ("\n" not in line and "actor.gpu_memory_gb=" in line and "131072" in line) or "1048576" in line
    assert words in line
    # What it names is valid, does fit, and nothing less of it does.
    keys = line.split("smallest change that fits: ")[1].split(" (")[0].split(" ")
    changed = swe(*overrides, *small, *keys)
    layout_rules.check_sizes(changed.actor)
    assert fits(changed).fits
    for kept in range(len(keys)):
        less = swe(*overrides, *small, *keys[:kept], *keys[kept + 1 :])
        if layout_is_valid(less):
            with pytest.raises(ConfigError):
                fits(less)


def layout_is_valid(config: VenusConfig) -> bool:
    try:
        layout_rules.check_sizes(config.actor)
    except ConfigError:
        return False
    return True


def test_where_no_layout_helps_a_shorter_context_is_named() -> None:
    # One layer, which no pipeline cuts, and one GPU a machine: only context parallelism is left, and not enough of it.
    model = {**MODEL, "num_hidden_layers": 1, "vocab_size": 1000}
    single = ["actor.ranks=1", "actor.parallel={tensor: 1, sequence: false, context: 1}", "actor.gpus_per_machine=1"]
    longest = ["model.context_length=1048576", "actor.micro_batch_tokens=1048576"]
    with pytest.raises(ConfigError, match=r"fits: model.context_length=(\d+) actor.micro_batch_tokens=\1 \("):
        fits(swe(*single, *longest, "actor.gpu_memory_gb=20"), model)
    with pytest.raises(ConfigError, match="no layout of this model fits"):
        fits(swe(*single, *longest, "actor.gpu_memory_gb=2"), model)


def test_an_engine_that_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(ConfigError, match=r"kv_tokens=1572864.*80.0 GB.*at most 9\d{5} tokens fit"):
        preflight.check_memory(swe("rollout.worker.kv_tokens=1572864"))


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("actor.loss.updates_per_batch=5", r"batch=32 is not divisible by actor.loss.updates_per_batch=5"),
        ("actor.gpu_memory_gb=-1", r"gpu_memory_gb=-1"),
        ("actor.gpus_per_machine=0", r"gpus_per_machine=0"),
        ("actor.parallel.tensor=3", r"neither divides|no multiple of the 6"),
        ("actor.parallel.context=4", r"no multiple of the 32"),
        ("model.yarn.factor=1.0", r"context_length=131072 is beyond the 40960 positions"),
    ],
)
def test_what_a_32b_config_may_not_say(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        preflight.check_config(swe(override))


# ------------------------------------------------------------------------------------------------------- the dry run


@pytest.mark.parametrize(("mode", "replica", "capacity"), [("default", "0", "80.00"), ("gpu141", "1", "141.00")])
def test_the_dry_run_prints_config_places_and_memory(
    mode: str, replica: str, capacity: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # Programs and libraries of this machine are another test's matter.
    monkeypatch.setattr(preflight, "check_machine", lambda config, run_dir: None)
    text = dry_run(swe(f"mode={mode}"), Path("runs/swe"))
    assert "context_length: 131072" in text
    rows = [line.split() for line in text.splitlines() if line.endswith("       0") and "0-63" in line]
    assert [row[0] for row in rows] == [str(rank) for rank in range(16)]
    assert [row[1] for row in rows] == ["0"] * 8 + ["1"] * 8
    assert rows[8][3] == replica
    for part in ("weights", "gradients", "optimizer", "activations", "logits chunk", "sync buckets", "peak"):
        assert part in text
    assert "verdict: fits: " in text and f"of {capacity} GB" in text
    assert "tokenizer.json is not there" in text and "this machine has 0 GPUs, the config needs 32" in text


def test_a_dry_run_of_a_plan_that_does_not_fit_shows_the_sum_and_ends_with_the_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preflight, "check_machine", lambda config, run_dir: None)
    overrides = [f"model.path={FOLDER}", "actor.parallel.recompute=false"]
    assert "verdict: does NOT fit: " in dry_run(resolve(SWE, overrides), Path("runs/swe"))
    with pytest.raises(ConfigError, match=r"smallest change that fits: actor\.parallel\.recompute=true"):
        main(["--config", str(SWE), "--dry-run", *overrides])


def test_the_quickstarts_dry_run_counts_host_memory(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "megatron_venus.launch",
            "--config",
            str(QUICKSTART),
            "--dry-run",
            f"run.root={tmp_path}",
        ],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "MB (10^6 bytes) of one process" in done.stdout and "this machine's memory, no GPU" in done.stdout
    assert done.stdout.rstrip().endswith("nothing")
    assert not list(tmp_path.iterdir())


def fake_nvidia_smi(folder: Path, gpus: int, mib: int) -> str:
    """A PATH with a program that lists so many GPUs."""
    program = folder / "nvidia-smi"
    program.write_text("#!/bin/sh\n" + f"echo {mib}\n" * gpus)
    program.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_a_start_needs_the_gpus_that_the_config_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path, 8, 81559))
    with pytest.raises(PreflightError, match=r"has 8 GPUs, the config needs 32 \(actor.ranks=16, engines 16\)"):
        preflight.check_gpus(swe())
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path, 32, 81559))
    preflight.check_gpus(swe())
    with pytest.raises(PreflightError, match=r"gpu_memory_gb=141, but a GPU here has 85.5 GB"):
        preflight.check_gpus(swe("mode=gpu141"))
    unstated = preflight.memory_target(swe("actor.gpu_memory_gb=0"))
    assert (unstated.kind, unstated.capacity) == ("GPU", 81559 << 20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert preflight.memory_target(swe("actor.gpu_memory_gb=0")).kind == "host"


def test_the_script_names_the_quickstart_where_there_are_no_gpus(tmp_path: Path) -> None:
    for name in ("dirname", "grep", "timeout"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)

    def run_script() -> subprocess.CompletedProcess[str]:
        script = ["/bin/bash", str(ROOT / "examples/qwen3_32b_swe.sh"), "steps=1"]
        return subprocess.run(script, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)

    before = set(ROOT.iterdir())
    done = run_script()
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "no NVIDIA GPU" in done.stderr and "bash examples/quickstart.sh" in done.stderr
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nfor i in 0 1 2 3 4 5 6 7; do echo GPU $i: NVIDIA H100; done\n")
    program.chmod(0o755)
    done = run_script()
    assert done.returncode == 2 and "this machine has 8 GPUs, Qwen3-32B needs 32" in done.stderr
    assert set(ROOT.iterdir()) == before, "nothing was installed"


# ------------------------------------------------------------------------------------------------------ GPU shares


def test_every_role_has_its_own_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path, 32, 81559))
    shares = device_shares(swe(), machine.visible_gpus())
    parts = [share["CUDA_VISIBLE_DEVICES"].split(",") for share in (shares.actor, *shares.workers)]
    assert [len(part) for part in parts] == [16, 4, 4, 4, 4] and shares.others == {"CUDA_VISIBLE_DEVICES": ""}
    assert [int(name) for part in parts for name in part] == list(range(needed_gpus(swe())))


def test_shares_keep_to_the_gpus_that_the_caller_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", fake_nvidia_smi(tmp_path, 8, 81559))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    config = resolve(QUICKSTART, [])
    preflight.check_gpus(config)
    shares = device_shares(config, machine.visible_gpus())
    assert (shares.actor, shares.workers) == ({"CUDA_VISIBLE_DEVICES": "3"}, [{"CUDA_VISIBLE_DEVICES": "5"}])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(PreflightError, match=r"has 1 GPUs, the config needs 2 .*CUDA_VISIBLE_DEVICES= "):
        preflight.check_gpus(config)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    preflight.check_gpus(config)
    shares = device_shares(config, machine.visible_gpus())
    assert (shares.actor, shares.workers, shares.others) == ({}, [{}], {})


# -------------------------------------------------------------------------------------------- environment elsewhere


class Health(BaseHTTPRequestHandler):
    role = "environment"

    def do_GET(self) -> None:
        body = json.dumps({"role": self.role, "status": "ok"}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_an_environment_elsewhere_is_asked_before_a_start(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = resolve(QUICKSTART, [f"env.url={service}"])
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with pytest.raises(PreflightError, match=TOKEN_VARIABLE):
        preflight.check_environment(config)
    monkeypatch.setenv(TOKEN_VARIABLE, "token")
    preflight.check_environment(config)
    monkeypatch.setattr(Health, "role", "coordinator")
    with pytest.raises(PreflightError, match=r"is not an environment service \(coordinator\)"):
        preflight.check_environment(config)


def test_an_environment_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "token")
    monkeypatch.setattr(preflight, "PROBE_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(PreflightError, match=r"no environment service answers within 0.2 s \(ReadTimeout\)"):
            preflight.check_environment(resolve(QUICKSTART, [f"env.url={url}"]))
    for nowhere in (url, "nonsense"):
        with pytest.raises(PreflightError, match="no environment service answers"):
            preflight.check_environment(resolve(QUICKSTART, [f"env.url={nowhere}"]))
