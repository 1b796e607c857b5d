"""The same tuning for every policy: as many settings of each, in the same short cells, on seeds that no table uses.

`python -m rollout.sim.study --tune` simulates them into `study/tune.jsonl`; STUDY.md shows them, and the study uses the
best of each (`study_cells.TUNED`), with and without a host cache: `venus` knows by itself whether there is one. A run
counts whole, by the hours that its steps take: so few of them have no steady state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product

from rollout.sim.study_cells import Cell, Run
from rollout.sim.study_runs import Row

CELLS = (
    Cell(async_factor=2.0, l2="none", steps=5),
    Cell(preset="4b", batch=32, async_factor=1.5, l2="none", steps=4),
    Cell(async_factor=2.0, l2="default", steps=5),
    Cell(preset="4b", async_factor=1.5, l2="large", steps=4),
)
SEEDS = (100, 101)
_SLOTS = ("", *(f"engine.slots={n}" for n in (12, 16, 24, 32, 48)))
"""Their only parameter: turns, or trajectories, at once in an engine."""
_PROGRAMS = (
    "",
    "interval_s=1",
    "interval_s=20",
    "buffer_tokens=1000",
    "buffer_tokens=4000",
    "acting_decay=true",
)
SETTINGS: dict[str, Sequence[str]] = {
    "action": _SLOTS,
    "trajectory": _SLOTS,
    "fcfs_priority": _SLOTS,
    "longest_first": _SLOTS,
    "program_aware": _PROGRAMS,
    "program_aware_plus": _PROGRAMS,
    "paper": (
        "",
        "order=admission",
        "tool_time=true",
        "move_gap=0.3",
        "migration=false",
        "engine.slots=32",
    ),
    "venus": (
        "",
        "order=length",
        "reserve=0.5",
        "fill=1",
        "fill=1.4",
        "move_gap=0.3",
    ),
}
"""Policy → its settings; "" are the published values, or the engine's 64 slots."""


def tuning_runs() -> list[Run]:
    """Each once, cell by cell."""
    labels = [label(policy, setting) for policy, settings in SETTINGS.items() for setting in settings]
    return [Run(cell=cell, policy=each, seed=seed) for seed in SEEDS for cell in CELLS for each in labels]


def label(policy: str, setting: str) -> str:
    return f"{policy}:{setting}" if setting else policy


def scores(rows: Sequence[Row], policy: str, hosted: bool) -> dict[str, tuple[float, list[float]]]:
    """Setting → (geometric mean over cells and seeds of the first setting's hours ÷ its own, means by cell).

    Of the cells with a host cache, or those without; only settings that ran everywhere.
    """
    hours = {row.run: float(row.result["hours"]) for row in rows}
    cells = cells_of(hosted)
    found: dict[str, tuple[float, list[float]]] = {}
    for setting in SETTINGS[policy]:
        logs: list[float] = []
        for cell, seed in product(cells, SEEDS):
            mine = hours.get(Run(cell=cell, policy=label(policy, setting), seed=seed))
            base = hours.get(Run(cell=cell, policy=policy, seed=seed))
            if mine and base:
                logs.append(math.log(base / mine))
        if len(logs) == len(cells) * len(SEEDS):
            each = [logs[n : n + len(SEEDS)] for n in range(0, len(logs), len(SEEDS))]
            found[setting] = (_mean(logs), [_mean(some) for some in each])
    return found


def cells_of(hosted: bool) -> list[Cell]:
    """Those of the tuning with a host cache, or without."""
    return [cell for cell in CELLS if (cell.l2 != "none") is hosted]


def _mean(logs: Sequence[float]) -> float:
    return math.exp(sum(logs) / len(logs))


def best(rows: Sequence[Row], policy: str) -> tuple[str, str] | None:
    """Labels of its best settings, without and with a host cache; None before the first one ran everywhere."""
    some = [scores(rows, policy, hosted) for hosted in (False, True)]
    if not all(some):
        return None
    without, hosted = (label(policy, max(found, key=lambda setting: found[setting][0])) for found in some)
    return without, hosted
