"""The actor on Transformer Engine's layers and kernels, in bfloat16, against plain transformers in float32.

Bounds: bfloat16 keeps 8 bits of a number, so a product of two rounded ones is right to 2⁻⁸ ≈ 0.4%; errors of a sum over
tokens and layers average out. A missing mask, a wrong position or a dropped attention factor changes log-probs by 0.1
and gradients by tens of per cent.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_venus import packing
from megatron_venus.config import ParallelConfig
from rollout.config import YarnConfig
from tests.numerics import kit

LOGPROB_BOUND = 0.05
GRADIENT_BOUND = 0.05

LAYOUTS = {
    "tensor": ParallelConfig(tensor=2),
    "tensor and sequence": ParallelConfig(tensor=2, sequence=True),
    "pipeline": ParallelConfig(pipeline=2),
    "virtual stages": ParallelConfig(pipeline=2, virtual_stages=2),
    "context": ParallelConfig(context=2),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.make_model(tmp_path_factory.mktemp("model"), tied=False, layers=4)


def assert_near(ours: dict[str, torch.Tensor], reference: torch.nn.Module) -> None:
    gradients = kit.gradients_of(reference)
    assert set(ours) == set(gradients)
    for name, gradient in gradients.items():
        assert kit.relative_error(ours[name].cpu().float(), gradient) <= GRADIENT_BOUND, name


@pytest.mark.parametrize("micro_batch_tokens", [64, 4096])
def test_gradient_of_packed_sequences(model: Path, micro_batch_tokens: int) -> None:
    """Several sequences of one micro-batch do not see one another."""
    groups = kit.make_groups(5, seed=3)
    actor = kit.make_actor(model, dtype="bfloat16")
    stream = kit.make_stream(actor, micro_batch_tokens=micro_batch_tokens)
    gradient = kit.capture_gradient(actor)
    for group in groups:
        stream.add(group)
    stream.finish(1, kit.counts_of(groups))
    assert all(tensor.dtype == torch.float32 for tensor in gradient.values()), "main gradients are summed in float32"
    assert_near(gradient, kit.reference_gradient(model, groups))


def test_recompute_changes_nothing(model: Path) -> None:
    groups = kit.make_groups(3, seed=3)
    gradients = []
    for recompute in (False, True):
        actor = kit.make_actor(model, dtype="bfloat16", parallel=ParallelConfig(recompute=recompute))
        stream = kit.make_stream(actor, micro_batch_tokens=64)
        gradients.append(kit.capture_gradient(actor))
        for group in groups:
            stream.add(group)
        stream.finish(1, kit.counts_of(groups))
    for name, gradient in gradients[0].items():
        assert kit.relative_error(gradients[1][name], gradient) <= 1e-3, name


def test_yarn_keeps_its_attention_factor(model: Path, tmp_path: Path) -> None:
    """Transformer Engine's fused rotary kernel for packed sequences would drop it."""
    yarn = YarnConfig(factor=4.0, original_length=64, attention_factor=1.25)
    folder = kit.stretched(model, tmp_path / "yarn", yarn)
    sequences = [group.sequences[1] for group in kit.make_groups(6, seed=5)]
    [batch] = packing.pack(sequences, 4096)
    [(ours, _)] = kit.make_actor(folder, dtype="bfloat16").log_probs([batch], 1.0)
    reference = kit.reference_model(folder)
    with torch.no_grad():
        expected = torch.cat([kit.reference_log_probs(reference, sequences[member]) for member in batch.members])
    assert (ours.cpu() - expected).abs().mean().item() <= LOGPROB_BOUND


@pytest.mark.gpus(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_gradient_in_layouts(name: str, model: Path, tmp_path: Path) -> None:
    """Over NCCL, two GPUs: Transformer Engine's own context parallelism among them."""
    groups = kit.make_groups(5, seed=3)
    case = kit.Case(
        folder=str(model),
        groups=groups,
        first=[],
        micro_batch_tokens=64,
        parallel=LAYOUTS[name],
        dtype="bfloat16",
    )
    [result] = kit.torchrun(2, [case], tmp_path)
    assert_near(result["gradient"], kit.reference_gradient(model, groups))
