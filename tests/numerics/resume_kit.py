"""One leg of a run whose layout changes at every resume: `python -m tests.numerics.resume_kit JOB` under torchrun."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from megatron_venus.checkpoint_index import find_latest
from megatron_venus.config import OptimizerConfig, ParallelConfig
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
    """Then load that checkpoint into a new actor of the same layout: both must go on alike, to the bit."""


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


def run(leg: Leg) -> dict[str, torch.Tensor]:
    """The weights after the leg."""
    from megatron_venus import checkpoint

    folder, run_dir = Path(leg.folder), Path(leg.run_dir)
    actor = kit.make_actor(folder, SETTINGS, parallel=leg.parallel)
    found = find_latest(run_dir)
    if found is not None:
        checkpoint.load(found, actor)
    train(actor, found.step + 1 if found else 1, leg.until)
    checkpoint.save(run_dir, leg.until, actor, 0, hf_source=folder, keep=9)
    weights = {name: tensor.clone() for name, tensor in actor.hf_tensors()}
    if leg.twice:
        other = kit.make_actor(folder, SETTINGS, parallel=leg.parallel)
        found = find_latest(run_dir)
        assert found is not None and found.step == leg.until
        checkpoint.load(found, other)
        assert_equal(moments(other), moments(actor))
        for each in (actor, other):
            train(each, leg.until + 1, leg.until + 1)
        assert_equal(dict(other.hf_tensors()), dict(actor.hf_tensors()))
    return weights


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
