"""What is sent into the engines with one request: consecutive tensors of one type, in messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_venus.weight_source import TensorInfo, WeightSource
from rollout.engine_layout import messages_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """Tensors `start` and following of a source, broadcast as one block of `nbytes`."""

    start: int
    infos: list[TensorInfo]
    nbytes: int

    def whole(self, source: WeightSource) -> Tensor | None:
        """Its tensor, where it is one that needs no gathering."""
        return source.whole(self.start) if len(self.infos) == 1 else None

    def views(self, flat: Tensor) -> list[Tensor]:
        """The tensors, one after another in the first bytes of `flat`."""
        parts = flat[: self.nbytes].view(self.infos[0].dtype).split([torch.Size(i.shape).numel() for i in self.infos])
        return [part.view(info.shape) for part, info in zip(parts, self.infos, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Messages that one request announces."""

    messages: list[Message]

    @property
    def infos(self) -> list[TensorInfo]:
        return [info for message in self.messages for info in message.infos]

    @property
    def nbytes(self) -> int:
        return sum(message.nbytes for message in self.messages)

    def gathered(self, source: WeightSource) -> list[int]:
        """Numbers of the tensors that `source` must gather, in order."""
        return [
            message.start + index
            for message in self.messages
            if message.whole(source) is None
            for index in range(len(message.infos))
        ]


def buckets_of(infos: Sequence[TensorInfo], bucket_bytes: int) -> Iterator[Bucket]:
    """Consecutive tensors of one type, together at most `bucket_bytes`; a larger tensor gets a bucket of its own."""
    start, filled = 0, 0
    for index, info in enumerate(infos):
        if index > start and (filled + info.nbytes > bucket_bytes or infos[start].dtype != info.dtype):
            yield _bucket(infos, start, index)
            start, filled = index, 0
        filled += info.nbytes
    if filled:
        yield _bucket(infos, start, len(infos))


def _bucket(infos: Sequence[TensorInfo], start: int, stop: int) -> Bucket:
    sizes = [info.nbytes for info in infos[start:stop]]
    return Bucket(
        messages=[
            Message(start=start + first, infos=list(infos[start + first : start + last]), nbytes=sum(sizes[first:last]))
            for first, last in messages_of(sizes)
        ]
    )
