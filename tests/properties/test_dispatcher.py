"""The dispatcher keeps its promises in every world: see `dispatcher_world` for what is checked after each event."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from rollout.dispatcher import DispatcherConfig
from rollout.policy.settings import PolicySettings
from rollout.types import POLICY_NAMES, TrajectoryStatus
from tests.properties.dispatcher_world import World

LONG = bool(os.environ.get("VENUS_LONG"))
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

choices = st.integers(0, 1000)
rewards = st.sampled_from([0.0, 1.0, 0.5])
STATUSES = [
    TrajectoryStatus.FINISHED,
    TrajectoryStatus.FINISHED,
    TrajectoryStatus.TRUNCATED,
    TrajectoryStatus.FAILED,
    TrajectoryStatus.DISCARDED,
]


ESTIMATES = [0.0, 1.0, 7.0, 40.0, 1000.0, -3.0, 1e9, 1e308, math.inf, -math.inf, math.nan]
"""Remaining tokens as a predictor might see them; a broken one too."""
AHEAD = [0, 0, 0, -1, 1]
"""Turns that an answer is beyond the latest one: late, in time, or of another trajectory."""
PROGRAMS = ["program_aware", "program_aware_plus"]
LIVE = [name for name in POLICY_NAMES if name != "oracle"]


@st.composite
def policies(draw: st.DrawFn) -> PolicySettings:
    return PolicySettings(
        name=draw(st.sampled_from(LIVE)),
        order=draw(st.sampled_from(["length", "admission"])),
        tool_time=draw(st.booleans()),
        demotion=draw(st.booleans()),
        migration=draw(st.booleans()),
        reserve=draw(st.sampled_from([-1.0, 0.0, 0.5, 1.0])),
        growth_tokens=draw(st.sampled_from([0, 10])),
        move_gap=draw(st.sampled_from([0.0, 0.25])),
        buffer_tokens=draw(st.sampled_from([0, 2])),
        acting_decay=draw(st.booleans()),
        interval_s=draw(st.sampled_from([0.1, 5.0])),
        longest_wait_s=draw(st.sampled_from([0.0, 2.0, 1800.0])),
    )


@dataclass(frozen=True)
class Engines:
    """What all engines of a world are like."""

    priority: bool = False
    migration: bool = False
    kv_tokens: int = 0
    turn_tokens: int = 3


engines = st.builds(
    Engines,
    priority=st.booleans(),
    migration=st.booleans(),
    kv_tokens=st.sampled_from([0, 1, 40, 150, 1000]),
    turn_tokens=st.sampled_from([3, 3, 3, 0]),
)


@st.composite
def configs(draw: st.DrawFn, promised: bool = False) -> DispatcherConfig:
    size = draw(st.integers(1, 8))
    span = draw(st.sampled_from([2, 3, 1, 4] if promised else [1, 2, 3]))
    factors = [f for f in (4.0, 3.0, 2.0, 1.5, 1.0) if f <= span][:2] if promised else [1.0, 1.5, 2.0, 4.0]
    return DispatcherConfig(
        group_size=size,
        batch=draw(st.integers(1, 4)),
        async_factor=draw(st.sampled_from(factors)),
        max_version_span=span,
        include_promoted=promised or draw(st.booleans()),
        filter_zero_variance=size > 1 and draw(st.booleans()),
        max_refills=100_000,
        max_resamples=draw(st.integers(0, 2)),
        on_lost_member=draw(st.sampled_from(["drop", "shrink"])),
        deadline_s=50.0,
        train_truncated=draw(st.booleans()),
        workers=draw(st.integers(1, 3)),
        max_trajectories=draw(st.sampled_from([1, 3, 8, 128])),
        policy=draw(policies()),
    )


class AnyWorld(RuleBasedStateMachine):
    """Everything may happen, in any order."""

    benign = False
    world: World

    @initialize(
        data=st.data(),
        replicas=st.integers(1, 3),
        prompts=st.sampled_from([None, None, 0, 3, 20]),
        requeued=st.integers(0, 5),
        resume_step=st.sampled_from([0, 0, 7]),
        like=engines,
    )
    def begin(
        self,
        data: st.DataObject,
        replicas: int,
        prompts: int | None,
        requeued: int,
        resume_step: int,
        like: Engines,
    ) -> None:
        self.world = World(
            data.draw(configs(promised=self.benign)),
            replicas=replicas,
            prompts=prompts,
            requeued=requeued if resume_step else 0,
            resume_step=resume_step,
            **asdict(like),
        )
        self.world.promised_no_discards = self.benign

    def alive(self) -> bool:
        return not self.world.stop_cause  # a drained source is no end: syncs and evaluations still work

    @precondition(alive)
    @rule()
    def join(self) -> None:
        if len(self.world.workers) < 4:
            self.world.join()

    @precondition(alive)
    @rule(count=st.integers(1, 8))
    def prompts(self, count: int) -> None:
        for _ in range(count):
            self.world.deliver_prompt()

    @precondition(alive)
    @rule(picks=st.lists(choices, max_size=8))
    def sample(self, picks: list[int]) -> None:
        for pick in picks:
            self.world.sample(pick)

    @precondition(alive)
    @rule(picks=st.lists(st.tuples(choices, st.sampled_from(AHEAD), st.sampled_from(ESTIMATES)), max_size=8))
    def estimates(self, picks: list[tuple[int, int, float]]) -> None:
        for pick, ahead, remaining in picks:
            self.world.estimate(pick, ahead, remaining)

    @precondition(alive)
    @rule(picks=st.lists(st.tuples(choices, st.sampled_from(STATUSES), rewards), max_size=16))
    def end(self, picks: list[tuple[int, TrajectoryStatus, float]]) -> None:
        for pick, status, reward in picks:
            self.world.end(pick, TrajectoryStatus.FINISHED if self.benign else status, reward)

    @precondition(alive)
    @rule(picks=st.lists(choices, max_size=16))
    def reports(self, picks: list[int]) -> None:
        for pick in picks:
            self.world.deliver_report(pick)

    @precondition(alive)
    @rule(picks=st.lists(choices, min_size=1, max_size=8))
    def replica(self, picks: list[int]) -> None:
        for pick in picks:
            self.world.replica(pick)

    @precondition(alive)
    @rule()
    def actor(self) -> None:
        self.world.actor()

    @precondition(alive)
    @rule(steps=st.integers(1, 2))
    def a_good_while(self, steps: int) -> None:
        """Without this few examples would get beyond the second step."""
        self.world.drain(steps)

    @precondition(alive)
    @rule(samples=st.integers(0, 5))
    def evaluate(self, samples: int) -> None:
        self.world.evaluate(samples)

    @precondition(alive)
    @rule(pick=choices)
    def repeat(self, pick: int) -> None:
        self.world.repeat(pick)

    @precondition(lambda self: self.alive() and not self.benign)
    @rule(pick=choices)
    def lose(self, pick: int) -> None:
        self.world.lose(pick)

    @rule(seconds=st.sampled_from([0.1, 1.0, 20.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(0.001 if self.benign else seconds)

    def teardown(self) -> None:
        if not hasattr(self, "world") or self.world.broken:
            return
        if self.alive():
            self.world.drain(3)
        self.world.check_end()
        if self.benign:
            assert self.world.dispatcher.statistics()["trajectories_discarded"] == 0


class BenignWorld(AnyWorld):
    """Nothing fails and floor(async_factor · B) ≤ S · B: nothing may be discarded."""

    benign = True


TestAnyWorld = AnyWorld.TestCase
SETTINGS = settings(
    max_examples=3000 if LONG else 120,
    stateful_step_count=50,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=CHECKS,
)
TestAnyWorld.settings = SETTINGS
TestBenignWorld = BenignWorld.TestCase
TestBenignWorld.settings = SETTINGS


@given(config=configs(), replicas=st.integers(1, 3), like=engines)
@settings(max_examples=600 if LONG else 60, deadline=None)
def test_a_fair_world_makes_every_step(config: DispatcherConfig, replicas: int, like: Engines) -> None:
    """Among others: no mixture of parked, demoted and promoted trajectories stands still."""
    world = World(config, replicas=replicas, **asdict(like))
    world.drain(5)
    world.check_end()
    assert world.steps_done == 5


@given(config=configs(), replicas=st.integers(1, 3), prompts=st.integers(0, 30), like=engines)
@settings(max_examples=300 if LONG else 30, deadline=None)
def test_a_finite_source_is_trained_to_its_end(
    config: DispatcherConfig, replicas: int, prompts: int, like: Engines
) -> None:
    world = World(config, replicas=replicas, prompts=prompts, **asdict(like))
    world.drain(1000)
    assert world.stop_cause == ""
    counts = world.dispatcher.counts()
    assert counts["running"] == 0 and counts["submitted"] == prompts
    assert sum(len(members) for members in world.sealed.values()) >= counts["accepted"]


def walk(world: World, chance: Random, moves: int, *, benign: bool, estimates: bool = True) -> None:
    """`moves` random moves in proportions that keep every part of the world busy; `estimates`: a predictor answers."""

    newest_first = chance.choice([0.8, 0.97] if benign else [0.0, 0.8, 0.97])  # starves old trajectories

    def end() -> None:
        good = benign or chance.random() < 0.8
        status = TrajectoryStatus.FINISHED if good else chance.choice(STATUSES)
        pick = -1 if chance.random() < newest_first else chance.randrange(1000)
        world.end(pick, status, chance.choice([0.0, 1.0]))

    def estimate() -> None:
        recent = max(0, len(world.classes) - 12)
        world.estimate(
            chance.randrange(recent, recent + 13) if chance.random() < 0.7 else chance.randrange(1000),
            chance.choice(AHEAD),
            chance.choice(ESTIMATES),
        )

    def reports() -> None:
        for _ in range(chance.randint(1, 3)):
            world.deliver_report(chance.randrange(1000))

    def tick() -> None:
        world.tick(0.001 if benign else chance.choice([0.01, 0.1, 20.0]))

    def check() -> None:
        # Programs are paused and resumed at ticks only. In a benign world no trajectory may reach its deadline.
        world.tick(0.1 if benign else chance.choice([0.1, 1.0]))

    def join() -> None:
        if len(world.workers) < 4:
            world.join()

    def lose() -> None:
        if not benign:
            world.lose(chance.randrange(1000))

    options: list[tuple[float, Callable[[], object]]] = [
        (8, world.deliver_prompt),
        (chance.choice([3, 12]), lambda: world.sample(chance.randrange(1000))),
        (chance.choice([0, 6]) if estimates else 0, estimate),
        (3 if benign else chance.choice([3, 16]), end),  # rollout or trainer is what the other waits for
        (16, reports),
        (12, lambda: world.replica(chance.randrange(1000))),
        (10, world.actor),
        (2, lambda: world.repeat(chance.randrange(1000))),
        (0.1, lambda: world.evaluate(chance.randrange(5))),
        (0.3, tick),
        (3 if world.config.policy.name in PROGRAMS else 0, check),
        (0.3, join),
        (0.2, lose),
    ]
    while len(world.workers) < world.config.workers:
        world.join()
    weights = [weight for weight, _ in options]
    for _ in range(moves):
        if world.stop_cause:
            return
        chance.choices(options, weights)[0][1]()


@given(config=configs(), seed=st.integers(0, 2**32), replicas=st.integers(1, 3), like=engines)
@settings(max_examples=4000 if LONG else 250, deadline=None, report_multiple_bugs=False)
def test_long_walks(config: DispatcherConfig, seed: int, replicas: int, like: Engines) -> None:
    chance = Random(seed)
    prompts = chance.choice([None, None, 40])
    resume_step = chance.choice([0, 7])
    world = World(
        config,
        replicas=replicas,
        prompts=prompts,
        requeued=chance.randrange(6) if resume_step else 0,
        resume_step=resume_step,
        **asdict(like),
    )
    walk(world, chance, 1000, benign=False)
    if not world.stop_cause:
        world.drain(3)
    world.check_end()


@given(config=configs(), seed=st.integers(0, 2**32), name=st.sampled_from(PROGRAMS), like=engines)
@settings(max_examples=1000 if LONG else 60, deadline=None, report_multiple_bugs=False)
def test_paused_programs_go_on(config: DispatcherConfig, seed: int, name: str, like: Engines) -> None:
    """Three contexts fit a worker, eight are open, and a check comes at every tick."""
    policy = msgspec.structs.replace(config.policy, name=name, interval_s=0.1)
    config = msgspec.structs.replace(config, policy=policy, group_size=4, batch=3, max_trajectories=8)
    world = World(config, **asdict(replace(like, priority=True, kv_tokens=40)))
    walk(world, Random(seed), 1000, benign=False)
    if not world.stop_cause:
        world.drain(3)
    world.check_end()


MOVED = DispatcherConfig(
    group_size=3,
    batch=1,
    max_version_span=1,
    deadline_s=50.0,
    max_trajectories=3,
    max_refills=100_000,
    policy=PolicySettings(name="paper", demotion=False, growth_tokens=0, move_gap=0.0),
)
"""A pending turn goes to another worker, where it has another class."""


@example(config=MOVED, seed=0, replicas=1, like=Engines(priority=True, migration=True, kv_tokens=1, turn_tokens=3))
@given(config=configs(promised=True), seed=st.integers(0, 2**32), replicas=st.integers(1, 3), like=engines)
@settings(max_examples=4000 if LONG else 250, deadline=None, report_multiple_bugs=False)
def test_nothing_is_discarded_where_that_is_promised(
    config: DispatcherConfig, seed: int, replicas: int, like: Engines
) -> None:
    """Nothing fails, and floor(async_factor · B) ≤ S · B."""
    world = World(config, replicas=replicas, **asdict(like))
    world.promised_no_discards = True
    walk(world, Random(seed), 1000, benign=True)
    world.drain(3)
    world.check_end()
    assert world.dispatcher.statistics()["trajectories_discarded"] == 0


def test_the_worlds_of_this_file_made_enough_steps(request: pytest.FixtureRequest) -> None:
    """A step is an event that a world has sent and checked; their number is printed at the end of the session."""
    wanted = {name for name in globals() if name.lower().startswith("test")}
    selected = {item.nodeid.split("::")[1] for item in request.session.items if item.path == Path(__file__)}
    if missing := wanted - selected:
        pytest.skip(f"only a part of this file is run, without {', '.join(sorted(missing))}")
    assert World.handled >= 100_000 and World.pauses >= 100
