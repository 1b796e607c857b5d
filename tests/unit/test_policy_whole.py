"""Whole policies, decision by decision: golden traces of the published rules and of ours."""

from __future__ import annotations

from typing import Any

import pytest

from envclient.base.errors import ConfigError
from rollout.config import PolicyConfig
from rollout.policy.base import Policy
from rollout.policy.jobs import Job, JobGroup, Phase, WorkerView
from rollout.policy.lengths import TrueLengths
from rollout.policy.registry import POLICIES, make_policy, policy_class
from rollout.policy.settings import PolicyLimits, PolicySettings
from rollout.types import POLICY_NAMES, PriorityClass

HIGH, LOW, PARKED = PriorityClass.HIGH, PriorityClass.LOW, PriorityClass.PARKED


class Table:
    """A policy with its jobs; every call is followed by a decision."""

    def __init__(
        self,
        name: str,
        *,
        kv_tokens: int = 1000,
        workers: int = 1,
        batch: int = 2,
        migration: bool = False,
        lengths: dict[str, tuple[int, int]] | None = None,
        max_trajectories: int = 128,
        host_kv_tokens: int = 0,
        **keys: Any,
    ) -> None:
        truth = TrueLengths(lambda t: (lengths or {}).get(t, (100, 0)))
        settings = PolicySettings(name=name, **{"growth_tokens": 0, "buffer_tokens": 0, **keys})
        limits = PolicyLimits(batch=batch, max_trajectories=max_trajectories)
        self.policy: Policy = make_policy(settings, limits, truth if name == "oracle" else None)
        if lengths is not None:
            self.policy.lengths = truth
        for number in range(workers):
            self.policy.join(
                WorkerView(
                    name=f"w{number}",
                    slots=8,
                    kv_tokens=kv_tokens,
                    host_kv_tokens=host_kv_tokens,
                    migration=migration,
                )
            )
        self.now = 0.0
        self.groups: dict[int, JobGroup] = {}
        self.jobs: dict[str, Job] = {}
        self.causes: dict[str, str] = {}
        self.moved: list[tuple[str, str]] = []

    def decide(self) -> dict[str, PriorityClass]:
        changed = self.policy.decide(self.now)
        for move in self.policy.moves:
            self.moved.append((move.job.trajectory_id, move.to))
            self.policy.moved(move.job, move.to)
        self.policy.moves.clear()
        self.policy.check_invariants()
        self.causes = {job.trajectory_id: job.cause for job in changed}
        return {job.trajectory_id: job.priority for job in changed}

    def add(self, *names: str, worker: str = "w0") -> dict[str, PriorityClass]:
        """Names are `{group}.{member}`."""
        for name in names:
            order, member = map(int, name.split("."))
            group = self.groups.setdefault(order, JobGroup(order=order, group_id=f"g{order}"))
            self.jobs[name] = Job(trajectory_id=name, group=group, member=member, worker=worker)
            self.policy.add(self.jobs[name])
        return self.decide()

    def start(self, *names: str, context: int = 100) -> dict[str, PriorityClass]:
        """It starts and wants its first turn."""
        for name in names:
            self.policy.start(self.jobs[name], self.now)
            self.policy.turn_ready(name, 1, context, self.now)
        return self.decide()

    def turn(self, name: str, output: int, observation: int = -1) -> dict[str, PriorityClass]:
        """Its turn ends; with an observation it wants the next one."""
        job = self.jobs[name]
        self.policy.turn_ended(name, job.turns + 1, job.context_tokens, output, self.now)
        changed = self.decide()
        if observation >= 0:
            self.policy.turn_ready(name, job.turns + 1, job.context_tokens + observation, self.now)
            changed |= self.decide()
        return changed

    def end(self, name: str) -> dict[str, PriorityClass]:
        self.policy.finished(self.jobs[name], self.jobs[name].output_tokens)
        self.policy.remove(self.jobs[name])
        return self.decide()

    def tick(self, seconds: float = 5.0) -> dict[str, PriorityClass]:
        self.now += seconds
        self.policy.tick(self.now)
        return self.decide()

    def age(self, order: int, oldest: int, version: int) -> dict[str, PriorityClass]:
        self.policy.version = version
        self.policy.age(self.groups[order], oldest)
        return self.decide()

    def age_unstarted(self, order: int, version: int) -> dict[str, PriorityClass]:
        """The version becomes current, and none of the group's trajectories has started."""
        self.policy.version = version
        self.policy.age(self.groups[order], None)
        return self.decide()

    def classes(self) -> dict[str, PriorityClass]:
        return {name: job.priority for name, job in self.policy.jobs.items()}


def test_every_name_has_its_policy_and_settings_read_the_config() -> None:
    assert set(POLICIES) == set(POLICY_NAMES)
    assert PolicySettings.from_config(PolicyConfig()) == PolicySettings()
    for name in POLICY_NAMES:
        settings = PolicySettings.from_config(PolicyConfig(name=name))
        assert policy_class(settings).slot_rule(settings) in ("action", "trajectory", "priority", "rank")
    with pytest.raises(ConfigError, match="oracle needs true lengths"):
        make_policy(PolicySettings(name="oracle"), PolicyLimits())


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"name": "fastest"}, "rollout.policy.name='fastest'"),
        ({"order": "size"}, "rollout.policy.order='size'"),
        ({"hysteresis": 1.5}, "rollout.policy.hysteresis=1.5"),
        ({"reserve": -1.1}, "rollout.policy.reserve=-1.1"),
        ({"reserve": 1.5}, "rollout.policy.reserve=1.5"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(keys: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line.replace(".", r"\.")):
        PolicySettings(**keys)


def test_action_and_trajectory_know_only_promotion() -> None:
    for name in ("action", "trajectory"):
        table = Table(name)
        assert table.add("1.0", "1.1", "2.0") == {}
        assert table.age(1, 0, 1) == {"1.0": HIGH, "1.1": HIGH}
        assert table.causes["1.0"] == "promoted: begun under version 0"
        assert table.age(1, 1, 1) == {"1.0": LOW, "1.1": LOW}
        assert not table.policy.wants_turns


# --------------------------------------------------------------------------------------------------- ThunderAgent


def test_program_aware_pauses_acting_programs_smallest_first_then_marks_reasoning_ones() -> None:
    table = Table("program_aware", kv_tokens=1000)
    names = ["1.0", "2.0", "3.0", "4.0"]
    assert table.add(*names) == dict.fromkeys(names, LOW), "they fit: started at once"
    table.start(*names, context=200)
    table.turn("1.0", 50)  # 250, acting
    table.turn("2.0", 10)  # 210, acting
    table.turn("3.0", 100, 250)  # 550, reasoning
    assert table.tick(4.0) == {}, "it looks every 5 s"
    assert table.tick(1.0) == {"2.0": PARKED}, "1,210 of 1,000: the smallest acting program"
    assert "over capacity" in table.causes["2.0"]
    table.policy.turn_ready("1.0", 2, 600, table.now)  # 250 → 600: 600 + 550 + 200 = 1,350
    assert table.tick() == {}, "nobody acts: 4.0 and 3.0, the smallest, are marked until the rest fits"
    assert table.turn("4.0", 10) == {"4.0": PARKED}, "at the end of its turn"
    assert table.tick() == {"2.0": LOW}, "1.0 alone counts: 400 are free, enough for one of two"
    assert table.turn("3.0", 1) == {"3.0": PARKED}
    assert table.end("1.0") == {}
    table.policy.turn_ready("4.0", 2, 260, table.now)
    assert table.tick() == {"4.0": LOW}, "pending turns before acting programs: 790 − 260 leave too little for 551"
    assert table.end("2.0") == {} and table.tick() == {"3.0": LOW}


def test_program_aware_places_the_largest_on_the_worker_with_the_most_room() -> None:
    table = Table("program_aware", kv_tokens=300, workers=2, migration=True)
    table.policy._prompt_tokens = 200.0  # type: ignore[attr-defined]
    table.add("1.0", "2.0", "3.0")
    assert table.classes() == {"1.0": LOW, "2.0": LOW, "3.0": PARKED}
    assert table.moved == [("2.0", "w1")], "new programs go to the worker with room, whatever their group's"


def test_program_aware_resumes_best_fit_decreasing() -> None:
    """The largest first, where most is free: the other way round one of them would find no room."""
    table = Table("program_aware", workers=2, migration=True)
    table.add("1.0", "3.0", "4.0")
    table.start("1.0", "3.0", "4.0")
    table.add("2.0")
    table.start("2.0", context=400)
    assert table.moved == [("2.0", "w1")]
    table.turn("1.0", 100, 500)  # 700, reasoning
    table.turn("3.0", 200)  # 300, acting
    table.turn("4.0", 450)  # 550, acting
    assert table.tick() == {"3.0": PARKED, "4.0": PARKED}, "1,550 of 1,000"
    assert table.tick() == {"3.0": LOW, "4.0": LOW}, "300 are free on w0, 600 on w1"
    assert table.moved[1:] == [("4.0", "w1")]


def test_program_aware_resumes_new_programs_before_acting_ones() -> None:
    table = Table("program_aware")
    table.add("1.0", "2.0", "3.0")
    table.start("1.0", "2.0", "3.0")
    table.turn("1.0", 100, 500)  # 700, reasoning
    table.turn("3.0", 200)  # 300, acting
    assert table.tick() == {"3.0": PARKED}, "1,100 of 1,000"
    table.end("2.0")
    table.policy._prompt_tokens = 250.0  # type: ignore[attr-defined]
    table.add("4.0")
    assert table.classes()["4.0"] is PARKED, "others wait"
    assert table.tick() == {"4.0": LOW}, "300 are free: for one of them"


@pytest.mark.parametrize("decay", [False, True])
def test_program_aware_can_count_acting_programs_less_the_longer_they_act(decay: bool) -> None:
    table = Table("program_aware", acting_decay=decay)
    table.add("1.0", "2.0")
    table.start("1.0", "2.0")
    table.turn("1.0", 100, 300)  # 500, reasoning
    table.turn("2.0", 300)  # 400, acting
    table.policy._prompt_tokens = 300.0  # type: ignore[attr-defined]
    assert table.add("3.0") == {}, "100 are free"
    # After 5 s the 300 beyond its prompt count for 9; resumed, it is too much again, and who acts is paused.
    assert table.tick() == ({"3.0": LOW, "2.0": PARKED} if decay else {})


def test_program_aware_plus_keeps_groups_together_and_resumes_promoted_ones_first() -> None:
    table = Table("program_aware_plus", workers=2, migration=True)
    table.policy._prompt_tokens = 400.0  # type: ignore[attr-defined]
    assert table.add("1.0", "2.0", "3.0", "4.0") == {"1.0": LOW, "2.0": LOW}
    assert table.moved == [], "their groups were placed on w0, although w1 is empty"
    table.start("1.0", "2.0", context=400)
    assert table.age_unstarted(4, 4) == {}
    assert table.end("2.0") == {} and table.tick() == {"4.0": HIGH}, "promoted: before 3.0, which came first"


def test_program_aware_resumes_after_the_longest_wait() -> None:
    table = Table("program_aware", kv_tokens=100, longest_wait_s=60.0)
    table.policy._prompt_tokens = 90.0  # type: ignore[attr-defined]
    table.add("1.0", "2.0")
    assert table.classes() == {"1.0": LOW, "2.0": PARKED}
    table.start("1.0", context=90)
    for _ in range(12):
        assert table.tick() == {}
    assert table.tick() == {"2.0": LOW} and "paused for 60 s" in table.causes["2.0"]


def test_program_aware_counts_a_program_whose_move_was_refused_where_it_is() -> None:
    """The dispatcher moves nothing while weights change; the program's worker may be lost, or join again, meanwhile."""
    for happens in ("check", "lost", "joined"):
        table = Table("program_aware", kv_tokens=300, workers=2, migration=True)
        table.policy._prompt_tokens = 200.0  # type: ignore[attr-defined]
        table.add("1.0", "2.0", "3.0")
        table.start("1.0", "2.0", context=200)
        table.end("2.0")
        table.policy.tick(table.now + 5.0)
        table.policy.decide(table.now)
        (refused,) = table.policy.moves
        table.policy.moves.clear()
        assert (refused.job.trajectory_id, refused.to) == ("3.0", "w1")
        if happens == "lost":
            table.policy.lose("w1")
        elif happens == "joined":
            table.policy.join(table.policy.workers["w1"])
        else:
            table.policy.tick(table.now + 10.0)
        table.policy.check_invariants()
        assert table.policy._home["3.0"] == "w0"  # type: ignore[attr-defined]


# -------------------------------------------------------------------------------------------------------- Heddle


def test_longest_first_ranks_by_what_is_left() -> None:
    table = Table("longest_first", lengths={"1.0": (1000, 0), "1.1": (100, 0)})
    table.add("1.0", "1.1")
    ranks = {name: job.rank for name, job in table.jobs.items()}
    assert ranks["1.0"] < ranks["1.1"], "smaller goes first"
    table.start("1.0", "1.1")
    table.turn("1.0", 990)
    assert table.jobs["1.0"].rank > ranks["1.1"], "10 tokens are left of it: renewed at every turn"


# --------------------------------------------------------------------------------------------------------- paper


def test_the_k_groups_that_end_first_are_critical_and_a_promoted_one_is_among_them() -> None:
    lengths = {"1.0": (900, 0), "2.0": (300, 0), "3.0": (500, 0), "3.1": (100, 0)}
    table = Table("paper", batch=2, lengths=lengths)
    table.add("1.0", "2.0", "3.0", "3.1")
    assert table.classes() == {"1.0": LOW, "2.0": HIGH, "3.0": HIGH, "3.1": HIGH}, "k = 2"
    assert table.age(1, 0, 1) == {"1.0": HIGH, "3.0": LOW, "3.1": LOW}, "the promoted one takes a place"
    table.policy.places = 3
    assert table.decide() == {"3.0": HIGH, "3.1": HIGH}
    assert table.causes["3.0"] == "critical: F = 500"


@pytest.mark.parametrize("tool_time", [False, True])
def test_with_tool_time_many_short_turns_take_longer_than_a_few_long_ones(tool_time: bool) -> None:
    """100 tokens in turns of 10 against 120 in turns of 100, and a tool takes as long as 300 tokens."""
    table = Table("paper", batch=1, tool_time=tool_time, lengths={"1.0": (110, 0), "2.0": (220, 0)})
    table.add("1.0", "2.0")
    table.start("1.0", "2.0", context=5)
    table.now = 1.0
    table.turn("1.0", 10)
    table.now = 10.0
    table.turn("2.0", 100)
    table.now = 31.0
    table.policy.turn_ready("1.0", 2, 15, table.now)
    table.tick()
    assert [name for name, cls in table.classes().items() if cls is HIGH] == (["2.0"] if tool_time else ["1.0"])


def test_tool_time_does_not_reorder_groups_when_the_means_move() -> None:
    """Groups of equal turns: whoever was reckoned under other running means keeps its place by length."""
    names = {f"{n}.0": (10 * n, 0) for n in range(1, 6)}
    table = Table("paper", batch=1, tool_time=True, lengths=names)
    table.add(*names)
    table.start("1.0", context=5)
    for turn in range(1, 6):
        table.now += 7.0 * turn
        table.turn("1.0", 1, 0)
        table.now += 40.0
        assert table.classes()["1.0"] is HIGH, "fewer tokens are left of it than of any other"


def test_a_group_that_is_never_started_comes_first_after_two_spans() -> None:
    """Shorter newcomers, which are critical, would pass it over for ever. S = 2, and k = 1 place is left."""
    lengths = {"1.0": (900, 900), "2.0": (9, 9)}
    table = Table("venus", order="length", batch=1, kv_tokens=1000, fill=1.0, lengths=lengths)
    table.policy.prompt_tokens = 600.0  # type: ignore[attr-defined]
    table.add("2.0", "1.0")
    assert table.classes() == {"2.0": HIGH, "1.0": PARKED}
    assert table.age_unstarted(1, 3) == {}
    assert table.age_unstarted(1, 4) == {"2.0": PARKED, "1.0": HIGH}
    assert table.causes["1.0"] == "promoted: admitted under version 0, not started"


def test_fcfs_priority_takes_the_oldest_groups() -> None:
    table = Table("fcfs_priority", batch=1, lengths={"1.0": (900, 0), "2.0": (3, 0)})
    table.add("1.0", "2.0")
    assert table.classes() == {"1.0": HIGH, "2.0": LOW}


def test_the_shortest_high_context_is_demoted_and_promoted_back() -> None:
    table = Table("paper", batch=3, kv_tokens=1000)
    table.add("1.0", "2.0", "3.0")
    table.start("1.0", context=300)
    table.start("2.0", context=400)
    assert set(table.classes().values()) == {HIGH}
    assert table.start("3.0", context=350) == {"1.0": LOW}
    assert "demoted: 300 tokens" in table.causes["1.0"]
    assert table.end("2.0") == {"1.0": HIGH}


def test_a_promoted_trajectory_is_not_demoted_beside_another_high_one() -> None:
    table = Table("paper", batch=2, kv_tokens=500)
    table.add("1.0", "2.0")
    table.start("1.0", context=300)
    assert table.start("2.0", context=400) == {"1.0": LOW}
    assert table.age(1, 0, 1) == {"1.0": HIGH, "2.0": LOW}, "the promoted one is the last to go, however short"


def test_a_pending_high_turn_leaves_a_crowded_worker_where_engines_can_migrate() -> None:
    for migration in (False, True):
        table = Table("paper", batch=9, workers=2, migration=migration)
        names = [f"{n}.0" for n in range(1, 5)]
        table.add(*names)
        table.start(*names, context=300)
        assert table.moved == ([("4.0", "w1")] if migration else [])


# --------------------------------------------------------------------------------------------------------- venus


def test_venus_parks_what_does_not_fit_and_takes_it_when_there_is_room() -> None:
    table = Table("venus", kv_tokens=1000, batch=1, fill=1.0)
    table.policy.prompt_tokens = 400.0  # type: ignore[attr-defined]
    table.add("1.0", "2.0", "3.0")
    assert table.classes() == {"1.0": HIGH, "2.0": LOW, "3.0": PARKED}
    table.start("1.0", "2.0", context=400)
    assert "3.0" in table.end("1.0") and table.classes()["3.0"] is not PARKED


def test_venus_counts_a_groups_prompt_once() -> None:
    table = Table("venus", kv_tokens=1000, fill=1.0)
    table.policy.prompt_tokens = 400.0  # type: ignore[attr-defined]
    table.add("1.0", "1.1", "1.2", "1.3")
    assert PARKED not in table.classes().values()


def test_venus_reserves_for_growth() -> None:
    for reserve, parked in ((0.0, set()), (1.0, {"2.0"})):
        table = Table("venus", kv_tokens=1000, fill=1.0, reserve=reserve, lengths={t: (9, 600) for t in ("1.0", "2.0")})
        table.add("1.0", "2.0")
        assert {name for name, cls in table.classes().items() if cls is PARKED} == parked


@pytest.mark.parametrize(("host_kv_tokens", "share"), [(0, 0.1), (4000, 0.25)])
def test_venus_reserves_more_where_a_host_cache_lets_more_in(host_kv_tokens: int, share: float) -> None:
    def reserved(**keys: float) -> float:
        table = Table("venus", host_kv_tokens=host_kv_tokens, lengths={"1.0": (9, 600)}, **keys)
        table.add("1.0")
        return table.policy._sets["w0"].reserved  # type: ignore[attr-defined]

    assert reserved() == reserved(reserve=share) > reserved(reserve=0.0)


def test_venus_parks_the_last_in_order_when_contexts_outgrow_the_pool() -> None:
    table = Table("venus", kv_tokens=1000, batch=1, fill=1.0, reserve=0.0, order="admission")
    table.add("1.0", "2.0", "3.0")
    table.start("1.0", "2.0", "3.0", context=300)
    assert PARKED not in table.classes().values()
    assert table.turn("2.0", 50, 200) == {"3.0": PARKED}
    assert table.causes["3.0"].startswith("no room: ")


def test_venus_starts_no_more_than_may_be_open_and_never_nobody() -> None:
    table = Table("venus", kv_tokens=100, max_trajectories=2)
    table.policy.prompt_tokens = 5000.0  # type: ignore[attr-defined]
    table.add("1.0", "2.0", "3.0")
    assert [cls is PARKED for cls in table.classes().values()] == [False, True, True], "one runs, whatever its size"
    roomy = Table("venus", kv_tokens=0, max_trajectories=2)
    roomy.add("1.0", "2.0", "3.0")
    assert [cls is PARKED for cls in roomy.classes().values()] == [False, False, True]
    roomy.start("1.0")
    assert roomy.jobs["1.0"].phase is Phase.READY
    assert roomy.end("1.0") == {"3.0": roomy.jobs["3.0"].priority} and roomy.jobs["3.0"].priority is not PARKED


def test_venus_lets_a_promoted_outsider_in_at_once() -> None:
    table = Table("venus", kv_tokens=1000, batch=1, fill=1.0)
    table.policy.prompt_tokens = 600.0  # type: ignore[attr-defined]
    table.add("1.0", "2.0")
    table.start("1.0", context=600)
    changed = table.age(2, 0, 1)
    assert changed == {"1.0": PARKED, "2.0": HIGH}


def test_venus_shares_from_every_worker_that_is_short_of_room() -> None:
    """The longest queue holds only what has started, which no engine here hands over: the next one's turn."""
    table = Table("venus", workers=3, kv_tokens=1000, fill=1.0, reserve=0.0)
    table.add("1.0", "2.0", "3.0", worker="w0")
    table.start("1.0", "2.0", "3.0", context=300)
    table.add("4.0", worker="w2")
    table.start("4.0", context=900)
    table.turn("1.0", 50, 400)
    table.add("5.0", worker="w1")
    table.start("5.0", context=900)
    table.add("6.0", worker="w1")
    assert {name for name, cls in table.classes().items() if cls is PARKED} == {"2.0", "3.0", "6.0"}
    assert table.moved == []
    table.end("4.0")
    assert table.moved == [("6.0", "w2")]


def test_venus_gives_an_empty_worker_what_fits_nowhere() -> None:
    """Alone it runs, whatever its size: so it may go where nobody is."""
    table = Table("venus", workers=2, kv_tokens=100)
    table.policy.prompt_tokens = 5000.0  # type: ignore[attr-defined]
    table.add("1.0", "2.0")
    table.decide()
    assert table.moved == [("2.0", "w1")] and PARKED not in table.classes().values()


def test_venus_reserves_no_more_than_there_is_for_a_predictor_that_raves() -> None:
    table = Table("venus", kv_tokens=1000, fill=1.0, reserve=1.0, growth_tokens=50)
    table.add("1.0")
    table.start("1.0", context=300)
    table.turn("1.0", 10)
    table.policy.estimated("1.0", 1, 1e9)
    table.decide()
    (working,) = table.policy._sets.values()  # type: ignore[attr-defined]
    assert 900 < working.reserved <= 1100
