"""Where weight sync takes the weights from: what there is, and the means to have some of it at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One tensor under Hugging Face's name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class WeightSource(Protocol):
    """The current weights of a model, whole, in a fixed order. Nothing is held between two calls of `read`."""

    @property
    def infos(self) -> Sequence[TensorInfo]: ...

    @property
    def device(self) -> torch.device: ...

    def whole(self, index: int) -> Tensor | None:
        """The weight of `infos[index]` itself, where it lies whole and contiguous in this process's memory."""

    def read(self, indices: Sequence[int], tensors: Iterable[Tensor]) -> None:
        """Copy the weights of `infos[i]`, i in `indices`, into `tensors`, which have their shapes and types.

        Each is asked for when the one before is filled, and their end when the last one is.
        """


class TensorSource:
    """Weights that are whole in this process."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = list(tensors.values())
        self.infos = [TensorInfo(name=n, shape=tuple(t.shape), dtype=t.dtype) for n, t in tensors.items()]
        self.device = self._tensors[0].device

    def whole(self, index: int) -> Tensor | None:
        tensor = self._tensors[index].detach()
        return tensor if tensor.is_contiguous() else None

    def read(self, indices: Sequence[int], tensors: Iterable[Tensor]) -> None:
        for index, target in zip(indices, tensors, strict=True):
            target.copy_(self._tensors[index].detach())
