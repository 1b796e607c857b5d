"""Slots that obey classes, under any order of turns, class changes, preemptions and pauses."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout.policy.slots import make_slots
from rollout.types import PriorityClass

HIGH, LOW, PARKED = PriorityClass.HIGH, PriorityClass.LOW, PriorityClass.PARKED
FIRST = {HIGH: 0, LOW: 1, PARKED: 2}


class ClassWorld(RuleBasedStateMachine):
    """A worker whose trajectories change class at any time; victims give their slot up when the test says so."""

    @initialize(rule=st.sampled_from(["priority", "rank"]), slots=st.integers(1, 4))
    def build(self, rule: str, slots: int) -> None:
        self.by_rank, self.slots = rule == "rank", slots
        self.policy = make_slots(rule, slots)
        self.count = 0
        self.waiting: dict[str, int] = {}
        self.running: dict[str, int] = {}
        self.victims: set[str] = set()
        self.made_room_for: dict[str, str] = {}
        self.classes: dict[str, tuple[PriorityClass, int]] = {}
        self.context: dict[str, int] = {}
        self.paused = False

    def order(self, trajectory: str) -> tuple[int, int]:
        priority, rank = self.classes.get(trajectory, (LOW, 0))
        return (FIRST[priority], rank)

    def after(self, started: list[str]) -> None:
        for trajectory in started:
            assert not self.paused and self.order(trajectory)[0] < 2, "a parked turn was started"
            best = min(((*self.order(t), a) for t, a in self.waiting.items() if self.order(t)[0] < 2))
            assert (*self.order(trajectory), self.waiting[trajectory]) == best, "not by class, rank and arrival"
            self.running[trajectory] = self.waiting.pop(trajectory)
        taken = self.policy.take_victims()
        fresh = list(taken)
        assert fresh == self.victims_by_the_rule()
        for victim, waiting in taken.items():
            assert self.comes_before(self.order(waiting), self.order(victim)), "preempted for one of no better class"
            self.made_room_for[victim] = waiting
        for victim in self.made_room_for.keys() - self.victims - taken.keys():
            del self.made_room_for[victim]
        assert len(set(self.made_room_for.values())) == len(self.made_room_for), "two make room for one"
        self.victims.update(fresh)

    def victims_by_the_rule(self) -> list[str]:
        """For each waiting turn that no victim makes room for yet, best first: the cheapest running one that yields."""
        if self.paused:
            return []
        waiting = sorted(self.order(t) for t in self.waiting if self.order(t)[0] < 2)
        fresh: list[str] = []
        for order in waiting[len(self.victims) :]:
            left = [t for t in self.running if t not in self.victims and t not in fresh]
            may = [t for t in left if self.comes_before(order, self.order(t))]
            if not may:
                break
            fresh.append(min(may, key=self.cost))
        return fresh

    def cost(self, running: str) -> tuple[int, ...]:
        """The worst class (and rank) first, then the shortest context, then the latest arrival."""
        first, rank = self.order(running)
        return (-first, -rank if self.by_rank else 0, self.context[running], -self.running[running])

    @rule(context=st.integers(0, 99), known=st.booleans(), priority=st.sampled_from(list(FIRST)))
    def new_trajectory(self, context: int, known: bool, priority: PriorityClass) -> None:
        name = f"t{self.count}"
        if known:
            self.classes[name] = (priority, 0)
            self.after(self.policy.set_class(name, priority, 0))
        self.count += 1
        self.waiting[name] = self.count
        self.context[name] = context
        self.after(self.policy.turn_ready(name, context))

    @precondition(lambda self: self.waiting or self.running)
    @rule(data=st.data(), priority=st.sampled_from(list(FIRST)), rank=st.integers(-2, 2))
    def class_changes(self, data: st.DataObject, priority: PriorityClass, rank: int) -> None:
        name = data.draw(st.sampled_from(sorted({*self.waiting, *self.running})))
        self.classes[name] = (priority, rank if self.by_rank else 0)
        self.after(self.policy.set_class(name, *self.classes[name]))

    @precondition(lambda self: self.victims)
    @rule(data=st.data())
    def victim_gives_way(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.victims)))
        self.victims.discard(name)
        self.waiting[name] = self.running.pop(name)
        self.after(self.policy.turn_preempted(name))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), whole=st.booleans())
    def turn_ends(self, data: st.DataObject, whole: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        del self.running[name]
        self.victims.discard(name)
        if not whole:
            self.after(self.policy.turn_ended(name))
        self.classes.pop(name, None)
        self.after(self.policy.trajectory_ended(name))

    @rule()
    def pause(self) -> None:
        self.policy.pause()
        self.paused = True
        for name in list(self.running):
            self.victims.discard(name)
            self.waiting[name] = self.running.pop(name)
            self.after(self.policy.turn_preempted(name))

    @rule()
    def resume(self) -> None:
        self.paused = False
        self.after(self.policy.resume())

    @invariant()
    def priority_is_inverted_by_no_more_than_the_abort(self) -> None:
        self.policy.check_invariants()
        assert len(self.running) <= self.slots
        if self.paused:
            return
        willing = [self.order(t) for t in self.waiting if self.order(t)[0] < 2]
        assert not willing or len(self.running) == self.slots, "a slot is idle"
        before = [o for o in willing if any(self.comes_before(o, self.order(r)) for r in self.running)]
        worse = [r for r in self.running if any(self.comes_before(o, self.order(r)) for o in willing)]
        assert len(self.victims) >= min(len(before), len(worse), 1), "a better turn waits and nobody gives way"

    def comes_before(self, order: tuple[int, int], running: tuple[int, int]) -> bool:
        return order < running if self.by_rank else order[0] < running[0]

    def teardown(self) -> None:
        """Nobody starves: once all is unparked and what runs ends in turn, every waiting turn gets to run."""
        if not hasattr(self, "policy"):
            return
        self.resume()
        for name in sorted(self.waiting):
            self.classes[name] = (LOW, 0)
            self.after(self.policy.set_class(name, LOW, 0))
        while self.running:
            name = sorted(self.running)[0]
            del self.running[name]
            self.victims.discard(name)
            self.after(self.policy.trajectory_ended(name))
        assert not self.waiting


ClassWorld.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestClassSlots = ClassWorld.TestCase


def test_the_victim_is_the_low_turn_of_the_shortest_context() -> None:
    policy = make_slots("priority", 2)
    policy.turn_ready("long", 900)
    policy.turn_ready("short", 100)
    policy.set_class("urgent", HIGH, 0)
    assert policy.turn_ready("urgent", 500) == []
    assert policy.take_victims() == {"short": "urgent"} and policy.take_victims() == {}
    assert policy.turn_preempted("short") == ["urgent"]
    assert policy.turn_ended("long") == ["short"], "it goes on where it was cut"


def test_the_longest_goes_first_and_preempts_the_shortest() -> None:
    policy = make_slots("rank", 1)
    policy.set_class("short", LOW, -10)
    policy.set_class("long", LOW, -90)
    assert policy.turn_ready("short", 100) == ["short"]
    assert policy.turn_ready("long", 100) == [] and policy.take_victims() == {"short": "long"}
    assert policy.turn_preempted("short") == ["long"]


@pytest.mark.parametrize("rule", ["action", "trajectory"])
def test_rules_without_classes_ignore_them(rule: str) -> None:
    policy = make_slots(rule, 1)
    assert policy.set_class("a", PARKED, 0) == [] and policy.turn_ready("a") == ["a"] and policy.take_victims() == {}
