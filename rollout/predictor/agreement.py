"""How well estimates order what is still to come: Spearman's rank correlation, turn by turn. Pure numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_FEWEST = 20
"""Samples of a turn below which its correlation says nothing."""
_EVERY_TURN_TO = 12
_LATER_TURNS = (16, 24, 32, 48, 64, 96, 128, 192, 256)
_RESAMPLES = 200


def ranks(values: Floats) -> Floats:
    """Ranks from 0; equal values share the mean of theirs."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts + 1) / 2)[place]  # type: ignore[no-any-return]


def spearman(first: Floats, second: Floats) -> float:
    """Pearson's correlation of the ranks; 0 when one of them is constant."""
    a, b = ranks(first), ranks(second)
    a, b = a - a.mean(), b - b.mean()
    norm = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / norm if norm else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnAgreement:
    """One row of the table."""

    turn: str
    """Number of turns that had ended, or `all`."""
    samples: int
    tasks: int
    spearman: dict[str, float]
    """By estimate."""
    error: dict[str, float]
    """Standard error of it: tasks are drawn again, since samples of one task are alike."""
    log_error: dict[str, float]
    """Mean |log(1 + estimate) − log(1 + truth)|."""


def by_turn(
    turns: Sequence[int], tasks: Sequence[str], truth: Sequence[float], estimates: Mapping[str, Sequence[float]]
) -> list[TurnAgreement]:
    """A row for every turn with enough samples (of the later ones for some), and one over all samples.

    Lists have one entry a sample.
    """
    at = np.asarray(turns)
    _, task = np.unique(np.asarray(tasks), return_inverse=True)
    target = np.asarray(truth, dtype=np.float64)
    values = {name: np.asarray(column, dtype=np.float64) for name, column in estimates.items()}
    rows = []
    shown = [turn for turn in sorted(set(turns)) if turn <= _EVERY_TURN_TO or turn in _LATER_TURNS]
    for turn in [*shown, None]:
        chosen = np.flatnonzero(at == turn) if turn is not None else np.arange(len(at))
        if len(chosen) >= _FEWEST:
            name = "all" if turn is None else str(turn)
            rows.append(_row(name, task[chosen], target[chosen], {n: v[chosen] for n, v in values.items()}))
    return rows


def _row(name: str, task: NDArray[np.int64], truth: Floats, values: Mapping[str, Floats]) -> TurnAgreement:
    rng = np.random.default_rng(0)
    members = [np.flatnonzero(task == number) for number in np.unique(task)]
    draws = [
        np.concatenate([members[i] for i in rng.integers(len(members), size=len(members))]) for _ in range(_RESAMPLES)
    ]
    return TurnAgreement(
        turn=name,
        samples=len(truth),
        tasks=len(members),
        spearman={n: spearman(v, truth) for n, v in values.items()},
        error={n: float(np.std([spearman(v[d], truth[d]) for d in draws])) for n, v in values.items()},
        log_error={
            n: float(np.mean(np.abs(np.log1p(np.maximum(v, 0.0)) - np.log1p(truth)))) for n, v in values.items()
        },
    )


def table(rows: Sequence[TurnAgreement]) -> str:
    """Text for people."""
    names = list(rows[0].spearman) if rows else []
    lines = ["turn  samples  tasks" + "".join(f"{name:>18}" for name in names)]
    for row in rows:
        cells = "".join(f"{row.spearman[n]:>10.3f} ± {row.error[n]:.3f}" for n in names)
        lines.append(f"{row.turn:>4}  {row.samples:>7}  {row.tasks:>5}{cells}")
    return "\n".join(lines)
