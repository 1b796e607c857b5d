"""SGLang as a child process: what it leaves when it or its parent dies, and what a start that fails says."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envclient.base.errors import ConfigError, VenusError, WireError
from envclient.base.ports import listen, port_of
from envclient.base.processes import processes_of_run
from rollout.adapters import sglang_engine
from rollout.adapters.sglang_args import server_arguments, server_environment
from rollout.adapters.sglang_engine import SglangEngine
from rollout.config import ModelConfig, WorkerConfig
from rollout.engine_args import tensor_parallel
from tests.conftest import MODEL, TOKEN

pytestmark = pytest.mark.sglang


def make(tmp_path: Path, **engine_args: object) -> SglangEngine:
    return SglangEngine(
        model_path=str(MODEL),
        model=ModelConfig(path=str(MODEL)),
        worker=WorkerConfig(slots=4, engine_args=dict(engine_args)),
        log=tmp_path / "engine.log",
        token=TOKEN,
        seed=0,
    )


def wait_gone(run_id: str, within_s: float) -> list[int]:
    deadline = time.monotonic() + within_s
    while (left := processes_of_run(run_id)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left


def test_a_start_on_a_taken_port_is_tried_again_and_a_killed_engine_says_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VENUS_RUN_ID", f"engine-{os.getpid()}")
    taken = listen("127.0.0.1")
    ports = iter([port_of(taken)])
    free_port = sglang_engine.free_port
    monkeypatch.setattr(sglang_engine, "free_port", lambda: next(ports, None) or free_port())

    async def scenario() -> None:
        engine = make(tmp_path)
        await engine.start()
        assert f":{port_of(taken)}" not in engine.url
        assert engine._child is not None
        dying = asyncio.ensure_future(engine.wait_dead())
        await asyncio.sleep(0)
        assert not dying.done()
        family = processes_of_run(f"engine-{os.getpid()}")
        [scheduler] = [pid for pid in family if "scheduler" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(scheduler, signal.SIGKILL)
        reason = await asyncio.wait_for(dying, 30)
        assert "engine ended, exit code" in reason
        assert str(tmp_path) in reason
        with pytest.raises(WireError):
            await engine.flush()
        await engine.stop()

    asyncio.run(scenario())
    taken.close()
    assert wait_gone(f"engine-{os.getpid()}", 10) == []


def test_killing_the_parent_leaves_no_process(tmp_path: Path) -> None:
    run_id = f"orphan-{os.getpid()}"
    script = (
        "import asyncio, sys; sys.path.insert(0, '.')\n"
        "from pathlib import Path\n"
        "from tests.e2e.test_sglang_process import make\n"
        "async def main():\n"
        f"    engine = make(Path({str(tmp_path)!r})); await engine.start(); print('up', flush=True)\n"
        "    await asyncio.sleep(300)\n"
        "asyncio.run(main())\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, env=os.environ | {"VENUS_RUN_ID": run_id}, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "up\n"
    # Server, scheduler, detokenizer and the resource tracker, all found by the run's id.
    assert len(processes_of_run(run_id)) >= 4
    parent.kill()
    parent.wait()
    assert wait_gone(run_id, 30) == []


def test_an_engine_without_the_plug_in_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang swallows a plug-in's exceptions; the named cache backend makes it notice."""
    monkeypatch.setattr(
        sglang_engine,
        "server_environment",
        lambda **names: server_environment(**names) | {"SGLANG_PLUGINS": "nothing"},
    )

    async def scenario() -> None:
        engine = make(tmp_path)
        with pytest.raises(VenusError, match="venus"):
            await engine.start()
        await engine.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("rl-on-policy-target", "bfloat16"),
        ("speculative_algorithm", "log-probs"),
        ("port", "set by the worker"),
        ("--model-path", "set by the worker"),
        ("radix_cache_backend", "set by the worker"),
        ("dp_size", "under tensor parallelism only"),
        ("pp-size", "under tensor parallelism only"),
        ("ep", "under tensor parallelism only"),
    ],
)
def test_arguments_that_spoil_the_contract_are_refused(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        server_arguments(
            model_path=str(MODEL),
            model=ModelConfig(path=str(MODEL)),
            worker=WorkerConfig(engine_args={name: "x"}),
            seed=0,
        )


def test_tensor_parallel_size(tmp_path: Path) -> None:
    assert tensor_parallel(WorkerConfig()) == 1
    assert tensor_parallel(WorkerConfig(engine_args={"tp_size": 4})) == 4
    assert tensor_parallel(WorkerConfig(engine_args={"--tensor-parallel-size": 2})) == 2
    with pytest.raises(ConfigError, match=r"engine_args\.tp is '2'"):
        tensor_parallel(WorkerConfig(engine_args={"tp": "2"}))
    environment = server_environment(token="t", extensions=tmp_path, ranks=3, inherited={}, cuda=False)
    assert len(environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 3


def test_a_context_beyond_the_models_positions_is_refused(tmp_path: Path) -> None:
    for model, match in [
        (ModelConfig(path=str(MODEL), context_length=1_000_000), "beyond the 2048 positions"),
        (ModelConfig(path=str(tmp_path)), "missing"),
        (ModelConfig(path=str(MODEL), dtype="float16"), "float16"),
    ]:
        with pytest.raises(ConfigError, match=match):
            server_arguments(model_path=model.path, model=model, worker=WorkerConfig(), seed=0)


def test_the_environment_has_cpu_stubs_only_without_cuda(tmp_path: Path) -> None:
    cpu = server_environment(token="t", extensions=tmp_path, inherited={"PYTHONPATH": "mine"}, cuda=False)
    gpu = server_environment(token="t", extensions=tmp_path, inherited={"PYTHONPATH": "mine"}, cuda=True)
    assert cpu["PYTHONPATH"].endswith(f"sglang_cpu{os.pathsep}mine")
    assert cpu["SGLANG_USE_CPU_ENGINE"] == "1"
    assert gpu["PYTHONPATH"] == "mine"
    assert "SGLANG_USE_CPU_ENGINE" not in gpu
