"""Hugging Face checkpoint → distributed checkpoint that the actor loads at any parallel layout.

OUT becomes a folder like a run's checkpoint: megatron/ (torch_dist, weights only), hf/ (config.json and tokenizer) and
manifest.json (checksum of every tensor). Values and type stay as they are, bit for bit.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from ckpt_tools import command, dist_writer
from ckpt_tools.dist_writer import Chunk, DistFile
from ckpt_tools.hf_checkpoint import BLOCK_BYTES, Block, HfCheckpoint
from ckpt_tools.layout import Box, Layout, Place, places
from ckpt_tools.output import check_target, complete_or_absent, file_sizes, gigabytes
from ckpt_tools.rows import Checksums
from ckpt_tools.workers import Workers
from megatron_venus.checkpoint_index import Manifest, write_manifest
from megatron_venus.hf_folder import companions, copy_companions
from megatron_venus.weight_map import row_runs

_LEAST_GROUP_BYTES = 64_000_000
"""Less is not worth a thread's turn."""


def main() -> int:
    """Entry point; returns the exit code."""
    arguments = command.parser(
        "from_hf", __doc__, "example: python -m ckpt_tools.from_hf models/Qwen3-32B ckpt/Qwen3-32B"
    )
    arguments.add_argument(
        "source", type=Path, metavar="HF", help="Hugging Face folder: Qwen3, Qwen3-MoE, Qwen2.5, Llama 3"
    )
    arguments.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    arguments.add_argument(
        "--any-dtype", action="store_true", help="take weights of another type than config.json states"
    )
    command.add_layout(arguments)
    command.add_writing(arguments)
    options = arguments.parse_args()
    convert(
        options.source,
        options.out,
        layout=command.layout_of(options),
        any_dtype=options.any_dtype,
        dry_run=options.dry_run,
        quiet=options.quiet,
    )
    return 0


def convert(
    source: Path,
    out: Path,
    *,
    layout: Layout,
    any_dtype: bool = False,
    dry_run: bool = False,
    quiet: bool = False,
) -> None:
    """Write the distributed checkpoint `out` of the Hugging Face folder `source`.

    Raises:
        ConfigError: the source, the layout or the target cannot be used; nothing was written.
        PreflightError: no room.
    """
    checkpoint = HfCheckpoint.open(source, any_dtype=any_dtype)
    layout.check(checkpoint.arch)
    groups = _groups(checkpoint, layout)
    beside = companions(source)
    check_target(out, checkpoint.nbytes + sum(path.stat().st_size for path in beside))
    name = str(checkpoint.dtype).removeprefix("torch.")
    print(
        f"{source}: {checkpoint.arch.family}, {len(checkpoint.tensors)} tensors, {gigabytes(checkpoint.nbytes)} {name}"
        f" -> {out}: {sum(len(group.files) for group in groups)} files, cut for TP {layout.tensor}"
        f" PP {layout.pipeline} EP {layout.expert}" + (" (dry run: nothing written)" if dry_run else "")
    )
    if dry_run:
        return
    progress = command.Progress(checkpoint.nbytes, "written", quiet=quiet)
    with complete_or_absent(out) as folder:
        (folder / "megatron").mkdir()
        copy_companions(source, folder / "hf")
        checksums = _write(folder / "megatron", checkpoint, groups, layout, progress)
        write_manifest(folder, Manifest(step=0, weights=checksums, files=file_sizes(folder)))
    progress.end()


@dataclass(kw_only=True)
class _Group:
    """Parameters that one thread converts."""

    places: list[Place] = field(default_factory=list)
    files: dict[int, int] = field(default_factory=dict)
    """Tensor-parallel rank → number of the file with its parts."""


def _groups(checkpoint: HfCheckpoint, layout: Layout) -> list[_Group]:
    """Consecutive parameters of one stage and expert rank: files of about `FILE_BYTES`, and work for every thread."""
    fair = max(_LEAST_GROUP_BYTES, checkpoint.nbytes // (4 * dist_writer.THREADS))
    homes: dict[tuple[int, int], list[Place]] = {}
    for place in places(checkpoint.arch):
        homes.setdefault(place.home(layout, checkpoint.arch), []).append(place)
    groups: list[_Group] = []
    for _, together in sorted(homes.items()):
        filled = most = min(dist_writer.FILE_BYTES * layout.tensor, fair)
        for place in together:
            if filled >= most:
                groups.append(_Group())
                filled = 0
            groups[-1].places.append(place)
            filled += math.prod(place.shape) * checkpoint.dtype.itemsize
    number = 0
    for group in groups:
        for rank in sorted({rank for place in group.places for rank, _ in place.cuts(layout)}):
            group.files[rank] = number
            number += 1
    return groups


def _write(
    folder: Path, checkpoint: HfCheckpoint, groups: Sequence[_Group], layout: Layout, progress: command.Progress
) -> dict[str, str]:
    """Write every group; the checksum of every Hugging Face tensor.

    Each tensor belongs to one parameter, whose rows one thread reads in ascending order: they are hashed on the way.
    """
    writer, workers, checksums = dist_writer.DistWriter(folder), Workers(dist_writer.THREADS), Checksums()

    def convert_group(group: _Group) -> None:
        with contextlib.ExitStack() as stack:
            files = {rank: stack.enter_context(writer.file(number)) for rank, number in group.files.items()}
            for place in group.places:
                row_bytes = max(1, math.prod(place.shape[1:]) * checkpoint.dtype.itemsize)
                for start, count, parts in place.blocks(layout, max(1, BLOCK_BYTES // row_bytes)):
                    workers.check()
                    rows = _read(checkpoint, place, start, count, checksums)
                    for rank, box in parts:
                        _add(files[rank], place, box, rows)
                    progress.add(rows.nbytes, place.name)

    with dist_writer.no_crc():
        workers.run([functools.partial(convert_group, group) for group in groups])
        writer.finish()
    return checksums.result()


def _read(checkpoint: HfCheckpoint, place: Place, start: int, count: int, checksums: Checksums) -> Tensor:
    """Rows [start, start + count) of the parameter, from the Hugging Face rows that it holds."""
    rows = torch.empty((count, *place.shape[1:]), dtype=checkpoint.dtype)
    end, at = start + count, 0
    for run in row_runs(place.name, checkpoint.arch):
        first, last = max(start, at), min(end, at + run.rows)
        if first < last:
            begin, piece = run.start + first - at, rows[first - start : last - start]
            checkpoint.read_rows(run.tensor, begin, piece)
            checksums.add(Block(tensor=run.tensor, start=begin, rows=piece))
        at += run.rows
    return rows


def _add(file: DistFile, place: Place, box: Box, rows: Tensor) -> None:
    """Add the box of the parameter; `rows` are all columns of its rows."""
    offsets, sizes = box
    part = rows
    for axis in range(1, len(sizes)):
        part = part.narrow(axis, offsets[axis], sizes[axis])
    boxed = place.boxed(box)
    part = part.contiguous().reshape(boxed[1])
    for key in place.keys:
        file.add(Chunk(key=key, global_shape=place.global_shape, box=boxed, dtype=rows.dtype), part)


if __name__ == "__main__":
    command.run(main)
