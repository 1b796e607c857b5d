"""Engines that freeze, die, refuse or come back in the middle of a weight sync: the others get every version."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

from envclient.base.errors import WireError
from megatron_venus.architecture import Architecture
from megatron_venus.config import SyncConfig
from megatron_venus.engine_digests import EngineDigests
from megatron_venus.weight_map import hf_shapes
from megatron_venus.weight_source import TensorSource
from megatron_venus.weight_sync import WeightSync
from rollout.engine_layout import EngineLayout
from tests.numerics.engine_double import Double, doubles

ARCH = Architecture(
    layers=2,
    hidden=32,
    feed_forward=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    vocabulary=100,
    max_positions=64,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=False,
)
SHAPES = {name: list(shape) for name, shape in hf_shapes(ARCH).items()}
CONFIG = SyncConfig(bucket_mb=0.02, timeout_s=2.0, verify_first=1)


def weights_of(version: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def sync_of(weights: dict[str, Tensor], config: SyncConfig = CONFIG) -> WeightSync:
    return WeightSync(TensorSource(weights), ARCH, config, "token")


def assert_holds(double: Double, weights: dict[str, Tensor]) -> None:
    digests = EngineDigests(EngineLayout(kv_heads=ARCH.kv_heads, experts=0, ranks=1))
    for name, tensor in weights.items():
        digests.add(name, tensor)
    assert double.checksums() == digests.finish()[0]


def test_the_others_go_on() -> None:
    weights = weights_of(0)
    sync = sync_of(weights)

    def new_version(version: int) -> None:
        for name, tensor in weights_of(version).items():
            weights[name].copy_(tensor)

    with doubles(SHAPES, "w0", "w1", "w2", "w1") as (w0, w1, w2, w1_again):
        assert len(sync.buckets) >= 4
        new_version(1)
        first = sync.send(1, [w0.address, w1.address, w2.address])
        assert first.lost == {} and first.seconds["verify"] > 0

        # w1 stops in the middle of the broadcast; gloo makes others depend on it.
        w1.post("set_faults", freeze_at=3)
        new_version(2)
        lost = sync.send(2, [w0.address, w1.address, w2.address]).lost
        assert lost.keys() == {"w1"} and re.search(r"worker w1 .*not answered within 2 s", lost["w1"])
        for double in (w0, w2):
            assert_holds(double, weights)

        # One that refuses once was the victim of a broken group, for all we know; nobody is lost.
        w2.post("set_faults", refuse_at=2)
        new_version(3)
        third = sync.send(3, [w0.address, w2.address])
        assert third.lost == {} and third.seconds["failed"] > 0 and third.seconds["verify"] == 0
        for double in (w0, w2):
            assert_holds(double, weights)

        # A dead process, and a restarted one under the name of the lost one.
        w2.process.kill()
        new_version(4)
        fourth = sync.send(4, [w0.address, w2.address, w1_again.address])
        assert fourth.lost.keys() == {"w2"} and "worker w2" in fourth.lost["w2"]
        assert fourth.seconds["verify"] > 0, "the checksums of an engine that is new are compared"
        for double in (w0, w1_again):
            assert_holds(double, weights)
            double.process.kill()
        with pytest.raises(WireError, match=r"no engine took version 5: .*worker w0 .*worker w1 "):
            sync.send(5, [w0.address, w1_again.address])
    sync.close()
