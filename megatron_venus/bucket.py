"""What is sent into the engines with one request: consecutive tensors, of one type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_venus.weight_source import TensorInfo, WeightSource
from rollout.engine_layout import messages_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """Tensors `start` and following of a source, together of `nbytes`."""

    start: int
    infos: list[TensorInfo]
    nbytes: int

    def gathered_bytes(self, source: WeightSource) -> int:
        """Bytes of the buffer that `fill` needs."""
        return sum(self.infos[index].nbytes for index, whole in enumerate(self._whole(source)) if whole is None)

    def fill(self, flat: Tensor, source: WeightSource) -> list[Tensor]:
        """The tensors: large ones where they lie whole, the others gathered into the bytes of `flat`."""
        tensors = self._whole(source)
        missing = [index for index, tensor in enumerate(tensors) if tensor is None]
        begin = 0
        for index in missing:
            info = self.infos[index]
            tensors[index] = flat[begin : begin + info.nbytes].view(info.dtype).view(info.shape)
            begin += info.nbytes
        filled = [tensor for tensor in tensors if tensor is not None]
        source.read([self.start + index for index in missing], [filled[index] for index in missing])
        return filled

    def messages(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What is broadcast one after another, as bytes; `tensors` are those that `fill` made."""
        # Tensors that go together lie together.
        return [
            torch.as_strided(tensors[start], (sum(t.numel() for t in tensors[start:stop]),), (1,)).view(torch.uint8)
            for start, stop in self._messages()
        ]

    def _whole(self, source: WeightSource) -> list[Tensor | None]:
        """The tensors that need no gathering; those of a message of several are not among them."""
        tensors: list[Tensor | None] = [None] * len(self.infos)
        for start, stop in self._messages():
            if stop == start + 1:
                tensors[start] = source.whole(self.start + start)
        return tensors

    def _messages(self) -> list[tuple[int, int]]:
        return messages_of([info.nbytes for info in self.infos])


def buckets_of(infos: Sequence[TensorInfo], bucket_bytes: int) -> Iterator[Bucket]:
    """Consecutive tensors of one type, together at most `bucket_bytes`; a larger tensor gets a bucket of its own."""
    start, filled = 0, 0
    for index, info in enumerate(infos):
        if index > start and (filled + info.nbytes > bucket_bytes or infos[start].dtype != info.dtype):
            yield Bucket(start=start, infos=list(infos[start:index]), nbytes=filled)
            start, filled = index, 0
        filled += info.nbytes
    if filled:
        yield Bucket(start=start, infos=list(infos[start:]), nbytes=filled)
