"""`python -m rollout.predictor.evaluate --data samples.jsonl --model FOLDER [--run RUN] [--json FILE] [--plot FILE]`.

Spearman's correlation between estimates and truth on held-out tasks, by turn. Compared: the predictor; the embedded
estimator as it stood at that moment of the run; the mean length of the siblings that had finished by then (the training
tasks' where none has), and that less what was generated; the prompt's length; and the mean (of logs) of predictor and
embedded estimate. `--run` adds the seconds of the answers against those of tools (`latency`); alone, it takes the run's
own episodes for data.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from envclient.base.errors import ConfigError, main_guard
from envclient.base.files import write_json_atomic
from rollout.predictor import latency
from rollout.predictor.agreement import TurnAgreement, by_turn, table
from rollout.predictor.collect import collect
from rollout.predictor.data import EpisodeSamples, read_samples, window
from rollout.predictor.model import LengthModel, load

_BATCH = 32


def predict(model: LengthModel, samples: Sequence[EpisodeSamples], limit: int) -> list[list[float]]:
    """Remaining tokens that the model predicts at every sample's turns."""
    texts: list[tuple[list[int], int, list[int]]] = []
    """Input, number of the sample, and the turns' ends in it: all in one where the window holds the episode."""
    for number, sample in enumerate(samples):
        ends = [turn.context_tokens for turn in sample.turns]
        if max(ends) <= limit:
            texts.append((sample.token_ids[: max(ends)], number, ends))
        else:
            cut = [window(sample.token_ids[:end], limit) for end in ends]
            texts += [(text, number, [len(text)]) for text in cut]
    found: list[list[float]] = [[] for _ in texts]
    order = sorted(range(len(texts)), key=lambda place: len(texts[place][0]))
    for begin in range(0, len(order), _BATCH):
        chosen = order[begin : begin + _BATCH]
        with torch.no_grad():
            scores = model([texts[place][0] for place in chosen])
        for row, place in enumerate(chosen):
            found[place] = [max(1.0, math.expm1(float(scores[row, end - 1]))) for end in texts[place][2]]
    predicted: list[list[float]] = [[] for _ in samples]
    for (_, number, _), values in zip(texts, found, strict=True):
        predicted[number] += values
    return predicted


def compare(samples: Sequence[EpisodeSamples], model: LengthModel | None, limit: int) -> list[TurnAgreement]:
    """The table's rows, over the held-out samples; without a model those of the simpler estimates.

    Raises:
        ConfigError: none are held out, or all are.
    """
    held = [sample for sample in samples if sample.held_out]
    totals = [s.turns[0].remaining_tokens for s in samples if not s.held_out]
    if not held or not totals:
        raise ConfigError(f"of {len(samples)} episodes {len(held)} are held out", "collect more tasks")
    usual = sum(totals) / len(totals)
    flat = [(sample, turn) for sample in held for turn in sample.turns]
    embedded = [turn.embedded_tokens for _, turn in flat]
    estimates: dict[str, list[float]] = {}
    if model is not None:
        estimates["predictor"] = [value for row in predict(model, held, limit) for value in row]
        pairs = zip(estimates["predictor"], embedded, strict=True)
        estimates["both"] = [math.sqrt((1 + a) * (1 + b)) - 1 for a, b in pairs]
    estimates["embedded"] = embedded
    siblings = [turn.siblings_tokens if turn.siblings else usual for _, turn in flat]
    estimates["siblings"] = siblings
    # Not cut off at 0: what is negative still orders.
    estimates["siblings' rest"] = [mean - turn.generated_tokens for mean, (_, turn) in zip(siblings, flat, strict=True)]
    estimates["prompt"] = [float(sample.turns[0].context_tokens) for sample, _ in flat]
    return by_turn(
        [turn.turn for _, turn in flat],
        [sample.task_id for sample, _ in flat],
        [turn.remaining_tokens for _, turn in flat],
        estimates,
    )


def plot(rows: Sequence[TurnAgreement], path: Path) -> None:
    """Spearman over turns, one line an estimate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    turns = [row for row in rows if row.turn != "all"]
    figure, axes = pyplot.subplots(figsize=(7, 4.2), dpi=130)
    for name in turns[0].spearman if turns else ():
        axes.errorbar(
            [int(row.turn) for row in turns],
            [row.spearman[name] for row in turns],
            yerr=[row.error[name] for row in turns],
            marker="o",
            capsize=3,
            label=name,
        )
    axes.axhline(0.0, color="0.7", linewidth=0.8)
    axes.set_xlabel("turns that had ended")
    axes.set_ylabel("Spearman, held-out tasks")
    axes.set_ylim(-0.5, 1.0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m rollout.predictor.evaluate")
    parser.add_argument("--data", type=Path, help="samples of rollout.predictor.collect; needed without --run")
    parser.add_argument("--model", type=Path, help="folder of rollout.predictor.train; none: simpler estimates only")
    parser.add_argument("--context-tokens", type=int, default=4096)
    parser.add_argument("--json", type=Path, help="file to write the numbers to")
    parser.add_argument("--plot", type=Path, help="PNG to draw")
    parser.add_argument("--run", type=Path, help="run with a predictor, for the seconds of its answers")
    arguments = parser.parse_args(argv)
    if arguments.data is None and arguments.run is None:
        raise ConfigError("nothing to evaluate on", "give --data, or --run")
    model = load(arguments.model) if arguments.model is not None else None
    samples = read_samples(arguments.data) if arguments.data is not None else collect([arguments.run])
    rows = compare(samples, model, arguments.context_tokens)
    report: dict[str, Any] = {"held_out": [asdict(row) for row in rows]}
    print(table(rows))
    if arguments.run is not None:
        report["workers"] = latency.workers(arguments.run)
        for worker, numbers in report["workers"].items():
            print(latency.worker_line(worker, numbers))
        verdicts = latency.verdicts(samples, report["workers"])
        report["latency"] = [asdict(verdict) | {"met": verdict.met} for verdict in verdicts]
        print(*verdicts, sep="\n")
    if arguments.json is not None:
        write_json_atomic(arguments.json, report)
    if arguments.plot is not None:
        plot(rows, arguments.plot)
    return 0


if __name__ == "__main__":
    main_guard(main)
