"""Replay of a recorded run: agrees with what was recorded, and finds the first row that does not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from envclient.base.configs import to_yaml
from envclient.base.errors import ConfigError
from rollout.config import FactoryConfig, RolloutConfig, RunConfig
from rollout.dispatcher import DispatcherConfig
from rollout.replay import first_difference, read_rows
from rollout.sim.cluster import Cluster
from rollout.types import EventRow, FetchPrompts, RunStarted
from tests.properties.dispatcher_world import World
from tests.sim.kit import small


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of three steps, with a resume after it."""
    rollout = RolloutConfig(tasks=FactoryConfig(factory="a:b"), agent=FactoryConfig(factory="a:b"))
    rollout.group.batch, rollout.group.size, rollout.group.async_factor = 2, 2, 1.5
    parts = {"run": RunConfig(steps=8), "rollout": rollout}
    text = "".join(f"{name}:\n" + _indent(to_yaml(part)) for name, part in parts.items())
    (tmp_path / "config.yaml").write_text(text)
    config = DispatcherConfig.from_config(rollout, steps=8)
    rows: list[EventRow] = []
    for resume_step in (0, 3):
        world = World(config, resume_step=resume_step)
        world.drain(3)
        for event, now, commands in world.log:
            rows.append(EventRow(seq=len(rows), now=now, event=event, commands=commands))
    write(tmp_path / "events.jsonl", rows)
    return tmp_path


def _indent(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())


def write(path: Path, rows: list[EventRow]) -> None:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))


def replay(run_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rollout.replay", str(run_dir / "events.jsonl")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_every_decision_is_derived_again(run_dir: Path) -> None:
    rows = list(read_rows(run_dir / "events.jsonl"))
    done = replay(run_dir)
    assert (done.returncode, done.stdout) == (0, f"{len(rows)} rows: every decision is derived again\n"), done.stderr


def test_the_first_difference_is_reported(run_dir: Path) -> None:
    rows = list(read_rows(run_dir / "events.jsonl"))
    place = next(i for i, row in enumerate(rows) if i > 20 and row.commands)
    rows[place] = msgspec.structs.replace(rows[place], commands=[FetchPrompts(count=99)])
    path = run_dir / "events.jsonl"
    write(path, rows)
    done = replay(run_dir)
    assert done.returncode == 1
    assert f"{place} rows agree; row {rows[place].seq} differs" in done.stdout
    assert '"count":99' in done.stdout
    assert "the run was resumed, and config.yaml may have changed" in done.stdout


def test_another_config_decides_otherwise(run_dir: Path) -> None:
    rows = read_rows(run_dir / "events.jsonl")
    _, difference = first_difference(rows, lambda: DispatcherConfig(batch=1, group_size=2))
    assert difference is not None


def test_each_start_is_derived_under_the_constants_that_it_recorded(tmp_path: Path) -> None:
    """A key changed with the resume, and no config.yaml is needed; the first start's rows do not fit the second's."""
    rows: list[EventRow] = []
    configs = [DispatcherConfig(batch=2, group_size=2), DispatcherConfig(batch=3, group_size=2, async_factor=2.0)]
    for config, resume_step in zip(configs, (0, 2), strict=True):
        world = World(config, resume_step=resume_step)
        world.drain(2)
        for event, now, commands in world.log:
            if isinstance(event, RunStarted):
                event = msgspec.structs.replace(event, constants=config.recorded())
            rows.append(EventRow(seq=len(rows), now=now, event=event, commands=commands))
    write(tmp_path / "events.jsonl", rows)
    done = replay(tmp_path)
    assert (done.returncode, done.stdout) == (0, f"{len(rows)} rows: every decision is derived again\n"), done.stderr
    start = rows[0].event
    assert isinstance(start, RunStarted)
    rows[0] = msgspec.structs.replace(rows[0], event=msgspec.structs.replace(start, constants=configs[1].recorded()))
    assert first_difference(rows, DispatcherConfig)[1] is not None


def test_a_simulated_run_is_derived_again_without_a_config() -> None:
    rows: list[EventRow] = []
    Cluster(small("policy.name=venus", "steps=2", "skip_steps=0"), record=rows.append).run()
    wire = [msgspec.json.decode(msgspec.json.encode(row), type=EventRow) for row in rows]
    assert first_difference(wire, lambda: pytest.fail("no constants")) == (len(rows), None)


def test_constants_of_another_version_are_named() -> None:
    with pytest.raises(ConfigError, match=r"constants: .*colour"):
        DispatcherConfig.from_recorded({"colour": 1})


def test_a_line_cut_by_a_kill_is_left_out(run_dir: Path) -> None:
    path = run_dir / "events.jsonl"
    whole = len(list(read_rows(path)))
    path.write_bytes(path.read_bytes()[:-7])
    assert len(list(read_rows(path))) == whole - 1


def test_a_missing_file_is_one_clear_line(tmp_path: Path) -> None:
    done = replay(tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no such file" in done.stderr
