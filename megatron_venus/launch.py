"""One config → every process of a run, on this machine.

    python -m megatron_venus.launch --config examples/configs/quickstart.yaml [--dry-run] [key=value …]

Starts environment service, coordinator, rollout workers (each the parent of its engine) and the actor under torchrun,
shows the run's progress, and ends them all when the actor is done, a role dies, or the person presses Ctrl-C.
Short keys: mode, resume, name, steps, seed, policy, async_factor.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import itertools
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from omegaconf import DictConfig, OmegaConf

from envclient.base.configs import build, read_yaml, to_yaml
from envclient.base.errors import ConfigError, PreflightError, VenusError, WireError, main_guard
from envclient.base.files import read_json, read_jsonl, write_atomic
from envclient.base.ports import listen, port_of
from envclient.base.processes import Child
from envclient.base.wire import Client
from megatron_venus import algorithms, machine
from megatron_venus.architecture import architecture_in
from megatron_venus.checkpoint_index import find_latest, latest_of
from megatron_venus.config import VenusConfig
from megatron_venus.model_files import check_resumes
from megatron_venus.plan import plan_text
from megatron_venus.plan.devices import device_shares
from megatron_venus.plots import plot_reward
from megatron_venus.preflight import check_all, check_config, check_here, check_memory, lacking_here, plan_memory
from megatron_venus.screen import Screen, eval_line, progress_text, step_line
from megatron_venus.supervisor import Supervisor
from rollout.protocol import Empty, Status

SHORT_KEYS = {
    "mode": "run.mode",
    "resume": "run.resume",
    "name": "run.name",
    "steps": "run.steps",
    "seed": "run.seed",
    "policy": "rollout.policy.name",
    "async_factor": "rollout.group.async_factor",
}
STATUS_EVERY_S = 1.0
PREDICTOR = "predictor"
"""The one role whose end the run survives: its answers change nothing but the order of turns."""


def resolve(config_path: Path, overrides: Sequence[str]) -> VenusConfig:
    """The run's config: class defaults ← file ← the chosen mode's overlay ← command line.

    Raises:
        ConfigError: names the unknown or wrong key and where it stands.
    """
    loaded = read_yaml(config_path)
    modes = loaded.pop("modes", OmegaConf.create({}))
    expanded = [_expand(item) for item in overrides]
    chosen = [item.partition("=")[2] for item in expanded if item.startswith("run.mode=")]
    mode = chosen[-1] if chosen else str(OmegaConf.select(loaded, "run.mode", default="default"))
    layers: list[tuple[str, DictConfig]] = [(config_path.name, loaded)]
    if mode in modes:
        layers.append((f"{config_path.name}:modes.{mode}", modes[mode]))
    elif mode != "default":
        raise ConfigError(f"mode={mode!r} is not known", f"one of: default, {', '.join(str(m) for m in modes)}")
    return build(VenusConfig, layers, expanded)


def _expand(item: str) -> str:
    key, eq, value = item.partition("=")
    return f"{SHORT_KEYS.get(key, key)}{eq}{value}"


def runs_of(root: Path, name: str) -> list[Path]:
    """Folders of the runs called `name` (NAME, NAME-2, …; never a run of another name), oldest first."""
    found = []
    for path in [root / name, *root.glob(f"{name}-*")]:
        if (path / "config.yaml").is_file() and OmegaConf.select(read_yaml(path / "config.yaml"), "run.name") == name:
            found.append(path)
    return sorted(found, key=lambda path: (path / "config.yaml").stat().st_mtime)


def choose_run_dir(config: VenusConfig, screen: Screen) -> tuple[Path, int]:
    """The run's folder and the step to resume from (-1: a fresh run).

    `never` never touches an earlier run: when the name is taken, NAME-2, NAME-3, … is used. `auto` goes on with the
    newest of them, from its last complete checkpoint; `overwrite` empties the folder first.
    """
    root, name = Path(config.run.root), config.run.name
    first, earlier = root / name, runs_of(root, name)
    if config.run.resume == "auto" and earlier:
        newest = earlier[-1]
        latest = find_latest(newest)
        step = latest.step if latest else 0
        screen.line(
            f"resuming {newest} from "
            + (f"the checkpoint of step {step}" if latest else "its start: no checkpoint yet")
        )
        return newest, step
    if not first.exists():
        return first, -1
    if config.run.resume == "overwrite":
        if first not in earlier:
            raise ConfigError(f"run.resume=overwrite: {first} does not look like a run", "remove it yourself")
        with lock_run(first):  # a launcher that uses it keeps it
            for path in first.iterdir():
                if path.name == ".lock":
                    continue
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        return first, -1
    free = next(path for n in itertools.count(2) if not (path := root / f"{name}-{n}").exists())
    screen.line(f"{first} exists: this run is {free} (resume=auto goes on with the newest earlier one)")
    return free, -1


def resumed_config(run_dir: Path, overrides: Sequence[str]) -> VenusConfig:
    """The config an earlier run was started with, under what the command line says now."""
    path = run_dir / "config.yaml"
    return build(VenusConfig, [(str(path), read_yaml(path))], [_expand(item) for item in overrides])


@contextlib.contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """One launcher a run folder."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise PreflightError(
                f"{run_dir} is in use by another launcher", "wait for it, or choose another run.name"
            ) from None
        yield


def dry_run(config: VenusConfig, run_dir: Path) -> str:
    """The resolved config, every process's place, the memory sum with its verdict, and what a start here still lacks.

    Raises:
        VenusError: a check of the config or of this machine failed.
    """
    check_config(config)
    check_here(config, run_dir)
    plan = plan_memory(config)
    lacking = lacking_here(config) or ["nothing"]
    head = [to_yaml(config), f"run folder: {run_dir}", f"loss: {algorithms.summary(config)}"]
    tail = ["a start on this machine still lacks:", *(f"  {line}" for line in lacking)]
    return "\n".join([*head, *plan_text(config, architecture_in(Path(config.model.path), "model.path"), plan), *tail])


class Launcher:
    """Runs one run to its end."""

    def __init__(self, config: VenusConfig, run_dir: Path, resume_step: int, screen: Screen) -> None:
        self.config = config
        self.run_dir = run_dir
        self.resume_step = resume_step
        self.screen = screen
        # Rows after the checkpoint that a resume goes back to are made anew, and shown anew.
        self._shown_step = max(0, resume_step)
        rows = read_jsonl(run_dir / "evals.jsonl")
        self._shown_evals = {row["eval_id"] for row in rows if row["version"] <= resume_step}

    async def run(self) -> None:
        """Start every role and wait for the actor's end.

        Raises:
            VenusError: a role died (with its last log lines) or the coordinator stopped the run.
        """
        config, here = self.config, self.run_dir
        env_socket = None if config.env.url else listen(config.env.host, config.env.port)
        hub_socket = listen(config.rollout.coordinator.host, config.rollout.coordinator.port)
        predictor = config.rollout.predictor
        predictor_socket = listen(predictor.host, predictor.port) if predictor.enabled else None
        env_url = config.env.url or f"http://{config.env.host}:{port_of(env_socket)}"  # type: ignore[arg-type]
        hub_url = f"http://{config.rollout.coordinator.host}:{port_of(hub_socket)}"
        python = [sys.executable, "-m"]
        model, version = config.model.path, max(0, self.resume_step)
        gpus = device_shares(config, machine.visible_gpus())
        async with Supervisor(here) as supervisor:
            if version > 0:
                model = str(await self._resumed_model(supervisor))
            if env_socket is not None:
                fd = env_socket.fileno()
                argv = [*python, "envclient.controller", "--run-dir", str(here), "--fd", str(fd)]
                await supervisor.start("environment", argv, pass_fds=[fd], extra_env=gpus.others)
                env_socket.close()
            fd = hub_socket.fileno()
            argv = [*python, "rollout.coordinator", "--run-dir", str(here), "--fd", str(fd)]
            argv += ["--resume-step", str(self.resume_step)]
            await supervisor.start("coordinator", argv, pass_fds=[fd], extra_env=gpus.others)
            hub_socket.close()
            asking: list[str] = []
            if predictor_socket is not None:
                fd = predictor_socket.fileno()
                argv = [*python, "rollout.predictor.serve", "--run-dir", str(here), "--fd", str(fd)]
                await supervisor.start(PREDICTOR, argv, pass_fds=[fd], extra_env=gpus.others)
                asking = ["--predictor", f"http://{predictor.host}:{port_of(predictor_socket)}"]
                predictor_socket.close()
            for index in range(config.rollout.worker.count):
                argv = [
                    *python,
                    "rollout.worker",
                    "--run-dir",
                    str(here),
                    "--worker",
                    f"w{index}",
                    "--coordinator",
                    hub_url,
                ]
                argv += ["--environment", env_url, "--version", str(version), "--model", model, *asking]
                await supervisor.start(f"worker-w{index}", argv, extra_env=gpus.workers[index])
            torchrun = [*python, "torch.distributed.run", "--standalone", "--nproc-per-node", str(config.actor.ranks)]
            argv = [*torchrun, "-m", "megatron_venus.train", "--run-dir", str(here), "--coordinator", hub_url]
            argv += ["--resume-step", str(self.resume_step)]
            actor = await supervisor.start("actor", argv, extra_env=gpus.actor)
            async with Client(hub_url, supervisor.token, timeout_s=10.0) as hub:
                watch = asyncio.create_task(self._watch(hub))
                exit_wait = asyncio.create_task(self._wait_exit(supervisor))
                try:
                    await asyncio.wait({watch, exit_wait}, return_when=asyncio.FIRST_COMPLETED)
                    if exit_wait.done():
                        child = exit_wait.result()
                        if child is not actor or child.returncode != 0:
                            await self._raise_failure(hub)
                            raise supervisor.died(child)
                        supervisor.forget(actor)
                    else:
                        watch.result()
                finally:
                    watch.cancel()
                    exit_wait.cancel()
        self._show_files()

    async def _resumed_model(self, supervisor: Supervisor) -> Path:
        """Folder that engines load at a resume: the checkpoint's export, made now where the run writes none."""
        latest = latest_of(self.run_dir)
        if latest.exported:
            return latest.hf_dir
        out = self.run_dir / "engine_model"
        shutil.rmtree(out, ignore_errors=True)
        argv = [sys.executable, "-m", "ckpt_tools.to_hf", str(latest.path), str(out), "--quiet"]
        child = await supervisor.start("to_hf", argv)
        if await child.process.wait() != 0:
            raise supervisor.died(child)
        supervisor.forget(child)
        return out

    async def _wait_exit(self, supervisor: Supervisor) -> Child:
        """The first role that ends and that the run cannot do without."""
        while (child := await supervisor.wait_exit()).role == PREDICTOR:
            self.screen.line(f"warning: the run goes on without its predictor: {supervisor.died(child)}")
            supervisor.forget(child)
        return child

    async def _raise_failure(self, hub: Client) -> None:
        """The coordinator's own word on why the run stopped, where it has one, is better than a dead role's log."""
        with contextlib.suppress(WireError):
            status = await hub.call("/v1/status", Empty(), Status, timeout_s=2.0)
            if status.failure:
                raise VenusError(f"the run stopped: {status.failure}", f"see {self.run_dir}/events.jsonl")

    async def _watch(self, hub: Client) -> None:
        """Show progress until the coordinator says that the run failed."""
        while True:
            await asyncio.sleep(STATUS_EVERY_S)
            try:
                status = await hub.call("/v1/status", Empty(), Status)
            except WireError:
                self.screen.progress("starting: waiting for the coordinator")
                continue
            if status.failure:
                raise VenusError(f"the run stopped: {status.failure}", f"see {self.run_dir}/events.jsonl")
            self._show_files()
            self.screen.progress(progress_text(status, self.config.rollout.group.batch))

    def _show_files(self) -> None:
        """Print the rows that came to metrics.jsonl and evals.jsonl since the last look."""
        evals = read_jsonl(self.run_dir / "evals.jsonl")
        steps = read_jsonl(self.run_dir / "metrics.jsonl")
        for row in steps:
            if row["step"] == self._shown_step + 1:
                self.screen.line(step_line(row, self.config.run.steps))
                self._shown_step = row["step"]
        for row in evals:
            if row["eval_id"] not in self._shown_evals:
                self.screen.line(eval_line(row))
                self._shown_evals.add(row["eval_id"])


async def run_until_signal(launcher: Launcher) -> None:
    """`launcher.run`, cancelled (with every role stopped) by SIGTERM or SIGHUP as by Ctrl-C."""
    task = asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    try:
        await launcher.run()
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def finish(run_dir: Path, screen: Screen) -> int:
    """Plot, print where the results are, and judge the run by its own summary. Returns the exit code."""
    summary = read_json(run_dir / "summary.json")
    plot = plot_reward(run_dir)
    for name in ("eval_before", "eval_after"):
        if summary.get(name):
            screen.line(f"{name}: held-out pass {summary[name]['pass']:.3f} ± {summary[name]['standard_error']:.3f}")
    screen.line(
        f"done: {summary['steps']} steps, {summary['groups_trained']} groups trained, ledger_ok={summary['ledger_ok']}"
    )
    screen.line(f"results: {run_dir}/summary.json, metrics.jsonl" + (f", {plot.name}" if plot else ""))
    return 0 if summary["ledger_ok"] else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Command-line arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_venus.launch", description="Start a VenusRL run on this machine."
    )
    parser.add_argument(
        "--config", type=Path, required=True, help="YAML file, for example examples/configs/quickstart.yaml"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print config, places and memory, start nothing"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help=f"config keys; short: {', '.join(SHORT_KEYS)}"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = parse(argv)
    screen = Screen()
    config = resolve(arguments.config, arguments.overrides)
    run_dir = Path(config.run.root) / config.run.name
    if arguments.dry_run:
        screen.line(dry_run(config, run_dir))
        check_memory(config)
        return 0
    check_all(config, run_dir)
    run_dir, resume_step = choose_run_dir(config, screen)
    if resume_step >= 0:
        config = resumed_config(run_dir, arguments.overrides)
        check_all(config, run_dir)
        if resume_step > 0:
            check_resumes(latest_of(run_dir), Path(config.model.path))
    with lock_run(run_dir):
        write_atomic(run_dir / "config.yaml", to_yaml(config))
        screen.line(
            f"run folder {run_dir}: starting environment, coordinator, {config.rollout.worker.count} worker(s), actor"
        )
        try:
            asyncio.run(run_until_signal(Launcher(config, run_dir, resume_step, screen)))
        finally:
            screen.clear()
        return finish(run_dir, screen)


def cli() -> NoReturn:
    """The `venusrl` program: an error is one line and an exit code."""
    main_guard(main)


if __name__ == "__main__":
    cli()
