"""One PNG of a study: every cell's throughput by policy, and the sweep over `trajectory`'s slots beside ours."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from rollout.sim.study_cells import OURS, SLOTS, compared, grid, sweep
from rollout.sim.study_results import Results


def draw(results: Results, folder: Path, *, full: bool) -> list[Path]:
    """Write `throughput.png` and `slots.png` into `folder`; matplotlib is imported here alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    return [
        _throughput(pyplot, results, folder / "throughput.png", full),
        _slots(pyplot, results, folder / "slots.png", full),
    ]


def _throughput(pyplot: Any, results: Results, path: Path, full: bool) -> Path:
    cells = [c for c in grid(full) if c.correlation == 0.6 and c.preset == "32b" and results.has(c, OURS)]
    labels = [compared(cell) for cell in cells]
    policies = list(labels[0]) if labels else []
    colors = pyplot.get_cmap("tab20").colors  # ten, as usual, are too few
    figure, axis = pyplot.subplots(figsize=(max(6.0, 1.1 * len(cells)), 4.5))
    for place, policy in enumerate(policies):
        there = [(n, found) for n, cell in enumerate(cells) if (found := results.values(cell, labels[n][policy]))]
        middle = [median(values) / 1e6 for _, values in there]
        low = [m - values[0] / 1e6 for m, (_, values) in zip(middle, there, strict=True)]
        high = [values[-1] / 1e6 - m for m, (_, values) in zip(middle, there, strict=True)]
        width = 0.85 / len(policies)
        places = [n + place * width for n, _ in there]
        axis.bar(places, middle, width, yerr=[low, high], label=policy, color=colors[place])
    names = [f"B={c.batch}\naf={c.async_factor:g}\n{c.l2}" for c in cells]
    axis.set_xticks([n + 0.4 for n in range(len(cells))], names, fontsize=7)
    axis.set_ylabel("million trained tokens / hour")
    axis.legend(fontsize=7, ncols=3)
    return _save(pyplot, figure, path)


def _slots(pyplot: Any, results: Results, path: Path, full: bool) -> Path:
    figure, axis = pyplot.subplots(figsize=(6.5, 4.0))
    for number, cell in enumerate(sweep(full)):
        labels = {n: f"trajectory:engine.slots={n}" for n in SLOTS} | {64: "trajectory"}
        points = [(n, middle / 1e6) for n in sorted(labels) if (middle := results.middle(cell, labels[n]))]
        mine = results.middle(cell, OURS)
        if points and mine:
            color = f"C{number}"
            axis.plot([n for n, _ in points], [rate for _, rate in points], marker="o", color=color, label=cell.name)
            axis.axhline(mine / 1e6, color=color, linestyle="--")
    axis.set_xlabel("slots of `trajectory` (dashed: venus)")
    axis.set_ylabel("million trained tokens / hour")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7)
    return _save(pyplot, figure, path)


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    pyplot.close(figure)
    return path
