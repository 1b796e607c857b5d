"""Log-probs, entropy and metrics of packed batches against plain transformers; chunks change nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_venus import packing
from megatron_venus.loss import log_probs, objectives
from tests.numerics import kit


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("chunk_rows", [10_000, 7])
def test_equal_hugging_face(
    tied: bool,
    temperature: float,
    chunk_rows: int,
    tied_model: Path,
    untied_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(log_probs, "CHUNK_LOGITS", chunk_rows * kit.VOCABULARY)
    folder = tied_model if tied else untied_model
    actor = kit.make_actor(folder)
    model = kit.reference_model(folder)
    sequences = [sequence for group in kit.make_groups(3) for sequence in group.sequences]
    seen = 0
    for batch in packing.pack(sequences, 100):
        [(log_pi, entropy)] = actor.log_probs([batch], temperature)
        assert log_pi.shape == entropy.shape == batch.targets_N.shape
        mine = [kit.reference_log_probs(model, sequences[member], temperature) for member in batch.members]
        reference = torch.cat(mine)
        assert (log_pi - reference).abs().max().item() <= 1e-5
        seen += len(batch.lengths)
    assert seen == len(sequences)


def test_metrics(tied_model: Path) -> None:
    """The gap and the k3 estimate are those of the forwarded loss tokens; versions give span and staleness."""
    groups = kit.make_groups(3, step=4)
    stream = kit.make_stream(kit.make_actor(tied_model))
    for group in groups:
        stream.add(group)
    metrics = stream.finish(4, kit.counts_of(groups)).metrics
    model = kit.reference_model(tied_model)
    trained = [sequence for group in groups for sequence in group.sequences if sequence.advantage]
    with torch.no_grad():
        log_pi = torch.cat([kit.reference_log_probs(model, sequence) for sequence in trained])
    difference = log_pi + 4.5
    assert metrics["logprob_gap/mean_abs"] == pytest.approx(difference.abs().mean().item(), rel=1e-4)
    assert metrics["logprob_gap/max"] == pytest.approx(difference.abs().max().item(), rel=1e-4)
    assert metrics["kl"] == pytest.approx((difference.exp() - 1 - difference).mean().item(), rel=1e-4)
    weights = torch.tensor([s.advantage for s in trained for bit in s.loss_mask if bit])
    assert metrics["loss"] == pytest.approx((-weights.sum() / kit.counts_of(groups).tokens).item(), rel=1e-4)
    assert metrics["clip_frac"] == 0.0
    assert metrics["staleness/span_max"] == 1
    assert metrics["staleness/max"] == 1
    assert metrics["tokens/forwarded"] == len(log_pi) < metrics["tokens/trained"]


def test_clip_binds_beyond_one_update() -> None:
    """With π ≠ π_old the objective is flat above 1 + ε_high for A > 0 and below 1 − ε_low for A < 0, only there."""
    log_pi = torch.tensor([0.5, -0.5, 0.5, -0.5, 0.1], requires_grad=True)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, 1.0])
    clip = objectives.Clip(low=0.2, high=0.28)
    losses, clipped = objectives.grpo(log_pi, torch.zeros(5), advantages, torch.zeros(5, dtype=torch.long), clip)
    losses.sum().backward()
    assert clipped.tolist() == [True, False, False, True, False]
    assert log_pi.grad is not None
    assert log_pi.grad.tolist() == pytest.approx([0.0, -0.6065, 1.6487, 0.0, -1.1052], abs=1e-4)
    assert losses.tolist() == pytest.approx([-1.28, -0.6065, 1.6487, 0.8, -1.1052], abs=1e-4)


def test_half_precision_sums_the_matrixs_gradient_in_float32(
    untied_model: Path, tied_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any chunk leaves the same main gradient of the output matrix: summed in bfloat16 it would differ by 0.5%."""
    for folder in (untied_model, tied_model):
        gradients = []
        for chunk_rows in (10_000, 3):
            monkeypatch.setattr(log_probs, "CHUNK_LOGITS", chunk_rows * kit.VOCABULARY)
            actor = kit.make_actor(folder, dtype="bfloat16")
            stream = kit.make_stream(actor)
            for group in kit.make_groups(3):
                stream.add(group)
            gradients.append(actor.chunks[-1].output_weight().main_grad.clone())
        assert gradients[0].dtype == torch.float32
        assert kit.relative_error(gradients[1], gradients[0]) <= 1e-4
