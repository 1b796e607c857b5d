"""Runs made by other code are kept where it changed nothing: some of each policy's are simulated again and compared.

A reworded sentence, a test hook or a faster loop changes the digest of every run, and hours of simulation would be lost
for it. `python -m rollout.sim.study --adopt N` simulates N runs again, drawn at random, of each policy and setting,
model, host cache and former code; where all are equal in every number, these runs count as of the present code too, and
say which one made them.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from envclient.base.errors import ConfigError
from envclient.base.files import write_atomic
from rollout.sim.study_runs import Row, code_digest, is_current, policy_name, read_rows, simulate_run


def adopt(
    path: Path,
    number: int,
    *,
    processes: int,
    tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> None:
    """Rewrite the digests of the rows in `path` whose kind passes; leave the others as they are.

    Args:
        number: runs of each kind to simulate again; all of them where there are fewer.

    Raises:
        ConfigError: a line that is no row, or the file was changed meanwhile.
    """
    before = path.read_bytes() if path.is_file() else b""
    rows = read_rows(path)
    if len(rows) != before.count(b"\n"):
        raise ConfigError(f"{path} has a line that is no run after {len(rows)}", "mend or remove the line")
    old: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        if not is_current(row):
            old.setdefault(_kind(row), []).append(row)
    drawn = {kind: random.Random(" ".join(kind)).sample(some, min(number, len(some))) for kind, some in old.items()}
    passed: set[tuple[str, ...]] = set()
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        results = iter(pool.map(simulate_run, [row.run for some in drawn.values() for row in some]))
        for kind, some in drawn.items():
            again = [result for result, _ in islice(results, len(some))]
            differing = _first_difference(some, again)
            if differing is None:
                passed.add(kind)
                tell(f"{', '.join(kind)}: {len(some)} of {len(old[kind])} runs are equal: kept")
            else:
                name = f"{differing.cell.name} seed {differing.seed}"
                tell(f"{', '.join(kind)}: {name} is another one: {len(old[kind])} runs are not kept")
    if not passed:
        return
    if path.read_bytes() != before:
        raise ConfigError(f"{path} was changed meanwhile", "let one study at a time write it")
    kept = [_adopted(row) if _kind(row) in passed else row for row in rows]
    write_atomic(path, b"".join(msgspec.json.encode(row) + b"\n" for row in kept))


def _kind(row: Row) -> tuple[str, ...]:
    """What a change may concern by itself."""
    return row.policy, row.cell.preset, f"L2 {row.cell.l2}", f"code {row.code}"


def _adopted(row: Row) -> Row:
    return msgspec.structs.replace(row, code=code_digest(policy_name(row.policy)), made_by=row.made_by or row.code)


def _first_difference(rows: Sequence[Row], again: Sequence[dict[str, Any]]) -> Row | None:
    """A row whose run gives another result now."""
    for row, result in zip(rows, again, strict=True):
        if msgspec.json.decode(msgspec.json.encode(result)) != row.result:
            return row
    return None
