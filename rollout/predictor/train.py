"""`python -m rollout.predictor.train --data samples.jsonl | --run runs/NAME --init FOLDER --out FOLDER`.

Fits trunk and head to log(1 + remaining tokens) with a Huber loss. An episode that fits the window is one sequence with
a target at every turn's end, so its tokens are computed once for all of its samples. A part of the training tasks
judges every epoch; the best one is kept. Called by the refresh in a process of its own, with a bound on its time.
"""

from __future__ import annotations

import argparse
import copy
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from envclient.base.errors import ConfigError, main_guard
from envclient.base.files import write_json_atomic
from rollout.predictor.collect import collect, summary
from rollout.predictor.data import EpisodeSamples, draw, read_samples, window
from rollout.predictor.model import LengthModel, load

REPORT = "train.json"
_JUDGED_SHARE = 0.15
_HEAD_LR_FACTOR = 10.0
_BETAS = (0.9, 0.98)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSettings:
    """How it is trained."""

    epochs: int = 32
    """At most; the best so far is kept. A tiny trunk still learns after 15; `minutes` bounds a large one."""
    minutes: float = 30.0
    """Training ends after so many, with the best epoch so far."""
    lr: float = 3e-4
    """Of the trunk; the head, which begins from nothing, learns ten times faster."""
    batch_tokens: int = 8192
    context_tokens: int = 4096
    """Longest input, as `rollout.predictor.context_tokens`."""
    huber: float = 1.0
    """Error in log(1 + tokens) from which on the loss is linear."""
    weight_decay: float = 0.01
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Example:
    """One input with targets: log(1 + remaining) after each of `ends` tokens."""

    token_ids: list[int]
    ends: list[int]
    targets: list[float]


def sequences(samples: Iterable[EpisodeSamples], limit: int) -> list[Example]:
    """Inputs of at most `limit` tokens: one for all turns whose context fits whole, one more for each that does not."""
    made = []
    for sample in samples:
        target = {turn.context_tokens: _log1p(turn.remaining_tokens) for turn in sample.turns}
        whole = [end for end in target if end <= limit]
        if whole:
            made.append(Example(sample.token_ids[: max(whole)], whole, [target[end] for end in whole]))
        for end in target.keys() - set(whole):
            text = window(sample.token_ids[:end], limit)
            made.append(Example(text, [len(text)], [target[end]]))
    return made


def _log1p(tokens: float) -> float:
    return float(torch.log1p(torch.tensor(float(tokens), dtype=torch.float64)))


def batches(items: Sequence[Example], tokens: int, rng: random.Random) -> Iterator[list[Example]]:
    """All items once, in batches of similar lengths and at most `tokens` tokens (padding counts), in random order."""
    ordered = sorted(items, key=lambda item: len(item.token_ids) * (1.0 + 0.2 * rng.random()))
    made: list[list[Example]] = [[]]
    for item in ordered:
        longest = max([len(item.token_ids), *(len(other.token_ids) for other in made[-1])])
        if made[-1] and longest * (len(made[-1]) + 1) > tokens:
            made.append([])
        made[-1].append(item)
    rng.shuffle(made)
    yield from (batch for batch in made if batch)


def batch_loss(model: LengthModel, batch: Sequence[Example], huber: float) -> tuple[torch.Tensor, int]:
    """Summed loss and number of targets."""
    scores = model([item.token_ids for item in batch])
    rows = [row for row, item in enumerate(batch) for _ in item.ends]
    columns = [end - 1 for item in batch for end in item.ends]
    targets = torch.tensor([target for item in batch for target in item.targets], device=scores.device)
    loss = functional.huber_loss(scores[rows, columns], targets, delta=huber, reduction="sum")
    return loss, len(rows)


@torch.no_grad()
def mean_loss(model: LengthModel, items: Sequence[Example], settings: TrainSettings) -> float:
    """Mean loss of a sample."""
    model.eval()
    total, count = 0.0, 0
    for batch in batches(items, settings.batch_tokens, random.Random(0)):
        loss, number = batch_loss(model, batch, settings.huber)
        total, count = total + float(loss), count + number
    return total / max(1, count)


def fit(model: LengthModel, samples: Sequence[EpisodeSamples], settings: TrainSettings) -> dict[str, Any]:
    """Train `model` in place; returns the report.

    Raises:
        ConfigError: too few samples, or tokens that the model's vocabulary or positions do not hold.
    """
    begun = time.monotonic()
    check(model, samples, settings)
    tasks = sorted({s.task_id for s in samples if not s.held_out}, key=lambda task: draw(task, "judge"))
    if len(tasks) < 2:
        raise ConfigError(
            f"{len(samples)} episodes of {len(tasks)} tasks that are not held out are too few to train on",
            "collect more tasks",
        )
    judges = set(tasks[: max(1, round(_JUDGED_SHARE * len(tasks)))])
    judged = sequences((s for s in samples if s.task_id in judges), settings.context_tokens)
    learnt = sequences((s for s in samples if s.task_id in set(tasks) - judges), settings.context_tokens)
    rng = random.Random(settings.seed)
    torch.manual_seed(settings.seed)
    before = mean_loss(model, judged, settings)
    best, best_state, best_epoch = before, copy.deepcopy(model.state_dict()), 0
    groups = [
        {"params": model.trunk.parameters(), "lr": settings.lr},
        {"params": model.score.parameters(), "lr": settings.lr * _HEAD_LR_FACTOR, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=_BETAS, weight_decay=settings.weight_decay)
    highest = [group["lr"] for group in optimizer.param_groups]
    history = []
    for epoch in range(1, settings.epochs + 1):
        model.train()
        steps = list(batches(learnt, settings.batch_tokens, rng))
        for step, batch in enumerate(steps):
            # Falls to a tenth: over the epochs, or over the minutes where these end first.
            spent = max((epoch - 1 + step / len(steps)) / settings.epochs, _minutes(begun) / settings.minutes)
            for group, lr in zip(optimizer.param_groups, highest, strict=True):
                group["lr"] = lr * max(0.1, 1.0 - 0.9 * spent)
            loss, count = batch_loss(model, batch, settings.huber)
            optimizer.zero_grad()
            (loss / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if _minutes(begun) > settings.minutes:
                break
        loss_now = mean_loss(model, judged, settings)
        history.append(loss_now)
        if loss_now < best:
            best, best_state, best_epoch = loss_now, copy.deepcopy(model.state_dict()), epoch
        if _minutes(begun) > settings.minutes:
            break
    model.load_state_dict(best_state)
    model.eval()
    return {
        "loss_before": before,
        "loss_after": best,
        "losses": history,
        "best_epoch": best_epoch,
        "sequences": len(learnt),
        "judges": len(judged),
        "seconds": time.monotonic() - begun,
    }


def _minutes(begun: float) -> float:
    return (time.monotonic() - begun) / 60


def check(model: LengthModel, samples: Sequence[EpisodeSamples], settings: TrainSettings) -> None:
    """Raises ConfigError where inputs do not fit the model."""
    highest = max((max(sample.token_ids) for sample in samples), default=0)
    if highest >= model.vocabulary:
        raise ConfigError(
            f"token {highest} is beyond the predictor's vocabulary of {model.vocabulary}",
            "use a trunk with the policy's tokenizer",
        )
    longest = max((turn.context_tokens for sample in samples for turn in sample.turns), default=0)
    if min(longest, settings.context_tokens) > model.positions:
        raise ConfigError(
            f"inputs of {min(longest, settings.context_tokens)} tokens are beyond the trunk's {model.positions} "
            "positions",
            "lower context_tokens",
        )


def typical_log(samples: Sequence[EpisodeSamples]) -> float:
    """Mean target: where a fresh head begins."""
    logs = [_log1p(turn.remaining_tokens) for sample in samples for turn in sample.turns]
    return sum(logs) / max(1, len(logs))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    defaults = TrainSettings()
    parser = argparse.ArgumentParser(prog="python -m rollout.predictor.train")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, help="samples of rollout.predictor.collect")
    source.add_argument("--run", type=Path, help="run folder with recorded episodes")
    parser.add_argument("--init", type=Path, required=True, help="Qwen3 folder, or an earlier predictor")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--epochs", type=int, default=defaults.epochs)
    parser.add_argument("--minutes", type=float, default=defaults.minutes)
    parser.add_argument("--lr", type=float, default=defaults.lr)
    parser.add_argument("--batch-tokens", type=int, default=defaults.batch_tokens)
    parser.add_argument("--context-tokens", type=int, default=defaults.context_tokens)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    a = parser.parse_args(argv)
    if (a.out / "config.json").exists():
        raise ConfigError(f"--out {a.out} already holds a model", "name another folder")
    samples = read_samples(a.data) if a.data is not None else collect([a.run])
    model = load(a.init, typical_log(samples))
    if torch.cuda.is_available():
        model.cuda()  # type: ignore[no-untyped-call]
    settings = TrainSettings(
        epochs=a.epochs,
        minutes=a.minutes,
        lr=a.lr,
        batch_tokens=a.batch_tokens,
        context_tokens=a.context_tokens,
        seed=a.seed,
    )
    print(summary(samples), flush=True)
    report = fit(model, samples, settings)
    model.save(a.out)
    write_json_atomic(a.out / REPORT, report)
    print(
        f"{a.out}: loss {report['loss_before']:.4f} before, {report['loss_after']:.4f} after epoch "
        f"{report['best_epoch']}, {report['seconds']:.0f} s"
    )
    return 0


if __name__ == "__main__":
    main_guard(main)
