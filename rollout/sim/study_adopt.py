"""Runs made by other code are kept where it changed nothing: some of each policy's are simulated again and compared.

A reworded sentence, a test hook or a faster loop changes the digest of every run, and hours of simulation would be lost
for it. `python -m rollout.sim.study --adopt N` simulates N runs of each policy and former code again, drawn at random;
where all are equal in every number, that policy's runs of that code count as of this one.
"""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec

from envclient.base.files import write_atomic
from rollout.sim.study_runs import Row, code_digest, is_current, policy_name, read_rows, simulate_run


def adopt(
    path: Path,
    number: int,
    *,
    processes: int,
    tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True),
) -> None:
    """Rewrite the digests of the rows in `path` whose policy and code pass; leave the others as they are.

    Args:
        number: runs of each policy and code to simulate again; all of them where there are fewer.
    """
    rows = read_rows(path)
    old: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if not is_current(row):
            old.setdefault((policy_name(row.policy), row.code), []).append(row)
    passed: set[tuple[str, str]] = set()
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for (policy, code), found in old.items():
            some = random.Random(f"{policy} {code}").sample(found, min(number, len(found)))
            differing = _first_difference(some, pool)
            if differing is None:
                passed.add((policy, code))
                tell(f"{policy}, code {code}: {len(some)} of {len(found)} runs are equal: kept")
            else:
                name = f"{differing.cell.name} {differing.policy} seed {differing.seed}"
                tell(f"{policy}, code {code}: {name} is another one: {len(found)} runs are not kept")
    kept = [
        msgspec.structs.replace(row, code=code_digest(policy_name(row.policy)))
        if (policy_name(row.policy), row.code) in passed
        else row
        for row in rows
    ]
    write_atomic(path, b"".join(msgspec.json.encode(row) + b"\n" for row in kept))


def _first_difference(rows: Sequence[Row], pool: ProcessPoolExecutor) -> Row | None:
    """A row whose run gives another result now."""
    for row, (result, _) in zip(rows, pool.map(simulate_run, [row.run for row in rows]), strict=True):
        if msgspec.json.decode(msgspec.json.encode(result)) != row.result:
            return row
    return None
