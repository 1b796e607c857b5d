"""The ledger keeps its promises, and says so when somebody else broke them."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from envclient.base.errors import ConfigError, InvariantError
from rollout.coordinator.ledger import Ledger, RunKey
from rollout.types import (
    AnyCommand,
    AnyEvent,
    ClosePrompt,
    EventRow,
    PriorityClass,
    PromptStatus,
    PromptSubmitted,
    Purpose,
    StartTrajectory,
    StepFinished,
    Tick,
    TrajectoryEnded,
    TrajectoryStatus,
)

KEY = RunKey(seed=1, tasks="digest")


def row(event: AnyEvent, *commands: AnyCommand, seq: int = 0) -> EventRow:
    return EventRow(seq=seq, now=0.0, event=event, commands=list(commands))


def submit(n: int) -> EventRow:
    order = StartTrajectory(
        worker="w",
        trajectory_id=f"p{n:06d}.0.0.0",
        group_id=f"p{n:06d}.0",
        task_id=f"t{n}",
        purpose=Purpose.TRAIN,
        priority=PriorityClass.LOW,
    )
    return row(PromptSubmitted(prompt_id=f"p{n:06d}", task_id=f"t{n}", epoch=0), order)


def close(n: int, status: PromptStatus, step: int = -1) -> ClosePrompt:
    return ClosePrompt(prompt_id=f"p{n:06d}", group_id=f"p{n:06d}.0", status=status, cause="why", step=step)


def ledger_at(path: Path, *rows: EventRow) -> Ledger:
    ledger = Ledger(path, KEY, "run7")
    ledger.resume(0)
    for one in rows:
        ledger.commit([one])
    return ledger


def two_steps(path: Path) -> Ledger:
    """Prompts 0 and 1 trained in steps 1 and 2, 2 filtered before step 1, 3 after step 2, 4 running."""
    return ledger_at(
        path,
        *(submit(n) for n in range(5)),
        row(Tick(), close(2, PromptStatus.FILTERED)),
        row(StepFinished(step=1), close(0, PromptStatus.ACCEPTED, 1)),
        row(StepFinished(step=2), close(1, PromptStatus.ACCEPTED, 2)),
        row(Tick(), close(3, PromptStatus.FAILED)),
    )


def test_counts_and_trained_groups(tmp_path: Path) -> None:
    ledger = two_steps(tmp_path / "l")
    identity = ledger.identity()
    assert identity.ledger_ok
    assert identity.counts == ledger.counts
    assert identity.counts == {
        "running": 1, "accepted": 2, "filtered": 1, "failed": 1, "discarded": 0, "submitted": 5
    }  # fmt: skip
    assert ledger.trained() == [(1, "p000000"), (2, "p000001")]
    assert ledger.last_step == 2


@pytest.mark.parametrize(
    ("step", "requeued", "accepted"),
    [(2, [4], 2), (1, [1, 3, 4], 1), (0, [0, 1, 3, 4], 0)],
)
def test_resume_undoes_what_came_after_the_checkpoint(
    tmp_path: Path, step: int, requeued: list[int], accepted: int
) -> None:
    two_steps(tmp_path / "l").close()
    ledger = Ledger(tmp_path / "l", KEY, "another")
    started = ledger.resume(step)
    assert started.version == step
    assert started.requeued == [(f"p{n:06d}", f"t{n}") for n in requeued]
    assert started.next_attempt == 1
    assert ledger.run_id == "run7"
    assert ledger.identity().ledger_ok
    assert ledger.counts["accepted"] == accepted
    assert ledger.counts["running"] == len(requeued)
    assert ledger.resume(step).next_attempt == 2


def test_a_resume_voids_the_trajectories_of_requeued_prompts(tmp_path: Path) -> None:
    two_steps(tmp_path / "l").close()
    Ledger(tmp_path / "l", KEY, "x").resume(1)
    statuses = dict(sqlite3.connect(tmp_path / "l").execute("SELECT prompt_id, status FROM trajectories"))
    assert statuses["p000001"] == statuses["p000004"] == "voided"
    assert statuses["p000000"] == "left"


def test_a_report_fills_the_trajectory_once(tmp_path: Path) -> None:
    def report(reward: float) -> EventRow:
        return row(
            TrajectoryEnded(
                trajectory_id="p000000.0.0.0",
                worker="w",
                status=TrajectoryStatus.FINISHED,
                reward=reward,
                first_version=3,
                last_version=4,
                generated_tokens=17,
                turns=2,
            )
        )

    ledger_at(tmp_path / "l", submit(0), report(1.0), report(0.5)).close()
    stored = sqlite3.connect(tmp_path / "l").execute(
        "SELECT status, reward, first_version, last_version, generated_tokens, turns FROM trajectories"
    )
    assert stored.fetchall() == [("finished", 1.0, 3, 4, 17, 2)]


@pytest.mark.parametrize(
    "bad",
    [submit(0), row(Tick(), close(0, PromptStatus.FAILED)), row(Tick(), close(9, PromptStatus.FAILED))],
    ids=["submitted twice", "closed twice", "never submitted"],
)
def test_a_batch_that_contradicts_the_ledger_leaves_no_trace(tmp_path: Path, bad: EventRow) -> None:
    ledger = ledger_at(tmp_path / "l", submit(0), row(StepFinished(step=1), close(0, PromptStatus.ACCEPTED, 1)))
    before = ledger.identity()
    with pytest.raises(InvariantError, match=r"p00000[09]"):
        ledger.commit([submit(1), bad])
    assert ledger.identity() == before
    assert ledger.counts == before.counts
    ledger.commit([submit(1)])
    assert ledger.counts["submitted"] == 2


@pytest.mark.parametrize(
    ("tampering", "fault"),
    [
        ("UPDATE prompts SET step = 2 WHERE prompt_id = 'p000000'", "match"),
        ("INSERT INTO trained VALUES (2, 'p000000.0', 'p000000')", "two optimizer steps"),
        ("INSERT INTO trained VALUES (2, 'p000004.0', 'p000004')", "match"),
        ("DELETE FROM prompts WHERE prompt_id = 'p000002'", "submitted"),
        ("UPDATE prompts SET status = 'accepted' WHERE prompt_id = 'p000004'", "match"),
        ("UPDATE prompts SET status = 'lost' WHERE prompt_id = 'p000004'", "submitted"),
        ("DELETE FROM steps WHERE step = 1", "gaps"),
        ("UPDATE trajectories SET status = 'running'", "closed prompts"),
    ],
)
def test_identity_finds_what_does_not_add_up(tmp_path: Path, tampering: str, fault: str) -> None:
    ledger = two_steps(tmp_path / "l")
    with sqlite3.connect(tmp_path / "l") as other:
        other.execute(tampering)
    identity = ledger.identity()
    assert not identity.ledger_ok
    assert any(fault in line for line in identity.faults), identity.faults


@pytest.mark.parametrize(
    ("key", "word"), [(RunKey(seed=2, tasks="digest"), "run.seed"), (RunKey(seed=1, tasks="other"), "training tasks")]
)
def test_another_seed_or_task_list_is_refused(tmp_path: Path, key: RunKey, word: str) -> None:
    two_steps(tmp_path / "l").close()
    with pytest.raises(ConfigError, match=word):
        Ledger(tmp_path / "l", key, "x")


def test_a_full_disk_is_reported_as_such(tmp_path: Path) -> None:
    ledger = ledger_at(tmp_path / "ledger.sqlite")
    pages = ledger._db.execute("PRAGMA page_count").fetchone()[0]
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(sqlite3.OperationalError, match="full"):
        ledger.commit([submit(n) for n in range(200)])
    assert ledger.counts["submitted"] == 0
    ledger._db.execute(f"PRAGMA max_page_count = {1000 * pages}")
    ledger.commit([submit(0)])
    assert ledger.identity().ledger_ok


def test_a_checkpoint_that_the_ledger_does_not_know_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="step 3"):
        two_steps(tmp_path / "l").resume(3)


def test_events_without_meaning_for_prompts_cost_no_transaction(tmp_path: Path) -> None:
    ledger = two_steps(tmp_path / "l")
    before = ledger.last_event
    ledger.commit([row(Tick(), seq=99)])
    assert ledger.last_event == before
    ledger.commit([EventRow(seq=100, now=0.0, event=submit(5).event, commands=[])])
    assert ledger.last_event == 100
