"""A batch's streamed gradient is the one-shot gradient of plain transformers, however it is split and ordered."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import msgspec
import pytest
import torch

from envclient.base.errors import InvariantError, VenusError
from megatron_venus.config import OptimizerConfig
from rollout.types import TrainGroup
from tests.numerics import kit

TOLERANCE = 1e-5


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("budget", "skip", "temperature"), [(4096, True, 1.0), (40, False, 0.7), (1, True, 1.3)])
def test_one_replica(
    tied: bool, budget: int, skip: bool, temperature: float, tied_model: Path, untied_model: Path
) -> None:
    folder = tied_model if tied else untied_model
    groups = kit.make_groups(5)
    actor = kit.make_actor(folder)
    stream = kit.make_stream(actor, micro_batch_tokens=budget, skip_zero_advantage=skip, temperature=temperature)
    gradient = kit.capture_gradient(actor)
    shuffled = list(groups)
    random.Random(budget).shuffle(shuffled)
    for group in shuffled:
        assert stream.add(group) == sum(sum(sequence.loss_mask) for sequence in group.sequences)
    result = stream.finish(1, kit.counts_of(groups))

    reference = kit.reference_gradient(folder, groups, temperature)
    kit.assert_gradient(gradient, reference)
    # From the same gradient on: Adam's first step is nearly its sign, so rounding near zero would show as a whole step.
    for name, param in reference.named_parameters():
        param.grad = gradient[name].clone()
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), OptimizerConfig().clip_grad).item()
    assert result.metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    settings = OptimizerConfig()
    before = {name: param.detach().clone() for name, param in reference.named_parameters()}
    torch.optim.AdamW(
        reference.parameters(),
        lr=settings.lr,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    ).step()
    after = dict(actor.hf_tensors())
    for name, param in reference.named_parameters():
        moved, expected = after[name] - before[name], param.detach() - before[name]
        assert kit.relative_error(moved, expected) <= 1e-3, name


def test_two_replicas(tied_model: Path, untied_model: Path, tmp_path: Path) -> None:
    """Uneven shares, any order, also a replica without a group."""
    groups = kit.make_groups(5, seed=3)
    cases = [
        kit.Case(folder=str(tied_model), groups=groups, first=[3, 0, 4, 1], micro_batch_tokens=64),
        kit.Case(folder=str(untied_model), groups=groups, first=[1, 2], micro_batch_tokens=4096),
        kit.Case(folder=str(tied_model), groups=groups, first=[], micro_batch_tokens=200),
    ]
    results = kit.torchrun(2, cases, tmp_path)
    for case, result in zip(cases, results, strict=True):
        reference = kit.reference_gradient(Path(case.folder), groups)
        kit.assert_gradient(result["gradient"], reference)
        assert result["metrics"]["tokens/trained"] == kit.counts_of(groups).tokens
    # The split of the batch leaves no trace in the weights either.
    for name, tensor in results[0]["weights"].items():
        assert kit.relative_error(tensor, results[2]["weights"][name]) <= TOLERANCE


def test_batch_must_be_the_coordinators(tied_model: Path) -> None:
    groups = kit.make_groups(2)
    stream = kit.make_stream(kit.make_actor(tied_model))
    stream.add(groups[0])
    with pytest.raises(InvariantError, match=r"groups=1.*groups=2"):
        stream.finish(1, kit.counts_of(groups))


def poisoned(group: TrainGroup) -> TrainGroup:
    first = group.sequences[1]
    return msgspec.structs.replace(group, sequences=[msgspec.structs.replace(first, advantage=float("nan"))])


def test_nonfinite_gradient_skips_and_stops(tied_model: Path) -> None:
    settings = dataclasses.replace(OptimizerConfig(), max_nonfinite_steps=2)
    actor = kit.make_actor(tied_model, settings)
    stream = kit.make_stream(actor, optimizer=settings)
    good, bad = kit.make_groups(1)[0], poisoned(kit.make_groups(1)[0])

    def step(number: int, group: TrainGroup) -> bool:
        stream.add(group)
        return bool(stream.finish(number, kit.counts_of([group])).skipped)

    before = {name: tensor.clone() for name, tensor in actor.hf_tensors()}
    assert step(1, bad)
    assert all(torch.equal(tensor, before[name]) for name, tensor in actor.hf_tensors())
    # A good step in between starts the count anew; nothing of the bad gradient is left in the buffers.
    assert not step(2, good)
    assert all(torch.isfinite(tensor).all() for _, tensor in actor.hf_tensors())
    assert any(not torch.equal(tensor, before[name]) for name, tensor in actor.hf_tensors())
    assert step(3, bad)
    with pytest.raises(VenusError, match="2 gradients in a row"):
        step(4, bad)


def test_learning_rate_warms_up(tied_model: Path) -> None:
    settings = dataclasses.replace(OptimizerConfig(), lr=1e-2, warmup_steps=4)
    stream = kit.make_stream(kit.make_actor(tied_model, settings), optimizer=settings)
    group = kit.make_groups(1)[0]
    rates = []
    for step in range(1, 7):
        stream.add(group)
        rates.append(stream.finish(step, kit.counts_of([group])).metrics["lr"])
    assert rates == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2, 1e-2, 1e-2])


def test_bfloat16_steps_near_float32(tied_model: Path) -> None:
    """Half-precision weights with a float32 master copy: close in log-probs, and a step moves the exported weights."""
    groups = kit.make_groups(2)
    results, moved = [], False
    for dtype in ("float32", "bfloat16"):
        actor = kit.make_actor(tied_model, dtype=dtype)
        before = {name: tensor.clone() for name, tensor in actor.hf_tensors()}
        stream = kit.make_stream(actor)
        for group in groups:
            stream.add(group)
        results.append(stream.finish(1, kit.counts_of(groups)).metrics)
        moved = any(not torch.equal(tensor, before[name]) for name, tensor in actor.hf_tensors())
    assert moved and all(tensor.dtype == torch.bfloat16 for tensor in before.values())
    single, half = results
    assert half["logprob_gap/mean_abs"] == pytest.approx(single["logprob_gap/mean_abs"], rel=0.02)
    assert half["grad_norm"] == pytest.approx(single["grad_norm"], rel=0.05)
