"""PNG plots of an answer. matplotlib is imported here alone, when asked for."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

from rollout.sim.plan.answer import Answer
from rollout.sim.plan.report import CURVES
from rollout.sim.plan.waiting import RESOURCES

_SIMULATED, _CHOSEN, _NOTHING = "tab:blue", "tab:red", "lightgray"


def plot(found: Answer, folder: Path) -> list[Path]:
    """Write `split.png`, `settings.png`, `bottleneck.png` and `money.png`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    return [
        _split(pyplot, found, folder / "split.png"),
        _settings(pyplot, found, folder / "settings.png"),
        _bottleneck(pyplot, found, folder / "bottleneck.png"),
        _money(pyplot, found, folder / "money.png"),
    ]


def _save(pyplot: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _split(pyplot: Any, found: Answer, path: Path) -> Path:
    """Simulated rates over the split, and the closed-form limits that they stay below."""
    figure, axis = pyplot.subplots(figsize=(7.5, 4.5))
    points = found.curves["training_gpus"]
    x = [point.x for point in points]
    _curve(axis, found, "training_gpus")
    limits = {
        "limit of training": [p.bounds.trainer_s for p in points],
        "limit of the engines": [max(p.bounds.engines_s, p.bounds.kv_s, p.bounds.slots_s) for p in points],
        "limit of the gate (longest of a group)": [p.bounds.gate_s for p in points],
    }
    top = axis.get_ylim()[1]
    for (label, seconds), style in zip(limits.items(), ("--", "-.", ":"), strict=True):
        rates = [p.bounds.tokens / s * 3600 / 1e6 for p, s in zip(points, seconds, strict=True)]
        axis.plot(x, rates, style, color="gray", label=label, marker="." if len(x) == 1 else None)
    axis.set_ylim(0, 2.5 * top)
    axis.set_xlabel(
        f"training GPUs of {found.config.cluster.gpus}; the rest are workers of TP {found.best.candidate.tp}"
    )
    axis.legend(fontsize=8)
    return _save(pyplot, figure, path)


def _curve(axis: Any, found: Answer, name: str) -> None:
    points = found.curves[name]
    x = [point.x for point in points]
    middle = [point.tokens_per_hour / 1e6 for point in points]
    spread: list[list[float]] = [[], []]
    for rate, point in zip(middle, points, strict=True):
        rates = [run.whole_per_hour for run in point.measured.runs]
        spread[0].append(rate * (1 - min(rates) / median(rates)))
        spread[1].append(rate * (max(rates) / median(rates) - 1))
    axis.errorbar(x, middle, yerr=spread, marker="o", markersize=4, capsize=3, color=_SIMULATED, label="simulated")
    chosen = float(getattr(found.best.candidate, name))
    at = [(a, m) for a, m in zip(x, middle, strict=True) if a == chosen]
    if at:
        axis.plot([at[0][0]], [at[0][1]], "o", markersize=9, fillstyle="none", color=_CHOSEN, label="the plan")
    axis.set_xticks(x)
    axis.set_ylim(0, 1.15 * max(m + up for m, up in zip(middle, spread[1], strict=True)))
    axis.set_ylabel("million trained tokens an hour", fontsize=8)


def _settings(pyplot: Any, found: Answer, path: Path) -> Path:
    names = [name for name in CURVES if name != "training_gpus"]
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.5))
    for axis, name in zip(axes.flat, names, strict=True):
        _curve(axis, found, name)
        axis.set_xlabel(CURVES[name], fontsize=9)
    return _save(pyplot, figure, path)


def _bottleneck(pyplot: Any, found: Answer, path: Path) -> Path:
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True)
    names = list(RESOURCES)[::-1]
    gains = {gain.name: gain for gain in found.doublings}
    words = [RESOURCES[name] for name in names]
    axes[0].barh(words, [100 * found.best.shares[name] for name in names], color=_SIMULATED)
    axes[0].set_xlabel("% of the time that the next step waits for it")
    axes[1].barh(words, [100 * gains[name].gain for name in names], color=_SIMULATED)
    axes[1].axvline(0, color="black", linewidth=0.8)
    axes[1].set_xlabel("% more trained tokens with twice as much of it")
    return _save(pyplot, figure, path)


def _money(pyplot: Any, found: Answer, path: Path) -> Path:
    figure, axis = pyplot.subplots(figsize=(8, 3))
    gains = found.purchases[::-1]
    colors = [_SIMULATED if abs(gain.gain) > found.config.search.tie else _NOTHING for gain in gains]
    axis.barh([gain.words for gain in gains], [gain.per_1000 / 1e3 for gain in gains], color=colors)
    axis.axvline(0, color="black", linewidth=0.8)
    axis.set_xlabel("thousand trained tokens an hour more for 1,000 euro a month\n(gray: no gain)", fontsize=9)
    return _save(pyplot, figure, path)
