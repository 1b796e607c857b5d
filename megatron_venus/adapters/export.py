"""Whole weights for rank 0's weight sync, gathered from the processes of its replica as it asks for them.

Every process keeps its part of the model; rank 0 asks for some Hugging Face tensors at a time, and whoever holds a
piece of one (tensor, pipeline and expert parallelism) sends it straight to its place there. So rank 0 holds what it
asked for and one small chunk, the others nothing beyond their parts. The other processes serve these reads until rank
0 says that the sync is over; other replicas have no part in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_venus.adapters import shards
from megatron_venus.adapters.megatron import Actor
from megatron_venus.weight_map import hf_shapes
from megatron_venus.weight_source import TensorInfo

CHUNK_BYTES = 4_000_000
"""Pieces that cannot be received in place (columns) travel in chunks of this size."""


class WeightExport:
    """A `WeightSource` on rank 0; every process of replica 0 makes one, and calls `finish` once a sync."""

    def __init__(self, actor: Actor) -> None:
        self._layout = actor.layout
        self._mine = actor.parts()
        assert all(param.dtype == actor.dtype for param in self._mine.values())
        self.device = actor.device
        self._pieces = self._plan(actor)
        """Hugging Face tensor → (process that holds it, its parameter, the piece)."""
        shapes = hf_shapes(actor.arch)
        self.infos = [TensorInfo(name=name, shape=shape, dtype=actor.dtype) for name, shape in shapes.items()]

    def _plan(self, actor: Actor) -> dict[str, list[tuple[int, str, shards.Piece]]]:
        """Who sends what; the same on every process of the replica."""
        layout, tensor = self._layout, self._layout.parallel.tensor
        mine = (dist.get_rank(), layout.tensor_rank, list(self._mine))
        holders: list[Any] = [None] * dist.get_world_size(layout.peers)
        dist.all_gather_object(holders, mine, group=layout.peers)
        self._head = holders[0][0]
        pieces: dict[str, list[tuple[int, str, shards.Piece]]] = {name: [] for name in hf_shapes(actor.arch)}
        taken: set[tuple[str, int]] = set()
        # The head comes first: what it holds itself, nobody sends.
        for process, rank, names in holders:
            for name in names:
                cut = tensor > 1 and shards.cut_dim(name) is not None
                part = (name, rank if cut else 0)
                if part not in taken:
                    taken.add(part)
                    for piece in shards.pieces_of(name, actor.arch, part[1], tensor if cut else 1):
                        pieces[piece.tensor].append((process, name, piece))
        return pieces

    def whole(self, index: int) -> Tensor | None:
        """See `WeightSource`; on rank 0 only."""
        (process, name, piece), *others = self._pieces[self.infos[index].name]
        if others or process != self._head:
            return None
        part = piece.of_part(self._mine[name].detach())
        return part if part.is_contiguous() else None

    @torch.no_grad()
    def read(self, indices: Sequence[int], tensors: Iterable[Tensor]) -> None:
        """See `WeightSource`; on rank 0 only."""
        self._layout.share(lambda: list(indices))
        for index, tensor in zip(indices, tensors, strict=True):
            for process, name, piece in self._pieces[self.infos[index].name]:
                target = piece.of_whole(tensor)
                if process == self._head:
                    target.copy_(piece.of_part(self._mine[name]))
                    continue
                for part in _chunks(target):
                    if part.is_contiguous():
                        dist.recv(part, process)
                    else:
                        chunk = torch.empty(part.shape, dtype=part.dtype, device=part.device)
                        dist.recv(chunk, process)
                        part.copy_(chunk)

    @torch.no_grad()
    def finish(self) -> None:
        """Rank 0: the sync is over. Its peers: serve until then. Other replicas: nothing."""
        if self._layout.replica != 0:
            return
        if self._layout.head:
            self._layout.share(lambda: None)
            return
        asked: list[int] | None
        while (asked := self._layout.share(lambda: None)) is not None:
            for index in asked:
                for process, name, piece in self._pieces[self.infos[index].name]:
                    if process == dist.get_rank():
                        for part in _chunks(piece.of_part(self._mine[name])):
                            dist.send(part.contiguous(), self._head)


def _chunks(rows: Tensor) -> Iterator[Tensor]:
    """Consecutive rows, at most `CHUNK_BYTES` at once (at least one)."""
    row_bytes = rows[0].numel() * rows.element_size()
    yield from rows.split(max(1, CHUNK_BYTES // row_bytes))
