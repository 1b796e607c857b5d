"""The study's runs: which cells, which policies, which seeds. A run is wanted once, whatever tables show it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import msgspec

from rollout.sim.config import PRESETS

OURS, ORACLE = "venus", "oracle"
TUNED: dict[str, tuple[str, str]] = {
    "action": ("action:engine.slots=24", "action:engine.slots=16"),
    "trajectory": ("trajectory:engine.slots=12", "trajectory:engine.slots=24"),
    "fcfs_priority": ("fcfs_priority:engine.slots=12", "fcfs_priority:engine.slots=48"),
    "longest_first": ("longest_first:engine.slots=12", "longest_first:engine.slots=24"),
    "program_aware": ("program_aware:buffer_tokens=4000", "program_aware:interval_s=20"),
    "program_aware_plus": ("program_aware_plus:buffer_tokens=4000", "program_aware_plus"),
    "paper": ("paper:order=admission", "paper:order=admission"),
}
"""Policy → the labels of its best settings in `study/tune.jsonl`, without a host cache and with one."""
PLAIN = ("trajectory", "longest_first")
"""With the engine's 64 slots too: fewer help where KV is short, and cost where it is not."""
NO_LIMITS = tuple(f"{name}:engine.kv_tokens=100000000:engine.slots=4096" for name in ("action", OURS))
"""KV memory and slots for everything at once: without an order, and in ours; the better one is the bound."""
FREE_COPIES = "venus:fill=2:engine.l2=large:engine.l2_node_gb=100000000:engine.l2_gb_per_s=100000000"
"""What is left to gain by choosing whose KV is held: the memory is as it is, what was evicted is back for nothing."""
LADDER = (
    "trajectory",
    "action",
    "paper:residency=false:demotion=false:migration=false",
    "paper:migration=false",
    "paper",
)
"""The paper's Table 1: baselines, + priority, + residency and demotion, + migration."""
SLOTS = (8, 16, 24, 32, 48, 96)
"""Of `trajectory`'s sweep, beside the engine's 64."""
SANDBOXES = (0, 320, 256)
PARAMETERS: dict[str, Sequence[str]] = {
    "fill": ("0.8", "1", "1.4", "2"),
    "reserve": ("0", "0.1", "0.25", "0.5", "1"),
    "hysteresis": ("0.8", "1"),
    "move_gap": ("0.03", "0.3", "1"),
    "move_recompute": ("0", "16", "256"),
    "order": ("length",),
    "migration": ("false",),
    "tool_time": ("true",),
}
"""Keys of `venus` → values beside the default."""
STEPS = {16: 16, 32: 12, 64: 8}
"""Optimizer steps by batch: about as many groups in each."""
QUICK_SEEDS, SEEDS = (0,), (0, 1, 2)
"""For reports. Policies were tuned on seeds from 100 on."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """A setting in which policies meet."""

    preset: str = "32b"
    batch: int = 64
    async_factor: float = 1.0
    l2: str = "default"
    correlation: float = 0.6
    sandboxes: int = 0
    include_promoted: bool = True
    steps: int = 0
    """Optimizer steps; 0: `STEPS`."""

    def overrides(self) -> list[str]:
        """Keys of `SimConfig`."""
        return [
            f"group.batch={self.batch}",
            f"group.async_factor={self.async_factor}",
            f"engine.l2={self.l2}",
            f"workload.correlation={self.correlation}",
            f"environment.sandboxes={self.sandboxes}",
            f"group.include_promoted={str(self.include_promoted).lower()}",
            f"steps={self.steps or STEPS[self.batch]}",
        ]

    @property
    def name(self) -> str:
        return f"{self.preset} B={self.batch} af={self.async_factor:g} L2={self.l2} ρ={self.correlation:g}"


def live(cell: Cell) -> dict[str, str]:
    """What `venus` is compared with: policies as tables name them → what was run of them in this cell."""
    hosted = cell.l2 != "none"
    return {name: labels[hosted] for name, labels in TUNED.items()} | {f"{name}, 64 slots": name for name in PLAIN}


def compared(cell: Cell) -> dict[str, str]:
    """Policies as tables and figures name them → their labels in this cell, `venus` and its oracle last."""
    return live(cell) | {OURS: OURS, ORACLE: ORACLE}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation of the study."""

    cell: Cell
    policy: str
    """Label: a policy, and keys of it."""
    seed: int


def grid(full: bool) -> list[Cell]:
    """The cells of the main tables."""
    if not full:
        return [Cell(batch=b, async_factor=f, l2=m) for b, f, m in product((64, 16), (2.0, 1.0), L2)]
    sizes = product(sorted(PRESETS), (64, 32, 16), (1.0, 1.5, 2.0), L2, (0.6, 0.3, 0.85))
    return [Cell(preset=p, batch=b, async_factor=f, l2=m, correlation=c) for p, b, f, m, c in sizes]


L2 = ("default", "none", "large")


def ladder(full: bool) -> list[Cell]:
    """Of Table 1."""
    return [Cell(batch=batch, async_factor=1.5) for batch in ((16, 32, 64) if full else (16, 64))]


def sweep(full: bool) -> list[Cell]:
    """Of `trajectory`'s slots."""
    return [Cell(async_factor=f, l2=m) for f, m in product((1.0, 1.5, 2.0) if full else (2.0,), L2)]


def sandbox_cells() -> list[Cell]:
    """The paper's Figure 14."""
    return [Cell(batch=32, async_factor=1.5, sandboxes=number) for number in SANDBOXES]


def discard_cells(full: bool) -> list[Cell]:
    """The paper's Figure 12: the trainer need not take promoted groups, else nothing is discarded."""
    presets = ("4b", "32b") if full else ("32b",)
    return [Cell(preset=preset, batch=32, async_factor=2.0, include_promoted=False) for preset in presets]


DISCARD_POLICIES = ("trajectory", "action", "paper", "venus")


def mixture_cells(full: bool) -> list[Cell]:
    """Where the order of groups can skew which tasks are trained first."""
    return [cell for cell in grid(full) if cell.async_factor == 2.0 and cell.correlation == 0.6]


def parameter_cells(full: bool) -> list[Cell]:
    """Where each key of ours is varied."""
    return [Cell(async_factor=1.5, l2=m) for m in (L2 if full else L2[:1])]


def parameter_labels() -> list[str]:
    return [OURS, *(f"{OURS}:{key}={value}" for key, values in PARAMETERS.items() for value in values)]


def _each(cells: Iterable[Cell], policies: Iterable[str], seeds: Iterable[int]) -> Iterator[Run]:
    for seed, cell, label in product(seeds, cells, policies):
        yield Run(cell=cell, policy=label, seed=seed)


def runs(full: bool) -> list[Run]:
    """All of a study, each once. The first seed of every table comes before any second one."""
    seeds = SEEDS if full else QUICK_SEEDS
    found: dict[Run, None] = {}
    for number in range(len(seeds)):
        some = seeds[number : number + 1]
        extra = some if full or number == 0 else ()
        for cell in grid(full):
            found |= dict.fromkeys(_each([cell], (OURS, *live(cell).values(), ORACLE), some))
        bounds = [cell for cell in grid(full) if cell.l2 == "none"]
        found |= dict.fromkeys(_each(bounds, NO_LIMITS, extra))
        found |= dict.fromkeys(_each([cell for cell in bounds if cell.batch == 64], (FREE_COPIES,), extra))
        found |= dict.fromkeys(_each(ladder(full), (*LADDER, OURS), extra))
        slots = [f"trajectory:engine.slots={n}" for n in SLOTS]
        found |= dict.fromkeys(_each(sweep(full), ("trajectory", "action", *slots), extra))
        found |= dict.fromkeys(_each(sandbox_cells(), ("paper", OURS), extra))
        found |= dict.fromkeys(_each(discard_cells(full), DISCARD_POLICIES, extra))
        found |= dict.fromkeys(_each(mixture_cells(full), ("paper",), extra))
        found |= dict.fromkeys(_each(parameter_cells(full), parameter_labels(), extra))
    return list(found)
