"""The planner on clusters where the answer is known by construction."""

from __future__ import annotations

import pytest

from rollout.sim.plan.answer import Answer, as_json
from rollout.sim.plan.report import text
from rollout.sim.plan.waiting import most_waited
from tests.sim.plan_kit import ask


def gains(found: Answer) -> dict[str, float]:
    return {gain.name: gain.gain for gain in found.doublings}


def test_slow_training_gets_all_the_gpus_it_can_and_more_of_them_is_what_to_buy() -> None:
    found = ask("sim.trainer.efficiency=0.002", "training.min_gpus=2", "sim.group.batch=12", "search.steps=3")
    assert (found.best.candidate.training_gpus, found.best.candidate.workers) == (6, 1)
    assert found.bottleneck == "training" and 0.8 < found.doublings[0].gain < 1.1
    assert found.best.shares["training"] > 0.8
    assert found.purchases[0].name == "training" and found.purchases[0].gain > 0.1
    rates = [point.tokens_per_hour for point in found.curves["training_gpus"]]
    assert rates == sorted(rates) and len(rates) == 3
    # Training binds on paper too, and the closed form is near.
    assert found.bounds.step_s == found.bounds.trainer_s
    assert 0.8 < found.best.tokens_per_hour / found.bounds.tokens_per_hour < 1.2


def test_too_few_sandboxes_are_named_and_bring_most() -> None:
    found = ask("cluster.sandboxes=6", "prices.sandbox_step=1.0", "search.steps=6")
    assert found.best.candidate.sandboxes == 6
    assert found.bottleneck == "sandboxes" and gains(found)["sandboxes"] > 0.3
    assert found.best.shares["sandboxes"] > 0.3
    assert found.purchases[0].name == "sandboxes" and found.purchases[0].per_1000 > 0
    half, whole = found.curves["sandboxes"]
    assert half.x == 3 and half.tokens_per_hour < 0.8 * whole.tokens_per_hour
    assert "bottleneck: sandboxes" in text(found)


KV_SHORT = (
    "sim.engine.kv_tokens=22000",
    "cluster.host_gb_per_node=16",
    "prices.host_step_gb=32",
    "cluster.gpus=6",
    "sim.group.batch=8",
    "search.slots=[16]",
    "search.async_factors=[1.0]",
    "sim.workload.scale_tools=0.05",
    "sim.environment.score_s=0.1",
    "sim.trainer.efficiency=0.7",
    "search.steps=3",
)
"""A worker holds one long context and hardly more, on device and host; tools and training take little time."""


def test_short_kv_memory_is_named_and_host_memory_or_a_worker_is_what_to_buy() -> None:
    found = ask(*KV_SHORT)
    assert found.bottleneck == most_waited(found.best.shares) == "kv"
    assert gains(found)["kv"] > 0.5
    assert [gain.name for gain in found.purchases[:2]] == ["host", "worker"]
    host, worker = found.purchases[:2]
    assert host.gain > 0.3 and worker.gain > 0.1
    # 32 GB on the node that two workers of two GPUs fill; two GPUs and their share of a node's 16 GB.
    assert (host.month_cost, worker.month_cost) == (32 * 2, 2 * 1500 + 0.5 * 16 * 2)
    assert host.per_1000 == pytest.approx(host.gain * found.best.tokens_per_hour / 0.064)


def test_where_nothing_is_short_the_smallest_settings_win() -> None:
    found = ask(
        "search.async_factors=[1.0]", "search.slots=[8,16,32,64]", "search.sandbox_shares=[1.0]", "search.tie=0.02"
    )
    best = found.best.candidate
    assert best.l2_gb == 0.0 and best.slots == 8
    assert best.sandboxes == found.best.peak_sandboxes == 16
    assert found.bottleneck == most_waited(found.best.shares) == "environment"
    assert abs(gains(found)["kv"]) < 0.02 and abs(gains(found)["slots"]) < 0.02
    assert abs(sum(found.best.shares.values()) - 1) < 1e-9
    # 16 trajectories are in flight: more slots are all alike.
    assert [point.x for point in found.curves["slots"]] == [8, 16]


def test_the_same_question_has_the_same_answer_on_any_number_of_processes() -> None:
    quick = ("search.steps=2", "cluster.gpus=4")
    assert as_json(ask(*quick)) == as_json(ask(*quick, jobs=2))
    assert as_json(ask(*quick)) != as_json(ask(*quick, "seeds=[1]"))
