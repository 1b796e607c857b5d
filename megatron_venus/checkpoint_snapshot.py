"""A step's state in host memory, as Megatron plans to store it: made in the training loop, written beside it.

Megatron says what each process stores and in which file; its own asynchronous writers are not used, since they start
processes and meet in the collectives of the training loop. Used by `checkpoint_saver`.
"""

from __future__ import annotations

import itertools
import queue
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch import Tensor

from megatron_venus.adapters.megatron import Actor
from megatron_venus.checkpoint import CONTENT, sharded_state, small_state

_BACKEND, _BACKEND_VERSION = "torch_dist", 1
_Bucket = tuple[str, str, tuple[list[Any], list[Any]]]
"""Of Megatron's writer: (path, name, (objects, tensors)) of one file."""


class _Plan(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Megatron's strategy, stopped when it knows what this process stores."""

    writer: Any
    metadata: Any
    """Of the whole checkpoint; only on rank 0."""

    def __init__(self) -> None:
        super().__init__(_BACKEND, _BACKEND_VERSION, thread_count=1)

    def _get_save_and_finalize_callbacks(self, writer: Any, planned: Any) -> AsyncRequest:
        self.writer, self.metadata = writer, planned[1]
        return AsyncRequest(None, (), [])


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Nothing in it changes when training goes on."""

    step: int
    folder: Path
    """Of the checkpoint; Megatron's files go into its `megatron/`."""
    weights: dict[str, Tensor]
    """Whole, under Hugging Face's names; only on rank 0."""
    _plan: _Plan
    _buckets: list[_Bucket]

    @classmethod
    def take(cls, folder: Path, step: int, actor: Actor, nonfinite_steps: int, *, leader: bool) -> Snapshot:
        """Of the actor as it is now. Every process calls it; `folder`/megatron is there. `leader`: this is rank 0."""
        # Megatron would start a manager process for results of this very process: seconds, and an orphan after a kill.
        filesystem_async._results_queue = queue.Queue()
        plan = _Plan()
        dist_checkpointing.save(
            sharded_state(actor, loading=False) | small_state(step, nonfinite_steps),
            str(folder / "megatron"),
            plan,
            async_sharded_save=True,
            content_metadata=CONTENT,
        )
        weights: dict[str, Tensor] = {}
        if actor.layout.replica == 0:
            for name, tensor in actor.hf_tensors():
                if leader:
                    weights[name] = _copied(tensor)
        buckets = [_staged(bucket) for bucket in plan.writer.write_buckets]
        plan.writer.write_buckets = None
        return cls(step=step, folder=folder, weights=weights, _plan=plan, _buckets=buckets)

    @property
    def stored_bytes(self) -> int:
        """What this process writes of Megatron's state."""
        return sum(
            sum(tensor.nbytes for _, tensor in tensors) + sum(len(data.getbuffer()) for _, data in objects)
            for _, _, (objects, tensors) in self._buckets
        )

    def write(self) -> list[Any]:
        """Write and fsync this process's file; what rank 0's `close` has to know of it."""
        # Unwrapped: the decorator would switch the garbage collector off, for the training loop too.
        write = filesystem_async.FileSystemWriterAsync.write_preloaded_data.__wrapped__
        written: list[list[Any]] = []
        for bucket in self._buckets:
            results: queue.Queue[Any] = queue.Queue()
            running: queue.Queue[int] = queue.Queue()
            running.put(0)
            write([self._plan.writer.transforms], 0, bucket, results, running, use_fsync=True)
            _, result = results.get_nowait()
            if isinstance(result, Exception):
                raise result
            written.append(result)
        return list(itertools.chain.from_iterable(written))

    def close(self, written: list[list[Any]]) -> None:
        """Rank 0, when every process has written: make Megatron's folder whole. `written`: the results, by rank."""
        self._plan.writer.finish(self._plan.metadata, written)
        save_config(CheckpointingConfig(_BACKEND, _BACKEND_VERSION), str(self.folder / "megatron"))


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _staged(bucket: _Bucket) -> _Bucket:
    """The bucket with tensors of its own; the originals are let go of one by one."""
    path, name, (objects, tensors) = bucket
    copies = []
    tensors.reverse()
    while tensors:
        item, tensor = tensors.pop()
        copies.append((item, _copied(tensor)))
    return path, name, (objects, copies)
