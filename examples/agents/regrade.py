"""`python -m examples.agents.regrade LOG`: runs the tests again for every verdict that a run's memo remembered.

LOG is the file that `rollout.agent.args.memo_log` named. A memo is honest only if a full grading without it agrees;
every disagreement is printed, and the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from envclient.base.errors import ConfigError, main_guard
from envclient.base.files import read_jsonl
from envclient.types import Backend
from examples.agents.memo import MemoRow
from examples.tasks.libraries import library_named
from examples.tasks.records import DEFAULT_RECORDS, RepairRecord, load_records
from examples.tasks.repair_task import SOURCE_FILE, WALL_LIMIT_S, TaskReader
from examples.tasks.templates import TEST, template
from examples.tasks.testing import Verdict, read_verdict

SANDBOXES = 2
"""Per library, used at once."""


async def regrade(
    backend: Backend, records: Sequence[RepairRecord], rows: Sequence[MemoRow], tell: Callable[[str], None] = print
) -> list[tuple[MemoRow, Verdict]]:
    """Rows whose verdict is another now, with the new one. Uses fresh sandboxes of `backend` and leaves it open."""
    by_id = {record.instance_id: record for record in records}
    unknown = [row.instance_id for row in rows if row.instance_id not in by_id]
    if unknown:
        raise ConfigError(f"task {unknown[0]!r} of the log is not in the tasks file", "name the run's tasks file")
    reader = TaskReader()
    wrong: list[tuple[MemoRow, Verdict]] = []
    for name in sorted({by_id[row.instance_id].library for row in rows}):
        library = library_named(name)
        await backend.prepare(template(library))
        mine = [row for row in rows if by_id[row.instance_id].library == name]
        waiting = iter(mine)

        async def work(sandbox: str, folder: str = library.folder, rows_left: Iterator[MemoRow] = waiting) -> None:
            await backend.create(folder, sandbox)
            try:
                for row in rows_left:
                    await backend.write(sandbox, SOURCE_FILE, row.code.encode())
                    request = reader.read(by_id[row.instance_id]).test_request()
                    verdict = read_verdict(await backend.exec(sandbox, [TEST], WALL_LIMIT_S, request, 1 << 20))
                    if verdict != row.verdict:
                        wrong.append((row, verdict))
            finally:
                await backend.destroy(sandbox)

        async with asyncio.TaskGroup() as group:
            for index in range(SANDBOXES):
                group.create_task(work(f"regrade-{name}-{index}"))
        tell(f"{library.folder}: {len(mine)} verdicts again")
    return wrong


async def _main(log: Path, records: Path) -> int:
    from envclient.node.process import ProcessBackend

    if not log.is_file():
        raise ConfigError(f"log {str(log)!r} does not exist", "it is what rollout.agent.args.memo_log named")
    rows = [msgspec.convert(row, MemoRow) for row in read_jsonl(log)]
    backend = ProcessBackend()
    try:
        wrong = await regrade(backend, load_records(records), rows)
    finally:
        await backend.close()
    for row, verdict in wrong:
        print(f"{row.instance_id}: remembered {row.verdict}, now {verdict}\n{row.code}")
    print(f"{len(rows)} verdicts graded again without the memo: {len(rows) - len(wrong)} agree, {len(wrong)} do not")
    return 1 if wrong else 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.agents.regrade", description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("--records", type=Path, default=DEFAULT_RECORDS, help="tasks file of the run")
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    return asyncio.run(_main(arguments.log, arguments.records))


if __name__ == "__main__":
    main_guard(main)
