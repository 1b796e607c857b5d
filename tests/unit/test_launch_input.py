"""Bad input is answered with one clear line that names the key, the value and the remedy, before anything starts."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envclient.base.configs import to_yaml
from envclient.base.errors import ConfigError, PreflightError, VenusError
from envclient.base.ports import listen
from megatron_venus import preflight
from megatron_venus.launch import choose_run_dir, lock_run, resolve, resumed_config
from megatron_venus.screen import Screen

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/configs/quickstart.yaml"


def config(*overrides: str):
    return resolve(QUICKSTART, overrides)


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("rollout.group.sise=4", ["rollout.group.sise", "did you mean", "rollout.group.size"]),
        ("actor.optimizer.lr=fast", ["actor.optimizer.lr", "fast"]),
        ("run.steps=2.5", ["run.steps", "2.5"]),
        ("nonsense", ["nonsense", "key=value"]),
        ("run.name=[x", ["run.name=[x", "not YAML"]),
        ("mode=lern", ["lern", "learn"]),
    ],
)
def test_a_key_that_does_not_parse_is_named(override: str, names: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        config(override)
    line = str(raised.value)
    assert "\n" not in line
    for name in names:
        assert name in line


@pytest.mark.parametrize(
    ("override", "names"),
    [
        ("rollout.group.size=1", ["rollout.group.size=1", "at least 2"]),
        ("rollout.group.async_factor=0.5", ["async_factor=0.5", "1.0"]),
        ("rollout.sampling.top_p=0.9", ["top_p=0.9", "top_p=1.0"]),
        ("rollout.sampling.temperature=0", ["temperature=0", "above 0"]),
        ("run.steps=0", ["run.steps=0"]),
        ("run.name=a/b", ["run.name='a/b'"]),
        ("policy=oracle", ["rollout.policy.name='oracle'", "venus"]),
        ("rollout.policy.reserve=1.5", ["rollout.policy.reserve=1.5", "-1.0 to 1.0"]),
        ("rollout.policy.name=fastest", ["rollout.policy.name='fastest'", "action"]),
        ("rollout.worker.kv_tokens=10", ["rollout.worker.kv_tokens=10", "model.context_length"]),
        ("env.max_sandboxes=3", ["env.max_sandboxes=3", "max_trajectories"]),
    ],
)
def test_a_value_that_cannot_work_is_named(override: str, names: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        preflight.check_values(config(override))
    for name in names:
        assert name in str(raised.value)


def test_short_keys_and_modes_reach_their_places() -> None:
    learn = config("mode=learn", "async_factor=1.5", "seed=7")
    assert (learn.run.steps, learn.rollout.group.async_factor, learn.run.seed) == (36, 1.5, 7)
    assert config("mode=learn", "steps=3").run.steps == 3
    assert config().run.steps == 2


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.path='/nowhere'.*config.json"):
        preflight.check_model(config("model.path=/nowhere"))
    for name in ("tokenizer.json", "tokenizer_config.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        preflight.check_model(config(f"model.path={tmp_path}"))
    (tmp_path / "config.json").write_text(
        json.dumps({"architectures": ["Qwen3ForCausalLM"], "max_position_embeddings": 128})
    )
    with pytest.raises(ConfigError, match=r"model.context_length=640.*128"):
        preflight.check_model(config(f"model.path={tmp_path}"))


def test_a_missing_program_and_a_full_disk_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreflightError, match=r"bwrap is missing.*apt-get install bubblewrap"):
        preflight.check_machine(config(), tmp_path / "run")
    monkeypatch.undo()
    monkeypatch.setattr(preflight, "NEEDED_DISK_BYTES", 1 << 60)
    with pytest.raises(PreflightError, match=r"run.root='runs'.*are free"):
        preflight.check_machine(config(), tmp_path / "run")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(PreflightError, match=rf"127.0.0.1:{port}.*in use"):
            listen("127.0.0.1", port)
        with pytest.raises(PreflightError, match=rf"127.0.0.1:{port}.*in use"):
            preflight.check_machine(config(f"env.port={port}"), tmp_path / "run")


def test_a_factory_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rollout.tasks.factory='examples.no:thing'"):
        preflight.check_factories(config("rollout.tasks.factory=examples.no:thing"))
    with pytest.raises(ConfigError, match=r"rollout.agent.args: unknown key 'tols'"):
        preflight.check_factories(config("+rollout.agent.args.tols=edit".removeprefix("+")))


def test_a_broken_tasks_file_is_named(tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    whole = (ROOT / "examples/tasks/records.jsonl").read_text().splitlines()
    records.write_text(whole[0] + "\n" + whole[1][:100] + "\n")
    with pytest.raises(VenusError, match=r"records.jsonl.*line 2.*not JSON"):
        preflight.check_factories(config(f"rollout.tasks.args.records={records}"))


def test_the_program_ends_with_one_line_and_a_code(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_venus.launch", "--config", str(QUICKSTART)]
    for arguments in (["no.such=1"], ["model.path=/nowhere"], ["run.steps=-1"]):
        ended = subprocess.run(
            [*command, f"run.root={tmp_path}", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == 2
        assert ended.stderr.count("\n") == 1 and ended.stderr.startswith("error: ")
        assert not list(tmp_path.iterdir()), "a refused run leaves nothing"


def earlier_run(folder: Path, name: str, age_s: int) -> None:
    """What a run called `name` leaves, started `age_s` seconds ago."""
    folder.mkdir()
    (folder / "config.yaml").write_text(f"run: {{name: {name}}}\n")
    started = time.time() - age_s
    os.utime(folder / "config.yaml", (started, started))


def test_an_earlier_run_is_never_touched_unless_asked(tmp_path: Path) -> None:
    fresh, resumed = config(f"run.root={tmp_path}"), config(f"run.root={tmp_path}", "resume=auto")
    assert choose_run_dir(fresh, Screen()) == (tmp_path / "quickstart", -1)
    assert choose_run_dir(resumed, Screen()) == (tmp_path / "quickstart", -1)
    earlier_run(tmp_path / "quickstart", "quickstart", 300)
    assert choose_run_dir(fresh, Screen()) == (tmp_path / "quickstart-2", -1)
    earlier_run(tmp_path / "quickstart-3", "quickstart", 200)
    assert choose_run_dir(fresh, Screen()) == (tmp_path / "quickstart-2", -1)
    earlier_run(tmp_path / "quickstart-2", "quickstart-2", 100)
    assert choose_run_dir(fresh, Screen()) == (tmp_path / "quickstart-4", -1)
    assert choose_run_dir(resumed, Screen()) == (tmp_path / "quickstart-3", 0), "quickstart-2 is a run of another name"


def test_a_run_of_another_release_is_not_begun_anew(tmp_path: Path) -> None:
    """Its checkpoints are whole: taken for unfinished ones they would be removed at the first save."""
    earlier_run(tmp_path / "quickstart", "quickstart", 300)
    folder = tmp_path / "quickstart/checkpoints/step_000010"
    folder.mkdir(parents=True)
    manifest = folder / "manifest.json"
    for content in ({"step": 10, "weights": {}, "files": {}, "schema": 1}, {"schema": 9, "new": True}):
        manifest.write_text(json.dumps(content))
        with pytest.raises(
            ConfigError, match=r"step_000010' was made by another release \(schema \d, this one reads 2"
        ):
            choose_run_dir(config(f"run.root={tmp_path}", "resume=auto"), Screen())
    manifest.write_text("{")
    resumed = choose_run_dir(config(f"run.root={tmp_path}", "resume=auto"), Screen())
    assert resumed == (tmp_path / "quickstart", 0), "a manifest that is none makes no checkpoint"


def test_overwriting_empties_a_run_but_never_one_in_use_or_something_else(tmp_path: Path) -> None:
    again = config(f"run.root={tmp_path}", "resume=overwrite")
    (tmp_path / "quickstart").mkdir()
    (tmp_path / "quickstart/precious").touch()
    with pytest.raises(ConfigError, match="does not look like a run"):
        choose_run_dir(again, Screen())
    (tmp_path / "quickstart/config.yaml").write_text("run: {name: quickstart}\n")
    with lock_run(tmp_path / "quickstart"), pytest.raises(PreflightError, match="in use by another launcher"):
        choose_run_dir(again, Screen())
    assert (tmp_path / "quickstart/precious").exists()
    assert choose_run_dir(again, Screen()) == (tmp_path / "quickstart", -1)
    assert [path.name for path in (tmp_path / "quickstart").iterdir()] == [".lock"]


def test_a_resumed_run_keeps_its_config_save_what_the_command_line_says(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(to_yaml(config("mode=learn", "actor.optimizer.lr=1e-5")))
    resumed = resumed_config(tmp_path, ["resume=auto", "steps=40"])
    assert (resumed.run.mode, resumed.run.steps, resumed.actor.optimizer.lr) == ("learn", 40, 1e-5)


def test_one_launcher_a_run_folder(tmp_path: Path) -> None:
    with lock_run(tmp_path / "r"):
        again = lock_run(tmp_path / "r")
        with pytest.raises(PreflightError, match="in use by another launcher"):
            again.__enter__()


def test_the_readme_is_whole_and_names_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text()
    assert "@@" not in text
    for command in ("bash examples/quickstart.sh", "bash tests/run.sh"):
        assert command in text
    assert all((ROOT / path).exists() for path in re.findall(r"\]\(([a-zA-Z][^):]*)\)", text))
