"""PURE: which turns a worker's engine generates at once (paper §4: GPU slots at the framework level).

The worker's scheduler tells what happened and starts what the policy returns. `action` frees a slot while the
trajectory's tool runs (RollFlash's rule); `trajectory` keeps it from the first turn to the end (Slime's rule). Both
serve turns first come, first served. `priority` obeys classes: HIGH before LOW, PARKED never, and a HIGH turn that
finds no slot preempts a running LOW one; `rank` lets a turn of smaller rank preempt one of larger rank too. A preempted
turn keeps its place. While paused nothing is started.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Protocol

from envclient.base.errors import ConfigError, InvariantError
from rollout.types import PriorityClass

Order = tuple[int, ...]
_FIRST = {PriorityClass.HIGH: 0, PriorityClass.LOW: 1, PriorityClass.PARKED: 2}


class SlotPolicy(Protocol):
    """Every method returns the trajectories whose turn starts now, in order."""

    def turn_ready(self, trajectory_id: str, context_tokens: int = 0) -> list[str]:
        """The trajectory has a context to go on from and wants a slot."""

    def set_class(self, trajectory_id: str, priority: PriorityClass, rank: int) -> list[str]:
        """Its class from now on, known before its first turn or not."""

    def take_victims(self) -> dict[str, str]:
        """Running turns to abort → the waiting one for whose sake, each told once; `turn_preempted` is expected."""

    def turn_preempted(self, trajectory_id: str) -> list[str]:
        """Its running turn was aborted with its tokens kept; it waits again, at its old place."""

    def turn_ended(self, trajectory_id: str) -> list[str]:
        """Its running turn is complete; its tool runs next."""

    def trajectory_ended(self, trajectory_id: str) -> list[str]:
        """It ends, from whatever state; idempotent."""

    def pause(self) -> None:
        """Start nothing until `resume`."""

    def resume(self) -> list[str]: ...

    def check_invariants(self) -> None: ...

    def statistics(self) -> dict[str, int]: ...


class ActionSlots:
    """Slots are held by running turns only."""

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ConfigError(f"rollout.worker.slots is {slots}", "give at least 1")
        self.slots = slots
        self._paused = False
        self._arrivals = 0
        self._queue: list[tuple[Order, int, str]] = []
        """(order, arrival, trajectory) of each waiting turn, ascending."""
        self._waiting: dict[str, tuple[Order, int]] = {}
        """Order and arrival of each waiting turn."""
        self._running: dict[str, int] = {}
        """Arrival of each running turn."""

    @property
    def held(self) -> int:
        """Slots in use."""
        return len(self._running)

    def turn_ready(self, trajectory_id: str, context_tokens: int = 0) -> list[str]:
        self._expect(trajectory_id not in self._waiting, trajectory_id, "waits already")
        self._expect(trajectory_id not in self._running, trajectory_id, "runs already")
        self._arrivals += 1
        return self._enqueue(trajectory_id, self._arrivals)

    def turn_preempted(self, trajectory_id: str) -> list[str]:
        return self._enqueue(trajectory_id, self._stop(trajectory_id))

    def turn_ended(self, trajectory_id: str) -> list[str]:
        self._stop(trajectory_id)
        return self._start()

    def trajectory_ended(self, trajectory_id: str) -> list[str]:
        if trajectory_id in self._waiting:
            self._dequeue(trajectory_id)
        elif trajectory_id in self._running:
            self._stop(trajectory_id)
        return self._start()

    def set_class(self, trajectory_id: str, priority: PriorityClass, rank: int) -> list[str]:
        return []

    def take_victims(self) -> dict[str, str]:
        return {}

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> list[str]:
        self._paused = False
        return self._start()

    def check_invariants(self) -> None:
        self._expect(self.held <= self.slots, "policy", f"holds {self.held} slots of {self.slots}")
        self._expect(not self._waiting.keys() & self._running.keys(), "policy", "has a turn both waiting and running")
        queued = {trajectory_id: (order, arrival) for order, arrival, trajectory_id in self._queue}
        self._expect(queued == self._waiting, "policy", "has another queue than turns that wait")
        self._expect(self._paused or self._next() is None, "policy", "leaves a turn waiting that could run")

    def statistics(self) -> dict[str, int]:
        return {"running": len(self._running), "waiting": len(self._waiting), "held": self.held}

    def _order(self, trajectory_id: str) -> Order:
        """Smaller goes first, whatever the arrival."""
        return ()

    def _may_run(self, trajectory_id: str) -> bool:
        return self.held < self.slots

    def _enqueue(self, trajectory_id: str, arrival: int) -> list[str]:
        place = (self._order(trajectory_id), arrival)
        self._waiting[trajectory_id] = place
        insort(self._queue, (*place, trajectory_id))
        return self._start()

    def _dequeue(self, trajectory_id: str) -> int:
        """Its turn waits no more; its arrival."""
        place = self._waiting.pop(trajectory_id)
        del self._queue[bisect_left(self._queue, (*place, trajectory_id))]
        return place[1]

    def _stop(self, trajectory_id: str) -> int:
        self._expect(trajectory_id in self._running, trajectory_id, "has no running turn")
        return self._running.pop(trajectory_id)

    def _next(self) -> str | None:
        """The turn to start now, if any."""
        return self._queue[0][2] if self._queue and self._may_run(self._queue[0][2]) else None

    def _start(self) -> list[str]:
        started: list[str] = []
        while not self._paused and (trajectory_id := self._next()) is not None:
            self._run(trajectory_id, self._dequeue(trajectory_id))
            started.append(trajectory_id)
        return started

    def _run(self, trajectory_id: str, arrival: int) -> None:
        self._running[trajectory_id] = arrival

    @staticmethod
    def _expect(fact: bool, who: str, otherwise: str) -> None:
        if not fact:
            raise InvariantError(f"slots: {who} {otherwise}")


class TrajectorySlots(ActionSlots):
    """A slot is held from a trajectory's first turn to its end, tools included."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._holders: set[str] = set()

    @property
    def held(self) -> int:
        return len(self._holders)

    def trajectory_ended(self, trajectory_id: str) -> list[str]:
        self._holders.discard(trajectory_id)
        return super().trajectory_ended(trajectory_id)

    def check_invariants(self) -> None:
        super().check_invariants()
        self._expect(self._running.keys() <= self._holders, "policy", "has a turn that runs without a slot")

    def _order(self, trajectory_id: str) -> Order:
        return (0,) if trajectory_id in self._holders else (1,)

    def _may_run(self, trajectory_id: str) -> bool:
        return trajectory_id in self._holders or self.held < self.slots

    def _run(self, trajectory_id: str, arrival: int) -> None:
        self._holders.add(trajectory_id)
        super()._run(trajectory_id, arrival)


class PrioritySlots(ActionSlots):
    """Slots by class (and rank): LOW runs only in slots that would otherwise be idle (paper §4.3).

    Of the running turns that may be preempted the one with the shortest context goes: its KV is the cheapest to make
    again, and its tokens are kept in any case. An event costs the look-up of a place in a sorted list, and one look at
    each victim.
    """

    by_rank = False
    """Whether a smaller rank preempts within a class; the victim is then the one of the largest rank."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self._classes: dict[str, tuple[PriorityClass, int]] = {}
        self._parked: dict[str, int] = {}
        """Arrival of waiting turns that are parked; they are in no queue."""
        self._work: dict[str, int] = {}
        """Context tokens of each turn that waits or runs."""
        self._costs: dict[str, Order] = {}
        """Of each running turn: the smaller, the sooner it is a victim."""
        self._by_cost: list[tuple[Order, str]] = []
        """The same, ascending."""
        self._victims: dict[str, str] = {}
        """Running turns that were told to give their slot up → the waiting one for whose sake."""
        self._next_victims: dict[str, str] = {}
        """Those that have not been told."""

    def turn_ready(self, trajectory_id: str, context_tokens: int = 0) -> list[str]:
        self._expect(trajectory_id not in self._parked, trajectory_id, "waits already")
        self._work[trajectory_id] = context_tokens
        return super().turn_ready(trajectory_id)

    def turn_ended(self, trajectory_id: str) -> list[str]:
        self._work.pop(trajectory_id, None)
        return super().turn_ended(trajectory_id)

    def trajectory_ended(self, trajectory_id: str) -> list[str]:
        for kept in (self._classes, self._parked, self._work):
            kept.pop(trajectory_id, None)
        return super().trajectory_ended(trajectory_id)

    def set_class(self, trajectory_id: str, priority: PriorityClass, rank: int) -> list[str]:
        self._classes[trajectory_id] = (priority, rank)
        arrival = self._parked.pop(trajectory_id, None)
        if arrival is None and trajectory_id in self._waiting:
            arrival = self._dequeue(trajectory_id)
        if arrival is not None:
            return self._enqueue(trajectory_id, arrival)
        if trajectory_id in self._running:
            self._uncost(trajectory_id)
            self._cost(trajectory_id)
        return self._start()  # a running turn's class decides whether it is a victim

    def take_victims(self) -> dict[str, str]:
        fresh, self._next_victims = self._next_victims, {}
        self._victims |= fresh
        return fresh

    def statistics(self) -> dict[str, int]:
        numbers = super().statistics()
        return numbers | {"waiting": numbers["waiting"] + len(self._parked)}

    def check_invariants(self) -> None:
        super().check_invariants()
        victims = self._victims.keys() | self._next_victims.keys()
        self._expect(victims <= self._running.keys(), "policy", "preempts a turn that does not run")
        self._expect(not self._parked.keys() & self._waiting.keys(), "policy", "has a parked turn in its queue")
        costs = {trajectory_id: cost for cost, trajectory_id in self._by_cost}
        known = costs == self._costs and costs.keys() == self._running.keys()
        self._expect(known, "policy", "has other costs than running turns")
        if not self._paused and self._queue and not victims:
            worse = [t for t in self._running if self._yields(t, self._queue[0][0])]
            self._expect(not worse, "policy", f"lets {worse} run before a turn of order {self._queue[0][0]}")

    def _order(self, trajectory_id: str) -> Order:
        priority, rank = self._classes.get(trajectory_id, (PriorityClass.LOW, 0))
        return (_FIRST[priority], rank)

    def _enqueue(self, trajectory_id: str, arrival: int) -> list[str]:
        if self._classes.get(trajectory_id, (PriorityClass.LOW, 0))[0] is PriorityClass.PARKED:
            self._parked[trajectory_id] = arrival
            return self._start()
        return super()._enqueue(trajectory_id, arrival)

    def _run(self, trajectory_id: str, arrival: int) -> None:
        super()._run(trajectory_id, arrival)
        self._cost(trajectory_id)

    def _stop(self, trajectory_id: str) -> int:
        arrival = super()._stop(trajectory_id)
        self._uncost(trajectory_id)
        self._victims.pop(trajectory_id, None)
        self._next_victims.pop(trajectory_id, None)
        return arrival

    def _start(self) -> list[str]:
        started = super()._start()
        self._choose_victims()
        return started

    def _choose_victims(self) -> None:
        """As many as there are waiting turns that come before a running one, best of them first.

        Those that were told make room for the first of the waiting turns. Whoever is the next victim yields to more
        turns than any other running one: where it does not yield, nobody does.
        """
        self._next_victims = {}
        place = len(self._victims)
        if self._paused or place >= len(self._queue):
            return
        served = set(self._victims.values())
        for _, trajectory_id in self._by_cost:
            if trajectory_id in self._victims:
                continue
            if place >= len(self._queue) or not self._yields(trajectory_id, self._queue[place][0]):
                return
            waiting = next(name for _, _, name in self._queue if name not in served)
            self._next_victims[trajectory_id] = waiting
            served.add(waiting)
            place += 1

    def _yields(self, running: str, order: Order) -> bool:
        """Whether a running turn gives way to a waiting one of `order`."""
        mine = self._order(running)
        return mine > order if self.by_rank else mine[0] > order[0]

    def _cost(self, running: str) -> None:
        """Find the running turn's place among the victims to come."""
        first, rank = self._order(running)
        work = (self._work.get(running, 0), -self._running[running])
        cost = (-first, -rank, *work) if self.by_rank else (-first, *work)
        self._costs[running] = cost
        insort(self._by_cost, (cost, running))

    def _uncost(self, running: str) -> None:
        """The place of before is no longer its own."""
        del self._by_cost[bisect_left(self._by_cost, (self._costs.pop(running), running))]


class RankSlots(PrioritySlots):
    """A waiting turn of smaller rank preempts the running one of the largest (Heddle's preemptive longest first)."""

    by_rank = True


POLICIES: dict[str, type[ActionSlots]] = {
    "action": ActionSlots,
    "trajectory": TrajectorySlots,
    "priority": PrioritySlots,
    "rank": RankSlots,
}


CLASS_RULES = ("priority", "rank")
"""Those that obey classes."""


def make_slots(rule: str, slots: int) -> SlotPolicy:
    """The rule that a whole policy's `slots` names.

    Raises:
        ConfigError: no such rule, or no slot.
    """
    if rule not in POLICIES:
        raise ConfigError(f"slot rule {rule!r} is unknown", f"choose one of {', '.join(POLICIES)}")
    return POLICIES[rule](slots)
