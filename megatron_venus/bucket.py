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

    def fill(self, flat: Tensor, source: WeightSource) -> list[Tensor]:
        """The tensors: large ones where they lie whole, the others gathered into the bytes of `flat`."""
        sizes = [torch.Size(info.shape).numel() for info in self.infos]
        parts = flat[: self.nbytes].view(self.infos[0].dtype).split(sizes)
        tensors = [part.view(info.shape) for part, info in zip(parts, self.infos, strict=True)]
        gathered = set(range(len(tensors)))
        for start, stop in self._messages():
            if stop == start + 1 and (whole := source.whole(self.start + start)) is not None:
                tensors[start] = whole
                gathered.remove(start)
        source.read([self.start + index for index in sorted(gathered)], [tensors[index] for index in sorted(gathered)])
        return tensors

    def messages(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What is broadcast one after another, as bytes; `tensors` are those that `fill` made."""
        # Tensors that go together lie together.
        return [
            torch.as_strided(tensors[start], (sum(t.numel() for t in tensors[start:stop]),), (1,)).view(torch.uint8)
            for start, stop in self._messages()
        ]

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
