"""The planner's parts: memory rule, candidates, bounds, scaling down, command line and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
import yaml

from envclient.base.errors import ConfigError
from rollout.sim.__main__ import main as simulate_main
from rollout.sim.plan import search
from rollout.sim.plan.__main__ import main
from rollout.sim.plan.bounds import bounds, means
from rollout.sim.plan.config import PlanConfig, plan_config
from rollout.sim.plan.measure import Simulations, scaled_down
from rollout.sim.plan.space import candidates, min_training_gpus, month_cost, replica_gpus, sim_config, tp_choices
from tests.sim.plan_kit import SMALL, ask, small_plan


@pytest.mark.parametrize(
    ("preset", "keys", "fewest", "replica"),
    [
        ("32b", [], 16, 8),
        ("4b", [], 2, 1),
        ("32b", ["cluster.hbm_gb=141"], 8, 8),
        ("32b", ["training.gpus_per_replica=4"], 4, 4),
        ("32b", ["training.min_gpus=12"], 12, 4),
        ("4b", ["sim.group.batch=1"], 2, 2),
    ],
)
def test_training_fits_on_what_the_rule_says(preset: str, keys: list[str], fewest: int, replica: int) -> None:
    config = plan_config(preset, overrides=keys)
    assert min_training_gpus(config) == fewest
    assert replica_gpus(config, fewest) == replica


def test_candidates_fill_the_cluster_and_fit() -> None:
    config = plan_config("32b")
    fit, why_not = tp_choices(config)
    assert sorted(fit) == [2, 4, 8] and "TP 1" in why_not[0] and "context_limit" in why_not[0]
    field = candidates(config, dict.fromkeys(fit, 64))
    assert {(c.training_gpus, c.replicas) for c in field} == {(16, 2), (24, 3)}
    assert all(c.gpus == 32 for c in field) and len(field) == len(set(field)) == 2 * 3 * 3
    paper = next(c for c in field if (c.training_gpus, c.tp, c.async_factor) == (16, 4, 2.0))
    sim = sim_config(config, paper, steps=5, seed=7)
    assert (sim.workers, sim.engine.tp, sim.trainer.gpus, sim.trainer.replicas) == (4, 4, 16, 2)
    assert (sim.engine.l2, sim.engine.l2_node_gb, sim.group.async_factor) == ("large", 1800.0, 2.0)
    # 32 GPUs, the host memory of the two nodes that 16 rollout GPUs fill, no price for unlimited sandboxes.
    assert month_cost(config, paper) == 32 * 1500 + 2 * 2000 * 2


def test_a_large_cluster_is_searched_in_steps() -> None:
    config = plan_config("4b", overrides=["cluster.gpus=1024", "search.tp=[1]", "search.async_factors=[1.0]"])
    workers = [c.workers for c in candidates(config, {1: 64})]
    # With 16 groups a batch there are at most 16 replicas: training takes up to 15 × 64 GPUs.
    assert len(workers) == config.search.splits and workers == sorted(set(workers))
    assert (workers[0], workers[-1]) == (64, 1022)


@pytest.mark.parametrize("keys", [(), ("cluster.sandboxes=6",), ("sim.engine.kv_tokens=25000", "search.slots=[3]")])
def test_no_simulation_beats_its_closed_form(keys: tuple[str, ...]) -> None:
    config = small_plan("search.async_factors=[1.0,2.0]", "sim.workload.scale_tools=0.2", *keys)
    m = means(config)
    field = candidates(config, {2: config.search.slots[0]})
    runs = Simulations(config, tell=lambda line: None).measure(field, steps=4, seeds=[0], what="")
    limits = [bounds(config, c, m) for c in field]
    assert len(field) == 6
    for measured, limit in zip(runs, limits, strict=True):
        assert measured.tokens_per_hour <= config.search.slack * limit.tokens_per_hour


def test_bounds_follow_what_they_name() -> None:
    config = small_plan()
    m = means(config)
    base = candidates(config, {2: 8})[0]
    first = bounds(config, base, m)
    assert bounds(
        config, base.changed(replicas=2 * base.replicas, training_gpus=2 * base.training_gpus), m
    ).trainer_s < (first.trainer_s)
    assert (
        bounds(config, base.changed(sandboxes=4), m).sandboxes_s
        == 2 * bounds(config, base.changed(sandboxes=8), m).sandboxes_s
    )
    assert bounds(config, base.changed(slots=1), m).slots_s > first.slots_s
    assert bounds(config, base.changed(async_factor=3.0), m).gate_s == pytest.approx(first.gate_s / 2)
    assert first.sandboxes_s == 0 and first.kv_s >= first.engines_s


def test_scaling_down_keeps_the_load_of_a_worker() -> None:
    config = plan_config("32b", overrides=["cluster.gpus=64", "sim.group.batch=64", "cluster.sandboxes=400"])
    whole = next(c for c in candidates(config, {2: 64, 4: 64, 8: 64}) if (c.tp, c.training_gpus) == (4, 32))
    large = sim_config(config, whole, steps=4, seed=0)
    small = scaled_down(large, 16)
    assert (large.workers, small.workers) == (8, 2)
    assert (small.group.batch, small.environment.sandboxes, small.trainer.replicas) == (16, 100, 1)
    assert small.trainer.gpus * small.trainer.efficiency == pytest.approx(large.trainer.gpus * 0.35 / 4)
    assert scaled_down(small, 16) == small


def test_the_search_ends_where_every_short_simulation_passes_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "bounds", lambda *args: msgspec.structs.replace(bounds(*args), gate_s=1e9))
    assert ask("search.starters=4", "search.finalists=1").best.tokens_per_hour > 0


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["sim.workers=3"], r"sim\.workers is what the planner decides.*cluster\.gpus"),
        (["sim.engine.l2=none"], r"sim\.engine\.l2 is what the planner decides"),
        (["cluster.gpus=1"], r"cluster\.gpus is 1 \(give at least 2\)"),
        (["cluster.l2_fraction=1.5"], r"cluster\.l2_fraction is 1\.5"),
        (["search.tp=[]"], r"search\.tp is empty"),
        (["search.async_factors=[0.5]"], r"search\.async_factors has 0\.5"),
        (["search.steps=1"], r"search\.steps is 1"),
        (["prices.gpu=-1"], r"prices\.gpu is -1"),
        (["cluster.gpu=8"], r"did you mean cluster\.gpus"),
    ],
)
def test_mistakes_are_named_before_anything_is_simulated(keys: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_config("32b", overrides=keys)


def test_the_planners_own_keys_are_refused_in_a_file_too() -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml: sim\.trainer\.gpus is what the planner decides"):
        plan_config("32b", layers=[("mine.yaml", {"sim": {"trainer": {"gpus": 8}}})])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (("cluster.gpus=17",), r"cluster\.gpus is 17: training needs 16 and a rollout worker 2"),
        (("search.tp=[1,3]",), r"no search\.tp of \[1, 3\] fits: TP 1: .*TP 3 does not divide"),
    ],
)
def test_a_cluster_that_is_too_small_says_what_is_missing(keys: tuple[str, ...], said: str) -> None:
    config = plan_config("32b", overrides=keys)
    with pytest.raises(ConfigError, match=said):
        fit, _ = tp_choices(config)
        candidates(config, dict.fromkeys(fit, 64))


def test_options_that_cannot_work_are_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for argv, said in (
        (["--jobs", "0"], "--jobs is 0"),
        (["--out", str(tmp_path / "file")], "--out: .*file' is no folder"),
        (["--seeds", "x"], "--seeds 'x' is no list of seeds"),
        (["--workload", str(tmp_path)], r"has no events\.jsonl"),
        (["--policy", "paper:engine.slots=3"], r"sim\.engine\.slots is what the planner decides"),
    ):
        with pytest.raises(ConfigError, match=said):
            main(argv)


def test_unknown_workloads_and_policies_are_refused() -> None:
    for key, said in (("sim.workload.kind=mail", "mail"), ("sim.policy.name=best", "best")):
        with pytest.raises(ConfigError, match=said):
            ask(key)


def test_quick_is_the_same_question_on_shorter_runs() -> None:
    whole, quick = plan_config("32b"), plan_config("32b", quick=True)
    assert quick.search.steps < whole.search.steps and quick.seeds == [0]
    assert quick.cluster == whole.cluster and quick.sim == whole.sim and whole.sim.policy.name == "venus"


def test_command_line_plans_for_a_recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run's own events are the workload; the answer is text, JSON, PNGs, and a page that needs nothing else."""
    run, out = tmp_path / "runs" / "mine", tmp_path / "out"
    small = ["steps=2", "workers=1", "group.batch=2", "group.size=2", "workload.turns_mu=1.5"]
    assert simulate_main([*sets(small), "--events", str(run / "events.jsonl")]) == 0
    question = tmp_path / "question.yaml"
    question.write_text(yaml.safe_dump(SMALL))
    argv = ["--workload", str(run), "--config", str(question), "--policy", "venus:reserve=0.25", "--seeds", "0-1"]
    argv += sets(["search.steps=2", "cluster.gpus=4", "sim.engine.kv_tokens=200000"])
    argv += ["--json", str(tmp_path / "plan.json"), "--out", str(out)]
    capsys.readouterr()
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("best: 2 GPUs train") and "workload from_run" in captured.out
    assert "one more rollout worker (2 GPUs)" in captured.out and "min left" in captured.err
    answer = json.loads((tmp_path / "plan.json").read_text())
    assert answer["config"]["sim"]["workload"]["run"] == str(run) and answer["config"]["seeds"] == [0, 1]
    assert answer["config"]["sim"]["policy"] == PlanConfig().sim.policy.__dict__ | {"name": "venus", "reserve": 0.25}
    recorded = [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]
    lengths = [event["output_tokens"] for event in recorded if event["event"] == "turn_ended"]
    assert 0 < answer["bounds"]["tokens"] <= 16 * 60 * max(lengths)
    names = ["bottleneck", "money", "settings", "split"]
    assert [path.stem for path in sorted(out.glob("*.png"))] == names
    page = (out / "plan.html").read_text()
    assert page.count("data:image/png;base64,") == len(names)
    assert not re.search(r"https?://|<script|<link|@import|url\(", page)
    assert set(re.findall(r'src="(.{10})', page)) == {"data:image"}


def sets(keys: list[str]) -> list[str]:
    return [part for key in keys for part in ("--set", key)]
