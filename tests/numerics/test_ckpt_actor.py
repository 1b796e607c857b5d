"""Megatron and the actor on what ckpt_tools writes, ckpt_tools on what the actor writes, and SGLang on the export."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_tools import from_hf, reshard, to_hf
from ckpt_tools.layout import Layout
from envclient.base.errors import VenusError
from envclient.base.processes import last_lines
from megatron_venus import architecture, hf_folder, packing, weight_map
from megatron_venus.checkpoint_index import find_latest, read_checkpoint
from megatron_venus.config import OptimizerConfig
from megatron_venus.hf_folder import read_weights
from tests.conftest import MODEL, TOKEN, EngineHost
from tests.numerics import ckpt_kit, kit
from tests.numerics.test_checkpoint import SETTINGS, adam_state, assert_same, train
from tests.unit.ckpt_kit import FAMILIES, make


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_loads_every_family(family: str, tied: bool, tmp_path: Path) -> None:
    """Keys, shapes and rows are those that Megatron's own model of that family asks for."""
    source = make(tmp_path / "hf", family, tied=tied)
    from_hf.convert(source, tmp_path / "ckpt", layout=Layout(tensor=2), quiet=True)
    arch = architecture.architecture_in(source, "source")
    model = ckpt_kit.make_model(arch, torch.bfloat16)
    ckpt_kit.load(model, tmp_path / "ckpt" / "megatron")
    params = dict(model.named_parameters())
    assert params.keys() == weight_map.megatron_shapes(arch).keys()
    weights = read_weights(source)
    for name, param in params.items():
        assert torch.equal(param, weight_map.megatron_from_hf(name, weights, arch)), name


def test_tensor_parallel_ranks_load_their_parts(untied_model: Path, tmp_path: Path) -> None:
    """And an actor of that layout trains from them as from the Hugging Face folder."""
    from_hf.convert(untied_model, tmp_path / "ckpt", layout=Layout(), quiet=True)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    module = ["-m", "tests.numerics.ckpt_kit", str(untied_model), str(tmp_path / "ckpt"), str(tmp_path / "part")]
    done = subprocess.run([*torchrun, *module], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    parts = [torch.load(tmp_path / f"part.{rank}") for rank in (0, 1)]
    arch = architecture.architecture_in(untied_model, "source")
    weights = read_weights(untied_model)
    for name in weight_map.megatron_shapes(arch):
        whole = weight_map.megatron_from_hf(name, weights, arch)
        ours = [part[name] for part in parts]
        if "linear_fc1" in name:  # a rank holds its part of gate over its part of up
            halves = [part.chunk(2) for part in ours]
            joined = torch.cat([halves[0][0], halves[1][0], halves[0][1], halves[1][1]])
        elif "norm" in name:
            assert torch.equal(*ours), name
            joined = ours[0]
        else:
            joined = torch.cat(ours, dim=1 if "linear_proj" in name or "linear_fc2" in name else 0)
        assert torch.equal(joined, whole), name


def test_actor_computes_the_same_log_probs(tied_model: Path, tmp_path: Path) -> None:
    from_hf.convert(tied_model, tmp_path / "ckpt", layout=Layout(tensor=2, pipeline=2), quiet=True)
    actor = kit.make_actor(tied_model)
    sequences = [sequence for group in kit.make_groups(3) for sequence in group.sequences]

    def log_probs() -> torch.Tensor:
        return torch.cat([log_pi for log_pi, _ in actor.log_probs(packing.pack(sequences, 200), 1.0)])

    expected = log_probs()
    ckpt_kit.load(actor.chunks[0], tmp_path / "ckpt" / "megatron")
    assert torch.equal(log_probs(), expected)


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "float32"), ("qwen3", "bfloat16"), ("qwen3_moe", "float32")])
def test_actor_starts_from_it(family: str, dtype: str, tmp_path: Path) -> None:
    """From bfloat16 files, in the actor's own type: the same first step, to the bit, as from Hugging Face's files."""
    from megatron_venus import checkpoint

    source = make(tmp_path / "hf", family, tied=True)
    from_hf.convert(source, tmp_path / "ckpt", layout=Layout(tensor=2), quiet=True)
    actors = [kit.make_actor(source, SETTINGS, dtype=dtype, megatron=start) for start in (None, tmp_path / "ckpt")]
    made = read_checkpoint(tmp_path / "ckpt")
    assert made is not None
    checkpoint.check_weights(made, actors[1], "")
    for actor in actors:
        train(actor, range(1, 2))
    assert_same(dict(actors[1].hf_tensors()), dict(actors[0].hf_tensors()))
    assert_same(adam_state(actors[1]), adam_state(actors[0]))
    with pytest.raises(VenusError, match="is not the one in its manifest"):
        checkpoint.check_weights(made, actors[1], "")


def test_checkpoints_of_a_run(untied_model: Path, tmp_path: Path) -> None:
    """What the actor saved: exported as its own export; resumed to the bit after another cut, optimizer too."""
    from megatron_venus import checkpoint

    actor = kit.make_actor(untied_model, SETTINGS)
    train(actor, range(1, 3))
    kit.save_checkpoint(tmp_path / "run", 2, actor, hf_source=untied_model, nonfinite_steps=1)
    found = find_latest(tmp_path / "run")
    assert found is not None
    to_hf.convert(found.path, tmp_path / "export", quiet=True)
    assert_same(read_weights(tmp_path / "export"), read_weights(found.hf_dir))

    reshard.rewrite(found.path, tmp_path / "cut", layout=Layout(tensor=2, pipeline=2), quiet=True)
    cut = read_checkpoint(tmp_path / "cut")
    assert cut is not None and cut.step == 2
    resumed = kit.make_actor(untied_model, SETTINGS)
    assert checkpoint.load(cut, resumed) == 1
    assert_same(adam_state(resumed), adam_state(actor))
    for one in (actor, resumed):
        train(one, range(3, 4))
    assert_same(dict(resumed.hf_tensors()), dict(actor.hf_tensors()))


@pytest.mark.sglang
def test_sglang_generates_the_same_greedy_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped model, started from a converted checkpoint, trained a step and exported in three shards, in a real
    engine, against transformers on the actor's own weights."""
    from rollout.adapters.sglang_engine import SglangEngine
    from rollout.config import ModelConfig, WorkerConfig
    from rollout.protocol import GenerateRequest

    monkeypatch.setattr(hf_folder, "FILE_BYTES", 600_000)
    from_hf.convert(MODEL, tmp_path / "ckpt", layout=Layout(pipeline=2), quiet=True)
    actor = kit.make_actor(MODEL, OptimizerConfig(lr=1e-4), megatron=tmp_path / "ckpt")
    train(actor, range(1, 2))
    kit.save_checkpoint(tmp_path / "run", 1, actor, hf_source=MODEL)
    found = find_latest(tmp_path / "run")
    assert found is not None
    assert len(list(found.hf_dir.glob("model-*-of-00003.safetensors"))) == 3
    path = str(found.hf_dir)
    log = tmp_path / "engine.log"
    engine = SglangEngine(
        model_path=path,
        model=ModelConfig(path=path, context_length=640),
        worker=WorkerConfig(slots=8),
        log=log,
        token=TOKEN,
        seed=0,
    )
    prompts = [[3 + (number * 31 + i * i * 7) % 1900 for i in range(40)] for number in range(4)]

    async def scenario(host: EngineHost) -> list[Any]:
        return await asyncio.gather(
            *[
                host.engine.generate(
                    GenerateRequest(
                        request_id=f"r{number}",
                        trajectory_id=f"r{number}",
                        input_ids=ids,
                        max_new_tokens=16,
                        temperature=0.0,
                        stop_token_ids=[2],
                    )
                )
                for number, ids in enumerate(prompts)
            ]
        )

    loop = asyncio.new_event_loop()
    host = EngineHost(engine, loop)
    try:
        host.call(engine.start(), timeout_s=250)
        generations = host.call(scenario(host))
    except Exception as error:
        raise AssertionError(last_lines(log)) from error
    finally:
        host.call(engine.stop())
        loop.close()
    reference = kit.reference_model(MODEL).eval()
    missing = reference.load_state_dict(dict(actor.hf_tensors()), strict=False)
    assert missing.missing_keys in ([], ["lm_head.weight"]) and not missing.unexpected_keys
    for ids, generation in zip(prompts, generations, strict=True):
        prompt = torch.tensor([ids])
        whole = reference.generate(prompt, max_new_tokens=16, do_sample=False, eos_token_id=2, pad_token_id=0)
        assert generation.token_ids == whole[0, len(ids) :].tolist()
