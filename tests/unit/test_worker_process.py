"""`python -m rollout.worker` as the launcher starts it, with the scripted engine: plays, ends on SIGTERM, refuses."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rollout.config import (
    FactoryConfig,
    ModelConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    WorkerConfig,
)
from rollout.types import Trajectory, TrajectoryStatus
from tests.unit.test_worker_service import FakeCoordinator, serving
from tests.unit.worker_kit import order, run

ROOT = Path(__file__).parents[2]


def write_config(run_dir: Path, rollout: RolloutConfig) -> None:
    sections = {"run": RunConfig(), "model": ModelConfig(path="no-model-is-needed"), "rollout": rollout}
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(sections)))


def rollout(**changes: object) -> RolloutConfig:
    settings: dict[str, object] = {
        "worker": WorkerConfig(engine="scripted", engine_args={"stop_every": 3}),
        "agent": FactoryConfig(factory="tests.unit.worker_kit:make_agent", args={"turns": 2}),
        "tasks": FactoryConfig(factory="tests.unit.worker_kit:make_agent"),
    }
    return RolloutConfig(**(settings | changes))  # type: ignore[arg-type]


async def start(run_dir: Path, url: str) -> asyncio.subprocess.Process:
    argv = ["--run-dir", str(run_dir), "--worker", "w0", "--coordinator", url, "--environment", "http://127.0.0.1:9"]
    return await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "rollout.worker", *argv, "--version", "0", "--model", "no-model-is-needed"],
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"VENUS_TOKEN": "token"},
        cwd=ROOT,
    )


def test_a_worker_process_plays_and_ends_on_sigterm(tmp_path: Path) -> None:
    write_config(tmp_path, rollout())

    async def scenario() -> None:
        coordinator = FakeCoordinator()
        async with serving(coordinator) as url:
            process = await start(tmp_path, url)
            await coordinator.send(*[order(f"p{i}.0.0.0") for i in range(4)])
            ended = await coordinator.wait_report(Trajectory, 4)
            process.send_signal(signal.SIGTERM)
            _, log = await process.communicate()
        assert process.returncode == 0, log.decode()
        assert {t.status for t in ended if isinstance(t, Trajectory)} <= {
            TrajectoryStatus.FINISHED,
            TrajectoryStatus.TRUNCATED,
        }

    run(scenario())


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"worker": WorkerConfig(engine="vllm")}, "rollout.worker.engine is 'vllm'"),
        ({"policy": PolicyConfig(name="lifo")}, "rollout.policy.name='lifo' is not known"),
        ({"worker": WorkerConfig(engine="scripted", engine_args={"nope": 1})}, "rollout.worker.engine_args"),
        ({"agent": FactoryConfig(factory="tests.unit.worker_kit:nobody")}, "rollout.agent.factory="),
        ({"agent": FactoryConfig(factory="tests.unit.worker_kit:make_agent", args={"x": 1})}, "rollout.agent.args="),
        ({"sampling": SamplingConfig(top_p=0.9)}, "top_p=0.9"),
        ({"sampling": SamplingConfig(temperature=0.0)}, "temperature is 0.0"),
    ],
)
def test_a_config_that_cannot_work_is_one_line_and_an_exit_code(
    tmp_path: Path, changes: dict[str, object], line: str
) -> None:
    write_config(tmp_path, rollout(**changes))

    async def scenario() -> None:
        async with serving(FakeCoordinator()) as url:
            process = await start(tmp_path, url)
            _, log = await process.communicate()
        last = log.decode().splitlines()[-1]
        assert process.returncode == 2
        assert last.startswith("error: ")
        assert line in last

    run(scenario())
