"""`python -m rollout.sim.study`: every policy in every cell, several seeds, and STUDY.md out of it.

It goes on where it was stopped: each finished run is a line of `study/raw.jsonl`; the report is made, policy by
policy, of those of this code, or of the last line's where there are none. `--quick` is a fraction of `--full`
with the same runs: 32B, correlation 0.6, batch 16 and 64, async_factor 1 and 2, three host caches, one seed.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from envclient.base.errors import ConfigError, main_guard
from envclient.base.files import write_atomic
from rollout.sim.compiled import compiled_copy
from rollout.sim.study_adopt import adopt
from rollout.sim.study_cells import runs
from rollout.sim.study_csv import cells_csv
from rollout.sim.study_plot import draw
from rollout.sim.study_report import document
from rollout.sim.study_results import Results
from rollout.sim.study_runs import Row, code_digest, is_current, make_missing, policy_name, read_rows
from rollout.sim.study_tune import tuning_runs

HOME = Path(__file__).resolve().parent


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rollout.sim.study", description=__doc__)
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--quick", action="store_true", help="a fraction, ≤ 20 minutes on 2 cores with --compile (default)"
    )
    size.add_argument("--full", action="store_true", help="all cells, hours")
    size.add_argument("--tune", action="store_true", help="the tuning of every policy, about 40 minutes of one core")
    parser.add_argument("--report-only", action="store_true", help="write STUDY.md from the runs that are there")
    parser.add_argument(
        "--adopt", type=int, metavar="N", help="first keep runs of other code where N of each kind come out equal"
    )
    parser.add_argument("--folder", type=Path, default=HOME, help="of STUDY.md and study/raw.jsonl")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--time-budget", type=float, metavar="MIN", help="begin no run later than this")
    parser.add_argument(
        "--compile", type=Path, metavar="FOLDER", help="run a copy compiled by mypyc, made in this folder"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    for option in ("processes", "adopt"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise ConfigError(f"--{option} is {value}", "give at least 1")
    raw, tuned = (args.folder / "study" / f"{name}.jsonl" for name in ("raw", "tune"))
    wanted = runs(args.full)
    missing = 0
    if not args.report_only:
        if args.compile is not None:
            # The processes that simulate get this process's path, and import the compiled modules.
            sys.path.insert(0, str(compiled_copy(args.compile / code_digest()).resolve()))
        budget_s = None if args.time_budget is None else args.time_budget * 60
        path, some = (tuned, tuning_runs()) if args.tune else (raw, wanted)
        if args.adopt is not None:
            adopt(path, args.adopt, processes=args.processes)
        missing = make_missing(path, some, processes=args.processes, budget_s=budget_s)
    if args.tune and not args.report_only:
        return 1 if missing else 0  # which settings the study takes is for `study_cells.TUNED` to say
    asked = set(wanted)
    rows = [row for row in read_rows(raw) if row.run in asked]
    if not rows:
        raise ConfigError(f"{raw} has no run of this study", "leave --report-only out")
    results = Results(_of_one_code_each(rows))
    tuning = read_rows(tuned)
    text = document(results, full=args.full, wanted=len(wanted), tuning=tuning)
    write_atomic(args.folder / "STUDY.md", text.encode())
    write_atomic(args.folder / "study" / "cells.csv", cells_csv(results).encode())
    draw(results, args.folder / "study", full=args.full)
    print(f"wrote {args.folder / 'STUDY.md'}: {len(results.rows)} of {len(wanted)} runs", file=sys.stderr)
    return 1 if missing else 0


def _of_one_code_each(rows: Sequence[Row]) -> list[Row]:
    """Policy by policy those of this code, or of the last line's; each run once, though two codes' may be adopted."""
    codes = {policy_name(row.policy): row.code for row in rows}
    codes |= {policy_name(row.policy): row.code for row in rows if is_current(row)}
    return list({row.run: row for row in rows if row.code == codes[policy_name(row.policy)]}.values())


if __name__ == "__main__":
    main_guard(main)
