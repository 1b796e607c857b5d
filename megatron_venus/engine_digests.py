"""Checksums that an engine's ranks must show, made while the weights pass by: nothing is kept but the hashes."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from envclient.base.checksum import Checksum
from envclient.base.errors import InvariantError
from megatron_venus.weight_map import raw_bytes
from rollout.engine_layout import EngineLayout


class EngineDigests:
    """Takes every Hugging Face tensor once; those that share a parameter of the engine in its order."""

    def __init__(self, layout: EngineLayout) -> None:
        self._layout = layout
        self._hashes: dict[str, list[Any]] = {}
        self._added: dict[str, int] = {}
        self._parts: dict[str, int] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """The next tensor.

        Raises:
            InvariantError: it comes out of order.
        """
        place, layout, shape = self._layout.place(name), self._layout, tuple(tensor.shape)
        self._parts[place.param] = place.parts
        if place.index != self._added.get(place.param, 0):
            raise InvariantError(f"tensor {name!r} comes out of the order of the engine's {place.param!r}")
        self._added[place.param] = place.index + 1
        hashes = self._hashes.setdefault(place.param, [Checksum() for _ in range(layout.ranks)])
        for rank, digest in enumerate(hashes):
            digest.update(raw_bytes(tensor[layout.part(name, shape, rank)]))
            if rows := layout.filling(name, shape, rank):
                digest.update(bytes(rows * tensor[0].numel() * tensor.element_size()))

    def finish(self) -> list[dict[str, str]]:
        """Engine parameter → checksum, one mapping a rank.

        Raises:
            InvariantError: a parameter lacks a part.
        """
        for param, added in self._added.items():
            if added != self._parts[param]:
                raise InvariantError(f"the engine's {param!r} has {self._parts[param]} parts, {added} came")
        return [
            {param: hashes[rank].hexdigest() for param, hashes in self._hashes.items()}
            for rank in range(self._layout.ranks)
        ]
