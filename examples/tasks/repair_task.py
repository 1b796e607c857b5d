"""A record together with the function it is about, read from the unpacked library: what an episode starts from."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from envclient.base.errors import ConfigError
from examples.tasks.libraries import library_named, root
from examples.tasks.mutants import Site, apply, function_lines, functions, undo
from examples.tasks.records import RepairRecord

SOURCE_FILE = "function.py"
"""Where a sandbox keeps the function under repair, in its work folder."""
CPU_LIMIT_S = 2.0
"""Processor seconds of a test run; the covering tests need a few hundredths."""
WALL_LIMIT_S = 20.0
"""Seconds after which a test run that does not even use the processor is killed."""


@dataclass(frozen=True)
class RepairTask:
    """`buggy` and `original` are the function's lines without docstring, comments and blank lines."""

    record: RepairRecord
    original: tuple[str, ...]
    buggy: tuple[str, ...]

    @property
    def fix(self) -> Site:
        """The edit of `buggy` that restores `original`."""
        return undo(_site(self.record))

    @cached_property
    def _request(self) -> dict[str, object]:
        record = self.record
        return {
            "module": record.module,
            "file": record.file,
            "qualname": record.function,
            "first_line": record.first_line,
            "source_file": SOURCE_FILE,
            "tests": record.tests,
            "cpu_s": CPU_LIMIT_S,
        }

    def test_request(self, *, every_test: bool = False) -> bytes:
        """What `venus-test` reads on stdin; `every_test`: do not stop at the first failure."""
        return json.dumps(self._request | {"all": every_test}).encode()


def _site(record: RepairRecord) -> Site:
    return Site(line=record.position, old=record.original, new=record.replacement)


class TaskReader:
    """Reads library files once, however many records they have."""

    def __init__(self) -> None:
        self._functions: dict[tuple[str, str], dict[tuple[str, int], tuple[str, ...]]] = {}

    def read(self, record: RepairRecord) -> RepairTask:
        """The task of `record`.

        Raises:
            ConfigError: the library has no such function, or no such token there.
            PreflightError: the library cannot be fetched.
        """
        in_file = self._of_file(record)
        original = in_file.get((record.function, record.first_line))
        if original is None:
            raise ConfigError(
                f"task {record.instance_id!r}: field 'function': {record.file} has no {record.function!r} at line "
                f"{record.first_line}",
                "build the tasks again: python -m examples.tasks.build",
            )
        try:
            buggy = apply(original, _site(record))
        except ValueError as error:
            raise ConfigError(
                f"task {record.instance_id!r}: field 'position': {error}",
                "build the tasks again: python -m examples.tasks.build",
            ) from None
        return RepairTask(record=record, original=original, buggy=tuple(buggy))

    def _of_file(self, record: RepairRecord) -> dict[tuple[str, int], tuple[str, ...]]:
        key = (record.library, record.file)
        if key not in self._functions:
            path: Path = root(library_named(record.library)) / record.file
            try:
                source = path.read_text()
                defined = functions(source)
            except (OSError, SyntaxError) as error:
                raise ConfigError(
                    f"task {record.instance_id!r}: field 'file': {record.library} has no {record.file!r}: {error}",
                    "mend or remove that record",
                ) from None
            lines = {(f.qualname, f.first_line): function_lines(source, f) for f in defined}
            self._functions[key] = {name: tuple(found) for name, found in lines.items() if found}
        return self._functions[key]
