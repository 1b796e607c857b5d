"""Kill any role of a run: it ends with the role's last words, leaves nothing behind, and resumes soundly."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from envclient.base.files import read_jsonl
from tests.e2e.launched import SCRIPTED, Launched, alive, check_account, wait_until

STEPS = 3


def mounts() -> list[str]:
    return Path("/proc/self/mounts").read_text().splitlines()


def leftovers_end(before: set[tuple[int, int]], mounts_before: list[str]) -> None:
    wait_until(lambda: not alive(before), 30.0, f"processes {alive(before)} are left")
    assert mounts() == mounts_before


@pytest.mark.timeout(240)
@pytest.mark.parametrize("role", ["environment", "coordinator", "worker", "torchrun", "rank"])
def test_a_killed_role_ends_the_run_and_it_resumes(role: str, tmp_path: Path) -> None:
    mounted = mounts()
    with Launched(tmp_path, *SCRIPTED, f"steps={STEPS}") as run:
        run.wait_steps(1)
        processes = run.processes()
        os.kill(run.pid_of(role), signal.SIGKILL)
        assert run.wait(30.0) == 2
        leftovers_end(processes, mounted)
        named = {"torchrun": "actor", "rank": "actor", "worker": "worker-w0"}.get(role, role)
        assert f"error: {named} ended with" in run.text and "last log lines" in run.text
    with Launched(tmp_path, *SCRIPTED, f"steps={STEPS}", "resume=auto") as run:
        assert run.wait(150.0) == 0, run.text
        summary = run.summary()
        check_account(summary)
        assert summary["steps"] == STEPS and summary["groups_trained"] == 2 * STEPS
        assert [row["step"] for row in run.metrics()] == list(range(1, STEPS + 1))
        leftovers_end(processes, mounted)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_ended_launcher_leaves_nothing(signum: signal.Signals, tmp_path: Path) -> None:
    mounted = mounts()
    with Launched(tmp_path, *SCRIPTED, "steps=50") as run:
        run.wait_steps(1)
        processes = run.processes()
        assert len(processes) > 6
        run.process.send_signal(signum)
        assert run.wait(30.0) == (-signal.SIGKILL if signum == signal.SIGKILL else 130)
        leftovers_end(processes, mounted)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("factor", "ranks", "workers"), [(1.0, 2, 1), (1.5, 1, 2), (2.0, 2, 2)])
def test_factors_ranks_and_workers(factor: float, ranks: int, workers: int, tmp_path: Path) -> None:
    overrides = [f"async_factor={factor}", f"actor.ranks={ranks}", f"rollout.worker.count={workers}"]
    with Launched(tmp_path, *SCRIPTED, f"steps={STEPS}", *overrides) as run:
        assert run.wait(200.0) == 0, run.text
        check_account(run.summary())
        rows = run.metrics()
    assert [row["weight_version"] for row in rows] == list(range(1, STEPS + 1))
    assert all(row["staleness/span_max"] <= 2 for row in rows)
    if factor == 1.0:
        assert all(row["staleness/span_max"] == 1 for row in rows)
    events = read_jsonl(tmp_path / "quickstart/events.jsonl")
    trained = [c["group_id"] for e in events for c in e["commands"] if c["command"] == "close_prompt"]
    assert len(trained) == len(set(trained)) >= 2 * STEPS
    takers = {e["event"]["replica"] for e in events if e["event"]["event"] == "group_acknowledged"}
    assert takers <= set(range(ranks))
