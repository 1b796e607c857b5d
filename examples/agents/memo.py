"""A memo of test results: (task, code) → verdict, only where the record says that the tests are deterministic.

Groups try the same few edits many times; the memo spares running the same tests again. It can be switched off, counts
what it does, and `examples.agents.regrade` shows that a full grading without it agrees.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

from envclient.base.files import JsonlWriter
from examples.tasks.records import RepairRecord
from examples.tasks.testing import Verdict


class MemoRow(msgspec.Struct, frozen=True, kw_only=True):
    """One remembered verdict."""

    instance_id: str
    code: str
    verdict: Verdict


class Memo:
    """Remembers verdicts; concurrent askers of the same question wait for one run.

    Args:
        enabled: False: every question is a run.
        log: file to which every remembered verdict is appended (`MemoRow`, one JSON object a line).
    """

    def __init__(self, *, enabled: bool = True, log: Path | None = None) -> None:
        self.enabled = enabled
        self._log = JsonlWriter(log) if log else None
        self._known: dict[tuple[str, str], Verdict] = {}
        self._asked: dict[tuple[str, str], asyncio.Lock] = {}
        self._counts: Counter[str] = Counter()

    async def verdict(
        self, record: RepairRecord, lines: Sequence[str], run: Callable[[], Awaitable[Verdict]]
    ) -> Verdict:
        """The verdict about `lines`: a remembered one, or `run`'s."""
        if not (self.enabled and record.deterministic):
            return await self._run(run)
        key = (record.instance_id, "\n".join(lines))
        lock = self._asked.setdefault(key, asyncio.Lock())
        async with lock:
            known = self._known.get(key)
            if known is not None:
                self._counts["hits"] += 1
                return known
            verdict = await self._run(run)
            if not verdict.by_clock:
                self._known[key] = verdict
                if self._log:
                    self._log.write(msgspec.json.encode(MemoRow(instance_id=key[0], code=key[1], verdict=verdict)))
        self._asked.pop(key, None)
        return verdict

    async def _run(self, run: Callable[[], Awaitable[Verdict]]) -> Verdict:
        self._counts["runs"] += 1
        verdict = await run()
        self._counts["hung"] += verdict.hung
        self._counts["hung_by_clock"] += verdict.by_clock
        return verdict

    def entries(self) -> list[MemoRow]:
        """What is remembered."""
        return [MemoRow(instance_id=key[0], code=key[1], verdict=verdict) for key, verdict in self._known.items()]

    def close(self) -> None:
        """Close the log."""
        if self._log:
            self._log.close()

    def statistics(self) -> dict[str, float]:
        """Counts since the start."""
        names = ("runs", "hits", "hung", "hung_by_clock")
        return {f"memo_{name}": float(self._counts[name]) for name in names} | {"memo_size": float(len(self._known))}
