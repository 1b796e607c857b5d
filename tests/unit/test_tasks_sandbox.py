"""Shipped records verified again in real sandboxes, and what the warm pytest server does with hostile code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from envclient.node.process import ProcessBackend
from envclient.types import ExecResult, ExecStatus
from examples.tasks.libraries import LIBRARIES
from examples.tasks.repair_task import SOURCE_FILE, WALL_LIMIT_S, RepairTask, TaskReader
from examples.tasks.templates import TEST, template
from examples.tasks.testing import SandboxError, Verdict, read_verdict
from tests.unit.tasks_kit import records_of

Judge = Callable[[RepairTask, Sequence[str]], Awaitable[Verdict]]


async def in_sandbox(library: str, body: Callable[[Judge, ProcessBackend, str], Awaitable[None]]) -> None:
    """Run `body` with a judge of functions in one sandbox of `library`."""
    backend = ProcessBackend()
    name = LIBRARIES[library].folder
    try:
        await backend.prepare(template(LIBRARIES[library]))
        await backend.create(name, "s")

        async def judge(task: RepairTask, lines: Sequence[str]) -> Verdict:
            await backend.write("s", SOURCE_FILE, "\n".join(lines).encode())
            request = task.test_request(every_test=True)
            return read_verdict(await backend.exec("s", [TEST], WALL_LIMIT_S, request, 1 << 20))

        await body(judge, backend, "s")
    finally:
        await backend.close()


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_mutated_fails_as_recorded_and_undone_passes(library: str) -> None:
    records = records_of(library, 1000)[::9][:8]
    tasks = [TaskReader().read(record) for record in records]

    async def body(judge: Judge, backend: ProcessBackend, sandbox: str) -> None:
        for task in tasks:
            broken = await judge(task, task.buggy)
            assert not broken.ok and broken.failed == task.record.FAIL_TO_PASS, task.record.instance_id
            assert (await judge(task, task.original)).ok, task.record.instance_id

    asyncio.run(in_sandbox(library, body))


def test_code_that_hangs_breaks_or_eats_memory_fails_alone() -> None:
    task = TaskReader().read(records_of("toolz", 1)[0])
    header = task.original[0]

    async def body(judge: Judge, backend: ProcessBackend, sandbox: str) -> None:
        spinning = await judge(task, [header, "    while True: pass"])
        assert (spinning.ok, spinning.hung, spinning.by_clock, spinning.message) == (False, True, False, "Timeout")
        assert not (await judge(task, [header, "    return ("])).compiled
        assert not (await judge(task, [header, "    return [0] * (1 << 40)"])).ok
        assert (await judge(task, [header, "    __import__('os')._exit(0)"])).message == "Exit"
        assert not (await judge(task, ["x = 1"])).compiled
        assert (await judge(task, task.original)).ok

        await backend.write(sandbox, SOURCE_FILE, f"{header}\n    __import__('time').sleep(60)".encode())
        asleep = read_verdict(await backend.exec(sandbox, [TEST], 1.0, task.test_request(), 1 << 16))
        assert asleep.hung and asleep.by_clock

    asyncio.run(in_sandbox("toolz", body))


def test_a_verifier_that_cannot_judge_is_an_error_and_not_a_failure_of_the_code() -> None:
    task = TaskReader().read(records_of("toolz", 1)[0])

    async def body(judge: Judge, backend: ProcessBackend, sandbox: str) -> None:
        await backend.write(sandbox, SOURCE_FILE, "\n".join(task.original).encode())
        for good, bad in ((b"::test_", b"::gone_"), (b'"first_line": 1', b'"first_line": 9')):
            request = task.test_request().replace(good, bad)
            assert request != task.test_request()
            result = await backend.exec(sandbox, [TEST], 10.0, request, 1 << 16)
            assert result.status is ExecStatus.EXITED
            with pytest.raises(SandboxError, match="no verdict"):
                read_verdict(result)

    asyncio.run(in_sandbox("toolz", body))


@pytest.mark.parametrize(("exit_code", "own"), [(155, True), (139, True), (126, False), (137, False)])
def test_a_run_that_was_refused_or_killed_from_outside_is_no_timeout(exit_code: int, own: bool) -> None:
    for output in (b"", b"venus-test: Resource temporarily unavailable\n"):
        result = ExecResult(
            status=ExecStatus.KILLED, exit_code=exit_code, output=output, truncated=False, duration_s=0.0
        )
        if own:
            assert read_verdict(result).message == "Timeout"
        else:
            with pytest.raises(SandboxError, match=f"exit code {exit_code}" if not output else "unavailable"):
                read_verdict(result)
