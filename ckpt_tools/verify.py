"""Reads all of a checkpoint: is it complete, of the shapes its config.json promises, finite, and what was written?

Checksums are compared with the checkpoint's manifest.json, where it has one, and with a second checkpoint, of either
format, under --against. The last line is `ok` with a digest (equal digests: equal weights) or the number of faults.
Exit code 0: sound. 1: faults, each a line on stdout. 2: no whole checkpoint to read.
"""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from ckpt_tools import command
from ckpt_tools.hf_checkpoint import Block
from ckpt_tools.output import gigabytes
from ckpt_tools.rows import Checksums, each_block
from ckpt_tools.source import Source, Weights, find
from envclient.base.checksum import combined


def main() -> int:
    """Entry point; returns the exit code."""
    arguments = command.parser(
        "verify", __doc__, "example: python -m ckpt_tools.verify ckpt/Qwen3-32B --against models/Qwen3-32B"
    )
    arguments.add_argument(
        "path", type=Path, metavar="CKPT", help="Hugging Face folder, run's checkpoint, or its megatron/"
    )
    arguments.add_argument("--against", type=Path, metavar="OTHER", help="a checkpoint that must hold the same weights")
    arguments.add_argument(
        "--any-dtype", action="store_true", help="take weights of another type than config.json states"
    )
    command.add_hf(arguments)
    arguments.add_argument("--quiet", action="store_true", help="no progress on stderr")
    options = arguments.parse_args()
    found = find(options.path, options.hf)
    other = find(options.against, options.hf).open(any_dtype=True) if options.against else None
    weights = found.open(any_dtype=options.any_dtype)
    faults = _file_faults(found)
    checksums, broken = read(weights, quiet=options.quiet)
    faults += broken
    if found.manifest:
        faults += differences(checksums, found.manifest.weights, "the manifest")
    if other:
        faults += differences(checksums, read(other, quiet=options.quiet)[0], str(options.against))
    for fault in faults:
        print(f"fault: {fault}")
    if faults:
        print(f"{options.path}: {len(faults)} faults")
        return 1
    whole = combined(checksums.items())
    print(f"{options.path}: ok, {len(checksums)} tensors, {gigabytes(weights.nbytes)}, digest {whole}")
    return 0


def read(weights: Weights, *, quiet: bool) -> tuple[dict[str, str], list[str]]:
    """(checksum of every Hugging Face tensor, faults: tensors with numbers that are not finite)."""
    progress = command.Progress(weights.nbytes, "read", quiet=quiet)
    checksums, lock = Checksums(), threading.Lock()
    bad: dict[str, int] = {}

    def use(block: Block) -> None:
        checksums.add(block)
        wrong = int(block.rows.numel() - torch.isfinite(block.rows).sum())
        if wrong:
            with lock:
                bad[block.tensor] = bad.get(block.tensor, 0) + wrong
        progress.add(block.rows.nbytes, block.tensor)

    each_block(weights, use)
    progress.end()
    return checksums.result(), [
        f"tensor {name!r} has {count} numbers not finite" for name, count in sorted(bad.items())
    ]


def differences(ours: dict[str, str], theirs: dict[str, str], source: str) -> list[str]:
    """A line for every tensor that is not the same in both."""
    faults = [f"tensor {name!r} is not in {source}" for name in sorted(ours.keys() - theirs.keys())]
    faults += [f"tensor {name!r} is only in {source}" for name in sorted(theirs.keys() - ours.keys())]
    same = sorted(ours.keys() & theirs.keys())
    return faults + [f"tensor {name!r} differs from the one in {source}" for name in same if ours[name] != theirs[name]]


def _file_faults(found: Source) -> list[str]:
    """Files of the manifest that are missing or of another size."""
    faults = []
    for name, size in found.manifest.files.items() if found.manifest else ():
        path = found.root / name
        have = path.stat().st_size if path.is_file() else None
        if have != size:
            faults.append(f"file {name!r} " + ("is missing" if have is None else f"has {have} bytes, not {size}"))
    return faults


if __name__ == "__main__":
    command.run(main)
