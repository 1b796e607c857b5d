"""The lease book: who holds which sandbox, until when, and who waits for room. Pure.

Events come in through methods that take `now`; what is to be done comes out as commands, which the controller's shell
carries out and reports back. A lease goes

    WAITING -> CREATING -> LIVE -> DESTROYING -> ended

and every Create is answered, sooner or later, by exactly one Destroy (or by the news that the creation failed). Room is
taken from CREATING until a destroyed sandbox is gone; those without room wait first come, first served.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum

REMEMBERED_KEYS = 65536
"""Ended idempotency keys that are still recognised."""


class LeaseState(str, Enum):
    """Where a lease is on its way."""

    WAITING = "waiting"
    CREATING = "creating"
    LIVE = "live"
    DESTROYING = "destroying"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Create:
    """Make the sandbox, as a copy of `twin_of`'s when that is not empty; then report `created` or `create_failed`."""

    lease_id: str
    template: str
    twin_of: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Destroy:
    """End the sandbox; then report `destroyed`."""

    lease_id: str
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Answer everyone who asked with this key."""

    key: str
    lease_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Answer everyone who asked with this key: no."""

    key: str
    cause: str


LeaseCommand = Create | Destroy | Grant | Refuse


@dataclass(slots=True, kw_only=True)
class Entry:
    """One lease. Times are the shell's clock's."""

    lease_id: str
    key: str
    template: str
    trajectory: str
    lifetime_s: float
    twin_of: str
    wait_until: float
    state: LeaseState = LeaseState.WAITING
    expires_at: float = 0.0
    ending: str = ""
    """Why it ends; set while CREATING, its sandbox is destroyed as soon as it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseCounts:
    """Numbers since the start; `created` counts sandboxes that came up."""

    live: int
    waiting: int
    created: int
    failed: int
    released: int
    expired: int
    destroyed: int


@dataclass(slots=True)
class _Totals:
    created: int = 0
    failed: int = 0
    released: int = 0
    expired: int = 0
    destroyed: int = 0
    ordered: int = 0
    """Create commands given."""


@dataclass(slots=True, kw_only=True)
class LeaseBook:
    """Owner of all leases of one service.

    Args:
        capacity: sandboxes alive at once.
        wait_s: how long a lease may wait for room.
        prefix: makes lease ids of different services different.
    """

    capacity: int
    wait_s: float
    prefix: str
    _entries: dict[str, Entry] = field(default_factory=dict)
    _by_key: dict[str, str] = field(default_factory=dict)
    _ended_keys: dict[str, str] = field(default_factory=dict)
    """Key -> why its lease ended, oldest first."""
    _queue: deque[str] = field(default_factory=deque)
    _busy: int = 0
    _number: int = 0
    _totals: _Totals = field(default_factory=_Totals)

    def ask(
        self, *, key: str, template: str, trajectory: str, lifetime_s: float, now: float, twin_of: str = ""
    ) -> list[LeaseCommand]:
        """A lease is asked for; a key that is known joins the lease it has.

        A Grant or Refuse in the result answers this asker alone; without one, the asker waits with all of its key.
        """
        if key in self._ended_keys:
            return [Refuse(key=key, cause=f"the lease of key {key!r} has ended: {self._ended_keys[key]}")]
        if key in self._by_key:
            entry = self._entries[self._by_key[key]]
            if (entry.template, entry.twin_of) != (template, twin_of):
                return [Refuse(key=key, cause=f"key {key!r} was used for another lease")]
            return [Grant(key=key, lease_id=entry.lease_id)] if entry.state is LeaseState.LIVE else []
        if twin_of and not self.is_live(twin_of):
            return [Refuse(key=key, cause=f"lease {twin_of!r} does not live: it cannot have a twin")]
        self._number += 1
        entry = Entry(
            lease_id=f"{self.prefix}{self._number:08d}",
            key=key,
            template=template,
            trajectory=trajectory,
            lifetime_s=lifetime_s,
            twin_of=twin_of,
            wait_until=now + self.wait_s,
        )
        self._entries[entry.lease_id] = entry
        self._by_key[key] = entry.lease_id
        self._queue.append(entry.lease_id)
        return self._fill()

    def created(self, lease_id: str, now: float) -> list[LeaseCommand]:
        """Its sandbox is up: the lifetime begins, unless nobody wants it any more."""
        entry = self._entries[lease_id]
        assert entry.state is LeaseState.CREATING
        self._totals.created += 1
        entry.state = LeaseState.LIVE
        entry.expires_at = now + entry.lifetime_s
        if entry.ending:
            entry.state = LeaseState.DESTROYING
            return [Destroy(lease_id=lease_id, cause=entry.ending)]
        return [Grant(key=entry.key, lease_id=lease_id)]

    def create_failed(self, lease_id: str, cause: str) -> list[LeaseCommand]:
        """No sandbox came up, and nothing of it is left. The key may be tried again."""
        entry = self._entries.pop(lease_id)
        assert entry.state is LeaseState.CREATING
        entry.state = LeaseState.ENDED
        self._totals.failed += 1
        self._busy -= 1
        if entry.ending:
            return self._fill()
        del self._by_key[entry.key]
        return [Refuse(key=entry.key, cause=cause), *self._fill()]

    def release(self, lease_id: str) -> list[LeaseCommand]:
        """Its holder is done. Nothing happens for a lease that is unknown or ends already."""
        entry = self._entries.get(lease_id)
        if entry is None or entry.ending:
            return []
        self._totals.released += 1
        return self._end(entry, "released")

    def destroyed(self, lease_id: str) -> list[LeaseCommand]:
        """Its sandbox is gone: there is room for the next."""
        entry = self._entries.pop(lease_id)
        assert entry.state is LeaseState.DESTROYING
        entry.state = LeaseState.ENDED
        self._totals.destroyed += 1
        self._busy -= 1
        return self._fill()

    def tick(self, now: float) -> list[LeaseCommand]:
        """Time has passed: expired leases end, those who waited too long are refused."""
        commands: list[LeaseCommand] = []
        for entry in list(self._entries.values()):
            if entry.state is LeaseState.LIVE and now >= entry.expires_at:
                self._totals.expired += 1
                commands += self._end(entry, f"its lifetime of {entry.lifetime_s:g} s is over")
            elif entry.state is LeaseState.WAITING and now >= entry.wait_until:
                self._queue.remove(entry.lease_id)
                del self._entries[entry.lease_id], self._by_key[entry.key]
                entry.state = LeaseState.ENDED
                cause = f"no room for {self.wait_s:g} s: all {self.capacity} sandboxes are in use"
                commands.append(Refuse(key=entry.key, cause=cause))
        return commands

    def next_deadline(self) -> float | None:
        """When `tick` will next have something to do."""
        times = [entry.expires_at for entry in self._entries.values() if entry.state is LeaseState.LIVE]
        times += [entry.wait_until for entry in self._entries.values() if entry.state is LeaseState.WAITING]
        return min(times, default=None)

    def is_live(self, lease_id: str) -> bool:
        """Whether the sandbox of `lease_id` may be used."""
        entry = self._entries.get(lease_id)
        return entry is not None and entry.state is LeaseState.LIVE

    def entry(self, lease_id: str) -> Entry:
        """The lease; only while it has not ended."""
        return self._entries[lease_id]

    def statistics(self) -> LeaseCounts:
        totals = self._totals
        return LeaseCounts(
            live=sum(entry.state is LeaseState.LIVE for entry in self._entries.values()),
            waiting=len(self._queue),
            created=totals.created,
            failed=totals.failed,
            released=totals.released,
            expired=totals.expired,
            destroyed=totals.destroyed,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError when a promise of this file is broken."""
        states = [entry.state for entry in self._entries.values()]
        holding = sum(state is not LeaseState.WAITING for state in states)
        assert LeaseState.ENDED not in states
        assert self._busy == holding <= self.capacity
        assert list(self._queue) == [e.lease_id for e in self._entries.values() if e.state is LeaseState.WAITING]
        assert not (self._queue and self._busy < self.capacity), "someone waits although there is room"
        wanted = {entry.key: entry.lease_id for entry in self._entries.values() if not entry.ending}
        assert self._by_key == wanted
        assert not self._by_key.keys() & self._ended_keys.keys()
        assert len(self._ended_keys) <= REMEMBERED_KEYS
        totals = self._totals
        creating = states.count(LeaseState.CREATING)
        assert totals.ordered == creating + totals.created + totals.failed
        assert totals.created == totals.destroyed + states.count(LeaseState.LIVE) + states.count(LeaseState.DESTROYING)

    def _fill(self) -> list[LeaseCommand]:
        commands: list[LeaseCommand] = []
        while self._queue and self._busy < self.capacity:
            entry = self._entries[self._queue.popleft()]
            entry.state = LeaseState.CREATING
            self._busy += 1
            self._totals.ordered += 1
            commands.append(Create(lease_id=entry.lease_id, template=entry.template, twin_of=entry.twin_of))
        return commands

    def _end(self, entry: Entry, cause: str) -> list[LeaseCommand]:
        """The key is used up from here on; whoever still waits with it is refused."""
        entry.ending = cause
        del self._by_key[entry.key]
        self._ended_keys[entry.key] = cause
        if len(self._ended_keys) > REMEMBERED_KEYS:
            del self._ended_keys[next(iter(self._ended_keys))]
        if entry.state is LeaseState.LIVE:
            entry.state = LeaseState.DESTROYING
            return [Destroy(lease_id=entry.lease_id, cause=cause)]
        if entry.state is LeaseState.WAITING:
            self._queue.remove(entry.lease_id)
            del self._entries[entry.lease_id]
            entry.state = LeaseState.ENDED
        return [Refuse(key=entry.key, cause=cause)]  # CREATING: `created` destroys it
