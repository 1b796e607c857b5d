"""The incremental sets against what a plain recount would choose, and the estimator against simple rivals."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.policy.critical import CriticalSet
from rollout.policy.jobs import Job, JobGroup, Phase
from rollout.policy.lengths import OnlineLengths
from rollout.policy.working_set import WorkingSet


def group(order: int) -> JobGroup:
    return JobGroup(order=order, group_id=f"g{order}")


@given(
    moves=st.lists(st.tuples(st.sampled_from("pds"), st.integers(1, 12), st.integers(1, 60)), max_size=120),
    hysteresis=st.sampled_from([1.0, 0.95, 0.5]),
)
@settings(max_examples=300, deadline=None)
def test_critical_groups_are_those_of_smallest_f_up_to_the_hysteresis(
    moves: list[tuple[str, int, int]], hysteresis: float
) -> None:
    critical = CriticalSet(hysteresis)
    known: dict[int, float] = {}
    groups = {order: group(order) for order in range(1, 13)}
    before: set[int] = set()
    for kind, order, number in moves:
        if kind == "p":
            critical.put(groups[order], float(number))
            known[order] = float(number)
        elif kind == "d":
            assert critical.drop(groups[order]) is (known.pop(order, None) is not None)
        wanted = number % 6
        changed = {g.order for g in critical.settle(wanted)}
        now = {g.order for g in critical.groups()}
        assert changed >= (before ^ now) & known.keys() and not changed - (before ^ now)
        before = now
        assert len(now) == len(critical) == min(wanted, len(known))
        critical.check_invariants()
        if hysteresis == 1.0 and now and known.keys() - now:
            worst = max(known[o] for o in now)
            best = min(known[o] for o in known.keys() - now)
            assert worst <= best


def test_a_group_that_is_only_a_little_better_replaces_nobody() -> None:
    critical = CriticalSet(0.95)
    a, b = group(1), group(2)
    critical.put(a, 100.0)
    assert critical.settle(1) == [a]
    critical.put(b, 96.0)
    assert critical.settle(1) == []
    critical.put(b, 94.0)
    assert critical.settle(1) == [a, b]
    assert a not in critical and b in critical


members = st.tuples(
    st.sampled_from("pppds"), st.integers(0, 9), st.integers(0, 3), st.integers(0, 40), st.integers(0, 20)
)


@given(
    moves=st.lists(members, max_size=80),
    room=st.sampled_from([1.0, 50.0, 100.0, None]),
    spare=st.sampled_from([0.0, 15.0]),
    prompt=st.integers(0, 30),
    unit=st.sampled_from([1.0, 0.1]),
)
@settings(max_examples=400, deadline=None)
def test_a_working_set_fits_is_never_empty_and_is_sticky(
    moves: list[tuple[str, int, int, int, int]], room: float | None, spare: float, prompt: int, unit: float
) -> None:
    """`unit`: of tokens; sums of tenths are rounded."""
    most = None if room is None else unit * (room + spare)
    room = None if room is None else unit * room
    working = WorkingSet(room, most)
    for kind, name, rank, held, growth in moves:
        before = {entry.name for entry in working.entries.values() if entry.member}
        if kind == "d":
            working.drop(str(name))
        else:
            working.put(
                str(name),
                inside=(rank, name, -1.0),
                outside=(rank, name, 0.0),
                held=unit * held,
                reserved=unit * (held + growth),
                shared=name % 3,
                prompt_tokens=unit * prompt,
                new=kind == "s",
            )
        openings = growth % 3
        fitted = most is None or working.held <= most
        changed = set(working.settle(openings))
        working.check_invariants()
        inside = {entry.name for entry in working.entries.values() if entry.member}
        assert changed == (before ^ inside) - ({str(name)} - working.entries.keys())
        left = (before - inside) & working.entries.keys()
        assert not left or inside - before or not fitted, "who leaves though what is held fits makes room for somebody"
        if room is None:
            startable = {e.name for e in working.entries.values() if not e.new}
            assert startable <= inside
            continue
        assert most is not None and (working.held <= most or len(inside) == 1)
        outside = [e for e in working.entries.values() if not e.member and (not e.new)]
        assert inside or not outside, "nobody runs although somebody could"
        fresh = any(e.new and not e.member for e in working.entries.values())
        for entry in outside:  # who comes before every other outsider waits only if the worse members are too few
            if entry.outside == min(e.outside for e in outside) and not fresh:
                kept = [e for n in inside if not entry.outside < (e := working.entries[n]).inside]
                needed = sum(e.reserved for e in (*kept, entry))
                needed += sum(working._prompts[shared].tokens for shared in {e.shared for e in (*kept, entry)})
                assert needed > room - 1e-9 and kept


def test_a_prompt_is_counted_once_and_growth_is_reserved() -> None:
    working = WorkingSet(100.0, 100.0)
    for name in "abc":
        working.put(
            name,
            inside=(0, ord(name)),
            outside=(0, ord(name)),
            held=10,
            reserved=20,
            shared=1,
            prompt_tokens=50,
            new=False,
        )
    assert working.settle(0) == ["a", "b"]
    assert (working.held, working.reserved) == (70, 90)
    working.put("a", inside=(0, 97), outside=(0, 97), held=45, reserved=45, shared=1, prompt_tokens=50, new=False)
    assert working.settle(0) == ["b"]  # 105 tokens are held: the worst goes, and comes not back


def test_nobody_leaves_for_one_who_does_not_come_in() -> None:
    working = WorkingSet(100.0, 100.0)

    def put(name: str, rank: int, tokens: int) -> list[str]:
        key = (rank, ord(name))
        shared = ord(name)
        working.put(
            name, inside=key, outside=key, held=tokens, reserved=tokens, shared=shared, prompt_tokens=0, new=False
        )
        return working.settle(0)

    assert put("a", 0, 60) == ["a"] and put("b", 1, 30) == ["b"]
    assert put("c", 0, 70) == []  # without b it would still not fit
    assert put("d", 0, 40) == []  # it comes after c
    working.drop("c")
    assert working.settle(0) == ["b", "d"]


def test_an_opening_that_a_leaver_gives_up_is_not_for_one_who_does_not_fit() -> None:
    working = WorkingSet(100.0, 100.0)
    for rank, name, tokens, new in ((0, "m", 60, False), (5, "n", 30, True), (1, "f", 90, True), (2, "b", 40, False)):
        key = (rank, ord(name))
        shared = ord(name)
        working.put(
            name, inside=key, outside=key, held=tokens, reserved=tokens, shared=shared, prompt_tokens=0, new=new
        )
        if name == "n":
            assert working.settle(1) == ["m", "n"]
    assert set(working.settle(0)) == {"n", "b"}


def spearman(a: list[float], b: list[float]) -> float:
    def ranks(values: list[float]) -> list[float]:
        order = sorted(range(len(values)), key=values.__getitem__)
        result = [0.0] * len(values)
        for place, index in enumerate(order):
            result[index] = float(place)
        return result

    x, y = ranks(a), ranks(b)
    mean = (len(x) - 1) / 2
    top = sum((i - mean) * (j - mean) for i, j in zip(x, y, strict=True))
    return top / sum((i - mean) ** 2 for i in x)


def test_estimates_rank_unseen_trajectories() -> None:
    """Lognormal numbers of turns with intra-group correlation 0.6, as in the cluster model: Spearman by turn."""
    chance = Random(5)
    lengths = OnlineLengths(growth_tokens=1000)
    seen: dict[int, list[tuple[float, float, float]]] = {1: [], 8: [], 32: []}
    overall: list[int] = []
    for number in range(260):
        siblings = JobGroup(order=number, group_id=f"g{number}", prompt_tokens=13500)
        common = chance.gauss(0, 1)
        for member in range(8):
            tilt = 0.6**0.5 * common + 0.4**0.5 * chance.gauss(0, 1)
            turns = max(1, round(2.718281828 ** (3.745 + 0.628 * tilt)))
            outputs = [max(1, round(chance.lognormvariate(5.089, 0.945))) for _ in range(turns)]
            job = Job(trajectory_id=f"{number}.{member}", group=siblings, member=member, worker="w0")
            job.phase, job.context_tokens = Phase.READY, 13500
            lengths.observe(job)
            for output in outputs:
                job.turns += 1
                job.output_tokens += output
                job.context_tokens += output + 545
                lengths.observe(job)
                if number >= 160 and job.turns in seen:
                    truth = sum(outputs[job.turns :])
                    rival = siblings.finished_tokens or overall
                    mean = sum(rival) / len(rival) - job.output_tokens
                    seen[job.turns].append((lengths.estimate(job)[0], float(truth), mean))
            siblings.finished_tokens.append(job.output_tokens)
            overall.append(job.output_tokens)
            lengths.finished(job, job.output_tokens)
            lengths.dropped(job)
    assert lengths.samples > 10_000 and not lengths._open
    for turn, rows in seen.items():
        truth = [row[1] for row in rows]
        ours, siblings_mean = spearman([row[0] for row in rows], truth), spearman([row[2] for row in rows], truth)
        assert ours > siblings_mean - 0.02, (
            f"turn {turn}: {ours:.3f}, the siblings' mean alone gives {siblings_mean:.3f}"
        )
        assert ours > 0.3, f"turn {turn}: {ours:.3f}"
