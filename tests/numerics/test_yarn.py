"""YaRN from one config: engine, actor, export and plain transformers compute the same at four times the length."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from envclient.base.errors import ConfigError
from megatron_venus import packing
from rollout.adapters.sglang_engine import SglangEngine
from rollout.config import ModelConfig, WorkerConfig, YarnConfig
from rollout.protocol import GenerateRequest, Generation
from rollout.rope import check_context, read_rope, rope_of, usual_attention_factor
from rollout.types import TrainSequence
from tests.numerics import kit, resume_kit

ORIGINAL = 64
YARN = YarnConfig(factor=4.0, original_length=ORIGINAL, attention_factor=1.25)


@pytest.fixture(scope="module")
def short_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 64 positions."""
    folder = kit.make_model(tmp_path_factory.mktemp("short"), tied=False)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": ORIGINAL}))
    return folder


def sequence(length: int, response: list[int] | None = None, logprobs: list[float] | None = None) -> TrainSequence:
    """`length` random tokens, then the response; without one, the second half is it."""
    ids = torch.randint(0, kit.VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    prompt = ids if response is not None else ids[: length // 2]
    response = response if response is not None else ids[length // 2 :]
    return TrainSequence(
        trajectory_id="p0.0.0.0",
        prompt_ids=prompt,
        response_ids=response,
        loss_mask=[1] * len(response),
        logprobs=logprobs or [0.0] * len(response),
        spans=[],
        advantage=1.0,
        reward=1.0,
    )


def actor_log_probs(folder: Path, sequences: list[TrainSequence], yarn: YarnConfig) -> torch.Tensor:
    actor = kit.make_actor(folder, yarn=yarn)
    return torch.cat([log_pi for log_pi, _ in actor.log_probs(packing.pack(sequences, 4096), 1.0)])


def test_equal_transformers_beyond_the_original_length(short_model: Path, tmp_path: Path) -> None:
    long = sequence(4 * ORIGINAL)
    model = kit.reference_model(kit.stretched(short_model, tmp_path / "yarn", YARN))
    with torch.no_grad():
        reference = kit.reference_log_probs(model, long)
    ours = actor_log_probs(short_model, [long], YARN)
    assert (ours - reference).abs().max().item() <= 1e-4
    # The same numbers without the config, from what config.json says; and the scaling is no decoration.
    again = actor_log_probs(tmp_path / "yarn", [long], YarnConfig())
    assert torch.equal(again, ours)
    plain = actor_log_probs(short_model, [long], YarnConfig())
    assert (plain - ours).abs().max().item() > 1e-2


def test_export_keeps_it(short_model: Path, tmp_path: Path) -> None:
    from megatron_venus.checkpoint_index import find_latest

    actor = kit.make_actor(short_model, yarn=YARN)
    resume_kit.train(actor, 1, 1)
    kit.save_checkpoint(tmp_path, 1, actor, hf_source=short_model, keep=1)
    found = find_latest(tmp_path)
    assert found is not None
    assert read_rope(found.hf_dir, YarnConfig()) == read_rope(found.hf_dir, YARN) == actor.rope
    assert json.loads((found.hf_dir / "config.json").read_text())["max_position_embeddings"] == 4 * ORIGINAL


@pytest.mark.sglang
def test_engine_and_actor_agree(short_model: Path, tmp_path: Path) -> None:
    """At four times the original length: what SGLang reports and what the actor computes, ≤ 1e-4."""
    engine = SglangEngine(
        model_path=str(short_model),
        model=ModelConfig(path=str(short_model), context_length=4 * ORIGINAL, yarn=YARN),
        worker=WorkerConfig(slots=4, kv_tokens=2048),
        log=tmp_path / "engine.log",
        token="token-of-the-test",
        seed=0,
    )
    prompt = sequence(4 * ORIGINAL - 50, response=[]).prompt_ids

    async def sample() -> Generation:
        await engine.start()
        try:
            request = GenerateRequest(
                request_id="r",
                trajectory_id="t",
                input_ids=prompt,
                max_new_tokens=50,
                temperature=1.0,
                stop_token_ids=[],
            )
            return await engine.generate(request)
        finally:
            await engine.stop()

    sampled = asyncio.run(asyncio.wait_for(sample(), 200))
    assert len(sampled.token_ids) == 50
    ours = actor_log_probs(short_model, [sequence(len(prompt), sampled.token_ids, sampled.logprobs)], YARN)
    gap = (ours - torch.tensor(sampled.logprobs)).abs()
    print(f"gap mean {gap.mean():.2e}, max {gap.max():.2e}")
    assert gap.mean().item() <= 1e-4


def test_refusals() -> None:
    plain = {"max_position_embeddings": 64, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
    with pytest.raises(ConfigError, match=r"context_length=65 is beyond the 64 positions.*model\.yarn\.factor"):
        check_context(65, rope_of(plain, YarnConfig(), "x"), "x")
    check_context(256, rope_of(plain, YarnConfig(factor=4.0), "x"), "x")
    with pytest.raises(ConfigError, match=r"model\.yarn\.factor=0\.5"):
        rope_of(plain, YarnConfig(factor=0.5), "x")
    scaled = plain | rope_of(plain, YARN, "x").config_fields(plain)
    with pytest.raises(ConfigError, match=r"differ from the yarn in config\.json"):
        rope_of(scaled, YarnConfig(factor=8.0), "x")
    with pytest.raises(ConfigError, match=r"yarn beta_fast = 16"):
        rope_of({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16}}, YarnConfig(), "x")
    with pytest.raises(ConfigError, match="rope type = 'llama3'"):
        rope_of({"rope_scaling": {"rope_type": "llama3"}}, YarnConfig(), "x")
    old = {"max_position_embeddings": 64, "rope_theta": 1e6}
    assert rope_of(old | rope_of(old, YARN, "x").config_fields(old), YarnConfig(), "x") == rope_of(old, YARN, "x")
    assert usual_attention_factor(4.0) == pytest.approx(1.1386294)
