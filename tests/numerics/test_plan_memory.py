"""The memory plan against what a real actor holds: every number within 2%."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from envclient.base.errors import InvariantError
from megatron_venus.config import ActorConfig, ParallelConfig
from megatron_venus.loss import log_probs
from megatron_venus.plan import activations, places
from megatron_venus.plan.memory import StageMemory
from tests.numerics import kit, plan_kit
from tests.numerics.live_bytes import LiveBytes


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan_kit.make_model(tmp_path_factory.mktemp("dense"))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (log_probs, activations):
        monkeypatch.setattr(module, "CHUNK_LOGITS", plan_kit.CHUNK_ROWS * plan_kit.SHAPE["vocab_size"])


def coming(stage: StageMemory) -> int:
    """Bytes of the worst moment of a forward-backward pass, beside what lasts."""
    phases = stage.phases()
    return max(phases["backward"], phases["loss"])


def in_loss(stage: StageMemory) -> int:
    """Bytes of the worst moment of the loss, without what was there before: the batch's own tensors, and the rotary
    embedding's table, which Megatron keeps from pass to pass."""
    table = 4 * plan_kit.SHAPE["head_dim"]
    return stage.phases()["loss"] - plan_kit.TOKENS * (activations.INPUT_BYTES + table)


def kept(stage: StageMemory, parts: int = 1) -> int:
    """What the plan says of a forward pass: with what the last norm keeps in float32 (its input and the normalised
    input: the plan counts it in the loss), without the batch's own tensors, which were there before."""
    return stage.activations + plan_kit.TOKENS * (8 * plan_kit.SHAPE["hidden_size"] // parts - activations.INPUT_BYTES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("recompute", [False, True])
def test_activations(model: Path, dtype: str, recompute: bool) -> None:
    parallel = ParallelConfig(recompute=recompute)
    actor = kit.make_actor(model, dtype=dtype, parallel=parallel)
    measured = plan_kit.measure_activations(actor)
    plan = plan_kit.planned(model, parallel, dtype)
    assert kept(plan) == pytest.approx(measured["kept"], rel=0.02)
    assert coming(plan) == pytest.approx(measured["peak"], rel=0.02)
    assert in_loss(plan) == pytest.approx(measured["loss"], rel=0.02)


def test_activations_of_experts(tmp_path: Path) -> None:
    """Experts' loads are uneven here and even in the plan: what is kept agrees, the peak is bounded."""
    folder = plan_kit.make_model(tmp_path, experts=4)
    actor = kit.make_actor(folder)
    measured = plan_kit.measure_activations(actor)
    plan = plan_kit.planned(folder, ParallelConfig(), "float32")
    assert kept(plan) == pytest.approx(measured["kept"], rel=0.02)
    assert 1.0 <= coming(plan) / measured["peak"] <= 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_chunk(dtype: torch.dtype) -> None:
    """One chunk's bytes, however many tokens there are: without a gradient nothing else is alive."""
    rows_held = plan_kit.CHUNK_ROWS
    vocabulary, hidden, tokens = 4096, 2, 3 * rows_held
    log_probs.CHUNK_LOGITS = rows_held * vocabulary
    rows, weight = torch.randn(tokens, hidden, dtype=dtype), torch.randn(vocabulary, hidden, dtype=dtype)
    targets = torch.zeros(tokens, dtype=torch.long)
    with torch.no_grad(), LiveBytes() as live:
        log_probs.token_log_probs(rows, targets, weight, 1.0)
    per_logit = 8 if dtype == torch.float32 else 10
    assert live.peak == pytest.approx(rows_held * vocabulary * per_logit, rel=0.02)


def test_four_processes(tmp_path: Path) -> None:
    """Two replicas of two tensor- and sequence-parallel processes: cut weights, sharded optimizer, cut activations."""
    folder = plan_kit.make_model(tmp_path / "model")
    kit.run_module(4, "tests.numerics.plan_kit", str(folder), str(tmp_path / "out"))
    parallel = ParallelConfig(tensor=2, sequence=True, recompute=True)
    plan = plan_kit.planned(folder, parallel, "bfloat16", ranks=4)
    for measured in json.loads((tmp_path / "out").read_text()):
        for name in ("weights", "gradients", "optimizer"):
            assert getattr(plan, name) == pytest.approx(measured[name], rel=0.02), name
        assert kept(plan, parts=2) == pytest.approx(measured["kept"], rel=0.02)
        assert coming(plan) == pytest.approx(measured["peak"], rel=0.02)
        assert in_loss(plan) == pytest.approx(measured["loss"], rel=0.02)


def test_one_process_holds_float32_states_without_a_master_copy(model: Path) -> None:
    actor = kit.make_actor(model)
    measured = plan_kit.measure_states(actor)
    plan = plan_kit.planned(model, ParallelConfig(), "float32")
    for name, size in measured.items():
        assert getattr(plan, name) == pytest.approx(size, rel=0.02), name


@pytest.mark.parametrize(
    ("ranks", "parallel"),
    [
        (16, ParallelConfig(tensor=4, sequence=True, context=2)),
        (16, ParallelConfig(tensor=2, pipeline=2, context=2)),
        (16, ParallelConfig(pipeline=4, expert=4)),
        (32, ParallelConfig(tensor=2, context=2, pipeline=2, expert=4)),
        (16, ParallelConfig(tensor=2, pipeline=2, expert=8)),
    ],
)
def test_places_are_megatrons(ranks: int, parallel: ParallelConfig) -> None:
    """The groups that Megatron would make of these sizes, from its own generator, without any process."""
    from megatron_venus.adapters import cpu

    cpu.install()
    from megatron.core.parallel_state import RankGenerator

    def group_ranks(tensor: int, expert: int, context: int) -> RankGenerator:
        data = ranks // (tensor * expert * context * parallel.pipeline)
        order = "tp-cp-ep-dp-pp"
        return RankGenerator(tp=tensor, ep=expert, dp=data, pp=parallel.pipeline, cp=context, order=order)

    dense, experts = group_ranks(parallel.tensor, 1, parallel.context), group_ranks(1, parallel.expert, 1)
    expected: dict[int, dict[str, int]] = {rank: {} for rank in range(ranks)}
    for name, groups in (
        ("tensor_rank", dense.get_ranks("tp")),
        ("context_rank", dense.get_ranks("cp")),
        ("data", dense.get_ranks("dp")),
        ("stage", dense.get_ranks("pp")),
        ("expert_rank", experts.get_ranks("ep")),
    ):
        for group in groups:
            for place, rank in enumerate(group):
                expected[rank][name] = place
    lanes = parallel.lanes()
    for place in places(ActorConfig(ranks=ranks, parallel=parallel)):
        want = expected[place.rank]
        want["replica"], want["lane"] = divmod(want.pop("data"), lanes)
        assert {name: getattr(place, name) for name in want} == want, place


def test_not_a_number_anywhere_is_noticed_without_a_copy_of_the_gradient(model: Path) -> None:
    actor = kit.make_actor(model)
    [buffer] = actor.buffers()
    with LiveBytes() as live:
        assert actor.gradient_is_finite()
    assert live.peak < 1000
    for bad in (math.nan, math.inf, -math.inf):
        buffer.grad_data.zero_()
        buffer.grad_data[-1] = bad
        assert not actor.gradient_is_finite()


def test_the_pipeline_that_gives_wrong_numbers_is_never_built(model: Path) -> None:
    actor = kit.make_actor(model)
    from megatron_venus.adapters.model import build_chunks, transformer_config

    parallel = ParallelConfig(pipeline=2, virtual_stages=2)
    config = transformer_config(actor.arch, torch.float32, parallel)
    assert (config.overlap_p2p_comm, config.batch_p2p_comm) == (True, False)
    config.overlap_p2p_comm, config.batch_p2p_comm = False, True
    with pytest.raises(InvariantError, match="wrong numbers"):
        build_chunks(actor.arch, actor.rope, config)
