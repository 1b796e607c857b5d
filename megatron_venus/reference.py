"""The reference policy of a KL term: a frozen copy of the weights that the run started from.

Made by `setup` from `model.path` before a checkpoint is loaded, so that a resumed run keeps its reference. The model
itself computes the reference's log-probs while the copy stands in for its weights: every layout of the model works, and
the price is one copy of this rank's weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


class FrozenReference:
    """Owner of the copy."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        """Of the model pieces that this process holds."""
        self._chunks = chunks
        self._weights = [param.detach().clone() for param in self._parameters()]

    def _parameters(self) -> list[nn.Parameter]:
        return [param for chunk in self._chunks for param in chunk.parameters()]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the model is the reference. Only for forward passes without gradient."""
        params = self._parameters()
        own = [param.data for param in params]
        for param, weight in zip(params, self._weights, strict=True):
            param.data = weight
        try:
            yield
        finally:
            for param, weight in zip(params, own, strict=True):
                param.data = weight
