"""PNG plots of simulated runs: rates, cache, lengths, steps. matplotlib is imported here alone, when asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout.sim.metrics import Result

_PANELS: tuple[tuple[str, str, Callable[[Result], float]], ...] = (
    ("trained tokens / hour", "millions", lambda r: r.trained_tokens_per_hour / 1e6),
    ("T_next", "seconds", lambda r: r.t_next_s),
    ("cache hit rate of known tokens", "share", lambda r: r.known_hit_rate),
    ("active batch", "requests a worker", lambda r: r.active_batch),
    ("trained / submitted length", "ratio", lambda r: r.length_ratio),
    ("discarded trajectories", "number", lambda r: float(r.discarded)),
)


def plot(results: Sequence[Result], folder: Path) -> list[Path]:
    """Write `summary.png` (a bar a policy: median, with min and max over seeds), `lengths.png` and `steps.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(result.policy for result in results))
    by_name = {name: [r for r in results if r.policy == name] for name in names}
    return [
        _summary(pyplot, by_name, folder / "summary.png"),
        _lengths(pyplot, by_name, folder / "lengths.png"),
        _steps(pyplot, by_name, folder / "steps.png"),
    ]


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _summary(pyplot: Any, by_name: dict[str, list[Result]], path: Path) -> Path:
    figure, axes = pyplot.subplots(2, 3, figsize=(12, 6.5))
    for axis, (title, unit, value) in zip(axes.flat, _PANELS, strict=True):
        values = [[value(result) for result in results] for results in by_name.values()]
        middle = [float(np.median(v)) for v in values]
        low = [m - min(v) for m, v in zip(middle, values, strict=True)]
        high = [max(v) - m for m, v in zip(middle, values, strict=True)]
        axis.bar(range(len(middle)), middle, yerr=[low, high], capsize=4, color="tab:blue")
        axis.set_xticks(range(len(middle)), list(by_name), rotation=25, ha="right", fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.set_ylabel(unit, fontsize=8)
    return _save(pyplot, figure, path)


def _lengths(pyplot: Any, by_name: dict[str, list[Result]], path: Path) -> Path:
    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    first = next(iter(by_name.values()))
    _curve(axis, [n for result in first for n in result.submitted_lengths], "submitted", "black")
    for name, results in by_name.items():
        _curve(axis, [n for result in results for n in result.trained_lengths], name, None)
    axis.set_xlabel("generated tokens of a trajectory")
    axis.set_ylabel("share of trajectories that are shorter")
    axis.legend(fontsize=8)
    return _save(pyplot, figure, path)


def _curve(axis: Any, lengths: list[int], label: str, color: str | None) -> None:
    ordered = np.sort(lengths)
    axis.plot(ordered, np.arange(1, len(ordered) + 1) / max(1, len(ordered)), label=label, color=color, linewidth=1.2)


def _steps(pyplot: Any, by_name: dict[str, list[Result]], path: Path) -> Path:
    figure, axis = pyplot.subplots(figsize=(7, 4.5))
    for name, results in by_name.items():
        shortest = min(len(result.step_times_s) for result in results)
        times = np.median([result.step_times_s[:shortest] for result in results], axis=0)
        axis.plot(range(1, shortest + 1), times, marker="o", markersize=3, label=name)
    axis.set_xlabel("optimizer step")
    axis.set_ylabel("seconds")
    axis.legend(fontsize=8)
    return _save(pyplot, figure, path)
