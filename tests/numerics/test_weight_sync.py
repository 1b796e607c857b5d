"""Weights from the actor into a real SGLang server, and what happens when they do not arrive."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from envclient.base.errors import InvariantError, WireError
from envclient.base.ports import listen, port_of
from megatron_venus.bucket import buckets_of
from megatron_venus.config import OptimizerConfig, ParallelConfig, SyncConfig
from megatron_venus.weight_source import TensorSource
from megatron_venus.weight_sync import PHASES, WeightSync
from rollout.adapters import sglang_engine
from rollout.adapters.sglang_engine import SglangEngine
from rollout.config import ModelConfig, WorkerConfig
from rollout.protocol import EngineAddress, GenerateRequest, Generation
from rollout.types import TrainGroup, TrainSequence, VersionSpan
from tests.benchmarks.ckpt import make_checkpoint
from tests.numerics import kit, sync_kit
from tests.numerics.engine_double import doubles
from tests.numerics.sync_kit import SyncCase
from tests.numerics.test_sync_memory import CONFIG

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
    return greedy(model, tokens)


def greedy(model: Any, tokens: int) -> list[int]:
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
def test_into_sglang(untied_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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

        async def send_once(weights: dict[str, Tensor]) -> None:
            await asyncio.to_thread(WeightSync(TensorSource(weights), actor.arch, config, TOKEN).send, 3, addresses)

        addresses = [EngineAddress(worker="w0", engine_url=engine.url)]
        sync = WeightSync(kit.make_export(actor), actor.arch, config, TOKEN)
        before = (await generate(engine, 0.0, 24, "before")).token_ids
        assert before == greedy_by_transformers(actor.hf_tensors(), folder, 24)
        for version in (1, 2):
            train_step(version)
            # `send` compares every checksum itself after syncs 1 and 2.
            result = await asyncio.to_thread(sync.send, version, addresses)
            assert not result.lost and result.seconds.keys() == {*PHASES, "total"}
            assert min(result.seconds[phase] for phase in ("connect", "gather", "broadcast", "load", "verify")) > 0
            after = (await generate(engine, 0.0, 24, f"after{version}")).token_ids
            assert after == greedy_by_transformers(actor.hf_tensors(), folder, 24)
            assert after != before
        assert len(sync.buckets) > 3

        sampled = [await generate(engine, 1.0, 40, f"sample{index}") for index in range(4)]
        gap = log_prob_gap(actor, sampled)
        print(f"gap {gap:.2e}")
        assert gap <= 1e-4
        with torch.no_grad():
            dict(actor.chunks[0].named_parameters())["decoder.layers.1.self_attention.linear_qkv.weight"][40] += 0.3
        with pytest.raises(InvariantError, match=r"w0.*model\.layers\.1\.self_attn\.qkv_proj\.weight"):
            await asyncio.to_thread(sync.verify)
        assert log_prob_gap(actor, sampled) > 1e-3

        weights = dict(actor.hf_tensors())
        with pytest.raises(InvariantError, match=r"no parameter.*layers\.2\.mlp\.down_proj"):
            await send_once(weights | {"model.layers.2.mlp.down_proj.weight": torch.zeros(2, 2)})
        with pytest.raises(InvariantError, match=r"'lm_head.weight' would never be updated"):
            await send_once({name: tensor for name, tensor in weights.items() if name != "lm_head.weight"})
        with pytest.raises(InvariantError, match=r"'model.norm.weight' is float32\[32\], the actor's float32\[31\]"):
            await send_once(weights | {"model.norm.weight": torch.zeros(31)})

        assert engine._child is not None
        engine._child.signal_group(signal.SIGSTOP)
        impatient = WeightSync(kit.make_export(actor), actor.arch, dataclasses.replace(config, timeout_s=1.0), TOKEN)
        frozen = r"no engine took version 3: engine of worker w0 .*not answered within 1 s"
        with pytest.raises(WireError, match=frozen):
            await asyncio.to_thread(impatient.send, 3, addresses)
        monkeypatch.setattr(sglang_engine, "CONTROL_S", 0.5)
        with pytest.raises(WireError, match=r"/flush_cache: no answer within 0\.5 s"):
            await engine.flush()
        await engine.stop()
        with pytest.raises(WireError, match="no engine took version 3: engine of worker w0"):
            await asyncio.to_thread(sync.send, 3, addresses)
        sync.close()

    async def bounded() -> None:
        try:
            await asyncio.wait_for(scenario(), 200)
        finally:
            await engine.stop()

    asyncio.run(bounded())


@pytest.mark.sglang
def test_experts_into_two_ranks(tmp_path: Path) -> None:
    """Qwen3-MoE, its experts on two actor processes, into a server of two tensor-parallel ranks."""
    # On CPU SGLang fills smaller experts up.
    folder = kit.make_model(tmp_path / "model", tied=False, experts=4, expert_size=64)
    engine = SglangEngine(
        model_path=str(folder),
        model=ModelConfig(path=str(folder), context_length=128),
        worker=WorkerConfig(slots=4, kv_tokens=1024, engine_args={"tp_size": 2}),
        log=tmp_path / "engine.log",
        token=TOKEN,
        seed=0,
    )

    async def scenario() -> None:
        try:
            await engine.start()
            before = (await generate(engine, 0.0, 24, "before")).token_ids
            assert before == greedy(kit.reference_model(folder), 24)
            case = SyncCase(
                folder=str(folder),
                parallel=ParallelConfig(expert=2),
                engines=[EngineAddress(worker="w0", engine_url=engine.url)],
                token=TOKEN,
                bucket_mb=0.008,
                steps=2,
            )
            (synced,) = await asyncio.to_thread(sync_kit.torchrun, 2, [case], tmp_path)
            assert [report.result.lost for report in synced] == [{}, {}]
            assert all(report.result.seconds["verify"] > 0 for report in synced)
            after = (await generate(engine, 0.0, 24, "after")).token_ids
            assert after != before
            assert after == greedy(kit.reference_model(tmp_path / "trained0"), 24)
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(scenario(), 250))


def test_silent_engine_is_named(tied_model: Path) -> None:
    actor = kit.make_actor(tied_model)
    silent = listen("127.0.0.1")
    address = EngineAddress(worker="w7", engine_url=f"http://127.0.0.1:{port_of(silent)}")
    sync = WeightSync(kit.make_export(actor), actor.arch, SyncConfig(timeout_s=0.5), TOKEN)
    with pytest.raises(WireError, match=r"worker w7.*not answered within 0\.5 s"):
        sync.send(1, [address])
    sync.close()


def test_large_tensors_leave_and_arrive_where_they_lie(tmp_path: Path) -> None:
    """Into an engine that receives in place and one that does not, in one group; every checksum is compared."""
    folder = tmp_path / "model"
    config = CONFIG | {"num_hidden_layers": 2}
    make_checkpoint(folder, config)
    actor = kit.make_actor(folder)
    export = kit.make_export(actor)
    whole = {
        info.name.rpartition(".layers.1.")[2] for n, info in enumerate(export.infos) if export.whole(n) is not None
    }
    assert {"self_attn.o_proj.weight", "mlp.up_proj.weight"} <= whole and "self_attn.q_proj.weight" not in whole
    shapes = {info.name: list(info.shape) for info in export.infos}
    sync = WeightSync(export, actor.arch, SyncConfig(bucket_mb=8.0, timeout_s=30.0, verify_first=2), TOKEN)
    with doubles(shapes, "w0") as (apart,), doubles(shapes, "w1", lies="place_in") as (in_place,):
        for version in (1, 2):
            with torch.no_grad():
                for chunk in actor.chunks:
                    for parameter in chunk.parameters():
                        parameter.add_(torch.randn_like(parameter))
            result = sync.send(version, [apart.address, in_place.address])
            assert not result.lost and result.seconds["verify"] > 0
    sync.close()


def test_buckets_keep_order_size_and_type() -> None:
    tensors = {
        "a": torch.zeros(10),
        "b": torch.zeros(5),
        "c": torch.zeros(100),
        "d": torch.zeros(3, dtype=torch.bfloat16),
        "e": torch.zeros(3),
    }
    buckets = list(buckets_of(TensorSource(tensors).infos, 64))
    assert [[info.name for info in bucket.infos] for bucket in buckets] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [(bucket.messages[0].start, bucket.nbytes) for bucket in buckets] == [(0, 60), (2, 400), (3, 6), (4, 12)]
