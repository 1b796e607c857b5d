"""Where a model's parameters lie in a distributed checkpoint, and how ranks of a parallel layout would cut them.

Megatron stacks the layers (and experts) of one kind under one key: `decoder.layers.mlp.linear_fc2.weight` is [L, h, f].
The cut never decides what can be loaded: any layout reads any cut. It decides which bytes a rank has to read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from envclient.base.errors import ConfigError
from megatron_venus.architecture import Architecture
from megatron_venus.weight_map import megatron_shapes

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of a part of a tensor."""

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
# Megatron stores the norms of its local layers under Transformer Engine's names. With experts its two kinds of layers
# disagree about the second norm (0.16.1), so it is written under both names: a few kilobytes.
_STORED = {
    "input_layernorm.weight": ("self_attention.linear_qkv.layer_norm_weight",),
    "pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight",),
}
_STORED_MOE = _STORED | {"pre_mlp_layernorm.weight": ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")}
_SPLIT_AXIS = {
    "linear_qkv": 0,
    "linear_fc1": 0,
    "word_embeddings": 0,
    "output_layer": 0,
    "linear_proj": 1,
    "linear_fc2": 1,
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Numbers of ranks that share a model."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    def check(self, arch: Architecture) -> None:
        """Refuse numbers that do not divide the model.

        Raises:
            ConfigError: names the option and what it must divide.
        """
        for what, size in (
            ("attention heads", arch.heads),
            ("key-value heads", arch.kv_heads),
            ("feed-forward columns", arch.feed_forward),
            ("vocabulary entries", arch.vocabulary),
        ):
            _must_divide("--tp", self.tensor, what, size)
        _must_divide("--pp", self.pipeline, "layers", arch.layers)
        if self.expert > 1 and not arch.experts:
            raise ConfigError(f"--ep {self.expert}: the model has no experts", "leave it out")
        if arch.experts:
            _must_divide("--ep", self.expert, "experts", arch.experts)


def _must_divide(option: str, ranks: int, what: str, size: int) -> None:
    if ranks < 1 or size % ranks:
        raise ConfigError(f"{option} {ranks} does not divide the model's {size} {what}", "choose a divisor")


@dataclass(frozen=True, kw_only=True)
class Place:
    """One parameter's place: tensor `keys[0]` at index `lead` of its leading axes (also under the other keys)."""

    name: str
    """Megatron's name of the parameter."""
    shape: tuple[int, ...]
    keys: tuple[str, ...]
    lead: tuple[int, ...] = ()
    """(layer, expert), as far as it has them."""
    lead_shape: tuple[int, ...] = ()

    @property
    def global_shape(self) -> tuple[int, ...]:
        return self.lead_shape + self.shape

    def boxed(self, box: Box) -> Box:
        """A box of the parameter, as a box of the stacked tensor."""
        offsets, sizes = box
        return self.lead + offsets, (1,) * len(self.lead) + sizes

    def cuts(self, layout: Layout) -> Iterator[tuple[int, Box]]:
        """(tensor-parallel rank, its part); gate and up of `linear_fc1` are cut each by itself, as Megatron does."""
        origin = (0,) * len(self.shape)
        module = self.name.split(".")[-2]
        axis = _SPLIT_AXIS.get(module)
        # Megatron shards experts over expert ranks; tensor-parallel experts are their own, rarer, setting.
        if axis is None or len(self.lead) > 1:
            ranks, axis = 1, 0
        else:
            ranks = layout.tensor
        if axis >= len(self.shape):
            ranks, axis = 1, 0
        parts = (2 if module == "linear_fc1" else 1) * ranks
        size = self.shape[axis] // parts
        for part in range(parts):
            offsets = (*origin[:axis], part * size, *origin[axis + 1 :])
            yield part % ranks, (offsets, (*self.shape[:axis], size, *self.shape[axis + 1 :]))

    def blocks(self, layout: Layout, most_rows: int) -> Iterator[tuple[int, int, list[tuple[int, Box]]]]:
        """(first row, rows, [(tensor-parallel rank, its part of these rows)]): all rows once, ascending."""
        parts = list(self.cuts(layout))
        for start, rows in dict.fromkeys((offsets[0], sizes[0]) for _, (offsets, sizes) in parts):
            here = [(rank, box) for rank, box in parts if box[0][0] == start]
            for (first, *_), (count, *_) in by_rows(((start,), (rows,)), most_rows):
                cut = [(rank, ((first, *o[1:]), (count, *s[1:]))) for rank, (o, s) in here]
                yield first, count, cut

    def home(self, layout: Layout, arch: Architecture) -> tuple[int, int]:
        """(pipeline stage, expert rank) that holds it."""
        if self.lead:
            stage = self.lead[0] * layout.pipeline // arch.layers
            return stage, self.lead[1] * layout.expert // arch.experts if len(self.lead) > 1 else 0
        return (0 if self.name.startswith("embedding.") else layout.pipeline - 1), 0


def places(arch: Architecture) -> list[Place]:
    """Every parameter of the model, in its order."""
    stored = _STORED_MOE if arch.experts else _STORED
    found = []
    for name, shape in megatron_shapes(arch).items():
        layer = _LAYER.fullmatch(name)
        if layer is None:
            found.append(Place(name=name, shape=shape, keys=(name,)))
            continue
        lead: tuple[int, ...] = (int(layer[1]),)
        lead_shape: tuple[int, ...] = (arch.layers,)
        inner = layer[2]
        names: tuple[str, ...] = stored.get(inner, (inner,))
        if expert := _EXPERT.fullmatch(inner):
            lead, lead_shape = (*lead, int(expert[1])), (*lead_shape, arch.experts)
            names = (f"mlp.experts.experts.{expert[2]}",)
        keys = tuple(f"decoder.layers.{part}" for part in names)
        found.append(Place(name=name, shape=shape, keys=keys, lead=lead, lead_shape=lead_shape))
    return found


def by_rows(box: Box, most_rows: int) -> Iterator[Box]:
    """The box in pieces of at most `most_rows` rows."""
    offsets, sizes = box
    for start in range(0, sizes[0], most_rows):
        rows = min(most_rows, sizes[0] - start)
        yield (offsets[0] + start, *offsets[1:]), (rows, *sizes[1:])
