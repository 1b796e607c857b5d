"""PURE: which groups are critical (paper §4.1): the k that are expected to complete the next batch soonest.

Kept incrementally: a change of one group's F_g costs O(log n). k changes as groups become ready or are taken. Promoted
groups are not in here: they are critical in any case, and k counts the places they leave.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from envclient.base.errors import InvariantError
from rollout.policy.jobs import JobGroup


@dataclass(slots=True, eq=False)
class _Entry:
    group: JobGroup
    remaining: float
    ticket: int
    member: bool = False


class CriticalSet:
    """The k groups of smallest F_g, ties by admission order.

    One replaces another only if its F_g is below `hysteresis` times the other's.
    """

    def __init__(self, hysteresis: float) -> None:
        self._hysteresis = hysteresis
        self._entries: dict[int, _Entry] = {}
        self._members = 0
        self._tickets = 0
        self._best: list[tuple[float, int, int, _Entry]] = []
        """Heap of (F, order, ticket, entry) of those that are not critical; one with an old ticket is dropped when met.
        """
        self._worst: list[tuple[float, int, int, _Entry]] = []
        """Heap of (−F, −order, ticket, entry) of the critical ones."""

    def __contains__(self, group: JobGroup) -> bool:
        return group.critical

    def __len__(self) -> int:
        return self._members

    def put(self, group: JobGroup, remaining: float) -> bool:
        """The group's F_g, new or changed. Whether it was news."""
        entry = self._entries.get(group.order)
        if entry is None:
            entry = self._entries[group.order] = _Entry(group, remaining, 0)
        elif entry.remaining == remaining:
            return False
        entry.remaining = remaining
        self._push(entry)
        return True

    def drop(self, group: JobGroup) -> bool:
        """The group waits for nothing any more, or is promoted. Whether it was known."""
        entry = self._entries.pop(group.order, None)
        if entry is None:
            return False
        self._members -= entry.member
        entry.member = group.critical = False
        entry.ticket = 0
        return True

    def settle(self, wanted: int) -> list[JobGroup]:
        """Make `wanted` groups critical, as far as there are so many; those that became so or ceased to be."""
        changed: dict[int, JobGroup] = {}
        while self._members > wanted and (worst := self._top(self._worst, member=True)) is not None:
            self._flip(worst, changed)
        while (best := self._top(self._best, member=False)) is not None:
            if self._members < wanted:
                self._flip(best, changed)
                continue
            worst = self._top(self._worst, member=True)
            if worst is None or not best.remaining < self._hysteresis * worst.remaining:
                break
            self._flip(worst, changed)
            self._flip(best, changed)
        return list(changed.values())

    def _flip(self, entry: _Entry, changed: dict[int, JobGroup]) -> None:
        entry.member = entry.group.critical = not entry.member
        self._members += 1 if entry.member else -1
        self._push(entry)
        if changed.pop(entry.group.order, None) is None:
            changed[entry.group.order] = entry.group

    def _push(self, entry: _Entry) -> None:
        self._tickets += 1
        entry.ticket = self._tickets
        if entry.member:
            heapq.heappush(self._worst, (-entry.remaining, -entry.group.order, entry.ticket, entry))
        else:
            heapq.heappush(self._best, (entry.remaining, entry.group.order, entry.ticket, entry))
        for heap in (self._best, self._worst):
            if len(heap) > 64 + 4 * len(self._entries):
                heap[:] = [item for item in heap if item[3].ticket == item[2]]
                heapq.heapify(heap)

    @staticmethod
    def _top(heap: list[tuple[float, int, int, _Entry]], *, member: bool) -> _Entry | None:
        while heap:
            _, _, ticket, entry = heap[0]
            if entry.ticket == ticket and entry.member is member:
                return entry
            heapq.heappop(heap)
        return None

    def groups(self) -> Iterator[JobGroup]:
        """The critical ones."""
        return (entry.group for entry in self._entries.values() if entry.member)

    def check_invariants(self) -> None:
        """Recount. Raises InvariantError."""
        members = [entry for entry in self._entries.values() if entry.member]
        others = [entry for entry in self._entries.values() if not entry.member]
        if len(members) != self._members or not all(e.group.critical is e.member for e in self._entries.values()):
            raise InvariantError(f"{self._members} critical groups are counted, there are {len(members)}")
        if members and others:
            worst, best = max(e.remaining for e in members), min(e.remaining for e in others)
            if best < self._hysteresis * worst:
                raise InvariantError(f"a group of F = {best:g} is not critical beside one of {worst:g}")
