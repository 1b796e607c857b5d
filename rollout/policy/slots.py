"""PURE: which turns a worker's engine generates at once (paper §4: GPU slots at the framework level).

The worker's scheduler tells what happened and starts what the policy returns. `action` frees a slot while the
trajectory's tool runs (RollFlash's rule); `trajectory` keeps it from the first turn to the end (Slime's rule). Both
serve turns first come, first served; a preempted turn keeps its place. While paused nothing is started.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from envclient.base.errors import ConfigError, InvariantError


class SlotPolicy(Protocol):
    """Every method returns the trajectories whose turn starts now, in order."""

    def turn_ready(self, trajectory_id: str) -> list[str]:
        """The trajectory has a context to go on from and wants a slot."""

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
        self._queue: list[tuple[int, int, str]] = []
        """Heap of (rank, arrival, trajectory); an entry whose turn waits no more is stale and dropped when met."""
        self._waiting: dict[str, tuple[int, int]] = {}
        """Rank and arrival of each waiting turn."""
        self._running: dict[str, int] = {}
        """Arrival of each running turn."""

    @property
    def held(self) -> int:
        """Slots in use."""
        return len(self._running)

    def turn_ready(self, trajectory_id: str) -> list[str]:
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

    def _rank(self, trajectory_id: str) -> int:
        """Smaller goes first, whatever the arrival."""
        return 0

    def _may_run(self, trajectory_id: str) -> bool:
        return self.held < self.slots

    def _enqueue(self, trajectory_id: str, arrival: int) -> list[str]:
        place = (self._rank(trajectory_id), arrival)
        self._waiting[trajectory_id] = place
        heapq.heappush(self._queue, (*place, trajectory_id))
        return self._start()

    def _stop(self, trajectory_id: str) -> int:
        self._expect(trajectory_id in self._running, trajectory_id, "has no running turn")
        return self._running.pop(trajectory_id)

    def _next(self) -> str | None:
        """The turn to start now, if any."""
        while self._queue:
            rank, arrival, trajectory_id = self._queue[0]
            if self._waiting.get(trajectory_id) == (rank, arrival):
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

    def _rank(self, trajectory_id: str) -> int:
        return 0 if trajectory_id in self._holders else 1

    def _may_run(self, trajectory_id: str) -> bool:
        return trajectory_id in self._holders or self.held < self.slots

    def _run(self, trajectory_id: str, arrival: int) -> None:
        self._holders.add(trajectory_id)
        super()._run(trajectory_id, arrival)


POLICIES: dict[str, type[ActionSlots]] = {"action": ActionSlots, "trajectory": TrajectorySlots}


def make_slots(policy: str, slots: int) -> SlotPolicy:
    """The policy that `rollout.worker.policy` names.

    Raises:
        ConfigError: no such policy, or no slot.
    """
    if policy not in POLICIES:
        raise ConfigError(f"rollout.worker.policy {policy!r} is unknown", f"choose one of {', '.join(POLICIES)}")
    return POLICIES[policy](slots)
