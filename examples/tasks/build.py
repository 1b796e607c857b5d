"""`python -m examples.tasks.build`: makes `records.jsonl` again from nothing.

Fetches the libraries, runs their tests under a profiler to learn which test covers which function, breaks every
function of a fitting size at a few places, and keeps the mutants that some covering test sees and whose undoing
passes, each result seen twice. The same libraries and the same Python give the same records.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from envclient.base.errors import VenusError, main_guard
from envclient.base.files import write_atomic
from envclient.types import Backend
from examples.agents.dialogue import shorten
from examples.tasks.libraries import LIBRARIES, Library, library_named, root
from examples.tasks.mutants import Site, apply, fits, function_lines, functions, reversible, sites
from examples.tasks.records import DEFAULT_RECORDS, MIN_TESTS, RepairRecord, Split, dump_records
from examples.tasks.repair_task import SOURCE_FILE, WALL_LIMIT_S, RepairTask
from examples.tasks.templates import COVERAGE, TEST, template
from examples.tasks.testing import Verdict, read_verdict

MAX_TESTS = 30
MAX_MUTANTS = 6
"""Of one function."""
COVERAGE_TIMEOUT_S = 600.0
SANDBOXES = 2
"""Used at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A function that may carry tasks, with its covering tests, the cheapest first."""

    library: Library
    file: str
    qualname: str
    first_line: int
    lines: tuple[str, ...]
    tests: tuple[str, ...]


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """One test's row of `venus-coverage`."""

    calls: list[tuple[str, int]]
    """Functions called: file and first line."""
    cost: int
    """Calls and returns."""
    passed: bool


class Sandbox:
    """One sandbox of the process backend, used by one task at a time."""

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend = backend
        self._name = name

    async def verdict(self, lines: Sequence[str], task: RepairTask) -> Verdict:
        """Of all of the task's tests about `lines`."""
        await self._backend.write(self._name, SOURCE_FILE, "\n".join(lines).encode())
        request = task.test_request(every_test=True)
        return read_verdict(await self._backend.exec(self._name, [TEST], WALL_LIMIT_S, request, 1 << 20))

    async def coverage(self, folder: str) -> dict[str, Coverage]:
        """What every test of the library calls in `folder`, by test id."""
        result = await self._backend.exec(self._name, [COVERAGE, folder], COVERAGE_TIMEOUT_S, b"", 256 << 20)
        try:
            return msgspec.json.decode(result.output, type=dict[str, Coverage])
        except msgspec.DecodeError:
            tail = result.output.decode(errors="replace")[-200:]
            raise VenusError(f"coverage of {folder} failed ({result.status.value}): {tail}", "see above") from None


def covering(library: Library, first: dict[str, Coverage], second: dict[str, Coverage]) -> list[Candidate]:
    """The library's functions of a fitting size with enough tests that pass, and do the same in both runs."""
    reached: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for test, row in first.items():
        again = second.get(test)
        if again and row.passed and again.passed and row.calls == again.calls:
            # By order of magnitude: the exact count may differ by a retry of a random file name.
            magnitude = row.cost.bit_length()
            for place in row.calls:
                reached.setdefault(place, []).append((magnitude, test))
    found: list[Candidate] = []
    home = root(library)
    for path in sorted((home / library.package).rglob("*.py")):
        file = str(path.relative_to(home))
        if "/tests/" in file:
            continue
        source = path.read_text()
        for function in functions(source):
            tests = sorted(reached.get((file, function.first_line), []))[:MAX_TESTS]
            lines = function_lines(source, function)
            if len(tests) >= MIN_TESTS and lines and lines[0].startswith("def ") and fits(lines):
                found.append(
                    Candidate(
                        library=library,
                        file=file,
                        qualname=function.qualname,
                        first_line=function.first_line,
                        lines=tuple(lines),
                        tests=tuple(test for _, test in tests),
                    )
                )
    return found


def split_of(library: Library, qualname: str) -> Split:
    """Every fifth function, by hash, is held out with all its mutants."""
    digest = hashlib.md5((library.package + qualname).encode()).hexdigest()
    return Split.HELD_OUT if int(digest, 16) % 5 == 0 else Split.TRAIN


def make_record(candidate: Candidate, site: Site, number: int, verdict: Verdict | None) -> RepairRecord:
    """The record of the mutant at `site` (the `number`-th site of the function); no verdict: before it is known."""
    library = candidate.library
    failed = verdict.failed if verdict else list(candidate.tests)
    module = candidate.file.removesuffix(".py").partition("/")[2].replace("/", ".")
    return RepairRecord(
        instance_id=f"{library.name}.{module}.{candidate.qualname}.{candidate.first_line}.{number}",
        repo=library.repo,
        version=library.version,
        library=library.name,
        file=candidate.file,
        function=candidate.qualname,
        first_line=candidate.first_line,
        position=site.line,
        original=site.old,
        replacement=site.new,
        test=verdict.test.rpartition("::")[2] if verdict else "",
        message=shorten(verdict.message) if verdict else "",
        FAIL_TO_PASS=failed,
        PASS_TO_PASS=[test for test in candidate.tests if test not in failed],
        deterministic=True,
        split=split_of(library, candidate.qualname),
    )


async def mutants_of(candidate: Candidate, sandbox: Sandbox, dropped: Counter[str]) -> list[RepairRecord]:
    """Up to `MAX_MUTANTS` verified records of one function."""
    every = sites(candidate.lines)
    numbered = list(enumerate(every))
    random.Random(f"{candidate.library.name}:{candidate.file}:{candidate.qualname}").shuffle(numbered)
    found: list[tuple[int, RepairRecord]] = []
    undone_passes = False
    for number, site in numbered:
        if len(found) == MAX_MUTANTS:
            break
        if not reversible(candidate.lines, site):
            continue
        draft = make_record(candidate, site, number, None)
        task = RepairTask(record=draft, original=candidate.lines, buggy=tuple(apply(candidate.lines, site)))
        if not undone_passes:
            originals = [await sandbox.verdict(candidate.lines, task) for _ in range(2)]
            if not all(verdict.ok for verdict in originals):
                dropped[f"original: {originals[0].message[:40]}"] += 1
                return []
            undone_passes = True
        verdict = await sandbox.verdict(task.buggy, task)
        if verdict.ok:
            dropped["no test sees it"] += 1
        elif verdict.hung or not verdict.compiled:
            dropped["hangs" if verdict.hung else "does not compile"] += 1
        elif verdict != await sandbox.verdict(task.buggy, task):
            dropped["not deterministic"] += 1
        else:
            found.append((number, make_record(candidate, site, number, verdict)))
    return [record for _, record in sorted(found, key=lambda pair: pair[0])]


async def build_library(library: Library, backend: Backend) -> list[RepairRecord]:
    """Every record of one library, in the order of its sources."""
    started = time.monotonic()
    warm = template(library)
    print(f"{library.folder}: collecting its tests", flush=True)
    await backend.prepare(warm)
    names = [f"build-{library.name}-{index}" for index in range(SANDBOXES)]
    for name in names:
        await backend.create(warm.name, name)
    sandboxes = [Sandbox(backend, name) for name in names]
    first = await sandboxes[0].coverage(library.package)
    candidates = covering(library, first, await sandboxes[-1].coverage(library.package))
    print(f"{library.folder}: {len(first)} tests, {len(candidates)} functions of a fitting size", flush=True)
    dropped: Counter[str] = Counter()
    results: dict[int, list[RepairRecord]] = {}
    waiting = iter(enumerate(candidates))

    async def work(sandbox: Sandbox) -> None:
        for index, candidate in waiting:
            results[index] = await mutants_of(candidate, sandbox, dropped)
            if len(results) % 25 == 0:
                made = sum(map(len, results.values()))
                seconds = time.monotonic() - started
                print(
                    f"{library.folder}: {len(results)}/{len(candidates)} functions, {made} tasks, {seconds:.0f} s",
                    flush=True,
                )

    async with asyncio.TaskGroup() as group:
        for sandbox in sandboxes:
            group.create_task(work(sandbox))
    for name in names:
        await backend.destroy(name)
    records = [record for index in sorted(results) for record in results[index]]
    print(
        f"{library.folder}: {len(records)} tasks in {time.monotonic() - started:.0f} s; dropped {dict(dropped)}",
        flush=True,
    )
    return records


async def build(libraries: Sequence[Library], backend: Backend) -> list[RepairRecord]:
    """Records of all `libraries`, one after the other."""
    records: list[RepairRecord] = []
    try:
        for library in libraries:
            records += await build_library(library, backend)
    finally:
        await backend.close()
    return records


def main(argv: list[str] | None = None) -> int:
    from envclient.node.process import ProcessBackend

    parser = argparse.ArgumentParser(prog="python -m examples.tasks.build", description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_RECORDS, help="tasks file to write")
    parser.add_argument("--library", action="append", default=[], help="only this one (repeatable)")
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    chosen = [library_named(name) for name in arguments.library] or list(LIBRARIES.values())
    records = asyncio.run(build(chosen, ProcessBackend()))
    write_atomic(arguments.out, dump_records(records))
    splits = Counter(record.split.value for record in records)
    print(f"{len(records)} tasks {dict(splits)} -> {arguments.out}")
    return 0


if __name__ == "__main__":
    main_guard(main)
