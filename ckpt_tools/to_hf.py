"""Distributed checkpoint (a run's, or one made by from_hf) → Hugging Face folder that engines load.

OUT gets the config and tokenizer of the model, sharded safetensors and a complete index. Values and type stay as they
are, bit for bit; each tensor's checksum is compared with the checkpoint's manifest, where it has one.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

from ckpt_tools import command
from ckpt_tools.flusher import Flusher
from ckpt_tools.hf_checkpoint import Block
from ckpt_tools.megatron_checkpoint import MegatronCheckpoint
from ckpt_tools.output import check_target, complete_or_absent, gigabytes
from ckpt_tools.raw import write_from
from ckpt_tools.rows import Checksums, each_block
from ckpt_tools.safetensors_file import create
from ckpt_tools.source import find
from envclient.base.errors import ConfigError
from envclient.base.files import write_json_atomic
from megatron_venus.hf_folder import FILE_BYTES, companions, index_of, into_files, state_dtype
from megatron_venus.safetensors_header import INDEX, StoredTensor
from megatron_venus.weight_map import hf_shapes


def main() -> int:
    """Entry point; returns the exit code."""
    arguments = command.parser(
        "to_hf", __doc__, "example: python -m ckpt_tools.to_hf runs/NAME/checkpoints/step_000100 out/hf"
    )
    arguments.add_argument("source", type=Path, metavar="CKPT", help="a run's checkpoint folder, or its megatron/")
    arguments.add_argument("out", type=Path, metavar="OUT", help="folder to make")
    arguments.add_argument("--shard-gb", type=float, default=5.0, metavar="N", help="most gigabytes of a file (5)")
    command.add_hf(arguments)
    command.add_writing(arguments)
    options = arguments.parse_args()
    convert(
        options.source,
        options.out,
        hf_dir=options.hf,
        shard_bytes=int(options.shard_gb * 1e9),
        dry_run=options.dry_run,
        quiet=options.quiet,
    )
    return 0


def convert(
    source: Path,
    out: Path,
    *,
    hf_dir: Path | None = None,
    shard_bytes: int = FILE_BYTES,
    dry_run: bool = False,
    quiet: bool = False,
) -> None:
    """Write the Hugging Face folder `out` of the distributed checkpoint `source`.

    Raises:
        ConfigError: the source or the target cannot be used, or a tensor is not the one in the manifest.
        PreflightError: no room.
    """
    found = find(source, hf_dir)
    if found.megatron_dir is None:
        raise ConfigError(f"{str(source)!r} is a Hugging Face folder already", "name a distributed checkpoint")
    weights = MegatronCheckpoint.open(found.megatron_dir, found.hf_dir)
    shards = _shards(weights, shard_bytes)
    beside = companions(found.hf_dir)
    check_target(out, weights.nbytes + sum(path.stat().st_size for path in beside))
    name = str(weights.dtype).removeprefix("torch.")
    print(
        f"{source}: {weights.arch.family}, {gigabytes(weights.nbytes)} {name} -> {out}:"
        f" {sum(map(len, shards.values()))} tensors in {len(shards)} files"
        + (" (dry run: nothing written)" if dry_run else "")
    )
    if dry_run:
        return
    with complete_or_absent(out) as folder:
        for path in beside:
            shutil.copy2(path, folder / path.name)
        state_dtype(folder / "config.json", weights.dtype)
        checksums = _write(folder, weights, shards, command.Progress(weights.nbytes, "written", quiet=quiet))
        for tensor, checksum in checksums.items():
            if found.manifest and found.manifest.weights.get(tensor) != checksum:
                raise ConfigError(
                    f"{source}: tensor {tensor!r} is not the one in its manifest", "use another checkpoint"
                )


def _shards(weights: MegatronCheckpoint, shard_bytes: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """File name → its tensors with their shapes, in the model's order."""
    shapes = hf_shapes(weights.arch)
    files = into_files(_sizes(shapes, weights), shard_bytes)
    return {file: {name: shapes[name] for name in names} for file, names in files.items()}


def _sizes(shapes: Mapping[str, tuple[int, ...]], weights: MegatronCheckpoint) -> dict[str, int]:
    return {name: math.prod(shape) * weights.dtype.itemsize for name, shape in shapes.items()}


def _write(
    folder: Path,
    weights: MegatronCheckpoint,
    shards: dict[str, dict[str, tuple[int, ...]]],
    progress: command.Progress,
) -> dict[str, str]:
    stored: dict[str, StoredTensor] = {}
    for file, shapes in shards.items():
        stored |= create(folder / file, shapes, weights.dtype)
    if len(shards) > 1:
        sizes = _sizes(hf_shapes(weights.arch), weights)
        write_json_atomic(folder / INDEX, index_of({file: list(names) for file, names in shards.items()}, sizes))
    opened = {file: os.open(folder / file, os.O_WRONLY) for file in shards}
    checksums = Checksums()
    # The kernel lets one writer at a time into a file, and the other would spin, not sleep.
    turns = {file: threading.Lock() for file in shards}
    written: dict[str, int] = dict.fromkeys(stored, 0)

    def use(block: Block) -> None:
        place = stored[block.tensor]
        file = place.path.name
        with turns[file]:
            write_from(opened[file], block.rows, place.offset + block.start * place.row_bytes)
        flusher.wrote(opened[file], block.rows.nbytes)
        checksums.add(block)
        written[block.tensor] += block.rows.nbytes
        progress.add(block.rows.nbytes, block.tensor)

    try:
        with Flusher() as flusher:
            each_block(weights, use)
    finally:
        for fd in opened.values():
            os.close(fd)
    assert all(written[name] == tensor.nbytes for name, tensor in stored.items()), "every row is written once"
    progress.end()
    return checksums.result()


if __name__ == "__main__":
    command.run(main)
