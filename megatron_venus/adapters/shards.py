"""This process's part of a Megatron parameter, and the whole made of all parts again.

`weight_map` knows whole parameters under their global names; here is what tensor, pipeline and expert parallelism make
of them: the dimension each is cut along, and the layer and expert numbers that a stage counts from 0.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_venus.architecture import Architecture
from megatron_venus.weight_map import hf_shapes, row_runs

_CUT_DIM = {
    "embedding.word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_proj.weight": 1,
    "linear_fc1.weight": 0,
    "linear_fc2.weight": 1,
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.local_experts\.(\d+)\.")


def cut_dim(name: str) -> int | None:
    """Dimension along which tensor parallelism cuts the parameter; None: not at all (norms, router, experts)."""
    if is_expert(name):
        return None
    for ending, dim in _CUT_DIM.items():
        if name.endswith(ending):
            return dim
    return None


def is_expert(name: str) -> bool:
    """Whether the parameter belongs to one expert."""
    return _EXPERT.search(name) is not None


def layer_of(name: str) -> int | None:
    """Number of the layer that the parameter belongs to."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def expert_of(name: str) -> int:
    """Number of the expert that the parameter belongs to."""
    match = _EXPERT.search(name)
    assert match is not None
    return int(match[1])


def global_name(name: str, chunk: Any, experts_before: int) -> str:
    """The parameter's name in the whole model; `chunk` is the model piece that holds it under `name`."""
    layers = chunk.decoder.layers

    def layer(match: re.Match[str]) -> str:
        return f"decoder.layers.{layers[int(match[1])].layer_number - 1}."

    name = _LAYER.sub(layer, name)
    return _EXPERT.sub(lambda match: f".local_experts.{int(match[1]) + experts_before}.", name)


def part_of(name: str, whole: Tensor, rank: int, size: int) -> Tensor:
    """What tensor-parallel process `rank` of `size` holds of the parameter."""
    dim = cut_dim(name)
    if dim is None or size == 1:
        return whole
    if name.endswith("linear_fc1.weight"):
        # Gate and up are cut each by itself, so that every process can multiply its halves.
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    return whole.chunk(size, dim)[rank]


def whole_of(name: str, parts: Sequence[Tensor]) -> Tensor:
    """The inverse of `part_of`."""
    dim = cut_dim(name)
    if dim is None or len(parts) == 1:
        return parts[0]
    if name.endswith("linear_fc1.weight"):
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[0] for half in halves] + [half[1] for half in halves])
    return torch.cat(list(parts), dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Rows of a process's part, and where in a Hugging Face tensor they belong."""

    tensor: str
    part_row: int
    """First row in the part."""
    row: int
    """First row in the Hugging Face tensor."""
    rows: int
    columns: tuple[int, int] | None
    """Columns of the Hugging Face tensor, from and to; None: all."""

    def of_part(self, part: Tensor) -> Tensor:
        return part[self.part_row : self.part_row + self.rows]

    def of_whole(self, whole: Tensor) -> Tensor:
        rows = whole[self.row : self.row + self.rows]
        return rows if self.columns is None else rows[:, slice(*self.columns)]


def pieces_of(name: str, arch: Architecture, rank: int, size: int) -> list[Piece]:
    """All that tensor-parallel process `rank` of `size` holds of the parameter, as pieces of Hugging Face tensors."""
    runs = row_runs(name, arch)
    whole_rows = sum(run.rows for run in runs)
    dim = cut_dim(name) if size > 1 else None
    held, columns = [(0, whole_rows)], None
    if dim == 1:
        width = hf_shapes(arch)[runs[0].tensor][1] // size
        columns = (rank * width, (rank + 1) * width)
    elif dim == 0:
        # Gate and up are cut each by itself (see `part_of`).
        halves = 2 if name.endswith("linear_fc1.weight") else 1
        rows = whole_rows // halves // size
        starts = [half * whole_rows // halves + rank * rows for half in range(halves)]
        held = [(start, start + rows) for start in starts]
    pieces = []
    part_row = 0
    for start, stop in held:
        run_start = 0
        for run in runs:
            first, last = max(start, run_start), min(stop, run_start + run.rows)
            if first < last:
                pieces.append(
                    Piece(
                        tensor=run.tensor,
                        part_row=part_row,
                        row=run.start + first - run_start,
                        rows=last - first,
                        columns=columns,
                    )
                )
                part_row += last - first
            run_start += run.rows
    return pieces
