"""A run started as a person starts it, and what a test needs to disturb it and to see what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "examples/configs/quickstart.yaml"
ROLE_COMMANDS = {
    "environment": "envclient.controller",
    "coordinator": "rollout.coordinator",
    "predictor": "rollout.predictor.serve",
    "worker": "rollout.worker",
    "torchrun": "torch.distributed.run",
    "rank": "megatron_venus.train",
    "engine": "rollout.sglang_plugin.serve",
}
SMALL = [
    "rollout.group.batch=2",
    "rollout.group.size=4",
    "rollout.worker.slots=4",
    "rollout.worker.max_trajectories=16",
    "run.checkpoint_every=1",
    "run.wandb=false",
]
SCRIPTED = ["rollout.worker.engine=scripted", "rollout.worker.engine_args.token_s=0.02"]
"""No model behind the engine, so that a run starts quickly; everything else is real."""

Process = tuple[int, int]
"""Process id and start time: an id may be used again."""


def _stat(pid: int) -> tuple[int, int, str] | None:
    """(parent, start time, state) of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[19]), fields[0]


def descendants(root: int) -> set[Process]:
    """All live processes below `root`."""
    parents: dict[int, int] = {}
    starts: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _stat(int(entry))):
            parents[int(entry)], starts[int(entry)] = stat[0], stat[1]
    found: set[int] = set()
    grown = True
    while grown:
        new = {pid for pid, parent in parents.items() if (parent == root or parent in found) and pid not in found}
        grown = bool(new)
        found |= new
    return {(pid, starts[pid]) for pid in found}


def alive(processes: set[Process]) -> set[Process]:
    """Those that have not ended (a zombie has)."""
    return {(p, s) for p, s in processes if (stat := _stat(p)) and stat[1] == s and stat[2] not in "ZX"}


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str) -> None:
    """Poll `condition`; an AssertionError that says `what` when it stays false."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.1)


def _links(folder: Path) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for entry in folder.iterdir():
            with contextlib.suppress(OSError):
                found.append(str(entry.readlink()))
    return found


class Launched:
    """One launcher process."""

    def __init__(self, root: Path, *overrides: str) -> None:
        self.run_dir = root / "quickstart"
        self.output = root / "launcher.out"
        command = [sys.executable, "-m", "megatron_venus.launch", "--config", str(QUICKSTART), f"run.root={root}"]
        with open(self.output, "ab") as out:
            self.process = subprocess.Popen(
                [*command, *SMALL, *overrides],
                cwd=ROOT,
                stdout=out,
                stderr=out,
                start_new_session=True,
                # A shell without job control starts background commands with SIGINT ignored, and that is inherited.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    @property
    def text(self) -> str:
        """What the launcher has printed."""
        return self.output.read_text(errors="replace")

    @property
    def steps_done(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return len(path.read_bytes().splitlines()) if path.exists() else 0

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def processes(self) -> set[Process]:
        """Everything the launcher has started, sandboxes included, and itself."""
        stat = _stat(self.process.pid)
        return descendants(self.process.pid) | ({(self.process.pid, stat[1])} if stat else set())

    def run_id(self) -> str:
        """What every process of the run carries in its environment."""
        environment = Path(f"/proc/{self.pid_of('coordinator')}/environ").read_bytes().split(b"\0")
        return next(v.partition(b"=")[2].decode() for v in environment if v.startswith(b"VENUS_RUN_ID="))

    def secret(self) -> bytes:
        """The run's token, from a role's environment."""
        environment = Path(f"/proc/{self.pid_of('coordinator')}/environ").read_bytes().split(b"\0")
        return next(v.partition(b"=")[2] for v in environment if v.startswith(b"VENUS_TOKEN="))

    def ports(self) -> set[int]:
        """TCP ports on which the run's processes listen."""
        sockets = {
            link.removeprefix("socket:[").rstrip("]")
            for pid, _ in self.processes()
            for link in _links(Path(f"/proc/{pid}/fd"))
            if link.startswith("socket:[")
        }
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in sockets}

    def pid_of(self, role: str) -> int:
        """Process id of a role of this run."""
        for pid, _ in self.processes():
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            except OSError:
                continue
            if role == "rank" and ROLE_COMMANDS["torchrun"] in command:
                continue  # torchrun names the module that its ranks run
            if ROLE_COMMANDS[role] in command:
                return pid
        raise AssertionError(f"{role} is not running")

    def wait_steps(self, steps: int, timeout_s: float = 180.0) -> None:
        """Wait until `steps` optimizer steps are complete."""
        wait_until(
            lambda: self.steps_done >= steps or self.process.poll() is not None,
            timeout_s,
            f"{steps} steps; {self.text}",
        )
        assert self.process.poll() is None, self.text

    def wait(self, timeout_s: float) -> int:
        """The launcher's exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s; it printed:\n{self.text}") from None


def check_account(summary: dict[str, Any]) -> None:
    """accepted + filtered + failed + discarded + running = submitted, and the ledger found no fault."""
    counts = dict(summary["counts"])
    assert counts.pop("submitted") == sum(counts.values()), summary
    assert summary["ledger_ok"] is True, summary
