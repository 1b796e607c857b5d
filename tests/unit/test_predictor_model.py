"""The length model learns what the text says, comes back from its folder as it was, and refuses what does not fit."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from scipy import stats
from transformers import Qwen3Config, Qwen3Model

from envclient.base.errors import ConfigError
from envclient.base.files import write_json_atomic
from rollout.predictor import evaluate, latency, train
from rollout.predictor.agreement import by_turn, spearman
from rollout.predictor.data import EpisodeSamples, make_samples, window, write_samples
from rollout.predictor.evaluate import compare, predict
from rollout.predictor.model import LengthModel, load
from rollout.predictor.train import TrainSettings, batches, fit, sequences
from tests.conftest import MODEL
from tests.unit.predictor_kit import told_episodes


def small(seed: int = 0) -> LengthModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
    )
    return LengthModel(Qwen3Model(config), bias=2.0)


@pytest.fixture(scope="module")
def samples() -> list[EpisodeSamples]:
    return make_samples(told_episodes(160))


@pytest.fixture(scope="module")
def trained(samples: list[EpisodeSamples]) -> tuple[LengthModel, dict[str, object]]:
    model = small()
    return model, fit(model, samples, TrainSettings(epochs=12, lr=3e-3, batch_tokens=512, context_tokens=64))


def test_it_learns_what_the_text_says(
    samples: list[EpisodeSamples], trained: tuple[LengthModel, dict[str, object]]
) -> None:
    """The prompt tells the length exactly; siblings tell it only once one has finished, the prompt's length never."""
    model, report = trained
    assert report["loss_after"] < 0.35 * report["loss_before"]  # type: ignore[operator]
    first, *later = compare(samples, model, 64)
    assert (first.turn, first.tasks > 20) == ("0", True)
    assert first.spearman["predictor"] > 0.85
    assert first.spearman["predictor"] > first.spearman["siblings"] + 0.1
    # Before a turn nothing was generated: what is left of the siblings' mean is all of it.
    assert first.spearman["siblings' rest"] == first.spearman["siblings"]
    assert any(row.spearman["siblings' rest"] != row.spearman["siblings"] for row in later)
    assert first.spearman["prompt"] == 0.0


def test_a_forward_pass_serves_all_turns_of_an_episode(samples: list[EpisodeSamples]) -> None:
    """What the pass over the whole episode says at a turn's end is what the turn's own text gives."""
    model = small(1)
    torch.nn.init.normal_(model.score.weight)
    some = max(samples, key=lambda sample: len(sample.turns))
    [whole] = sequences([some], 64)
    assert (whole.ends, len(whole.token_ids)) == ([t.context_tokens for t in some.turns], some.turns[-1].context_tokens)
    with torch.no_grad():
        at_ends = model([whole.token_ids])[0, [end - 1 for end in whole.ends]]
    alone = model.predict([some.token_ids[:end] for end in whole.ends])
    assert alone == pytest.approx(at_ends.tolist(), abs=1e-5)
    # Beyond the window each turn is an input of its own, cut in the middle.
    cut = sequences([some], 16)
    ends = [end for end in whole.ends if end > 16]
    assert sorted(item.token_ids[-1] for item in cut[1:]) == sorted(some.token_ids[end - 1] for end in ends)
    assert all(8 < len(item.token_ids) == item.ends[-1] <= 16 for item in cut[1:])
    assert sum(len(item.ends) for item in cut) == len(some.turns)
    assert {tuple(item.token_ids[:4]) for item in cut} == {tuple(some.token_ids[:4])}


def test_batches_hold_every_item_once_within_the_budget(samples: list[EpisodeSamples]) -> None:
    items = sequences(samples, 64)
    made = list(batches(items, 200, random.Random(0)))
    assert sorted(map(id, items)) == sorted(id(item) for batch in made for item in batch)
    assert max(len(batch) * max(len(item.token_ids) for item in batch) for batch in made) <= 200


def test_a_saved_model_predicts_the_same(tmp_path: Path, trained: tuple[LengthModel, dict[str, object]]) -> None:
    model, _ = trained
    model.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["architectures"], config["num_labels"]) == (["Qwen3ForSequenceClassification"], 1)
    texts = [[3, 20, 41, 42], [3, 23, 50]]
    assert load(tmp_path).predict(texts) == model.predict(texts)


def test_what_does_not_fit_is_refused(samples: list[EpisodeSamples], tmp_path: Path) -> None:
    settings = TrainSettings(context_tokens=64)
    alien = [msgspec.structs.replace(sample, token_ids=[*sample.token_ids[:-1], 64]) for sample in samples]
    with pytest.raises(ConfigError, match="token 64 is beyond the predictor's vocabulary of 64"):
        fit(small(), alien, settings)
    long = [msgspec.structs.replace(s, turns=[msgspec.structs.replace(s.turns[0], context_tokens=99)]) for s in samples]
    with pytest.raises(ConfigError, match="64 positions"):
        fit(small(), long, TrainSettings(context_tokens=65))
    with pytest.raises(ConfigError, match="too few"):
        fit(small(), samples[:1], settings)
    with pytest.raises(ConfigError, match="name a folder"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(ConfigError, match="LlamaForCausalLM"):
        load(tmp_path)


def test_spearman_is_scipys_with_ties_too() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        a, b = rng.integers(0, 12, 50).astype(float), rng.random(50)
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)
    assert spearman(np.ones(5), np.arange(5.0)) == 0.0


def test_rows_are_by_turn_and_over_all() -> None:
    truth = [float(n) for n in range(60)]
    turns = [n % 2 for n in range(50)] + [2] * 10
    rows = by_turn(turns, [f"t{n // 3}" for n in range(60)], truth, {"right": truth, "wrong": truth[::-1]})
    assert [(row.turn, row.samples) for row in rows] == [("0", 25), ("1", 25), ("all", 60)], "turn 2 has too few"
    assert rows[0].spearman == {"right": 1.0, "wrong": pytest.approx(-1.0)}
    assert rows[0].log_error["right"] == 0.0


def test_seconds_of_answers_stand_against_each_kind_of_tool(
    samples: list[EpisodeSamples], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run's predictor is slower than its own tools, faster than those on real repositories."""
    numbers = {"asked": 9.0, "used": 8.0, "in_time": 1.0, "answer_p50_s": 0.01, "answer_p95_s": 0.02}
    numbers |= {"tool_p50_s": 0.0005, "tool_p95_s": 0.001}
    (tmp_path / "predictor").mkdir()
    write_json_atomic(tmp_path / "predictor" / "worker-w0.json", numbers)
    data, report = tmp_path / "samples.jsonl", tmp_path / "report.json"
    write_samples(samples, data)
    assert evaluate.main(["--data", str(data), "--run", str(tmp_path), "--json", str(report)]) == 0
    said = capsys.readouterr().out
    assert "predictor of worker w0: p95 20 ms is NOT below the median of worker w0's tools, 0.5 ms" in said
    assert "predictor of worker w0: p95 20 ms is below the median of SWE tools as measured, 35 ms" in said
    rows = {(row["answers"], row["tools"]): row for row in json.loads(report.read_text())["latency"]}
    assert len(rows) == 6 == said.count("the median of")
    embedded = rows["embedded estimate", "worker w0's tools"]
    assert embedded["met"] and embedded["p95_s"] > 1e-7
    simulated = rows["predictor of worker w0", "SWE tools as simulated"]
    assert 0.05 < simulated["tool_median_s"] < 0.2
    assert 0.9 < simulated["outlasting"] < 1.0
    assert latency.worker_line("w1", {"asked": 3.0}) == "worker w1: no answer in 3 questions"
    with pytest.raises(ConfigError, match="--data, or --run"):
        evaluate.main([])


def test_train_and_evaluate_as_a_person_runs_them(
    samples: list[EpisodeSamples], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped tiny model as trunk: its tokenizer goes with it, and the table is what `compare` says."""
    data, out = tmp_path / "samples.jsonl", tmp_path / "model"
    write_samples(samples, data)

    def call(main: Callable[[list[str]], int], *arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    fitting = ["--data", data, "--init", MODEL, "--out", out, "--epochs", 1]
    with pytest.raises(ConfigError, match="--out"):
        train.main(["--data", str(data), "--init", str(MODEL), "--out", str(MODEL)])
    assert "loss" in call(train.main, *fitting)
    assert (out / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()
    numbers, picture = tmp_path / "numbers.json", tmp_path / "plot.png"
    text = call(evaluate.main, "--data", data, "--model", out, "--json", numbers, "--plot", picture)
    rows = json.loads(numbers.read_text())["held_out"]
    assert len(text.splitlines()) == 1 + len(rows) >= 4
    assert picture.read_bytes()[:4] == b"\x89PNG"
    model = load(out)
    assert rows[0]["spearman"]["predictor"] == compare(samples, model, 4096)[0].spearman["predictor"]
    held = [sample for sample in samples if sample.held_out]
    # One pass an episode, or a window a turn: the same numbers as turn by turn.
    for limit in (4096, 9):
        alone = [model.predict([window(s.token_ids[: t.context_tokens], limit)])[0] for s in held[:5] for t in s.turns]
        found = [value for row in predict(model, held[:5], limit) for value in row]
        assert found == pytest.approx([max(1.0, math.expm1(score)) for score in alone], rel=1e-4)
