"""The simulator's parts by themselves: costs against the numbers they were fitted to, KV memory, workloads, tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from envclient.base.configs import build
from envclient.base.errors import ConfigError
from rollout.policy.tiers import HIGH_REF, LOW_REF
from rollout.sim.__main__ import main
from rollout.sim.config import PRESETS, SimConfig
from rollout.sim.cost import engine_cost
from rollout.sim.kv import KvMemory, Node
from rollout.sim.labels import policy_keys
from rollout.sim.metrics import ks_distance
from rollout.sim.plan.__main__ import arguments as plan_arguments
from rollout.sim.plan.__main__ import question
from rollout.sim.recordings import _correlation, measured
from rollout.sim.workload import bounded, make_workload
from tests.sim.kit import run, small

_CONFIG = build(SimConfig, [], [])
COST_32B = engine_cost(_CONFIG.model, _CONFIG.engine)

# ------------------------------------------------------------------------------------------------------------- costs


@pytest.mark.parametrize(("tp", "base_ms", "kv_tokens"), [(2, 14.57, 272e3), (4, 9.9, 794e3), (8, 7.6, 1.84e6)])
def test_costs_of_the_32b_model_are_the_measured_ones(tp: int, base_ms: float, kv_tokens: float) -> None:
    config = build(SimConfig, [], [f"engine.tp={tp}"])
    cost = engine_cost(config.model, config.engine)
    assert cost.base_s * 1e3 == pytest.approx(base_ms, rel=0.02)
    assert cost.request_s * 1e3 == pytest.approx(0.0890 / (tp / 2), rel=0.01)
    assert cost.kv_token_s * 1e6 == pytest.approx(0.0373 / (tp / 2), rel=0.01)
    assert cost.kv_tokens == pytest.approx(kv_tokens, rel=0.01)


def test_recomputing_40k_tokens_takes_seconds_and_loading_them_a_tenth() -> None:
    cost = COST_32B
    assert 2.0 < cost.prefill_s(0, 40_000) < 4.0
    assert cost.load_token_s * 40_000 == pytest.approx(0.105, rel=0.01)


@given(
    steps=st.integers(1, 5000), batch=st.integers(1, 300), context=st.integers(1, 2_000_000), part=st.floats(0.01, 1.0)
)
def test_the_step_under_way_is_found(steps: int, batch: int, context: int, part: float) -> None:
    cost = COST_32B
    before, after = cost.decode_s(steps - 1, batch, context), cost.decode_s(steps, batch, context)
    found = cost.decode_steps(before + part * (after - before), batch, context)
    assert abs(found - steps) <= (1 if part < 0.02 or part > 0.98 else 0)
    exact = sum(cost.base_s + cost.request_s * batch + cost.kv_token_s * (context + i * batch) for i in range(3))
    assert cost.decode_s(3, batch, context) == pytest.approx(exact)


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_presets_have_room_for_the_longest_context(preset: str) -> None:
    config = build(SimConfig, [(preset, PRESETS[preset])])
    assert engine_cost(config.model, config.engine).kv_tokens > config.workload.context_limit


# --------------------------------------------------------------------------------------------------------- KV memory


class Model:
    """Requests on a KvMemory, each locked with its context, growing, unlocked or dropped."""

    PROMPT = 10

    def __init__(self, capacity: int, host: int) -> None:
        self.kv = KvMemory(capacity, host)
        self.context: dict[int, int] = {}
        self.locked: dict[int, int] = {}

    def tail(self, number: int) -> Node:
        return self.kv.tail(f"g{number % 3}", f"t{number}")

    def move(self, action: str, number: int, amount: int) -> None:
        tail = self.tail(number)
        context = self.context.get(number, self.PROMPT + 1)
        parent = tail.parent
        assert parent is not None
        if action == "lock" and number not in self.locked:
            device, known = self.kv.match(tail, self.PROMPT, context)
            assert 0 <= device <= known <= context
            own = sum(node.resident for node in (tail, parent) if node.locks == 0)
            if context - device <= self.kv.budget(HIGH_REF) - own:
                self.kv.lock(tail, self.PROMPT, context)
                self.kv.reclaim()
                self.locked[number] = context
                assert self.kv.match(tail, self.PROMPT, context)[0] == context
        elif action == "grow" and number in self.locked and amount <= self.kv.budget(HIGH_REF):
            self.kv.grow(amount)
            self.kv.reclaim()
            self.locked[number] += amount
        elif action == "unlock" and number in self.locked:
            context = self.locked.pop(number)
            self.kv.unlock(tail, context, self.PROMPT, max(0, context - amount))
            self.context[number] = context
        elif action == "drop" and number in self.locked:
            context = self.locked.pop(number)
            self.kv.drop(tail, context, self.PROMPT)
            self.context[number] = context
        elif action == "tier":
            self.kv.set_tier(tail, amount % 3)
        elif action == "import" and number not in self.locked:
            self.kv.import_host(tail, self.PROMPT, context)
        elif action == "flush" and not self.locked:
            self.kv.flush()


MOVES = st.tuples(
    st.sampled_from(["lock", "lock", "grow", "unlock", "unlock", "drop", "tier", "import", "flush"]),
    st.integers(0, 8),
    st.integers(0, 12),
)


@settings(max_examples=150, deadline=None)
@given(capacity=st.integers(40, 200), host=st.sampled_from([0, 60, 1000]), moves=st.lists(MOVES, max_size=80))
def test_kv_memory_adds_up(capacity: int, host: int, moves: list[tuple[str, int, int]]) -> None:
    model = Model(capacity, host)
    for move in moves:
        model.move(*move)
        model.kv.check_invariants()
        groups = {number % 3 for number in model.locked}
        tails = sum(context - Model.PROMPT for context in model.locked.values())
        assert model.kv.locked == tails + Model.PROMPT * len(groups)


def test_tiers_are_evicted_in_order_and_lru_inside_a_tier() -> None:
    kv = KvMemory(100, 0)
    tails = [kv.tail(f"g{i}", f"t{i}") for i in range(4)]
    for tail, tier in zip(tails, (HIGH_REF, LOW_REF, LOW_REF, 0), strict=True):
        kv.set_tier(tail, tier)
        kv.lock(tail, 5, 25)
        kv.unlock(tail, 25, 5, 25)
    assert kv.free == 0 and [kv.budget(tier) for tier in range(3)] == [25, 75, 100]
    kv.lock(kv.tail("new", "new"), 5, 50)
    kv.reclaim()
    # The unused one went whole, prompt last; of the LOW ones the older, from its end.
    assert [tail.resident for tail in tails] == [20, 0, 20, 0]
    assert kv.match(tails[0], 5, 25) == (25, 25)


def test_the_host_cache_gives_back_what_the_device_evicted() -> None:
    kv = KvMemory(60, 100)
    tail = kv.tail("g", "a")
    kv.lock(tail, 10, 50)
    kv.unlock(tail, 50, 10, 50)
    other = kv.tail("h", "b")
    kv.lock(other, 10, 60)
    kv.reclaim()
    assert kv.match(tail, 10, 50) == (0, 50)
    kv.unlock(other, 60, 10, 60)
    kv.flush()
    assert kv.match(tail, 10, 50) == (0, 0) and kv.used == 0


# ---------------------------------------------------------------------------------------------------------- workloads


def test_swe_workload_has_the_measured_moments() -> None:
    workload = make_workload(build(SimConfig, [], ["workload.correlation=0.6"]))
    groups = [[workload.script(p, m, 0) for m in range(8)] for p in range(250)]
    scripts = [script for group in groups for script in group]
    turns = np.array([script.turns for script in scripts])
    assert np.median(turns) == pytest.approx(math.exp(3.745), rel=0.08)
    outputs = np.concatenate([script.outputs for script in scripts])
    appended = np.concatenate([script.appended for script in scripts])
    assert np.median(outputs) == pytest.approx(162, rel=0.03)
    assert np.median(appended) == pytest.approx(179, rel=0.03) and appended.mean() == pytest.approx(545, rel=0.1)
    assert np.mean([script.context_tokens for script in scripts]) == pytest.approx(55_000, rel=0.08)
    tools = np.concatenate([script.tools_s for script in scripts])
    assert np.quantile(tools, [0.5, 0.75, 0.99]) == pytest.approx([0.09, 5.5, 20], rel=0.5)
    logs = np.log([[script.turns for script in group] for group in groups])
    between = np.var(logs.mean(axis=1)) - np.mean(np.var(logs, axis=1, ddof=1)) / 8
    assert between / np.var(logs) == pytest.approx(0.6, abs=0.1)


def test_scripts_do_not_depend_on_who_asks_first() -> None:
    first, second = make_workload(small()), make_workload(small())
    late = [first.script(p, 1, 0) for p in (5, 3)]
    early = [second.script(p, 1, 0) for p in (3, 5)]
    assert late == early[::-1]
    assert first.script(3, 1, 0) != first.script(3, 1, 1) != make_workload(small("seed=1")).script(3, 1, 1)


@given(
    prompt=st.integers(1, 50),
    turns=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=10),
    limit=st.integers(60, 400),
)
def test_no_context_passes_its_limit(prompt: int, turns: list[tuple[int, int]], limit: int) -> None:
    outputs, appended = [o for o, _ in turns], [a for _, a in turns]
    cut, truncated = bounded(prompt, outputs, appended, limit)
    assert 1 <= len(cut) <= len(outputs) and cut[:-1] == outputs[: len(cut) - 1]
    context = prompt
    for turn, output in enumerate(cut):
        assert context < limit
        context += output
        assert context <= limit
        context += appended[turn]
    assert truncated or (cut == outputs and context < limit)


def test_sessions_keep_their_counts() -> None:
    workload = make_workload(small("workload.kind=sessions", "workload.context_limit=131072"))
    scripts = [workload.script(p, 0, 0) for p in range(40)]
    assert all(script.prompt_tokens <= 2000 and min(script.appended) >= 1 for script in scripts)
    assert len({script.turns for script in scripts}) > 10


def test_a_group_of_recordings_has_one_prompt() -> None:
    keys = ("workload.kind=sessions", "workload.context_limit=131072", "workload.first_context=13500")
    workload = make_workload(small(*keys))
    groups = [[workload.script(p, member, attempt) for member in range(8) for attempt in (0, 1)] for p in range(40)]
    prompts = [{script.prompt_tokens for script in group} for group in groups]
    assert all(len(each) == 1 for each in prompts)
    assert len(set.union(*prompts)) > 1, "recordings begin with different prompts"
    assert any(len({script.turns for script in group}) > 1 for group in groups)


def test_a_run_of_ones_own_is_read(tmp_path: Path) -> None:
    turn = {"event": "turn_ended", "version": 0}
    events = [
        turn | {"trajectory_id": "p000000.0.0.0", "turn": 1, "context_tokens": 100, "output_tokens": 7},
        turn | {"trajectory_id": "p000000.0.0.0", "turn": 2, "context_tokens": 130, "output_tokens": 9},
        {"event": "trajectory_ended", "trajectory_id": "p000000.0.0.0", "status": "finished", "reward": 1},
        turn | {"trajectory_id": "p000000.0.1.0", "turn": 1, "context_tokens": 100, "output_tokens": 5},
        {"event": "trajectory_ended", "trajectory_id": "p000000.0.1.0", "status": "failed", "reward": 0},
    ]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps({"now": 1, "event": event}) + "\n" for event in events))
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"tool_s/mean": 3.0, "tool_calls/mean": 2.0}) + "\n")
    script = make_workload(small("workload.kind=from_run", f"workload.run={tmp_path}")).script(0, 0, 0)
    assert (script.prompt_tokens, script.outputs, script.appended[:1]) == (100, [7, 9], [23])
    assert script.tools_s == [1.5, 1.5]
    with pytest.raises(ConfigError, match=r"workload\.run"):
        make_workload(small("workload.kind=from_run", "workload.run=nowhere"))


def recorded_run(folder: Path, groups: list[list[int]]) -> str:
    """Two turns a trajectory, a tool of three seconds between them, the second turn of so many tokens."""
    rows: list[dict[str, Any]] = []
    for group, members in enumerate(groups):
        for member, tokens in enumerate(members):
            who = {"trajectory_id": f"p{group}.0.{member}.0"}
            turn = who | {"event": "turn_ended", "context_tokens": 100}
            rows += [
                {"now": 1.0, "event": who | {"event": "turn_ready", "turn": 1}},
                {"now": 2.0, "event": turn | {"turn": 1, "output_tokens": 1}},
                {"now": 5.0, "event": who | {"event": "turn_ready", "turn": 2}},
                {"now": 6.0, "event": turn | {"turn": 2, "output_tokens": tokens}},
                {"now": 7.0, "event": who | {"event": "trajectory_ended", "status": "finished", "reward": member % 2}},
            ]
    folder.mkdir()
    (folder / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    steps = [{"score_s/mean": 4.0, "tool_s/mean": 9.0, "tool_calls/mean": 6.0}, {"score_s/mean": 6.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    return str(folder)


def test_what_a_run_measured_is_taken_below_what_is_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    groups = [[round(200 * math.exp(s + t)) for t in rng.normal(0, 0.4, 8)] for s in rng.normal(0, 0.6, 40)]
    run = recorded_run(tmp_path / "run", groups)
    found = measured(run)
    assert found["environment"] == {"score_s": 5.0} and found["workload"]["pass_rate"] == 0.5
    script = make_workload(small("workload.kind=from_run", f"workload.run={run}")).script(0, 0, 0)
    assert script.tools_s == [1.5, 1.5], "workers measured 1.5 s a call, whatever the coordinator heard"
    keys = ["--set", "workload.kind=from_run", "--set", f"workload.run={run}", "--set", "workload.pass_rate=0.125"]
    assert main(["--show-config", *keys]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert (shown["workload"]["pass_rate"], shown["environment"]["score_s"]) == (0.125, 5.0)
    plan = question(plan_arguments(["--workload", run]))
    assert plan.sim.environment.score_s == 5.0 and plan.sim.workload.correlation == found["workload"]["correlation"]
    with pytest.raises(ConfigError, match=r"workload\.run 'nowhere'"):
        main(["--set", "workload.kind=from_run", "--set", "workload.run=nowhere"])


@pytest.mark.parametrize(("groups", "truth"), [(12, 0.69), (40, 0.69), (12, 0.0), (40, 0.0)])
def test_the_correlation_of_siblings_is_estimated_without_bias(groups: int, truth: float) -> None:
    """0.36 of 0.36 + 0.16 of the variance is the group's, mean of 40 draws; ties and few groups are no likeness."""
    estimates = []
    for seed in range(40):
        rng = np.random.default_rng(seed)
        shared = rng.normal(0, 0.6 if truth else 0.0, groups)
        lengths = {
            f"p{g}.0.{m}.0": (round(20 * math.exp(shared[g] + rng.normal(0, 0.4))), 0)
            for g in range(groups)
            for m in range(8)
        }
        estimates.append(_correlation(lengths))
    assert np.mean([each or 0.0 for each in estimates]) == pytest.approx(truth, abs=0.06)
    assert _correlation({f"p{g}.0.{m}.0": (3, 3) for g in range(20) for m in range(4)}) is None, "all are equal"
    assert _correlation({f"p{g}.0.{m}.0": (g, m) for g in range(7) for m in range(4)}) is None, "too few groups"


# ------------------------------------------------------------------------------------------------------- command line


def test_ks_distance() -> None:
    assert ks_distance([1, 2, 3], [1, 2, 3]) == 0.0
    assert ks_distance([1, 2], [3, 4]) == 1.0
    assert ks_distance([1, 2, 3, 4], [3, 4]) == 0.5


def test_labels_name_policies_and_keys() -> None:
    assert policy_keys("paper:migration=false:engine.slots=8") == [
        "policy.name=paper",
        "policy.migration=false",
        "engine.slots=8",
    ]


def test_command_line_writes_table_json_plots_and_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["steps=2", "skip_steps=0", "workers=2", "group.batch=2", "group.size=2", "workload.turns_mu=1.5"]
    argv = [part for key in sets for part in ("--set", key)]
    argv += ["--policies", "action,trajectory:engine.slots=1", "--seeds", "0-1"]
    argv += ["--json", str(tmp_path / "r.json"), "--plot", str(tmp_path), "--events", str(tmp_path / "events.jsonl")]
    assert main(argv) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].startswith("policy") and table[2].startswith("trajectory:engine.slots=1")
    results = json.loads((tmp_path / "r.json").read_text())["results"]
    assert [row["seed"] for row in results] == [0, 1, 0, 1]
    for name in ("summary", "lengths", "steps"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert len((tmp_path / "events.jsonl").read_text().splitlines()) > 50


def test_mistakes_are_named() -> None:
    for keys, said in ((["policy.name=best"], "best"), (["engine.l2=huge"], "l2"), (["engine.tp=0.5"], "tp")):
        with pytest.raises(ConfigError, match=said):
            run(*keys)
