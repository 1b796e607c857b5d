"""Says what a checkpoint holds: names, shapes, types, parameter count, files, and how its tensors are cut.

Only headers are read, so it takes a moment whatever the size. Layers (and experts) of one kind are one row of the
table unless --all is given.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch

from ckpt_tools import command
from ckpt_tools.hf_checkpoint import HfCheckpoint
from ckpt_tools.megatron_checkpoint import MegatronCheckpoint
from ckpt_tools.output import gigabytes
from ckpt_tools.source import Source, Weights, find
from megatron_venus.weight_map import hf_shapes


@dataclass(frozen=True, kw_only=True)
class Row:
    """One tensor as it is stored."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    cut: str
    """In how many parts, or in which file."""


def main() -> int:
    """Entry point; returns the exit code."""
    arguments = command.parser(
        "inspect", __doc__, "example: python -m ckpt_tools.inspect runs/NAME/checkpoints/step_000100"
    )
    arguments.add_argument(
        "path", type=Path, metavar="CKPT", help="Hugging Face folder, run's checkpoint, or its megatron/"
    )
    command.add_hf(arguments)
    arguments.add_argument("--all", action="store_true", help="a row for every tensor, optimizer state too")
    arguments.add_argument("--json", action="store_true", help="everything as one JSON object")
    options = arguments.parse_args()
    found = find(options.path, options.hf)
    weights = found.open(any_dtype=True)
    rows = tensors_of(weights)
    facts = facts_of(found, weights)
    if options.json:
        table = [{"name": r.name, "shape": r.shape, "dtype": r.dtype, "cut": r.cut} for r in rows]
        print(json.dumps(facts | {"tensors": table}))
        return 0
    for key, value in facts.items():
        print(f"{key:11} {value}")
    print()
    for row in rows if options.all else _collapsed(rows):
        print(f"{row.name:60} {'x'.join(map(str, row.shape)):>20}  {row.dtype:9} {row.cut}")
    return 0


def facts_of(found: Source, weights: Weights) -> dict[str, str | int]:
    """What is said above the table."""
    arch = weights.arch
    parameters = sum(torch.Size(shape).numel() for shape in hf_shapes(arch).values())
    facts: dict[str, str | int] = {
        "format": "Hugging Face" if isinstance(weights, HfCheckpoint) else "Megatron distributed (torch_dist)",
        "family": f"{arch.family}, embeddings {'tied' if arch.tied else 'untied'}, rope {arch.rope_type}",
        "parameters": parameters,
        "weights": f"{gigabytes(weights.nbytes)} {str(weights.dtype).removeprefix('torch.')}",
        "layers": arch.layers,
    }
    if arch.experts:
        facts["experts"] = f"{arch.experts} a layer, {arch.experts_per_token} a token"
    if isinstance(weights, MegatronCheckpoint):
        dist = weights.dist
        size = sum((dist.folder / name).stat().st_size for name in dist.files)
        facts["layout"] = f"any TP, PP, EP loads it; cut for {_cut_for(weights)}"
        facts["files"] = f"{len(dist.files)}, {gigabytes(size)}"
        facts["optimizer"] = "yes" if any(key.startswith("optimizer.") for key in dist.tensors) else "no"
    else:
        facts["files"] = len({tensor.path for tensor in weights.tensors.values()})
    facts["manifest"] = f"step {found.manifest.step}" if found.manifest else "none"
    return facts


def _cut_for(weights: MegatronCheckpoint) -> str:
    """Ranks that share a layer, told from the axis that only tensor parallelism cuts."""
    key = "decoder.layers.self_attention.linear_proj.weight"
    columns = {offsets[-1] for offsets, _ in weights.dist.chunks(key)}
    return f"TP {len(columns)}"


def tensors_of(weights: Weights) -> list[Row]:
    """A row for every tensor that is stored."""
    if isinstance(weights, HfCheckpoint):
        return [
            Row(name=name, shape=tensor.shape, dtype=tensor.dtype, cut=tensor.path.name)
            for name, tensor in weights.tensors.items()
        ]
    dist = weights.dist
    return [
        Row(
            name=key,
            shape=dist.shape(key),
            dtype=str(dist.dtype(key)).removeprefix("torch."),
            cut=f"{len(dist.chunks(key))} chunks",
        )
        for key in sorted(dist.tensors, key=lambda key: (key.startswith("optimizer."), key))
    ]


def _collapsed(rows: list[Row]) -> list[Row]:
    """One row for the same tensor of all layers and experts; the optimizer's tensors left out."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        if not row.name.startswith("optimizer."):
            kinds.setdefault(re.sub(r"\.\d+\.", ".*.", row.name), []).append(row)
    return [
        Row(
            name=kind,
            shape=same[0].shape,
            dtype=same[0].dtype,
            cut=same[0].cut if len(same) == 1 else f"{len(same)} tensors",
        )
        for kind, same in kinds.items()
    ]


if __name__ == "__main__":
    command.run(main)
