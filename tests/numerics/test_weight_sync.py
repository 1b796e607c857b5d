"""Weights from the actor into a real SGLang server, and what happens when they do not arrive."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from envclient.base.errors import InvariantError, WireError
from envclient.base.ports import listen, port_of
from megatron_venus.config import OptimizerConfig, SyncConfig
from megatron_venus.weight_sync import WeightSync, buckets_of
from rollout.adapters.sglang_engine import SglangEngine
from rollout.config import ModelConfig, WorkerConfig
from rollout.protocol import EngineAddress, GenerateRequest, Generation
from rollout.types import TrainGroup, TrainSequence, VersionSpan
from tests.numerics import kit

TOKEN = "token-of-the-test"
PROMPT = [5, 17, 40, 3, 88, 21, 9]


async def generate(engine: SglangEngine, temperature: float, tokens: int, name: str) -> Generation:
    return await engine.generate(
        GenerateRequest(
            request_id=name,
            trajectory_id=name,
            input_ids=PROMPT,
            max_new_tokens=tokens,
            temperature=temperature,
            stop_token_ids=[],
        )
    )


def greedy_by_transformers(weights: Iterator[tuple[str, Tensor]], folder: Path, tokens: int) -> list[int]:
    model = kit.reference_model(folder)
    model.load_state_dict(dict(weights), strict=False)
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(tokens):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[0, len(PROMPT) :].tolist()


def log_prob_gap(actor: object, generations: list[Generation]) -> float:
    """logprob_gap/mean_abs of a step over what the engine sampled."""
    sequences = [
        TrainSequence(
            trajectory_id=str(index),
            prompt_ids=PROMPT,
            response_ids=sampled.token_ids,
            loss_mask=[1] * len(sampled.token_ids),
            logprobs=sampled.logprobs,
            spans=[VersionSpan(start=0, end=len(sampled.token_ids), version=2)],
            advantage=1.0,
            reward=1.0,
        )
        for index, sampled in enumerate(generations)
    ]
    group = TrainGroup(group_id="p0.0", prompt_id="p0", task_id="t", step=3, sequences=sequences)
    settings = dataclasses.replace(OptimizerConfig(), lr=0.0)
    stream = kit.make_stream(actor, optimizer=settings)
    stream.add(group)
    return float(stream.finish(3, kit.counts_of([group])).metrics["logprob_gap/mean_abs"])


@pytest.mark.sglang
def test_into_sglang(untied_model: Path, tmp_path: Path) -> None:
    """An untied model here; the quickstart's is tied and its syncs are verified too."""
    folder = untied_model
    settings = dataclasses.replace(OptimizerConfig(), lr=2e-2)
    actor = kit.make_actor(folder, settings)
    # 8 kB a bucket: several buckets, and tensors larger than one.
    config = SyncConfig(bucket_mb=0.008, timeout_s=60.0, verify_first=2)
    engine = SglangEngine(
        model_path=str(folder),
        model=ModelConfig(path=str(folder), context_length=128),
        worker=WorkerConfig(slots=8, kv_tokens=2048),
        log=tmp_path / "engine.log",
        token=TOKEN,
        seed=0,
    )

    def train_step(step: int) -> None:
        stream = kit.make_stream(actor, optimizer=settings)
        groups = kit.make_groups(2, seed=step)
        for group in groups:
            stream.add(group)
        assert not stream.finish(step, kit.counts_of(groups)).skipped

    async def scenario() -> None:
        await engine.start()
        addresses = [EngineAddress(worker="w0", engine_url=engine.url)]
        sync = WeightSync(actor.hf_tensors, config, TOKEN)
        before = (await generate(engine, 0.0, 24, "before")).token_ids
        assert before == greedy_by_transformers(actor.hf_tensors(), folder, 24)
        for version in (1, 2):
            train_step(version)
            # `send` compares every checksum itself after syncs 1 and 2.
            seconds = await asyncio.to_thread(sync.send, version, addresses)
            assert seconds["verify"] > 0
            assert (seconds["connect"] > 0) == (version == 1)
            after = (await generate(engine, 0.0, 24, f"after{version}")).token_ids
            assert after == greedy_by_transformers(actor.hf_tensors(), folder, 24)
            assert after != before
        assert len(list(buckets_of(actor.hf_tensors(), 8000))) > 3

        sampled = [await generate(engine, 1.0, 40, f"sample{index}") for index in range(4)]
        gap = log_prob_gap(actor, sampled)
        print(f"gap {gap:.2e}")
        assert gap <= 1e-4
        with torch.no_grad():
            dict(actor.chunks[0].named_parameters())["decoder.layers.1.self_attention.linear_qkv.weight"][40] += 0.3
        with pytest.raises(InvariantError, match=r"w0.*model\.layers\.1\.self_attn\.qkv_proj\.weight"):
            await asyncio.to_thread(sync.verify)
        assert log_prob_gap(actor, sampled) > 1e-3

        def with_stranger() -> Iterator[tuple[str, Tensor]]:
            yield from actor.hf_tensors()
            yield "model.layers.2.mlp.down_proj.weight", torch.zeros(2, 2)

        strange = WeightSync(with_stranger, config, TOKEN)
        with pytest.raises(InvariantError, match=r"no parameter.*layers\.2\.mlp\.down_proj"):
            await asyncio.to_thread(strange.send, 3, addresses)
        await engine.stop()
        with pytest.raises(WireError, match="engine of worker w0"):
            await asyncio.to_thread(sync.send, 3, addresses)
        sync.close()

    async def bounded() -> None:
        try:
            await asyncio.wait_for(scenario(), 200)
        finally:
            await engine.stop()

    asyncio.run(bounded())


def test_silent_engine_is_named(tied_model: Path) -> None:
    actor = kit.make_actor(tied_model)
    silent = listen("127.0.0.1")
    address = EngineAddress(worker="w7", engine_url=f"http://127.0.0.1:{port_of(silent)}")
    sync = WeightSync(actor.hf_tensors, SyncConfig(timeout_s=0.5), TOKEN)
    with pytest.raises(WireError, match=r"worker w7.*not answered within 0\.5 s"):
        sync.send(1, [address])
    sync.close()


def test_buckets_keep_order_size_and_type() -> None:
    tensors = [
        ("a", torch.zeros(10)),
        ("b", torch.zeros(5)),
        ("c", torch.zeros(100)),
        ("d", torch.zeros(3, dtype=torch.bfloat16)),
        ("e", torch.zeros(3)),
    ]
    buckets = list(buckets_of(tensors, 64))
    assert [[name for name, _ in bucket] for bucket in buckets] == [["a", "b"], ["c"], ["d"], ["e"]]
