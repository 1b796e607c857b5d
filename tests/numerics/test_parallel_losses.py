"""Losses that look at whole sequences, keep batches or compare with a reference: the same numbers in every layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_venus.config import KlConfig, LossConfig, ParallelConfig
from megatron_venus.reference import FrozenReference
from tests.numerics import kit

# Sequence ratios, π_old and the reference computed on arrival, two updates: the second one has π ≠ π_old ≠ π_ref.
LOSS = LossConfig(
    algorithm="gspo", aggregation="seq-mean-token-mean", updates_per_batch=2, kl=KlConfig(place="loss", coefficient=0.1)
)
LAYOUTS = {
    "context": (0, ParallelConfig(context=2)),
    "tensor, sequence": (0, ParallelConfig(tensor=2, sequence=True)),
    "virtual stages": (0, ParallelConfig(pipeline=2, virtual_stages=2)),
    "expert lanes": (4, ParallelConfig(expert=2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_equal_one_process(name: str, tmp_path: Path) -> None:
    experts, parallel = LAYOUTS[name]
    folder = kit.make_model(tmp_path / "model", tied=False, layers=4, experts=experts)
    groups = kit.make_groups(4, seed=5)
    case = kit.Case(
        folder=str(folder), groups=groups, first=[2, 0], micro_batch_tokens=64, parallel=parallel, loss=LOSS
    )
    [result] = kit.torchrun(2, [case], tmp_path)

    actor = kit.make_actor(folder)
    reference = FrozenReference(actor.chunks)
    stream = kit.make_stream(actor, micro_batch_tokens=64, loss=LOSS, reference=reference)
    gradient = kit.capture_gradient(actor)
    for group in groups:
        stream.add(group)
    metrics = stream.finish(1, kit.counts_of(groups)).metrics
    assert metrics["updates"] == 2 and metrics["kl_ref"] > 0
    for key, value in metrics.items():
        assert result["metrics"][key] == pytest.approx(value, rel=1e-3, abs=1e-5), key
    # Of the second update: it starts from weights that Adam moved by almost the sign of the first gradient.
    for key, tensor in gradient.items():
        ours = result["gradient"][key]
        # An expert to which no token went has none at all.
        assert torch.equal(ours, tensor) or kit.relative_error(ours, tensor) <= 1e-3, key
