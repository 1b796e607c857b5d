"""Where an engine keeps a Hugging Face tensor. Both ends of a weight broadcast go by it: the actor and the plug-in.

SGLang keeps q over k over v as `qkv_proj`, gate over up as `gate_up_proj`, and all experts of a layer in two tensors:
`experts.w13_weight` [E, 2·f, h] (each expert's gate over its up) and `experts.w2_weight` [E, h, f]. Of R ranks (tensor
parallel) rank r holds block r of the rows of embedding, output layer, q, k, v, gate and up, block r of the columns of o
and down, and all of every norm and router. Fewer key-value heads than ranks are repeated, and zero rows fill the
vocabulary up. Pure: a tensor here is anything that has a shape and can be sliced.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_VOCABULARY_STEP = 64
"""SGLang's DEFAULT_VOCAB_PADDING_SIZE."""
_OWN_BYTES = 1_000_000
_PROJECTION = re.compile(r"(.+\.)(q|k|v|o|gate|up|down)_proj\.(weight|bias)")
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_FUSED = {
    **{letter: ("qkv", index, 3) for index, letter in enumerate("qkv")},
    **{half: ("gate_up", index, 2) for index, half in enumerate(("gate", "up"))},
}
_VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
Shape = tuple[int, ...]


def messages_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """How a bucket of tensors of these bytes is sent: [from, to) of the tensors of each message.

    A large tensor goes by itself, so that either side can use the memory where it lies; small neighbours go together.
    """
    messages: list[tuple[int, int]] = []
    for index, size in enumerate(sizes):
        small = size < _OWN_BYTES
        if small and messages and messages[-1][1] == index and sizes[index - 1] < _OWN_BYTES:
            messages[-1] = (messages[-1][0], index + 1)
        else:
            messages.append((index, index + 1))
    return messages


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the engine keeps a Hugging Face tensor: part `index` of `parts`, in memory order, of parameter `param`."""

    param: str
    index: int = 0
    parts: int = 1
    expert: int | None = None


def place_of(name: str, experts: int) -> Place:
    """Of the Hugging Face tensor `name`, in a model with `experts` a layer."""
    if expert := _EXPERT.fullmatch(name):
        number = int(expert[2])
        if expert[3] == "down":
            return Place(param=f"{expert[1]}.w2_weight", index=number, parts=experts, expert=number)
        index = 2 * number + (expert[3] == "up")
        return Place(param=f"{expert[1]}.w13_weight", index=index, parts=2 * experts, expert=number)
    if (projection := _PROJECTION.fullmatch(name)) and projection[2] in _FUSED:
        fused, index, parts = _FUSED[projection[2]]
        return Place(param=f"{projection[1]}{fused}_proj.{projection[3]}", index=index, parts=parts)
    return Place(param=name)


def view_in(param: Any, name: str, shape: Shape) -> Any:
    """The rows of `param`, the parameter of an engine of one rank, that hold the tensor `name`; not checked to fit."""
    place, rows = place_of(name, experts=0), shape[0]
    if place.expert is not None:
        param = param[place.expert]
        return param[rows * (place.index % 2) :][:rows] if "w13" in place.param else param
    # Keys and values have as many rows each, and stand at the end.
    first = (
        (len(param) - (place.parts - place.index) * rows) if place.parts == 3 and place.index else place.index * rows
    )
    return param[first : first + rows]


class EngineLayout:
    """One engine of `ranks` tensor-parallel ranks, for a model of `kv_heads` and `experts` a layer."""

    def __init__(self, *, kv_heads: int, experts: int, ranks: int) -> None:
        self.ranks = ranks
        self._kv_heads = kv_heads
        self._experts = experts

    def place(self, name: str) -> Place:
        """Of the Hugging Face tensor `name`."""
        return place_of(name, self._experts)

    def part(self, name: str, shape: Shape, rank: int) -> tuple[slice, ...]:
        """What `rank` holds of it: index of rows and, where columns are cut, of columns; without filled rows."""
        projection = _PROJECTION.fullmatch(name)
        if self.ranks == 1 or (projection is None and name not in _VOCABULARY):
            return (slice(0, shape[0]),)
        if projection is None:
            rows = self._vocabulary_rows(shape[0])
            return (slice(min(rows * rank, shape[0]), min(rows * (rank + 1), shape[0])),)
        if projection[2] in ("o", "down"):
            return slice(0, shape[0]), _block(shape[1], rank, self.ranks)
        if projection[2] in ("k", "v"):
            blocks = min(self._kv_heads, self.ranks)
            return (_block(shape[0], rank * blocks // self.ranks, blocks),)
        return (_block(shape[0], rank, self.ranks),)

    def filling(self, name: str, shape: Shape, rank: int) -> int:
        """Zero rows that `rank` holds behind its part."""
        if name not in _VOCABULARY:
            return 0
        rows = self.part(name, shape, rank)[0]
        return self._vocabulary_rows(shape[0]) - (rows.stop - rows.start)

    def _vocabulary_rows(self, vocabulary: int) -> int:
        """Rows of a rank. On CPU SGLang takes a larger step where the usual one does not fit the ranks."""
        padded = -(-vocabulary // _VOCABULARY_STEP) * _VOCABULARY_STEP
        if padded % self.ranks:
            step = _VOCABULARY_STEP * self.ranks
            padded = -(-vocabulary // step) * step
        return padded // self.ranks

    def shapes(self, tensors: Iterable[tuple[str, Shape]]) -> dict[str, Shape]:
        """Name and shape of every parameter of a rank, for Hugging Face `tensors` of these names and shapes."""
        shapes: dict[str, Shape] = {}
        for name, shape in tensors:
            place = self.place(name)
            lengths = [index.stop - index.start for index in self.part(name, shape, 0)]
            others = (*lengths[1:], *shape[len(lengths) :])
            rows = lengths[0] + self.filling(name, shape, 0)
            if place.expert is not None:
                shapes[place.param] = (self._experts, rows * place.parts // self._experts, *others)
            else:
                before = shapes.get(place.param, (0,))[0]
                shapes[place.param] = (before + rows, *others)
        return shapes


def _block(size: int, index: int, blocks: int) -> slice:
    return slice(size // blocks * index, size // blocks * (index + 1))
