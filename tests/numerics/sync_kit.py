"""A whole actor that trains and syncs, under torchrun: `python -m tests.numerics.sync_kit CASES OUT`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from megatron_venus.config import OptimizerConfig, ParallelConfig, SyncConfig
from megatron_venus.hf_folder import copy_companions, write_weights
from megatron_venus.sync_result import SyncResult
from rollout.protocol import EngineAddress
from rollout.types import Record
from tests.numerics import kit
from tests.numerics.memory import extra_bytes, reset_peak


class SyncCase(Record):
    """`steps` optimizer steps, each followed by a sync into `engines` whose checksums are compared."""

    folder: str
    parallel: ParallelConfig
    """All cases of one torchrun have the same."""
    engines: list[EngineAddress]
    token: str
    bucket_mb: float
    steps: int


class SyncReport(Record):
    """One sync, and by how many bytes every process's memory was larger at its peak than without it."""

    result: SyncResult
    extra_bytes: list[int]


def process(case: SyncCase, trained: Path) -> list[SyncReport]:
    from megatron_venus.weight_sync import WeightSync

    settings = dataclasses.replace(OptimizerConfig(), lr=2e-2)
    actor = kit.make_actor(Path(case.folder), settings, parallel=case.parallel)
    export = kit.make_export(actor)
    config = SyncConfig(bucket_mb=case.bucket_mb, timeout_s=60.0, verify_first=case.steps)
    sync = WeightSync(export, actor.arch, config, case.token)
    leader = actor.layout.head and actor.layout.replica == 0
    reports = []
    for step in range(1, case.steps + 1):
        stream = kit.make_stream(actor, optimizer=settings)
        groups = kit.make_groups(2, step=step, seed=step)
        for group in groups:
            stream.add(group)
        assert not stream.finish(step, kit.counts_of(groups)).skipped
        kept = sync.kept_bytes
        reset_peak()
        result = sync.send(step, case.engines) if leader else SyncResult(seconds={})
        export.finish()
        extra = [0] * dist.get_world_size()
        dist.all_gather_object(extra, kept + extra_bytes())
        reports.append(SyncReport(result=result, extra_bytes=extra))
    weights = {name: tensor.clone() for name, tensor in actor.hf_tensors()}
    if leader:
        copy_companions(Path(case.folder), trained)
        write_weights(trained, {name: tensor.contiguous() for name, tensor in weights.items()})
    sync.close()
    return reports


def main(cases: Path, out: Path) -> None:
    reports = [
        process(case, out / f"trained{number}")
        for number, case in enumerate(msgspec.msgpack.decode(cases.read_bytes(), type=list[SyncCase]))
    ]
    if dist.get_rank() == 0:
        (out / "reports").write_bytes(msgspec.msgpack.encode(reports))
    dist.barrier()
    dist.destroy_process_group()


def torchrun(ranks: int, cases: list[SyncCase], folder: Path) -> list[list[SyncReport]]:
    """Every case's syncs, made by an actor of `ranks` processes; its trained weights lie in `folder`/trainedN."""
    (folder / "cases").write_bytes(msgspec.msgpack.encode(cases))
    kit.run_module(ranks, "tests.numerics.sync_kit", str(folder / "cases"), str(folder))
    return msgspec.msgpack.decode((folder / "reports").read_bytes(), type=list[list[SyncReport]])


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
