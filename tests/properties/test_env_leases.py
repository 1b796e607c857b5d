"""The lease book under every order of events: nobody is forgotten, nothing is created without being destroyed."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from envclient.policy.leases import Create, Destroy, Grant, LeaseBook, LeaseCommand, Refuse

CAPACITY = 3
WAIT_S = 20.0


class Leases(RuleBasedStateMachine):
    """A backend and clients that do anything in any order; the model keeps only what they may rely on."""

    def __init__(self) -> None:
        super().__init__()
        self.book = LeaseBook(capacity=CAPACITY, wait_s=WAIT_S, prefix="l")
        self.now = 0.0
        self.creating: list[str] = []
        self.alive: list[str] = []
        """Sandboxes that exist."""
        self.destroying: list[str] = []
        self.asking: set[str] = set()
        """Keys with an asker who has no answer yet."""
        self.granted: dict[str, str] = {}
        """Key -> the lease it ever got."""

    def carry_out(self, commands: list[LeaseCommand]) -> None:
        for command in commands:
            if isinstance(command, Create):
                self.creating.append(command.lease_id)
                if command.twin_of == "":
                    assert command.template == "t"
            elif isinstance(command, Destroy):
                self.alive.remove(command.lease_id)
                self.destroying.append(command.lease_id)
            elif isinstance(command, Grant):
                assert self.granted.setdefault(command.key, command.lease_id) == command.lease_id
                assert command.lease_id in self.alive
                self.asking.remove(command.key)
            else:
                assert isinstance(command, Refuse)
                assert command.cause
                self.asking.remove(command.key)

    def ask_for(self, key: str, lifetime_s: float, twin_of: str) -> None:
        commands = self.book.ask(
            key=key, template="t", trajectory=key, lifetime_s=lifetime_s, now=self.now, twin_of=twin_of
        )
        answers = [command for command in commands if isinstance(command, (Grant, Refuse))]
        if answers:  # this asker's alone: others of the key go on waiting
            answer = only(commands)
            if isinstance(answer, Grant):
                assert self.granted[key] == answer.lease_id and answer.lease_id in self.alive
            return
        self.asking.add(key)
        self.carry_out(commands)

    @rule(key=st.sampled_from("abcdefgh"), lifetime_s=st.floats(1, 50))
    def ask(self, key: str, lifetime_s: float) -> None:
        self.ask_for(key, lifetime_s, twin_of="")

    @precondition(lambda self: self.granted)
    @rule(data=st.data(), key=st.sampled_from("wxyz"))
    def twin(self, data: st.DataObject, key: str) -> None:
        origin = data.draw(st.sampled_from(sorted(self.granted.values())))
        lived, known = self.book.is_live(origin), key in self.asking
        self.ask_for(key, 10.0, twin_of=origin)
        assert lived or known or key not in self.asking

    @precondition(lambda self: self.creating)
    @rule(data=st.data(), works=st.booleans())
    def backend_answers(self, data: st.DataObject, works: bool) -> None:
        lease_id = data.draw(st.sampled_from(self.creating))
        self.creating.remove(lease_id)
        if works:
            self.alive.append(lease_id)
            self.carry_out(self.book.created(lease_id, self.now))
        else:
            self.carry_out(self.book.create_failed(lease_id, "broken"))

    @precondition(lambda self: self.destroying)
    @rule(data=st.data())
    def backend_destroyed(self, data: st.DataObject) -> None:
        lease_id = data.draw(st.sampled_from(self.destroying))
        self.destroying.remove(lease_id)
        self.carry_out(self.book.destroyed(lease_id))

    @rule(number=st.integers(1, 30))
    def release(self, number: int) -> None:
        """Any lease at any time, known or not, also before it was granted, also twice."""
        lease_id = f"l{number:08d}"
        self.carry_out(self.book.release(lease_id))
        assert not self.book.is_live(lease_id)
        assert self.book.release(lease_id) == []

    @rule(seconds=st.floats(0, 30))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.carry_out(self.book.tick(self.now))
        deadline = self.book.next_deadline()
        assert deadline is None or deadline > self.now

    @invariant()
    def promises(self) -> None:
        self.book.check_invariants()
        assert len(self.creating) + len(self.alive) + len(self.destroying) <= CAPACITY
        counts = self.book.statistics()
        assert counts.live == len(self.alive)
        assert counts.created == counts.destroyed + len(self.alive) + len(self.destroying)

    def teardown(self) -> None:
        """Left alone, with a backend that answers, everything ends and every asker has been answered."""
        for _ in range(100):
            while self.creating:
                self.backend_created_last()
            while self.destroying:
                self.carry_out(self.book.destroyed(self.destroying.pop()))
            if not (self.creating or self.alive):
                break
            self.now += 100.0
            self.carry_out(self.book.tick(self.now))
        self.book.check_invariants()
        assert not (self.creating or self.alive or self.destroying or self.asking)
        counts = self.book.statistics()
        assert counts.created == counts.destroyed and counts.live == counts.waiting == 0

    def backend_created_last(self) -> None:
        lease_id = self.creating.pop()
        self.alive.append(lease_id)
        self.carry_out(self.book.created(lease_id, self.now))


Leases.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestLeases = Leases.TestCase


def only(commands: list[LeaseCommand]) -> LeaseCommand:
    assert len(commands) == 1
    return commands[0]


def test_room_is_given_first_come_first_served() -> None:
    book = LeaseBook(capacity=1, wait_s=WAIT_S, prefix="l")
    for key in "abc":
        book.ask(key=key, template="t", trajectory=key, lifetime_s=10, now=0.0)
    order = []
    for lease in ("l00000001", "l00000002", "l00000003"):
        order.append(only(book.created(lease, 1.0)))
        assert isinstance(only(book.release(lease)), Destroy)
        book.destroyed(lease)
    assert [command.key for command in order if isinstance(command, Grant)] == ["a", "b", "c"]


@pytest.mark.parametrize("end", ["release", "expiry"])
def test_a_used_key_is_refused_with_the_reason(end: str) -> None:
    book = LeaseBook(capacity=1, wait_s=WAIT_S, prefix="l")
    book.ask(key="a", template="t", trajectory="", lifetime_s=10, now=0.0)
    book.created("l00000001", 5.0)
    assert book.tick(14.9) == []
    commands = book.release("l00000001") if end == "release" else book.tick(15.0)
    assert isinstance(only(commands), Destroy)
    again = only(book.ask(key="a", template="t", trajectory="", lifetime_s=10, now=16.0))
    assert isinstance(again, Refuse)
    assert ("released" if end == "release" else "lifetime of 10 s is over") in again.cause


def test_a_failed_creation_may_be_tried_again_with_the_same_key() -> None:
    book = LeaseBook(capacity=1, wait_s=WAIT_S, prefix="l")
    book.ask(key="a", template="t", trajectory="", lifetime_s=10, now=0.0)
    assert isinstance(only(book.create_failed("l00000001", "no uid")), Refuse)
    assert isinstance(only(book.ask(key="a", template="t", trajectory="", lifetime_s=10, now=1.0)), Create)
