"""`python -m rollout.predictor.collect runs/NAME … --out samples.jsonl`: episodes of runs as samples to train on.

Runs must have been made with `rollout.predictor.record=true`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from envclient.base.errors import main_guard
from rollout.predictor.data import EpisodeSamples, make_samples, write_samples
from rollout.predictor.episodes import read_episodes


def collect(runs: Sequence[Path]) -> list[EpisodeSamples]:
    """Samples of all `runs`. Raises: ConfigError: a run without episodes."""
    return [sample for run in runs for sample in make_samples(read_episodes(run))]


def summary(samples: Sequence[EpisodeSamples]) -> str:
    """One line for people."""
    held = [sample for sample in samples if sample.held_out]
    tasks = {sample.task_id for sample in samples}
    return (
        f"{len(samples)} episodes of {len(tasks)} tasks, {sum(len(s.turns) for s in samples)} samples; held out: "
        f"{len(held)} episodes of {len({s.task_id for s in held})} tasks"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rollout.predictor.collect")
    parser.add_argument("runs", type=Path, nargs="+", help="run folders")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    arguments = parser.parse_args(argv)
    samples = collect(arguments.runs)
    write_samples(samples, arguments.out)
    print(f"{arguments.out}: {summary(samples)}")
    return 0


if __name__ == "__main__":
    main_guard(main)
