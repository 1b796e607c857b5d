"""The table that people read: a row a policy, medians over seeds, and whether the lengths allow a comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from rollout.sim.metrics import Result

LENGTH_TOLERANCE = 0.02
"""A cell counts only where the mean trained length is within this share of the submitted stream's …"""
KS_TOLERANCE = 0.05
"""… and the distributions are no farther apart than this."""

_COLUMNS: tuple[tuple[str, str, Callable[[Result], float]], ...] = (
    ("Mtok/h", "{:.3f}", lambda r: r.trained_tokens_per_hour / 1e6),
    ("T_next s", "{:.0f}", lambda r: r.t_next_s),
    ("step s", "{:.0f}", lambda r: r.step_s),
    ("length", "{:.3f}", lambda r: r.length_ratio),
    ("KS", "{:.3f}", lambda r: r.length_ks),
    ("device", "{:.3f}", lambda r: r.device_hit_rate),
    ("host", "{:.3f}", lambda r: r.host_hit_rate),
    ("known", "{:.3f}", lambda r: r.known_hit_rate),
    ("active", "{:.1f}", lambda r: r.active_batch),
    ("discards", "{:.0f}", lambda r: float(r.discarded)),
    ("retract", "{:.0f}", lambda r: float(r.retractions)),
    ("trainer", "{:.2f}", lambda r: r.trainer_busy),
)


def comparable(result: Result) -> bool:
    """Whether the run trained what was submitted."""
    return abs(result.length_ratio - 1.0) <= LENGTH_TOLERANCE and result.length_ks <= KS_TOLERANCE


def table(results: Sequence[Result]) -> str:
    """Medians over seeds; `tokens/h` of each policy over the first one's in the last column."""
    names = list(dict.fromkeys(result.policy for result in results))
    header = ["policy", *(name for name, _, _ in _COLUMNS), "vs first"]
    rows = [header]
    base = 0.0
    for name in names:
        group = [result for result in results if result.policy == name]
        rate = median(result.trained_tokens_per_hour for result in group)
        base = base or rate
        cells = [form.format(median(value(result) for result in group)) for _, form, value in _COLUMNS]
        mark = "" if all(comparable(result) for result in group) else " *"
        rows.append([name, *cells, f"{rate / base:.2f}x{mark}" if base else "-"])
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(cell.rjust(w) if i else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    if any("*" in row[-1] for row in rows):
        lines.append(f"* trained and submitted lengths differ by more than {LENGTH_TOLERANCE:.0%} or KS {KS_TOLERANCE}")
    return "\n".join(lines)
