"""Task records: what a repair task is, without a line of the library's source.

One JSON object a line. Fields that SWE-bench has keep its names (`instance_id`, `repo`, `version`, `FAIL_TO_PASS`,
`PASS_TO_PASS`; the two lists may also be JSON strings, as there); further fields of such records are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec

from envclient.base.errors import ConfigError
from examples.tasks.libraries import LIBRARIES

DEFAULT_RECORDS = Path(__file__).with_name("records.jsonl")
MIN_TESTS = 3
_IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Split(str, Enum):
    """Which side of the split a task's function is on; functions never straddle it."""

    TRAIN = "train"
    HELD_OUT = "held_out"


class RepairRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A single-token bug in a library function, and the tests that see it."""

    instance_id: str
    """Letters, digits, `.`, `_` and `-`."""
    repo: str
    version: str
    library: str
    """Distribution name, a key of `libraries.LIBRARIES`."""
    file: str
    """Path inside the source distribution."""
    function: str
    """Qualified name."""
    first_line: int
    """Of the function in `file`, decorators included, from 1."""
    position: int
    """Line of the function without docstring, comments and blank lines, from 0."""
    original: str
    """The first whole token of that line that the bug replaces."""
    replacement: str
    """What stands there in the buggy function."""
    test: str
    """Name of the first test that fails."""
    message: str
    """How it fails, as the prompt shows it."""
    FAIL_TO_PASS: list[str]
    PASS_TO_PASS: list[str]
    deterministic: bool
    """The tests gave the same results again when the task was built: their result may be remembered."""
    split: Split

    @property
    def tests(self) -> list[str]:
        """The covering tests; those that see the bug first."""
        return self.FAIL_TO_PASS + self.PASS_TO_PASS

    @property
    def module(self) -> str:
        """Import name of `file`."""
        return self.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _plain_lists(row: dict[str, Any]) -> dict[str, Any]:
    """Both forms of the test lists to the first."""
    for field in ("FAIL_TO_PASS", "PASS_TO_PASS"):
        if isinstance(row.get(field), str):
            try:
                row[field] = json.loads(row[field])
            except json.JSONDecodeError as error:
                raise ValueError(f"field {field!r}: not a JSON list: {error.msg}") from None
    return row


def _check(record: RepairRecord) -> None:
    """Raises ValueError naming the field that cannot work."""
    library = LIBRARIES.get(record.library)
    problems = {
        "instance_id": not _IDENTIFIER.fullmatch(record.instance_id),
        "library": library is None,
        "version": library is not None and record.version != library.version,
        "file": not record.file.endswith(".py") or ".." in record.file.split("/") or record.file.startswith("/"),
        "first_line": record.first_line < 1,
        "position": record.position < 0,
        "replacement": record.original == record.replacement,
        "FAIL_TO_PASS": not record.FAIL_TO_PASS,
        "PASS_TO_PASS": len(record.tests) < MIN_TESTS or len(set(record.tests)) != len(record.tests),
    }
    for field, wrong in problems.items():
        if wrong:
            value = getattr(record, field)
            hints = {
                "library": f"known: {', '.join(LIBRARIES)}",
                "version": f"the pinned one is {library.version if library else ''}",
                "FAIL_TO_PASS": "at least one test must fail",
                "PASS_TO_PASS": f"a task has at least {MIN_TESTS} covering tests, none twice",
                "replacement": "it must differ from the original",
            }
            raise ValueError(
                f"field {field!r}: {value!r} is not valid" + (f": {hints[field]}" if field in hints else "")
            )


def parse_record(line: str | bytes) -> RepairRecord:
    """One line of a tasks file.

    Raises:
        ValueError: not JSON, or a field is missing or wrong; names the field.
    """
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    try:
        record = msgspec.convert(_plain_lists(row), RepairRecord)
    except msgspec.ValidationError as error:
        text, _, place = str(error).partition(" - at `$.")
        raise ValueError(f"field {place.rstrip('`')!r}: {text}" if place else text) from None
    _check(record)
    return record


def load_records(path: Path) -> list[RepairRecord]:
    """Every record of a tasks file, in order.

    Raises:
        ConfigError: no such file, no record in it, or a wrong one; names line and field.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(
            f"tasks file {str(path)!r}: {error.strerror}", "python -m examples.tasks.build makes one"
        ) from None
    records: dict[str, RepairRecord] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = parse_record(line)
        except ValueError as error:
            raise ConfigError(f"tasks file {str(path)!r}, line {number}: {error}", "mend or remove that line") from None
        if record.instance_id in records:
            raise ConfigError(
                f"tasks file {str(path)!r}, line {number}: field 'instance_id': {record.instance_id!r} is there twice",
                "ids are unique",
            )
        records[record.instance_id] = record
    if not records:
        raise ConfigError(f"tasks file {str(path)!r} holds no record", "python -m examples.tasks.build makes one")
    return list(records.values())


def dump_records(records: Iterable[RepairRecord]) -> bytes:
    """A tasks file's content."""
    return b"".join(msgspec.json.encode(record) + b"\n" for record in records)
