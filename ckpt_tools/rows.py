"""Goes through a checkpoint's weights block by block, two parameters at a time: for `to_hf` and `verify`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from ckpt_tools.hf_checkpoint import Block
from ckpt_tools.raw import as_bytes
from ckpt_tools.source import Weights

THREADS = 2


def each_block(weights: Weights, use: Callable[[Block], None]) -> None:
    """Call `use` with every block, contiguous; those of one tensor come in ascending order, all from one thread."""

    def unit_of(unit: str) -> None:
        for block in weights.blocks(unit):
            use(Block(tensor=block.tensor, start=block.start, rows=block.rows.contiguous()))

    pool = ThreadPoolExecutor(THREADS, "ckpt-read")
    try:
        futures = [pool.submit(unit_of, unit) for unit in weights.units()]
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future.done():
                future.result()
    finally:
        pool.shutdown(cancel_futures=True)


class Checksums:
    """blake2b of every tensor's raw bytes, fed in ascending blocks: equal to `weight_map.checksum` of the whole."""

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = {}

    def add(self, block: Block) -> None:
        if block.start == 0:
            self._hashes[block.tensor] = hashlib.blake2b(digest_size=32)
        self._hashes[block.tensor].update(as_bytes(block.rows))

    def result(self) -> dict[str, str]:
        return {name: value.hexdigest() for name, value in sorted(self._hashes.items())}


def digest(checksums: dict[str, str]) -> str:
    """One short value for all: equal digests, equal weights under equal names."""
    lines = "".join(f"{name}:{value}\n" for name, value in sorted(checksums.items()))
    return hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()
