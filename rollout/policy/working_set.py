"""PURE: which trajectories of a worker may hold KV: a set that fits its capacity, kept as long as it fits.

Each entry says what it holds now and what is reserved for it (its growth included); a group's prompt is counted once.
Entries are taken in the order of their keys while what is *reserved* fits; they are put out, worst first, only when
what is *held* does not fit any more, or when a better outsider needs the room and gets it by that. Members compare by
another key than outsiders, so that small differences change nothing. A change costs O(log n) comparisons, for each
that enters or leaves, or would have to.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from operator import neg
from typing import Any

from envclient.base.errors import InvariantError

Key = tuple[float, ...]
_Item = tuple[Any, ...]
"""A key's parts, minus the ticket, the entry: flat, because a comparison reads fewer objects."""


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """One trajectory as the set sees it."""

    name: str
    inside: Key
    """Order among members; smaller is better."""
    outside: Key
    """Order among outsiders, and against members; not smaller than `inside`."""
    held: float
    """KV tokens beyond the shared prompt."""
    reserved: float
    """At least `held`."""
    shared: int
    """Whose prompt it shares."""
    new: bool
    """Not started: it can only be taken while its worker has an opening."""
    member: bool = False
    ticket: int = field(default=0)
    """Of its present place in the order."""
    filed: int = field(default=0)
    """Of the place that its queue knows: the present one, or one nearer to the queue's head."""


@dataclass(slots=True, eq=False)
class _Prompt:
    tokens: float
    entries: int = 0
    members: int = 0


class WorkingSet:
    """The set of one worker.

    Args:
        room: KV tokens that members' reservations may fill; None: everyone is a member.
        most: KV tokens that they may hold before one must leave.
    """

    def __init__(self, room: float | None, most: float | None) -> None:
        self._room = room
        self._most = most
        self.held = 0.0
        self.reserved = 0.0
        self.entries: dict[str, Entry] = {}
        self._members = 0
        self.demand = 0.0
        """What all would hold, members or not."""
        self.pending = 0
        """Members that have not started."""
        self._prompts: dict[int, _Prompt] = {}
        self._tickets = 0
        self._worst: list[_Item] = []
        """Members and outsiders by the order in which they would change places: sorted, the next one last. Taking that
        costs nothing, and a place is found with half of a heap's comparisons, which are what a flip costs."""
        self._best: list[_Item] = []
        self._best_new: list[_Item] = []

    def __len__(self) -> int:
        return self._members

    def prompt(self, shared: int, tokens: float) -> None:
        """The prompt's length, where it has become known."""
        prompt = self._prompts.get(shared)
        if prompt is None or prompt.tokens == tokens:
            return
        self.demand += tokens - prompt.tokens
        if prompt.members:
            self.held += tokens - prompt.tokens
            self.reserved += tokens - prompt.tokens
        prompt.tokens = tokens

    def put(
        self,
        name: str,
        *,
        inside: Key,
        outside: Key,
        held: float,
        reserved: float,
        shared: int,
        prompt_tokens: float,
        new: bool,
    ) -> None:
        """A trajectory, new or changed."""
        entry = self.entries.get(name)
        if entry is None:
            entry = Entry(
                name=name, inside=inside, outside=outside, held=held, reserved=reserved, shared=shared, new=new
            )
            self.entries[name] = entry
            prompt = self._prompts.get(shared)
            if prompt is None:
                prompt = self._prompts[shared] = _Prompt(prompt_tokens)
                self.demand += prompt_tokens
            prompt.entries += 1
            self.demand += held
            self._push(entry)
            return
        self.demand += held - entry.held
        if entry.member:
            self.held += held - entry.held
            self.reserved += reserved - entry.reserved
            self.pending += new - entry.new
        before, after = (entry.inside, inside) if entry.member else (entry.outside, outside)
        other_queue = entry.new is not new
        entry.held, entry.reserved, entry.new = held, reserved, new
        entry.inside, entry.outside = inside, outside
        if other_queue or before != after:
            self._tickets += 1
            entry.ticket = self._tickets
            # One whose turn comes later than its queue knows is moved there when it is met: most never are.
            if other_queue or (before < after) is entry.member:
                self._file(entry)

    def drop(self, name: str) -> None:
        """The trajectory is gone; idempotent."""
        entry = self.entries.pop(name, None)
        if entry is None:
            return
        if entry.member:
            self._flip(entry)
        self.demand -= entry.held
        entry.filed = 0
        prompt = self._prompts[entry.shared]
        prompt.entries -= 1
        if not prompt.entries:
            del self._prompts[entry.shared]
            self.demand -= prompt.tokens
        if not self.entries:
            self.demand = 0.0

    def settle(self, openings: int) -> list[str]:
        """Trajectories that came into the set or left it. `openings`: new ones that may be started."""
        changed: dict[str, None] = {}
        room, most = self._room, self._most
        if most is not None:
            while self.held > most and self._members > 1:
                worst = self._top(self._worst, member=True, new=None)
                assert worst is not None
                openings += worst.new
                self._turn(worst, changed)
        while (best := self._next(openings)) is not None:
            if room is None or not self._members or self.reserved + self._need(best) <= room:
                openings -= best.new
                self._turn(best, changed)
                continue
            leavers = self._make_room(best, room)
            if not leavers:
                break
            for worst in leavers:
                openings += worst.new
                self._turn(worst, changed)
            # Nobody else: an opening that one of them gave up may suit a better one, for whom the room is too small.
            openings -= best.new
            self._turn(best, changed)
        return list(changed)

    def fits(self, reserved: float, prompt_tokens: float) -> bool:
        """Whether a trajectory from elsewhere would find room; where nobody is a member, anyone does (`settle`)."""
        return self._room is None or not self._members or self.reserved + reserved + prompt_tokens <= self._room

    @property
    def outsiders(self) -> int:
        """Trajectories that wait for room here."""
        return len(self.entries) - self._members

    def first_outsiders(self) -> list[Entry]:
        """The best outsider that has started and the best one that has not, as far as there are; best first."""
        tops = [self._top(self._best, member=False, new=False), self._top(self._best_new, member=False, new=True)]
        return sorted((entry for entry in tops if entry is not None), key=lambda entry: entry.outside)

    def _need(self, entry: Entry) -> float:
        prompt = self._prompts[entry.shared]
        return entry.reserved + (0.0 if prompt.members else prompt.tokens)

    def _next(self, openings: int) -> Entry | None:
        """The best outsider that can run."""
        best = self._top(self._best, member=False, new=False)
        if openings > 0:
            fresh = self._top(self._best_new, member=False, new=True)
            if best is None or (fresh is not None and fresh.outside < best.outside):
                best = fresh
        return best

    def _make_room(self, best: Entry, room: float) -> list[Entry]:
        """The members, worst first, without which `best` fits; none, where those that are worse than it are not enough.

        They are taken out of their queue.
        """
        leavers: list[Entry] = []
        left: dict[int, int] = {}
        """Whose prompt → members that would still share it."""
        missing = self.reserved + self._need(best) - room
        while missing > 0 and len(leavers) < self._members:
            worst = self._top(self._worst, member=True, new=None)
            if worst is None or not best.outside < worst.inside:
                for entry in leavers:
                    insort(self._worst, _item(entry))
                return []
            self._worst.pop()
            leavers.append(worst)
            missing -= worst.reserved
            prompt = self._prompts[worst.shared]
            left[worst.shared] = left.get(worst.shared, prompt.members) - 1
            if not left[worst.shared] and worst.shared != best.shared:
                missing -= prompt.tokens
        return leavers

    def _turn(self, entry: Entry, changed: dict[str, None]) -> None:
        self._flip(entry)
        self._push(entry)
        if entry.name in changed:
            del changed[entry.name]
        else:
            changed[entry.name] = None

    def _flip(self, entry: Entry) -> None:
        sign = -1 if entry.member else 1
        prompt = self._prompts[entry.shared]
        before = prompt.members > 0
        prompt.members += sign
        tokens = (int(prompt.members > 0) - int(before)) * prompt.tokens
        self.held += sign * entry.held + tokens
        self.reserved += sign * entry.reserved + tokens
        self._members += sign
        self.pending += sign * entry.new
        entry.member = not entry.member
        if not self._members:
            self.held = self.reserved = 0.0  # no rounding error lives longer than the set

    def _push(self, entry: Entry) -> None:
        self._tickets += 1
        entry.ticket = self._tickets
        self._file(entry)

    def _file(self, entry: Entry) -> None:
        entry.filed = entry.ticket
        queue = self._worst if entry.member else (self._best_new if entry.new else self._best)
        insort(queue, _item(entry))
        if len(queue) > 64 + 4 * len(self.entries):
            queue[:] = [item for item in queue if item[-1].filed == -item[-2]]

    @staticmethod
    def _top(queue: list[_Item], *, member: bool, new: bool | None) -> Entry | None:
        while queue:
            item = queue[-1]
            entry: Entry = item[-1]
            ticket = -item[-2]
            if entry.filed != ticket or entry.member is not member or new not in (None, entry.new):
                queue.pop()
            elif entry.ticket != ticket:
                entry.filed = entry.ticket
                queue.pop()
                insort(queue, _item(entry))
            else:
                return entry
        return None

    def check_invariants(self) -> None:
        """Recount. Raises InvariantError."""
        members = [entry for entry in self.entries.values() if entry.member]
        prompts = {entry.shared for entry in members}
        tokens = sum(self._prompts[shared].tokens for shared in prompts)
        held = tokens + sum(entry.held for entry in members)
        reserved = tokens + sum(entry.reserved for entry in members)
        if len(members) != self._members or abs(held - self.held) > 1 or abs(reserved - self.reserved) > 1:
            raise InvariantError(
                f"working set counts {self._members} members, {self.held:g} held, {self.reserved:g} reserved; "
                f"recounted {len(members)}, {held:g}, {reserved:g}"
            )
        demand = sum(p.tokens for p in self._prompts.values()) + sum(e.held for e in self.entries.values())
        if abs(demand - self.demand) > 1:
            raise InvariantError(f"working set counts a demand of {self.demand:g}; recounted {demand:g}")
        if sum(entry.new for entry in members) != self.pending:
            raise InvariantError(f"working set counts {self.pending} members that have not started")


def _item(entry: Entry) -> _Item:
    """The greater, the sooner it leaves its queue: the worst member, the best outsider; of equals the first ticket."""
    key = entry.inside if entry.member else map(neg, entry.outside)
    return (*key, -entry.ticket, entry)
