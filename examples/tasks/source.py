"""Which tasks there are: the coordinator's TaskSource over a file of records."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

from examples.tasks.libraries import library_named
from examples.tasks.records import DEFAULT_RECORDS, RepairRecord, Split, load_records


class RecordSource:
    """Train and held-out ids of a file of records; the coordinator orders the former by its own seed."""

    def __init__(self, records: Sequence[RepairRecord]) -> None:
        self._train = [record.instance_id for record in records if record.split is Split.TRAIN]
        held_out = [record.instance_id for record in records if record.split is Split.HELD_OUT]
        # By hash, so that any prefix is a fair sample over the libraries.
        self._held_out = sorted(held_out, key=lambda name: hashlib.md5(name.encode()).hexdigest())

    def train_ids(self) -> list[str]:
        return list(self._train)

    def eval_ids(self) -> list[str]:
        return list(self._held_out)


def make_source(*, records: str = "", libraries: Sequence[str] = ()) -> RecordSource:
    """Factory for `rollout.tasks`.

    Args:
        records: path of a tasks file; empty: the shipped one.
        libraries: keep only tasks of these; empty: all.

    Raises:
        ConfigError: the file is missing or broken, or a library is unknown.
    """
    wanted = {library_named(name).name for name in libraries}
    loaded = load_records(Path(records) if records else DEFAULT_RECORDS)
    return RecordSource([record for record in loaded if not wanted or record.library in wanted])
