"""A weight sync holds two buckets at most beyond the model, in every process, whatever the model's size."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from megatron_venus.architecture import Architecture
from megatron_venus.config import ParallelConfig
from megatron_venus.weight_map import hf_shapes
from tests.benchmarks.ckpt import make_checkpoint
from tests.numerics import sync_kit
from tests.numerics.engine_double import doubles
from tests.numerics.sync_kit import SyncCase

BUCKET = 8_000_000
LAYERS = (2, 8)
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 256,
    "rope_theta": 1e4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def test_two_buckets_at_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sizes of an actor cut by tensor parallelism, whose pieces rank 0 must put together."""
    # Freed memory goes back at once, so that the resident set is what is held.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    cases, sizes = [], []
    with contextlib.ExitStack() as stack:
        engines = []
        for layers in LAYERS:
            config = CONFIG | {"num_hidden_layers": layers}
            folder = tmp_path / f"model{layers}"
            make_checkpoint(folder, config)
            shapes = {name: list(shape) for name, shape in hf_shapes(Architecture.from_hf(config, "test")).items()}
            sizes.append(sum(4 * torch.Size(shape).numel() for shape in shapes.values()))
            (engine,) = stack.enter_context(doubles(shapes, "w0"))
            engines.append(engine)
            cases.append(
                SyncCase(
                    folder=str(folder),
                    parallel=ParallelConfig(tensor=2, sequence=True),
                    engines=[engine.address],
                    token="none",
                    bucket_mb=BUCKET / 1e6,
                    steps=2,
                )
            )
        for engine in engines:
            engine.post("memory", reset=True)
        reports = sync_kit.torchrun(2, cases, tmp_path)
        received = [engine.post("memory", reset=False)["extra"] for engine in engines]
    # The first sync of a process also loads code; what that needs once is not what a sync holds.
    for model_bytes, (_, second), engine_bytes in zip(sizes, reports, received, strict=True):
        assert second.result.lost == {} and second.result.seconds["verify"] > 0
        held = {"rank 0": second.extra_bytes[0], "rank 1": second.extra_bytes[1], "engine": engine_bytes}
        print(f"{model_bytes / BUCKET:.1f} buckets of weights:", {who: f"{n / BUCKET:.2f}" for who, n in held.items()})
        assert model_bytes > 3 * BUCKET
        assert min(held["rank 0"], held["engine"]) > 0.5 * BUCKET, "the measurement must see the bucket"
        assert max(held.values()) <= 2 * BUCKET
