"""`python -m rollout.predictor.collect runs/NAME … --out samples.jsonl`: episodes of runs as samples to train on.

Runs must have been made with `rollout.predictor.record=true`. `--sessions` takes the coding sessions that come with
`rollout.data` instead: lengths without text or siblings, which only the simpler estimates can be judged by.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from envclient.base.errors import ConfigError, main_guard
from rollout.predictor.data import EpisodeSamples, make_samples, write_samples
from rollout.predictor.episodes import EpisodeRow, TurnRow, read_episodes
from rollout.sim.config import WorkloadConfig
from rollout.sim.recordings import sessions


def collect(runs: Sequence[Path]) -> list[EpisodeSamples]:
    """Samples of all `runs`. Raises: ConfigError: a run without episodes."""
    return [sample for run in runs for sample in make_samples(read_episodes(run))]


def coding_sessions() -> list[EpisodeSamples]:
    """The shipped sessions, one after the other, each a task of its own."""
    episodes: list[EpisodeRow] = []
    seq = 0
    for number, session in enumerate(sessions(WorkloadConfig())):
        turns, context = [], session.prompt_tokens
        for place, (output, appended) in enumerate(zip(session.outputs, session.appended, strict=True), start=1):
            turns.append(TurnRow(seq=seq + place, context_tokens=context, output_tokens=output))
            context += output + appended
        episodes.append(
            EpisodeRow(
                trajectory_id=f"s{number}.0.0.0",
                group_id=f"s{number}.0",
                task_id=f"session{number}",
                started_seq=seq,
                ended_seq=seq + len(turns) + 1,
                token_ids=[],
                turns=turns,
            )
        )
        seq += len(turns) + 2
    return make_samples(episodes)


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
    parser.add_argument("runs", type=Path, nargs="*", help="run folders")
    parser.add_argument("--sessions", action="store_true", help="the shipped coding sessions instead")
    parser.add_argument("--out", type=Path, required=True, help="JSONL file to write")
    arguments = parser.parse_args(argv)
    if bool(arguments.runs) is arguments.sessions:
        raise ConfigError("nothing, or two things, to collect from", "give run folders, or --sessions alone")
    samples = coding_sessions() if arguments.sessions else collect(arguments.runs)
    write_samples(samples, arguments.out)
    print(f"{arguments.out}: {summary(samples)}")
    return 0


if __name__ == "__main__":
    main_guard(main)
