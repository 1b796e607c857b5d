"""Hugging Face checkpoint → distributed checkpoint that the actor loads at any parallel layout.

OUT becomes a folder like a run's checkpoint: megatron/ (torch_dist, weights only), hf/ (config.json and tokenizer) and
manifest.json (checksum of every tensor). Values and type stay as they are, bit for bit.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from ckpt_tools import command
from ckpt_tools.dist_writer import Chunk, into_files, write
from ckpt_tools.hf_checkpoint import BLOCK_BYTES, HfCheckpoint
from ckpt_tools.layout import Box, Layout, Place, by_rows, places
from ckpt_tools.output import check_target, complete_or_absent, file_sizes, gigabytes
from ckpt_tools.rows import Checksums
from ckpt_tools.workers import Workers
from megatron_venus.checkpoint_index import Manifest, write_manifest
from megatron_venus.hf_folder import companions
from megatron_venus.weight_map import row_runs


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
    progress = command.Progress(checkpoint.nbytes, "written", quiet=quiet)
    workers = Workers(2)
    files = _files(checkpoint, layout, progress, workers)
    beside = companions(source)
    check_target(out, checkpoint.nbytes + sum(path.stat().st_size for path in beside))
    name = str(checkpoint.dtype).removeprefix("torch.")
    print(
        f"{source}: {checkpoint.arch.family}, {len(checkpoint.tensors)} tensors, {gigabytes(checkpoint.nbytes)} {name}"
        f" -> {out}: {sum(map(len, files))} chunks in {len(files)} files, cut for TP {layout.tensor}"
        f" PP {layout.pipeline} EP {layout.expert}" + (" (dry run: nothing written)" if dry_run else "")
    )
    if dry_run:
        return
    with complete_or_absent(out) as folder:
        (folder / "megatron").mkdir()
        (folder / "hf").mkdir()
        for path in beside:
            shutil.copy2(path, folder / "hf" / path.name)
        _, checksums = workers.run([lambda: write(folder / "megatron", files), lambda: _checksums(checkpoint, workers)])
        write_manifest(folder, Manifest(step=0, weights=checksums or {}, files=file_sizes(folder)))
    progress.end()


def _checksums(checkpoint: HfCheckpoint, workers: Workers) -> dict[str, str]:
    # Reads again what the writers read: from the page cache, as they go through the files in about the same order.
    checksums = Checksums()
    for unit in checkpoint.units():
        for block in checkpoint.blocks(unit):
            workers.check()
            checksums.add(block)
    return checksums.result()


def _files(checkpoint: HfCheckpoint, layout: Layout, progress: command.Progress, workers: Workers) -> list[list[Chunk]]:
    ranks: dict[tuple[int, int, int], list[Chunk]] = {}
    for place in places(checkpoint.arch):
        stage, expert_rank = place.home(layout, checkpoint.arch)
        row_bytes = max(1, torch.Size(place.shape[1:]).numel() * checkpoint.dtype.itemsize)
        for rank, part in place.cuts(layout):
            for box in by_rows(part, max(1, BLOCK_BYTES // row_bytes)):
                for key in place.keys:
                    chunk = _chunk(checkpoint, place, key, box, progress, workers)
                    ranks.setdefault((stage, rank, expert_rank), []).append(chunk)
    return [file for _, chunks in sorted(ranks.items()) for file in into_files(chunks)]


def _chunk(
    checkpoint: HfCheckpoint, place: Place, key: str, box: Box, progress: command.Progress, workers: Workers
) -> Chunk:
    boxed = place.boxed(box)

    def make() -> Tensor:
        workers.check()
        tensor = _gather(checkpoint, place, box)
        progress.add(tensor.nbytes, place.name)
        return tensor.reshape(boxed[1])

    return Chunk(key=key, global_shape=place.global_shape, box=boxed, dtype=checkpoint.dtype, make=make)


def _gather(checkpoint: HfCheckpoint, place: Place, box: Box) -> Tensor:
    """The box of the parameter, from the Hugging Face rows that it holds."""
    offsets, sizes = box
    rows = torch.empty((sizes[0], *place.shape[1:]), dtype=checkpoint.dtype)
    begin, end, at = offsets[0], offsets[0] + sizes[0], 0
    for run in row_runs(place.name, checkpoint.arch):
        first, last = max(begin, at), min(end, at + run.rows)
        if first < last:
            checkpoint.read_rows(run.tensor, run.start + first - at, rows[first - begin : last - begin])
        at += run.rows
    for axis in range(1, len(sizes)):
        rows = rows.narrow(axis, offsets[axis], sizes[axis])
    return rows.contiguous()


if __name__ == "__main__":
    command.run(main)
