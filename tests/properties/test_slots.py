"""Slot policies under any order of turns, ends and pauses: never too many, never idle, first come first served."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from envclient.base.errors import ConfigError, InvariantError
from rollout.policy.slots import make_slots


class SlotWorld(RuleBasedStateMachine):
    """A worker whose trajectories wait, run and use tools in any order."""

    @initialize(policy=st.sampled_from(["action", "trajectory"]), slots=st.integers(1, 4))
    def build(self, policy: str, slots: int) -> None:
        self.name, self.slots = policy, slots
        self.policy = make_slots(policy, slots)
        self.count = 0
        self.waiting: list[str] = []  # by arrival, a preempted turn at its old place
        self.running: set[str] = set()
        self.tooling: set[str] = set()
        self.holders: set[str] = set()
        self.arrival: dict[str, int] = {}
        self.paused = False

    def started(self, ids: list[str]) -> None:
        for trajectory in ids:
            assert not self.paused
            first = [t for t in self.waiting if t in self.holders] or self.waiting
            assert trajectory == first[0], "not first come, first served"
            self.waiting.remove(trajectory)
            self.running.add(trajectory)
            if self.name == "trajectory":
                self.holders.add(trajectory)

    def ready(self, trajectory: str) -> None:
        self.count += 1
        self.arrival[trajectory] = self.count
        self.waiting.append(trajectory)
        self.started(self.policy.turn_ready(trajectory))

    @rule()
    def new_trajectory(self) -> None:
        self.ready(f"t{self.count}")

    @precondition(lambda self: self.tooling)
    @rule(data=st.data())
    def tool_returns(self, data: st.DataObject) -> None:
        trajectory = data.draw(st.sampled_from(sorted(self.tooling)))
        self.tooling.remove(trajectory)
        self.ready(trajectory)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def turn_ends(self, data: st.DataObject) -> None:
        trajectory = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(trajectory)
        self.tooling.add(trajectory)
        self.started(self.policy.turn_ended(trajectory))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def turn_is_preempted(self, data: st.DataObject) -> None:
        trajectory = data.draw(st.sampled_from(sorted(self.running)))
        self.running.remove(trajectory)
        self.waiting.append(trajectory)
        self.waiting.sort(key=self.arrival.__getitem__)
        self.started(self.policy.turn_preempted(trajectory))

    @precondition(lambda self: self.running or self.tooling or self.waiting)
    @rule(data=st.data())
    def trajectory_ends(self, data: st.DataObject) -> None:
        trajectory = data.draw(st.sampled_from(sorted({*self.running, *self.tooling, *self.waiting})))
        self.running.discard(trajectory)
        self.tooling.discard(trajectory)
        self.holders.discard(trajectory)
        if trajectory in self.waiting:
            self.waiting.remove(trajectory)
        self.started(self.policy.trajectory_ended(trajectory))
        assert self.policy.trajectory_ended(trajectory) == []

    @rule()
    def pause(self) -> None:
        self.policy.pause()
        self.paused = True

    @rule()
    def resume(self) -> None:
        self.paused = False
        self.started(self.policy.resume())

    @invariant()
    def never_too_many_never_idle(self) -> None:
        self.policy.check_invariants()
        held = self.holders if self.name == "trajectory" else self.running
        assert len(held) <= self.slots
        assert len(self.running) <= self.slots
        if not self.paused:
            assert not self.waiting or (len(held) == self.slots and not self.holders & set(self.waiting))
        assert self.policy.statistics() == {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "held": len(held),
        }

    def teardown(self) -> None:
        """No starvation: once everything that holds a slot ends in turn, every waiting turn gets to run."""
        if not hasattr(self, "policy"):
            return
        self.resume()
        while self.running or self.tooling or self.waiting:
            trajectory = sorted(self.running or self.tooling)[0]
            self.running.discard(trajectory)
            self.tooling.discard(trajectory)
            self.holders.discard(trajectory)
            self.started(self.policy.trajectory_ended(trajectory))


SlotWorld.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSlots = SlotWorld.TestCase


def test_misuse_is_refused() -> None:
    with pytest.raises(ConfigError, match="slots is 0"):
        make_slots("action", 0)
    with pytest.raises(ConfigError, match="'lifo' is unknown"):
        make_slots("lifo", 1)
    policy = make_slots("action", 1)
    with pytest.raises(InvariantError, match="no running turn"):
        policy.turn_ended("a")
    policy.turn_ready("a")
    with pytest.raises(InvariantError, match="runs already"):
        policy.turn_ready("a")
