"""The random yardstick against a simulation of it, and the shipped model's folder."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.agents.scripted import Chances, curve, effort, exact_chances, main, pass_rate_at
from examples.tasks.repair_task import TaskReader
from tests.unit.tasks_kit import MODEL, records_of

CHANCES = st.lists(
    st.integers(1, 12).flatmap(lambda n: st.builds(Chances, candidates=st.just(n), passing=st.integers(0, n))),
    min_size=1,
)


def test_effort_is_what_random_edits_give() -> None:
    rng = random.Random(0)
    chances = [Chances(candidates=7, passing=1), Chances(candidates=3, passing=2), Chances(candidates=5, passing=0)]
    passed = edits = 0
    rounds = 20_000
    for _ in range(rounds):
        for chance in chances:
            order = rng.sample(range(chance.candidates), chance.candidates)[:3]
            hit = next((place for place, edit in enumerate(order) if edit < chance.passing), None)
            passed += hit is not None
            edits += len(order) if hit is None else hit + 1
    point = effort(chances, 3)
    assert point.pass_rate == pytest.approx(passed / rounds / 3, abs=0.01)
    assert point.mean_edits == pytest.approx(edits / rounds / 3, abs=0.03)


@given(CHANCES)
def test_more_edits_never_pass_less_and_all_edits_find_what_there_is(chances: list[Chances]) -> None:
    points = curve(chances)
    for less, more in pairwise(points):
        assert less.pass_rate <= more.pass_rate + 1e-9 and less.mean_edits <= more.mean_edits
    assert points[-1].pass_rate == pytest.approx(sum(chance.passing > 0 for chance in chances) / len(chances))
    for point in points:
        assert pass_rate_at(chances, point.mean_edits) == pytest.approx(point.pass_rate)


def test_the_command_reads_the_records_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--exact", "--split", "train", "--mean-edits", "2"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert 0.05 < summary["first_edit_pass"] < summary["pass_at_mean_edits"]["2.0"] < 1.0
    reader = TaskReader()
    assert all(chance.passing == 1 for chance in exact_chances([reader.read(r) for r in records_of("funcy", 5)]))


def test_the_shipped_model_is_the_tiny_qwen3_of_the_recipe() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(MODEL)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert sum(parameter.numel() for parameter in model.parameters()) == 328_512
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert len(tokenizer) == model.config.vocab_size == 2048
    assert model.config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (Path(MODEL) / "model.safetensors").stat().st_size < 1_400_000


def test_the_shipped_tokenizer_is_made_again_from_the_standard_library(tmp_path: Path) -> None:
    import platform

    from examples.model.make import main as make

    recipe = json.loads((Path(MODEL) / "recipe.json").read_text())
    if platform.python_version() != recipe["python"]:
        pytest.skip(f"the corpus is the standard library of Python {recipe['python']}; this is another")
    assert make(["--out", str(tmp_path), "--only-tokenizer"]) == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (Path(MODEL) / name).read_bytes()


def test_loss_weights_mark_exactly_what_the_assistant_writes() -> None:
    from transformers import AutoTokenizer

    from examples.model.demonstrations import SourceFunction, demonstration
    from examples.model.warmup import weighted_tokens

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    function = SourceFunction(
        qualname="f", lines=("def f(a, b):", "    if a < b:", "        return a + 1", "    return b")
    )
    messages = demonstration(random.Random(3), function)
    assert messages is not None
    chat = [{"role": message.role, "content": message.content} for message in messages]
    ids, weights = weighted_tokens(tokenizer, chat, 0.2)
    said = tokenizer.decode([token for token, weight in zip(ids, weights, strict=True) if weight == 1.0])
    assert said == "".join(f"{message.content}<|im_end|>" for message in messages if message.role == "assistant")
