"""What an engine's tensor-parallel rank holds of a Hugging Face tensor, and proof that it does.

Enters: Hugging Face tensors, one after another. Leaves: the names, shapes and checksums that every rank of an SGLang
engine must show after it loaded them. Called by weight sync; `weight_map` knows the layouts of the actor and of
checkpoints, this is the engine's.

SGLang keeps q over k over v as `qkv_proj`, gate over up as `gate_up_proj`, and all experts of a layer in two tensors:
`experts.w13_weight` [E, 2·f, h] (each expert's gate over its up) and `experts.w2_weight` [E, h, f]. Rank r of R holds
block r of the rows of embedding, output layer, q, k, v, gate and up, block r of the columns of o and down, and all of
every norm and router. Fewer key-value heads than ranks are repeated, and zero rows fill the vocabulary up.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from envclient.base.errors import InvariantError
from megatron_venus.weight_map import Architecture, raw_bytes

_VOCABULARY_STEP = 64
"""SGLang's DEFAULT_VOCAB_PADDING_SIZE."""
_PROJECTION = re.compile(r"(.+\.)(q|k|v|o|gate|up|down)_proj\.(weight|bias)")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_FUSED = {
    "q": ("qkv", 0, 3),
    "k": ("qkv", 1, 3),
    "v": ("qkv", 2, 3),
    "gate": ("gate_up", 0, 2),
    "up": ("gate_up", 1, 2),
}
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the engine keeps a Hugging Face tensor: part `index` of `parts`, in memory order, of parameter `param`."""

    param: str
    index: int = 0
    parts: int = 1


class EngineLayout:
    """One engine of `ranks` tensor-parallel ranks."""

    def __init__(self, arch: Architecture, ranks: int) -> None:
        self._arch = arch
        self.ranks = ranks

    def place(self, name: str) -> Place:
        """Of the Hugging Face tensor `name`."""
        if expert := _EXPERT.fullmatch(name):
            number, experts = int(expert[2]), self._arch.experts
            if expert[3] == "down":
                return Place(param=f"{expert[1]}.w2_weight", index=number, parts=experts)
            index = 2 * number + (expert[3] == "up")
            return Place(param=f"{expert[1]}.w13_weight", index=index, parts=2 * experts)
        if (projection := _PROJECTION.fullmatch(name)) and projection[2] in _FUSED:
            fused, index, parts = _FUSED[projection[2]]
            return Place(param=f"{projection[1]}{fused}_proj.{projection[3]}", index=index, parts=parts)
        return Place(param=name)

    def part(self, name: str, tensor: Tensor, rank: int) -> Tensor:
        """What `rank` holds of it, without the zero rows that fill the vocabulary; a view."""
        projection = _PROJECTION.fullmatch(name)
        if self.ranks == 1 or (projection is None and name not in _VOCABULARY):
            return tensor
        if projection is None:
            rows = self._vocabulary_rows(len(tensor))
            return tensor[rows * rank : rows * (rank + 1)]
        if projection[2] in ("o", "down"):
            return tensor.chunk(self.ranks, 1)[rank]
        if projection[2] in ("k", "v"):
            blocks = min(self._arch.kv_heads, self.ranks)
            return tensor.chunk(blocks)[rank * blocks // self.ranks]
        return tensor.chunk(self.ranks)[rank]

    def filling(self, name: str, tensor: Tensor, rank: int) -> int:
        """Zero rows that `rank` holds behind its part."""
        if name not in _VOCABULARY:
            return 0
        return self._vocabulary_rows(len(tensor)) - len(self.part(name, tensor, rank))

    def _vocabulary_rows(self, vocabulary: int) -> int:
        """Rows of a rank. On CPU SGLang takes a larger step where the usual one does not fit the ranks."""
        padded = -(-vocabulary // _VOCABULARY_STEP) * _VOCABULARY_STEP
        if padded % self.ranks:
            step = _VOCABULARY_STEP * self.ranks
            padded = -(-vocabulary // step) * step
        return padded // self.ranks

    def shapes(self, tensors: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
        """Name and shape of every parameter of a rank, for Hugging Face `tensors` of these names and shapes."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in tensors:
            place = self.place(name)
            whole = torch.empty(shape, device="meta")
            rows, *others = self.part(name, whole, 0).shape
            rows += self.filling(name, whole, 0)
            if _EXPERT.fullmatch(name):
                shapes[place.param] = (self._arch.experts, rows * place.parts // self._arch.experts, *others)
            else:
                before = shapes.get(place.param, (0,))[0]
                shapes[place.param] = (before + rows, *others)
        return shapes


class EngineDigests:
    """Checksums that an engine's ranks must show, made while the tensors pass by: nothing is kept but the hashes."""

    def __init__(self, layout: EngineLayout) -> None:
        self._layout = layout
        self._hashes: dict[str, list[Any]] = {}
        self._added: dict[str, int] = {}
        self._parts: dict[str, int] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """The next tensor. Those that share a parameter of the engine must come in its order.

        Raises:
            InvariantError: they do not.
        """
        place, layout = self._layout.place(name), self._layout
        self._parts[place.param] = place.parts
        if place.index != self._added.get(place.param, 0):
            raise InvariantError(f"tensor {name!r} comes out of the order of the engine's {place.param!r}")
        self._added[place.param] = place.index + 1
        hashes = self._hashes.setdefault(
            place.param, [hashlib.blake2b(digest_size=32) for _ in range(self._layout.ranks)]
        )
        for rank, digest in enumerate(hashes):
            digest.update(raw_bytes(layout.part(name, tensor, rank)))
            if rows := layout.filling(name, tensor, rank):
                digest.update(bytes(rows * tensor[0].numel() * tensor.element_size()))

    def finish(self) -> list[dict[str, str]]:
        """Engine parameter → blake2b (32 bytes, hex), one mapping a rank.

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
