"""PURE: which turns a worker's engine generates at once (paper §4: GPU slots at the framework level).

The worker's scheduler tells what happened and starts what the policy returns. `action` frees a slot while the
trajectory's tool runs (RollFlash's rule); `trajectory` keeps it from the first turn to the end (Slime's rule). Both
serve turns first come, first served. `priority` obeys classes: HIGH before LOW, PARKED never, and a HIGH turn that
finds no slot preempts a running LOW one; `rank` lets a turn of smaller rank preempt one of larger rank too. A preempted
turn keeps its place. While paused nothing is started.
"""

from __future__ import annotations

import heapq
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

    def take_victims(self) -> list[str]:
        """Running turns to abort for the sake of waiting ones, each told once; `turn_preempted` is expected."""

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
        """Heap of (order, arrival, trajectory); an entry whose turn waits no more is stale and dropped when met."""
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
        self._waiting.pop(trajectory_id, None)
        self._running.pop(trajectory_id, None)
        return self._start()

    def set_class(self, trajectory_id: str, priority: PriorityClass, rank: int) -> list[str]:
        return []

    def take_victims(self) -> list[str]:
        return []

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> list[str]:
        self._paused = False
        return self._start()

    def check_invariants(self) -> None:
        self._expect(self.held <= self.slots, "policy", f"holds {self.held} slots of {self.slots}")
        self._expect(not self._waiting.keys() & self._running.keys(), "policy", "has a turn both waiting and running")
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
        heapq.heappush(self._queue, (*place, trajectory_id))
        return self._start()

    def _stop(self, trajectory_id: str) -> int:
        self._expect(trajectory_id in self._running, trajectory_id, "has no running turn")
        return self._running.pop(trajectory_id)

    def _next(self) -> str | None:
        """The turn to start now, if any."""
        while self._queue:
            order, arrival, trajectory_id = self._queue[0]
            if self._waiting.get(trajectory_id) == (order, arrival):
                return trajectory_id if self._may_run(trajectory_id) else None
            heapq.heappop(self._queue)
        return None

    def _start(self) -> list[str]:
        started: list[str] = []
        while not self._paused and (trajectory_id := self._next()) is not None:
            _, arrival, _ = heapq.heappop(self._queue)
            del self._waiting[trajectory_id]
            self._run(trajectory_id, arrival)
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
    again, and its tokens are kept in any case.
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
        self._victims: dict[str, bool] = {}
        """Running turns that give their slot up; whether that was told."""

    def turn_ready(self, trajectory_id: str, context_tokens: int = 0) -> list[str]:
        self._expect(trajectory_id not in self._parked, trajectory_id, "waits already")
        self._work[trajectory_id] = context_tokens
        return super().turn_ready(trajectory_id)

    def turn_ended(self, trajectory_id: str) -> list[str]:
        self._work.pop(trajectory_id, None)
        return super().turn_ended(trajectory_id)

    def trajectory_ended(self, trajectory_id: str) -> list[str]:
        for kept in (self._classes, self._parked, self._work, self._victims):
            kept.pop(trajectory_id, None)
        return super().trajectory_ended(trajectory_id)

    def set_class(self, trajectory_id: str, priority: PriorityClass, rank: int) -> list[str]:
        self._classes[trajectory_id] = (priority, rank)
        arrival = self._parked.pop(trajectory_id, None)
        if arrival is None and trajectory_id in self._waiting:
            arrival = self._waiting.pop(trajectory_id)[1]
        if arrival is not None:
            return self._enqueue(trajectory_id, arrival)
        return self._start()  # a running turn's class decides whether it is a victim

    def take_victims(self) -> list[str]:
        fresh = [trajectory_id for trajectory_id, told in self._victims.items() if not told]
        self._victims.update(dict.fromkeys(fresh, True))
        return fresh

    def statistics(self) -> dict[str, int]:
        numbers = super().statistics()
        return numbers | {"waiting": numbers["waiting"] + len(self._parked)}

    def check_invariants(self) -> None:
        super().check_invariants()
        self._expect(self._victims.keys() <= self._running.keys(), "policy", "preempts a turn that does not run")
        self._expect(not self._parked.keys() & self._waiting.keys(), "policy", "has a parked turn in its queue")
        best = self._next_order()
        if not self._paused and best is not None and len(self._victims) == 0:
            worse = [t for t in self._running if self._yields(t, best)]
            self._expect(not worse, "policy", f"lets {worse} run before a turn of order {best}")

    def _order(self, trajectory_id: str) -> Order:
        priority, rank = self._classes.get(trajectory_id, (PriorityClass.LOW, 0))
        return (_FIRST[priority], rank)

    def _enqueue(self, trajectory_id: str, arrival: int) -> list[str]:
        if self._classes.get(trajectory_id, (PriorityClass.LOW, 0))[0] is PriorityClass.PARKED:
            self._parked[trajectory_id] = arrival
            return self._start()
        return super()._enqueue(trajectory_id, arrival)

    def _stop(self, trajectory_id: str) -> int:
        self._victims.pop(trajectory_id, None)
        return super()._stop(trajectory_id)

    def _start(self) -> list[str]:
        started = super()._start()
        self._choose_victims()
        return started

    def _choose_victims(self) -> None:
        """As many as there are waiting turns that come before a running one, best of them first."""
        if self._paused or not self._waiting:
            self._victims = {t: told for t, told in self._victims.items() if told}
            return
        told = {t: True for t, was_told in self._victims.items() if was_told}
        waiting = sorted(order for order, _ in self._waiting.values())
        self._victims = told
        for order in waiting[len(told) :]:
            may = [t for t in self._running if t not in self._victims and self._yields(t, order)]
            if not may:
                return
            self._victims[min(may, key=self._cost)] = False

    def _yields(self, running: str, order: Order) -> bool:
        """Whether a running turn gives way to a waiting one of `order`."""
        mine = self._order(running)
        return mine > order if self.by_rank else mine[0] > order[0]

    def _cost(self, running: str) -> tuple[int, ...]:
        first, rank = self._order(running)
        if self.by_rank:
            return (-first, -rank, self._work.get(running, 0), -self._running[running])
        return (-first, self._work.get(running, 0), -self._running[running])

    def _next_order(self) -> Order | None:
        return min((order for order, _ in self._waiting.values()), default=None)


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
