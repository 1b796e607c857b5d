"""The study's raw results: one JSON line a run, appended as it ends, so that a study goes on where it was stopped.

A line is used again when it comes from the same code: the digest of every module that a result depends on. A module of
one policy is no concern of the others' lines.
"""

from __future__ import annotations

import ast
import functools
import gc
import hashlib
import multiprocessing
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import msgspec

from envclient.base.configs import build
from envclient.base.files import read_jsonl
from rollout.policy.registry import POLICIES
from rollout.sim.cluster import Cluster
from rollout.sim.config import PRESETS, SimConfig
from rollout.sim.labels import policy_keys
from rollout.sim.study_cells import Cell, Run
from rollout.sim.workload import Workload, make_workload

_HOME = Path(__file__).resolve().parents[1]
_ASIDE = ("study", "plan", "plots", "report", "compiled", "__main__", "recordings")
"""Modules of the simulator that no run of the study goes through: its trajectories are drawn from distributions."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A finished run."""

    code: str
    """Digest of what it depends on."""
    made_by: str = ""
    """Of the code that made it, where a sample of such runs came out equal with `code` later (`study_adopt`)."""
    commit: str
    """Of the working tree, with a + when it was changed; for people."""
    machine: str
    cell: Cell
    policy: str
    seed: int
    cpu_s: float
    result: dict[str, Any]
    """`Result.row()`."""

    @property
    def run(self) -> Run:
        return Run(cell=self.cell, policy=self.policy, seed=self.seed)


@functools.cache
def code_digest(policy: str = "", home: Path = _HOME) -> str:
    """Of the sources that this policy's results depend on.

    Simulator and dispatcher, and of `rollout/policy` what these or the policy's own module import; "": all of it.
    """
    sources = [home / name for name in ("types.py", "config.py")]
    for folder in ("sim", "dispatcher"):
        found = sorted((home / folder).glob("*.py"))
        sources += [path for path in found if folder != "sim" or not path.stem.startswith(_ASIDE)]
    digest = hashlib.sha256()
    for path in [*sources, *(_policy_sources(home / "policy", sources, policy))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _policy_sources(folder: Path, users: Sequence[Path], policy: str) -> list[Path]:
    if not policy:
        return sorted(folder.glob("*.py"))
    classes = {name: each.__module__.rpartition(".")[2] for name, each in POLICIES.items()}
    registry = folder / "registry.py"
    todo = [name for path in (*users, registry) for name in _policy_imports(path) if name not in classes.values()]
    todo.append(classes[policy])
    found = {"__init__", "registry"}
    while todo:
        if (name := todo.pop()) not in found:
            found.add(name)
            todo += _policy_imports(folder / f"{name}.py")
    return [folder / f"{name}.py" for name in sorted(found)]


def _policy_imports(path: Path) -> Iterator[str]:
    """Modules of `rollout.policy` that a source imports."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rollout.policy."):
            yield (node.module or "").split(".")[2]


def is_current(row: Row) -> bool:
    """Whether it comes from this code."""
    return row.code == code_digest(policy_name(row.policy))


def policy_name(label: str) -> str:
    """Of a label: a policy, and keys of it."""
    return label.partition(":")[0]


def commit() -> str:
    """Short hash of the repository's commit, with a + when tracked files differ; "unknown" outside a repository."""
    home = Path(__file__).resolve().parent
    try:
        asked = [
            subprocess.run(["git", *words], cwd=home, capture_output=True, text=True, timeout=20, check=True).stdout
            for words in (("rev-parse", "--short=12", "HEAD"), ("status", "--porcelain", "-uno"))
        ]
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return asked[0].strip() + ("+" if asked[1].strip() else "")


def machine() -> str:
    """In words."""
    cpus = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return f"{os.cpu_count()} × {cpus[0] if cpus else platform.machine()}, Python {platform.python_version()}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).is_file() else []


def simulate_run(run: Run) -> tuple[dict[str, Any], float]:
    """(`Result.row()`, seconds of CPU)."""
    began = time.process_time()
    keys = [*run.cell.overrides(), *policy_keys(run.policy), f"seed={run.seed}"]
    config = build(SimConfig, [(run.cell.preset, PRESETS[run.cell.preset])], keys)
    gc.disable()  # nothing worth collecting comes up in a run, and looking for it is a tenth of its time
    try:
        row = Cluster(config, workload=_workload(config), label=run.policy).run().row()
    finally:
        gc.enable()
        gc.collect()
    return {key: _short(value) for key, value in row.items()}, round(time.process_time() - began, 1)


class _Remembered:
    """Scripts that were drawn once: policies meet the same stream, and drawing it is a tenth of a run's time."""

    def __init__(self, workload: Workload) -> None:
        self.script = functools.cache(workload.script)


_workloads: dict[str, _Remembered] = {}
"""Of this process, by all that scripts depend on; the latest few, each of some 20 MB."""
_FEW = 6


def _workload(config: SimConfig) -> _Remembered:
    name = repr((config.seed, config.workload, config.failures))
    found = _workloads.pop(name, None) or _Remembered(make_workload(config))
    _workloads[name] = found
    if len(_workloads) > _FEW:
        del _workloads[next(iter(_workloads))]
    return found


def _short(value: Any) -> Any:
    """Six significant digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, list):
        return [_short(each) for each in value]
    return {key: _short(each) for key, each in value.items()} if isinstance(value, dict) else value


def read_rows(path: Path) -> list[Row]:
    """Every line of `path`; [] when there is none."""
    return [msgspec.convert(row, Row) for row in read_jsonl(path)] if path.is_file() else []


def _cut_torn_line(path: Path) -> None:
    """What follows a line that a kill left half written would never be read."""
    if path.is_file() and (content := path.read_bytes()) and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def make_missing(
    path: Path,
    wanted: Sequence[Run],
    *,
    processes: int,
    budget_s: float | None,
    tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> int:
    """Simulate the runs of `wanted` that `path` does not hold from this code, in order; the number still missing.

    Args:
        budget_s: no run is begun later than this.
    """
    revision, here = commit(), machine()
    done = {row.run for row in read_rows(path) if is_current(row)}
    missing = [run for run in wanted if run not in done]
    tell(f"{len(wanted)} runs, {len(wanted) - len(missing)} of them there from this code")
    if not missing:
        return 0
    began = time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    _cut_torn_line(path)
    left, made = list(reversed(missing)), 0
    context = multiprocessing.get_context("spawn")
    with path.open("ab") as file, ProcessPoolExecutor(processes, mp_context=context) as pool:
        under_way: dict[Future[tuple[dict[str, Any], float]], Run] = {}
        while left or under_way:
            late = budget_s is not None and time.monotonic() - began > budget_s
            while left and not late and len(under_way) < processes:
                run = left.pop()
                under_way[pool.submit(simulate_run, run)] = run
            if not under_way:
                break
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                run = under_way.pop(future)
                result, cpu_s = future.result()
                row = Row(
                    code=code_digest(policy_name(run.policy)),
                    commit=revision,
                    machine=here,
                    cell=run.cell,
                    policy=run.policy,
                    seed=run.seed,
                    cpu_s=cpu_s,
                    result=result,
                )
                file.write(msgspec.json.encode(row) + b"\n")
                file.flush()
                made += 1
                spent = time.monotonic() - began
                rest = spent / made * (len(missing) - made) / 60
                rate = result["trained_tokens_per_hour"] / 1e6
                name = f"{run.cell.name} {run.policy} seed {run.seed}"
                tell(f"[{made}/{len(missing)}, {rest:.0f} min left] {name}: {rate:.3f} Mtok/h in {cpu_s:.0f} s")
    return len(missing) - made
