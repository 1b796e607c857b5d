"""What a checkpoint brings back: weights, Adam's moments and step, random states, to the bit; and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from envclient.base.errors import ConfigError, VenusError
from megatron_venus.checkpoint_index import Checkpoint, find_latest
from megatron_venus.config import OptimizerConfig
from megatron_venus.hf_folder import read_weights
from tests.numerics import kit

SETTINGS = dataclasses.replace(OptimizerConfig(), lr=1e-2)


def train(actor: Any, steps: range) -> None:
    stream = kit.make_stream(actor, optimizer=SETTINGS)
    for step in steps:
        groups = kit.make_groups(2, seed=step)
        for group in groups:
            stream.add(group)
        stream.finish(step, kit.counts_of(groups))


def adam_state(actor: Any) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for part, optimizer in enumerate(actor.optimizer.chained_optimizers):
        for number, group in enumerate(optimizer.optimizer.param_groups):
            state[f"{part}.{number}.step"] = group["step"]
            for index, param in enumerate(group["params"]):
                moments = optimizer.optimizer.state[param]
                state |= {f"{part}.{number}.{index}.{name}": tensor.clone() for name, tensor in moments.items()}
    return state


def assert_same(ours: dict[str, Any], reference: dict[str, Any]) -> None:
    assert ours.keys() == reference.keys() and len(ours) > 10
    for name, value in reference.items():
        assert torch.equal(torch.as_tensor(ours[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("tied", [True, False])
def test_round_trips(tied: bool, tied_model: Path, untied_model: Path, tmp_path: Path) -> None:
    """Twice: the second save of a resumed actor is as exact as the first."""
    from megatron_venus import checkpoint

    folder = tied_model if tied else untied_model
    first = kit.make_actor(folder, SETTINGS)
    train(first, range(1, 3))
    torch.manual_seed(77)
    kit.save_checkpoint(tmp_path, 2, first, hf_source=folder, nonfinite_steps=1)
    expected_random = torch.rand(3)

    second = kit.make_actor(folder, SETTINGS)
    torch.manual_seed(5)
    found = find_latest(tmp_path)
    assert found is not None
    assert checkpoint.load(found, second) == 1
    assert torch.equal(torch.rand(3), expected_random)
    assert_same(adam_state(second), adam_state(first))
    assert adam_state(second)["0.0.step"] == 2
    assert_same(dict(second.hf_tensors()), dict(first.hf_tensors()))

    train(first, range(3, 5))
    train(second, range(3, 5))
    assert_same(dict(second.hf_tensors()), dict(first.hf_tensors()))
    kit.save_checkpoint(tmp_path, 4, second, hf_source=folder, nonfinite_steps=1)
    third = kit.make_actor(folder, SETTINGS)
    found = find_latest(tmp_path)
    assert found is not None and found.step == 4
    checkpoint.load(found, third)
    assert_same(adam_state(third), adam_state(first))
    assert_same(read_weights(found.hf_dir), dict(first.hf_tensors()))


def test_export_loads_in_transformers(untied_model: Path, tmp_path: Path) -> None:
    actor = kit.make_actor(untied_model, SETTINGS)
    train(actor, range(1, 2))
    kit.save_checkpoint(tmp_path, 1, actor, hf_source=untied_model, keep=1)
    found = find_latest(tmp_path)
    assert found is not None
    assert (found.hf_dir / "config.json").read_bytes() == (untied_model / "config.json").read_bytes()
    model = kit.reference_model(found.hf_dir)
    assert_same(dict(model.named_parameters()), dict(actor.hf_tensors()))


def test_another_type_is_refused(tied_model: Path, tmp_path: Path) -> None:
    """And what a run in bfloat16 exports says so in its config.json."""
    from megatron_venus import checkpoint

    kit.save_checkpoint(tmp_path, 1, kit.make_actor(tied_model, SETTINGS, dtype="bfloat16"), hf_source=tied_model)
    found = find_latest(tmp_path)
    assert found is not None
    assert json.loads((found.hf_dir / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in read_weights(found.hf_dir).values()} == {torch.bfloat16}
    with pytest.raises(ConfigError, match=r"model\.dtype='float32', but checkpoint step_000001 holds bfloat16"):
        checkpoint.load(found, kit.make_actor(tied_model, SETTINGS))


def test_other_weights_than_the_manifests_are_refused(tied_model: Path, tmp_path: Path) -> None:
    from megatron_venus import checkpoint

    actor = kit.make_actor(tied_model, SETTINGS)
    train(actor, range(1, 2))
    kit.save_checkpoint(tmp_path, 1, actor, hf_source=tied_model, keep=1)
    found = find_latest(tmp_path)
    assert found is not None
    wrong = found.manifest.weights | {"model.norm.weight": "0" * 64}
    forged = Checkpoint(path=found.path, manifest=msgspec.structs.replace(found.manifest, weights=wrong))
    with pytest.raises(VenusError, match=r"step_000001.*model\.norm\.weight"):
        checkpoint.load(forged, kit.make_actor(tied_model, SETTINGS))
