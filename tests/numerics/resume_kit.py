"""One leg of a run whose layout changes at every resume: `python -m tests.numerics.resume_kit JOB` under torchrun."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from envclient.base.errors import VenusError
from megatron_venus.checkpoint_index import find_latest
from megatron_venus.config import CheckpointConfig, OptimizerConfig, ParallelConfig
from rollout.types import Record
from tests.numerics import kit

SETTINGS = OptimizerConfig(lr=1e-2)


class Leg(Record):
    """Resume from the run's newest checkpoint, make steps up to `until`, save."""

    folder: str
    run_dir: str
    until: int
    parallel: ParallelConfig
    twice: bool = False
    """Make one more step while that checkpoint is saved, and load it into a new actor of the same layout: it must go on
    alike, to the bit."""
    megatron: str = ""
    """What `from_hf` made of `folder`: an actor that starts from it must hold the same, on every rank."""
    failing_rank: int = -1
    """Then this rank fails in another save: all ranks must say so, and no manifest may be written."""


def train(actor: Any, first: int, last: int) -> None:
    """Steps `first` to `last` on groups that depend on the step alone."""
    stream = kit.make_stream(actor, optimizer=SETTINGS)
    for step in range(first, last + 1):
        groups = kit.make_groups(4, seed=step)
        for group in groups[actor.layout.replica :: actor.layout.replicas]:
            stream.add(group)
        stream.finish(step, kit.counts_of(groups))


def moments(actor: Any) -> dict[str, torch.Tensor]:
    """Adam's state of this process."""
    state = {}
    for part, optimizer in enumerate(actor.optimizer.chained_optimizers):
        for number, group in enumerate(optimizer.optimizer.param_groups):
            state[f"{part}.{number}.step"] = torch.tensor(group["step"])
            for index, param in enumerate(group["params"]):
                for name, tensor in optimizer.optimizer.state[param].items():
                    state[f"{part}.{number}.{index}.{name}"] = tensor.clone()
    return state


def own_weights(actor: Any) -> dict[str, torch.Tensor]:
    """This process's parameters, a last stage's copy of a tied embedding too."""
    return {
        f"{index}.{name}": param.detach()
        for index, chunk in enumerate(actor.chunks)
        for name, param in chunk.named_parameters()
    }


def run(leg: Leg) -> dict[str, torch.Tensor]:
    """The weights after the leg."""
    from megatron_venus import checkpoint
    from megatron_venus.checkpoint_saver import CheckpointSaver

    folder, run_dir = Path(leg.folder), Path(leg.run_dir)
    actor = kit.make_actor(folder, SETTINGS, parallel=leg.parallel)
    if leg.megatron:
        other = kit.make_actor(folder, SETTINGS, parallel=leg.parallel, megatron=Path(leg.megatron))
        assert_equal(own_weights(other), own_weights(actor))
    found = find_latest(run_dir)
    if found is not None:
        checkpoint.load(found, actor)
    train(actor, found.step + 1 if found else 1, leg.until)
    weights = {name: tensor.clone() for name, tensor in actor.hf_tensors()}
    with CheckpointSaver(run_dir, actor, CheckpointConfig(keep=9), hf_source=folder) as saver:
        before = moments(actor)
        saver.save(leg.until, 0)
        if leg.twice:
            train(actor, leg.until + 1, leg.until + 1)
    if leg.twice:
        other = kit.make_actor(folder, SETTINGS, parallel=leg.parallel)
        found = find_latest(run_dir)
        assert found is not None and found.step == leg.until
        checkpoint.load(found, other)
        assert_equal(moments(other), before)
        train(other, leg.until + 1, leg.until + 1)
        assert_equal(dict(other.hf_tensors()), dict(actor.hf_tensors()))
    if leg.failing_rank >= 0:
        fail(leg, actor)
    return weights


def fail(leg: Leg, actor: Any) -> None:
    from megatron_venus.checkpoint_saver import CheckpointSaver

    saver = CheckpointSaver(Path(leg.run_dir), actor, CheckpointConfig(keep=9), hf_source=Path(leg.folder))
    if dist.get_rank() == leg.failing_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, 1_000))
    saver.save(99, 0)
    try:
        saver.finish()
    except VenusError as error:
        assert f"rank {leg.failing_rank}: OSError: [Errno 27] File too large" in str(error)
    else:
        raise AssertionError("the save went well")
    dist.barrier()
    latest = find_latest(Path(leg.run_dir))
    assert latest is not None and latest.step == leg.until


def assert_equal(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == reference.keys() and len(ours) > 5
    for name, tensor in reference.items():
        assert torch.equal(ours[name], tensor), name


def main() -> None:
    torch.set_num_threads(1)
    run(msgspec.msgpack.decode(Path(sys.argv[1]).read_bytes(), type=Leg))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
