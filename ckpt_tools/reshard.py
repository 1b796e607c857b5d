"""Cuts a distributed checkpoint anew, weights and optimizer state, so that each rank of a layout reads only its part.

Never necessary: the format loads at any tensor, pipeline, expert and data parallel layout. It saves reading: a rank
loads every stored chunk that it needs a piece of, whole. OUT becomes a checkpoint folder like the source; its values
stay as they are, bit for bit.
"""

from __future__ import annotations

import functools
import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from ckpt_tools import command, dist_writer
from ckpt_tools.dist_reader import COMMON, DistCheckpoint
from ckpt_tools.dist_writer import Chunk, StoredObject, into_files
from ckpt_tools.hf_checkpoint import BLOCK_BYTES
from ckpt_tools.layout import Box, Layout, by_rows
from ckpt_tools.megatron_checkpoint import MegatronCheckpoint
from ckpt_tools.output import check_target, complete_or_absent, file_sizes, gigabytes
from ckpt_tools.source import find
from ckpt_tools.workers import Workers
from envclient.base.errors import ConfigError
from megatron_venus.checkpoint_index import Manifest, write_manifest

_OPTIMIZER = re.compile(r"optimizer\.state\.\w+\.")
"""What comes before a weight's key, where the optimizer keeps something shaped like it."""
Rank = tuple[int, int, int]


def main() -> int:
    """Entry point; returns the exit code."""
    arguments = command.parser("reshard", __doc__, "example: python -m ckpt_tools.reshard ckpt/A ckpt/B --tp 4 --pp 2")
    arguments.add_argument("source", type=Path, metavar="CKPT", help="a run's checkpoint folder, or its megatron/")
    arguments.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    command.add_hf(arguments)
    command.add_layout(arguments)
    command.add_writing(arguments)
    options = arguments.parse_args()
    rewrite(
        options.source,
        options.out,
        hf_dir=options.hf,
        layout=command.layout_of(options),
        dry_run=options.dry_run,
        quiet=options.quiet,
    )
    return 0


def rewrite(
    source: Path, out: Path, *, layout: Layout, hf_dir: Path | None = None, dry_run: bool = False, quiet: bool = False
) -> None:
    """Write `out`, the checkpoint `source` cut for `layout`.

    Raises:
        ConfigError: the source, the layout or the target cannot be used; nothing was written.
        PreflightError: no room.
    """
    found = find(source, hf_dir)
    if found.megatron_dir is None:
        raise ConfigError(f"{str(source)!r} is a Hugging Face folder", "from_hf makes a distributed checkpoint of it")
    weights = MegatronCheckpoint.open(found.megatron_dir, found.hf_dir)
    layout.check(weights.arch)
    dist = weights.dist
    total = sum(math.prod(dist.shape(key)) * dist.dtype(key).itemsize for key in dist.tensors)
    progress = command.Progress(total, "written", quiet=quiet)
    files = _files(weights, layout)
    objects = [StoredObject(key=key, data=dist.read_object(key)) for key in dist.objects]
    beside = sum(path.stat().st_size for path in found.hf_dir.rglob("*") if path.is_file())
    check_target(out, total + beside + sum(len(item.data) for item in objects))
    print(
        f"{source}: {len(dist.tensors)} tensors, {gigabytes(total)} -> {out}: {sum(map(len, files))} chunks in"
        f" {len(files)} files, cut for TP {layout.tensor} PP {layout.pipeline} EP {layout.expert}"
        + (" (dry run: nothing written)" if dry_run else "")
    )
    if dry_run:
        return
    with complete_or_absent(out) as folder:
        shutil.copytree(found.hf_dir, folder / "hf")
        (folder / "megatron").mkdir()
        _write(folder / "megatron", weights.dist, files, objects, progress)
        if found.manifest:
            manifest = Manifest(step=found.manifest.step, weights=found.manifest.weights, files=file_sizes(folder))
            write_manifest(folder, manifest)
    progress.end()


def _write(
    folder: Path,
    dist: DistCheckpoint,
    files: Sequence[Sequence[Chunk]],
    objects: Sequence[StoredObject],
    progress: command.Progress,
) -> None:
    writer, workers = dist_writer.DistWriter(folder), Workers(dist_writer.THREADS)

    def write_file(number: int, chunks: Sequence[Chunk]) -> None:
        with writer.file(number) as file:
            for chunk in chunks:
                workers.check()
                part = dist.read(chunk.key, chunk.box)
                # What was read may be a larger chunk's part; a blob holds all of its tensor's memory.
                file.add(chunk, part if part.untyped_storage().nbytes() == part.nbytes else part.clone())
                progress.add(part.nbytes, chunk.key)

    with dist_writer.no_crc():
        workers.run([functools.partial(write_file, number, chunks) for number, chunks in enumerate(files)])
        writer.finish(objects=objects, common=(dist.folder / COMMON).read_bytes())


def _files(weights: MegatronCheckpoint, layout: Layout) -> list[list[Chunk]]:
    """Chunks of every tensor, by rank; what is no weight and not shaped like one keeps its cut."""
    parts: dict[str, list[tuple[Rank, Box]]] = {}
    for place in weights.places.values():
        stage, expert_rank = place.home(layout, weights.arch)
        for rank, part in place.cuts(layout):
            for key in place.keys:
                parts.setdefault(key, []).append(((stage, rank, expert_rank), place.boxed(part)))
    shapes = {key: place.global_shape for place in weights.places.values() for key in place.keys}
    ranks: dict[Rank, list[Chunk]] = {}
    for key in weights.dist.tensors:
        like = _OPTIMIZER.sub("", key, count=1)
        if shapes.get(like) == weights.dist.shape(key):
            boxes = parts[like]
        else:
            boxes = [((0, 0, 0), box) for box in weights.dist.chunks(key)]
        for owner, part in boxes:
            chunks = ranks.setdefault(owner, [])
            shape, dtype = weights.dist.shape(key), weights.dist.dtype(key)
            boxes_of_part = _blocks(weights, key, part)
            chunks.extend(Chunk(key=key, global_shape=shape, box=box, dtype=dtype) for box in boxes_of_part)
    return [file for _, chunks in sorted(ranks.items()) for file in into_files(chunks)]


def _blocks(weights: MegatronCheckpoint, key: str, box: Box) -> list[Box]:
    """The box in blocks that fit the memory, cut along its first axis that is longer than 1."""
    offsets, sizes = box
    axis = next((i for i, size in enumerate(sizes) if size > 1), 0)
    row_bytes = max(1, math.prod(sizes[axis + 1 :]) * weights.dist.dtype(key).itemsize)
    inner = (offsets[axis:], sizes[axis:])
    pieces = by_rows(inner, max(1, BLOCK_BYTES // row_bytes)) if sizes else [inner]
    return [(offsets[:axis] + start, sizes[:axis] + size) for start, size in pieces]


if __name__ == "__main__":
    command.run(main)
