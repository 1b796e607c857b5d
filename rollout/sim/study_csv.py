"""Every cell and policy of a study as one CSV: what STUDY.md's tables leave out for want of room."""

from __future__ import annotations

import csv
import io
from statistics import median

from rollout.sim.study_cells import Cell
from rollout.sim.study_results import RATE, Results

FIGURES = (
    RATE,
    "t_next_s",
    "trained_length",
    "length_ratio",
    "length_ks",
    "discarded",
    "device_hit_rate",
    "host_hit_rate",
    "known_hit_rate",
)
"""Of `Result.row()`: each with the smallest, the median and the largest value over seeds."""


def cells_csv(results: Results) -> str:
    """One line a cell and policy, in the order of the runs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    spans = [f"{figure}_{part}" for figure in FIGURES for part in ("min", "median", "max")]
    writer.writerow([*Cell.__struct_fields__, "policy", "seeds", *spans])
    for cell, policy in dict.fromkeys((row.cell, row.policy) for row in results.rows):
        line = [getattr(cell, name) for name in Cell.__struct_fields__]
        line += [policy, len(results.seeds_of(cell, policy))]
        for figure in FIGURES:
            values = results.values(cell, policy, figure)
            line += [f"{value:.6g}" for value in (values[0], median(values), values[-1])]
        writer.writerow(line)
    return text.getvalue()
