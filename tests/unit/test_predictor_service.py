"""The service: what it answers, when a refresh is served, and which settings are refused before anything starts."""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3Model

from envclient.base.errors import ConfigError, VenusError, WireError
from envclient.base.files import read_json, write_json_atomic
from rollout.config import PredictorConfig
from rollout.predictor.model import LengthModel, load
from rollout.predictor.questions import Questions
from rollout.predictor.refresh import Refresher, current_model, newest_checkpoint
from rollout.predictor.serve import Predictor, listening
from rollout.predictor.settings import check_settings
from rollout.protocol import PredictRequest
from tests.conftest import MODEL
from tests.unit.worker_kit import run


def saved(folder: Path, seed: int) -> LengthModel:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
    )
    model = LengthModel(Qwen3Model(config), bias=3.0)
    torch.nn.init.normal_(model.score.weight)
    model.save(folder)
    return load(folder)


def question(ids: list[int], trajectory_id: str = "p0") -> PredictRequest:
    return PredictRequest(trajectory_id=trajectory_id, turn=1, token_ids=ids)


def test_it_answers_with_its_model_on_the_window_and_with_the_next_one_after_a_swap(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a", 0), saved(tmp_path / "b", 1)
    config = PredictorConfig(engine="torch", context_tokens=16, slots=3)
    long, short = list(range(1, 41)), [4, 5, 6]

    def wanted(model: LengthModel) -> list[float]:
        scores = model.predict([long[:4] + long[-12:], short])
        return [max(1.0, math.expm1(score)) for score in scores]

    async def scenario() -> None:
        predictor = Predictor(tmp_path, config, "token")
        assert (await predictor.predict(question(short))).remaining_tokens is None
        for folder, model in (("a", first), ("b", second)):
            await predictor.use(tmp_path / folder)
            asked = [question(ids, f"p{place}") for place, ids in enumerate([long, short] * 4)]
            replies = await asyncio.gather(*map(predictor.predict, asked))
            assert [r.remaining_tokens for r in replies] == pytest.approx(wanted(model) * 4, rel=1e-4)
        await predictor.stop()

    run(scenario())
    assert wanted(first) != pytest.approx(wanted(second), rel=0.01)


class SlowScorer:
    """Takes the scorer's place: answers the inputs' lengths when it is told to."""

    def __init__(self) -> None:
        self.calls: list[list[Sequence[int]]] = []
        self.gates: list[asyncio.Event] = []

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        self.calls.append(list(sequences))
        self.gates.append(asyncio.Event())
        await self.gates[-1].wait()
        if [99] in sequences:
            raise WireError("no such token")
        return [float(len(sequence)) for sequence in sequences]


def test_questions_are_asked_together_the_newest_first_and_each_trajectory_once() -> None:
    async def scenario() -> None:
        scorer = SlowScorer()
        questions = Questions(scorer.score, most=3, patience_s=9.0, clock=lambda: 0.0)

        async def ask(name: str, *token_ids: int, turn: int = 2) -> asyncio.Task[float | None]:
            task = asyncio.create_task(questions.ask(name, turn, token_ids))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            return task

        first, second = await ask("a", 1), await ask("b", 1, 2)
        assert scorer.calls == [[(1,)], [(1, 2)]], "two calls at once, no more"
        waiting = [await ask(name, *range(3 + place)) for place, name in enumerate("cdefg")]
        again = await ask("d", *range(9), turn=3)
        assert await waiting[1] is None, "d has gone on"
        assert await (await ask("d", 1, turn=1)) is None, "it comes late"
        scorer.gates[0].set()
        assert await first == 1.0
        await asyncio.sleep(0)
        assert [len(sequence) for sequence in scorer.calls[2]] == [9, 7, 6], "the newest three"
        assert not second.done() and len(scorer.calls) == 3
        for gate in scorer.gates:
            gate.set()
        assert [await again, await waiting[4], await waiting[3], await second] == [9.0, 7.0, 6.0, 2.0]
        await asyncio.sleep(0)
        assert [len(sequence) for sequence in scorer.calls[3]] == [5, 3]
        scorer.gates[3].set()
        assert [await waiting[0], await waiting[2]] == [3.0, 5.0]

    run(scenario())


def test_no_more_is_asked_together_than_is_computed_in_a_moment() -> None:
    """One call after the other. Where inputs are dear they are few; where only a call is, as many as there are."""

    async def scenario() -> list[list[int]]:
        now, costs, sizes = 0.0, [0.0, 0.0], []
        turn = asyncio.Lock()

        async def score(sequences: Sequence[Sequence[int]]) -> list[float]:
            nonlocal now
            async with turn:
                await asyncio.sleep(0)
                now += costs[0] + costs[1] * len(sequences)
            sizes[-1].append(len(sequences))
            return [1.0] * len(sequences)

        questions = Questions(score, most=16, patience_s=999.0, clock=lambda: now)
        for pair in ((0.0, 0.02), (0.028, 0.0005), (0.0, 0.02), (0.0, 0.001)):  # seconds of a call, and of an input
            costs[:] = pair
            sizes.append([])
            for _ in range(8):
                await asyncio.gather(*(questions.ask(f"p{place}", 1, [1]) for place in range(40)))
        return sizes

    dear, fixed, dear_again, cheap = run(scenario())
    assert max(dear[12:]) <= 4 and max(dear_again[12:]) <= 4
    assert sum(size == 16 for size in fixed) >= 8 and max(cheap[-10:]) == 16


def test_a_question_that_nobody_waits_for_is_not_computed() -> None:
    async def scenario() -> None:
        now, scorer = 0.0, SlowScorer()
        questions = Questions(scorer.score, most=1, patience_s=5.0, clock=lambda: now)
        asked = []
        for name in "abcd":
            asked.append(asyncio.create_task(questions.ask(name, 1, [1] * (len(asked) + 1))))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            now += 2.0
        now = 10.0
        scorer.gates[0].set()
        assert await asked[0] == 1.0
        assert await asked[2] is None, "asked 6 s ago"
        assert [len(inputs[0]) for inputs in scorer.calls] == [1, 2, 4], "the newest, and not the third"
        for gate in scorer.gates:
            gate.set()
        assert [await asked[1], await asked[3]] == [2.0, 4.0]

    run(scenario())


def test_what_cannot_be_scored_fails_and_the_next_is_asked() -> None:
    async def scenario() -> None:
        scorer = SlowScorer()
        questions = Questions(scorer.score, most=1, patience_s=9.0)
        asked = [
            asyncio.create_task(questions.ask(name, 1, [token])) for name, token in (("a", 99), ("b", 98), ("c", 97))
        ]
        while len(scorer.calls) < 3:
            await asyncio.sleep(0)
            for gate in scorer.gates:
                gate.set()
        with pytest.raises(WireError):
            await asked[0]
        assert [await asked[1], await asked[2]] == [1.0, 1.0]

    run(scenario())


class Refreshing:
    """A refresher whose training is made up: `losses` are those before and after, by step."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> None:
        self.run_dir = run_dir
        self.config = PredictorConfig(enabled=True, trunk=str(MODEL), **keys)
        self.served: list[str] = []
        self.began_from: list[str] = []
        self.losses: dict[int, tuple[float, float]] = {}
        self.called = asyncio.Event()
        (run_dir / "predictor").mkdir()
        self.refresher = Refresher(run_dir, self.config, self.serve)
        monkeypatch.setattr(self.refresher, "_train", self.train)

    async def serve(self, folder: Path) -> None:
        self.served.append(folder.name)

    async def train(self, begin: Path, target: Path) -> None:
        self.began_from.append(begin.name)
        self.called.set()
        step = int(target.name.removeprefix("model-"))
        if step not in self.losses:
            raise VenusError("training ended with 1")
        target.mkdir()
        before, after = self.losses[step]
        write_json_atomic(target / "train.json", {"loss_before": before, "loss_after": after, "losses": []})

    def checkpoint(self, step: int, *, whole: bool = True) -> None:
        folder = self.run_dir / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        if whole:
            (folder / "manifest.json").write_text("{}")


def test_a_refresh_is_served_only_when_it_is_better(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Refreshing(tmp_path, monkeypatch)
    scene.losses = {1: (1.0, 1.0), 2: (0.8, 0.9), 3: (0.8, 0.7), 4: (0.7, 0.6)}

    async def scenario() -> list[bool]:
        return [await scene.refresher.refresh(step) for step in scene.losses]

    # The first of a run that has none is served whatever it is.
    assert run(scenario()) == [True, False, True, True]
    assert scene.served == ["model-000001", "model-000003", "model-000004"]
    assert scene.began_from == [MODEL.name, "model-000001", "model-000001", "model-000003"]
    assert read_json(tmp_path / "predictor" / "current.json") == {"model": "model-000004", "step": 4}
    assert current_model(tmp_path, scene.config) == tmp_path / "predictor" / "model-000004"
    assert sorted(path.name for path in (tmp_path / "predictor").glob("model-*")) == ["model-000003", "model-000004"]


def test_whole_checkpoints_are_noticed_and_a_failed_training_is_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout.predictor.refresh._POLL_S", 0.01)
    scene = Refreshing(tmp_path, monkeypatch)
    scene.losses = {12: (1.0, 0.5)}

    async def scenario() -> None:
        running = asyncio.create_task(scene.refresher.run())
        scene.checkpoint(2, whole=False)
        await asyncio.sleep(0.05)
        assert scene.began_from == [] and newest_checkpoint(tmp_path) == -1
        scene.checkpoint(9)
        await scene.called.wait()
        scene.called.clear()
        scene.checkpoint(12)
        await scene.called.wait()
        await asyncio.sleep(0.05)
        assert not running.done()
        running.cancel()

    run(scenario())
    assert scene.served == ["model-000012"]


def test_a_training_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr("rollout.predictor.refresh._START_S", 0.2)
    config = PredictorConfig(enabled=True, trunk=str(MODEL), refresh_minutes=0.0)

    async def scenario() -> None:
        async def serve(folder: Path) -> None:
            raise AssertionError(folder)

        (tmp_path / "predictor").mkdir()
        with pytest.raises(VenusError, match="more than 0 minutes"):
            await Refresher(tmp_path, config, serve).refresh(1)

    run(scenario())


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"engine": "vllm"}, "engine='vllm'.*sglang, torch"),
        ({"trunk": ""}, "model is empty.*trunk"),
        ({"refresh": False}, "model is empty.*refresh=true"),
        ({"trunk": "nowhere"}, "trunk='nowhere'"),
        ({"model": str(MODEL)}, "Qwen3ForCausalLM.*must be Qwen3ForSequenceClassification"),
        ({"context_tokens": 4096}, "beyond the 2048 positions"),
        ({"context_tokens": 0}, "context_tokens=0 must be above 0"),
        ({"kv_tokens": 100}, "kv_tokens=100 cannot hold"),
        ({"record_steps": -1}, "record_steps=-1"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"timeout_s": 0.0}, "timeout_s=0.0 must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(keys: dict[str, Any], match: str) -> None:
    good: dict[str, Any] = {"enabled": True, "trunk": str(MODEL), "context_tokens": 640}
    check_settings(PredictorConfig(**good))
    with pytest.raises(ConfigError, match=f"rollout.predictor.*{match}"):
        check_settings(PredictorConfig(**good | keys))
    if "record_steps" not in keys:
        check_settings(PredictorConfig(**good | keys | {"enabled": False}))


def test_it_listens_where_the_launcher_did_or_where_the_config_says() -> None:
    with listening(None, PredictorConfig()) as own:
        assert own.getsockname()[0] == "127.0.0.1" and own.getsockname()[1] > 0
        with listening(os.dup(own.fileno()), PredictorConfig(host="192.0.2.1")) as inherited:
            assert inherited.getsockname() == own.getsockname()


def test_a_resumed_run_begins_with_what_it_had(tmp_path: Path) -> None:
    config = PredictorConfig(model="given")
    assert current_model(tmp_path, config) == Path("given")
    assert current_model(tmp_path, PredictorConfig()) is None
    (tmp_path / "predictor").mkdir()
    (tmp_path / "predictor" / "current.json").write_text(json.dumps({"model": "model-000003", "step": 3}))
    assert current_model(tmp_path, config) == tmp_path / "predictor" / "model-000003"
