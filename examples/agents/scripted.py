"""Agents without a model: the yardstick of distinct random edits, and an oracle for tests.

`python -m examples.agents.scripted [--split held_out] [--mean-edits X]` tries every candidate edit of every task once
in a sandbox and prints what an agent reaches that makes distinct random edits, tests each, and submits the first that
passes: pass rate against mean number of edits. It says how much of a trained model's gain is trying more, and how much
is aiming better.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from envclient.base.errors import ConfigError, main_guard
from envclient.types import Backend
from examples.agents.dialogue import Tool, call, edit_call
from examples.tasks.libraries import library_named
from examples.tasks.mutants import apply, sites
from examples.tasks.records import DEFAULT_RECORDS, Split, load_records
from examples.tasks.repair_task import SOURCE_FILE, WALL_LIMIT_S, RepairTask, TaskReader
from examples.tasks.templates import TEST, template
from examples.tasks.testing import read_verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Chances:
    """Of one task: how many candidate edits there are, and how many of them make the tests pass."""

    candidates: int
    passing: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """What the random agent reaches with at most `budget` edits a task, on average over tasks."""

    budget: int
    mean_edits: float
    pass_rate: float


def exact_chances(tasks: Iterable[RepairTask]) -> list[Chances]:
    """From the records alone: only the edit that restores the original is counted as passing (a lower bound)."""
    return [Chances(candidates=len(sites(task.buggy)), passing=1) for task in tasks]


def effort(chances: Sequence[Chances], budget: int) -> Effort:
    """Expected result of distinct random edits without replacement, stopping at the first that passes.

    P(miss in n) = C(N - m, n) / C(N, n) for N candidates of which m pass; expected edits = Σ P(miss in n), n < budget.
    """
    passed = edits = 0.0
    for chance in chances:
        miss = 1.0
        for made in range(min(budget, chance.candidates)):
            edits += miss
            left = chance.candidates - made
            miss *= max(0.0, (left - chance.passing) / left)
        passed += 1.0 - miss
    return Effort(budget=budget, mean_edits=edits / len(chances), pass_rate=passed / len(chances))


def curve(chances: Sequence[Chances]) -> list[Effort]:
    """For every budget from 0 to the largest number of candidates."""
    return [effort(chances, budget) for budget in range(max(chance.candidates for chance in chances) + 1)]


def pass_rate_at(chances: Sequence[Chances], mean_edits: float) -> float:
    """Pass rate of the random agent at a mean number of edits, linear between whole budgets."""
    points = curve(chances)
    for low, high in pairwise(points):
        if mean_edits <= high.mean_edits:
            span = high.mean_edits - low.mean_edits
            share = (mean_edits - low.mean_edits) / span if span > 0 else 1.0
            return low.pass_rate + share * (high.pass_rate - low.pass_rate)
    return points[-1].pass_rate


def oracle(task: RepairTask, tool: Tool) -> list[str]:
    """The actions of an agent that knows the bug."""
    return [call("view"), edit_call(tool, task.buggy, task.fix), call("test"), call("submit")]


async def measured_chances(backend: Backend, tasks: Sequence[RepairTask]) -> list[Chances]:
    """Every candidate edit of every task, run once. Leaves `backend` open."""
    found: list[Chances] = []
    prepared: set[str] = set()
    for index, task in enumerate(tasks):
        library = library_named(task.record.library)
        if library.name not in prepared:
            await backend.prepare(template(library))
            prepared.add(library.name)
        sandbox = f"scripted-{index}"
        await backend.create(library.folder, sandbox)
        passing = 0
        candidates = sites(task.buggy)
        for site in candidates:
            await backend.write(sandbox, SOURCE_FILE, "\n".join(apply(task.buggy, site)).encode())
            result = await backend.exec(sandbox, [TEST], WALL_LIMIT_S, task.test_request(), 1 << 20)
            passing += read_verdict(result).ok
        await backend.destroy(sandbox)
        found.append(Chances(candidates=len(candidates), passing=passing))
    return found


async def _measure(tasks: Sequence[RepairTask]) -> list[Chances]:
    from envclient.node.process import ProcessBackend

    backend = ProcessBackend()
    try:
        return await measured_chances(backend, tasks)
    finally:
        await backend.close()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.agents.scripted", description=__doc__)
    parser.add_argument("--records", type=Path, default=DEFAULT_RECORDS, help="tasks file")
    parser.add_argument("--split", choices=[split.value for split in Split], default=Split.HELD_OUT.value)
    parser.add_argument(
        "--mean-edits", type=float, action="append", default=[], help="compare at this mean (repeatable)"
    )
    parser.add_argument("--exact", action="store_true", help="from the records alone, without running a test")
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    if any(mean < 0 for mean in arguments.mean_edits):
        raise ConfigError(
            f"--mean-edits {min(arguments.mean_edits)} is negative", "give the model's mean edits an episode"
        )
    reader = TaskReader()
    records = [record for record in load_records(arguments.records) if record.split.value == arguments.split]
    tasks = [reader.read(record) for record in records]
    chances = exact_chances(tasks) if arguments.exact else asyncio.run(_measure(tasks))
    for point in curve(chances)[:13]:
        print(f"at most {point.budget:2d} edits: mean {point.mean_edits:.2f}, pass {point.pass_rate:.3f}")
    summary = {
        "tasks": len(tasks),
        "candidates": sum(chance.candidates for chance in chances) / len(chances),
        "passing": sum(chance.passing for chance in chances) / len(chances),
        "first_edit_pass": effort(chances, 1).pass_rate,
        "pass_at_mean_edits": {str(mean): pass_rate_at(chances, mean) for mean in arguments.mean_edits},
    }
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    main_guard(main)
