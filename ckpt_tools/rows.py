"""Goes through a checkpoint's weights block by block, two parameters at a time: for `to_hf` and `verify`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ckpt_tools.hf_checkpoint import Block
from ckpt_tools.raw import as_bytes
from ckpt_tools.source import Weights
from ckpt_tools.workers import Workers
from envclient.base.checksum import Checksum

THREADS = 2


def each_block(weights: Weights, use: Callable[[Block], None]) -> None:
    """Call `use` with every block, contiguous; those of one tensor come in ascending order, all from one thread."""

    workers = Workers(THREADS)

    def go_through(unit: str) -> None:
        for block in weights.blocks(unit):
            workers.check()
            use(Block(tensor=block.tensor, start=block.start, rows=block.rows.contiguous()))

    workers.run([functools.partial(go_through, unit) for unit in weights.units()])


class Checksums:
    """Checksum of every tensor's raw bytes, fed in ascending blocks: equal to `weight_map.checksum` of the whole."""

    def __init__(self) -> None:
        self._hashes: dict[str, Any] = {}

    def add(self, block: Block) -> None:
        if block.start == 0:
            self._hashes[block.tensor] = Checksum()
        self._hashes[block.tensor].update(as_bytes(block.rows))

    def result(self) -> dict[str, str]:
        return {name: value.hexdigest() for name, value in sorted(self._hashes.items())}
