"""SIGKILL of the coordinator at every kind of call, then resume from the toy actor's last checkpoint.

Over a finite list of tasks every prompt is trained exactly once, whenever and however often the coordinator dies.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from envclient.base.errors import WireError
from envclient.base.files import read_json, read_jsonl
from rollout.coordinator.ledger import Ledger, RunKey
from rollout.coordinator.source import TaskOrder
from tests.e2e.coordinator_world import CoordinatorProcess, ToyActor, ToyWorker, connected, play, toy_config, toy_tasks

TASKS = 8
KILLS = [
    ("/v1/worker/join", 1),
    ("/v1/worker/poll", 2),
    ("/v1/worker/poll", 9),
    ("/v1/actor/next_group", 2),
    ("/v1/actor/next_group", 5),
    ("/v1/actor/ack", 1),
    ("/v1/actor/ack", 4),
    ("/v1/actor/step", 1),
    ("/v1/actor/step", 2),
    ("/v1/actor/sync_begin", 1),
    ("/v1/actor/sync_begin", 2),
    ("/v1/actor/sync_end", 1),
    ("/v1/actor/sync_end", 2),
    ("/v1/actor/evaluate", 1),
]


class Killer:
    """Kills the coordinator during the n-th call of a path."""

    def __init__(self, process: CoordinatorProcess, path: str, number: int) -> None:
        self.process, self.path, self.left = process, path, number

    def __call__(self, path: str) -> None:
        if path == self.path:
            self.left -= 1
            if self.left == 0:
                self.process.kill()


async def live(
    process: CoordinatorProcess, checkpoint: int, every: int, killer: Callable[[str], None] = lambda path: None
) -> ToyActor:
    """One life of the run, until the source is drained or the coordinator dies."""
    async with connected(process.url, before_call=killer) as wire:
        actor = ToyActor(wire, steps=10**6, step=checkpoint, checkpoint=checkpoint, checkpoint_every=every)
        actor.evaluate_every = 2
        with contextlib.suppress(WireError):
            await play(actor, ToyWorker(wire, version=checkpoint))
        return actor


def key(seed: int = 0) -> RunKey:
    return RunKey(seed=seed, tasks=TaskOrder(toy_tasks(TASKS).train_ids(), seed).digest)


def run_with_kills(run_dir: Path, factor: float, kills: list[tuple[str, int]], every: int) -> list[tuple[int, str]]:
    """(step, prompt) of everything trained, by the ledger, after all lives."""
    config = toy_config(run_dir, steps=10**6, epochs=1, tasks=TASKS, async_factor=factor)
    checkpoint, resume_step = 0, -1
    for kill in [*kills, None]:
        process = CoordinatorProcess.start(run_dir, config, resume_step)
        try:
            killer = Killer(process, *kill) if kill else None
            actor = asyncio.run(live(process, checkpoint, every, killer or (lambda path: None)))
            if killer is None:
                assert process.end() == 0, process.log
            else:
                assert killer.left <= 0, "the run ended before the kill"
                assert not actor.drained
        finally:
            process.kill()
        checkpoint = resume_step = actor.checkpoint
        ledger = Ledger(run_dir / "ledger.sqlite", key(), "")
        identity = ledger.identity()
        trained = ledger.trained()
        ledger.close()
        assert identity.faults == ()
        if actor.drained:
            break
    assert actor.drained
    assert identity.counts["running"] == 0
    assert identity.counts["submitted"] == identity.counts["accepted"] == TASKS
    assert len({prompt for _, prompt in trained}) == len(trained) == TASKS
    assert read_json(run_dir / "summary.json")["ledger_ok"] is True
    steps = [row["step"] for row in read_jsonl(run_dir / "metrics.jsonl")]
    assert steps == list(range(1, trained[-1][0] + 1)), "every step is told once"
    return trained


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: f"{kill[0].rpartition('/')[2]}-{kill[1]}")
def test_killed_once_at_factor_one_the_same_batches_are_trained(tmp_path: Path, kill: tuple[str, int]) -> None:
    # Two groups a step in the stream's order: what an undisturbed run trains (the first test of the other kind).
    expected = [(step, f"p{position:06d}") for step in range(1, 5) for position in (2 * step - 2, 2 * step - 1)]
    assert run_with_kills(tmp_path / "run", 1.0, [kill], every=1) == expected


def test_undisturbed(tmp_path: Path) -> None:
    trained = run_with_kills(tmp_path / "run", 1.0, [], every=1)
    assert Counter(step for step, _ in trained) == {1: 2, 2: 2, 3: 2, 4: 2}
    assert sorted(prompt for _, prompt in trained) == [f"p{n:06d}" for n in range(TASKS)]
    assert trained == sorted(trained, key=lambda pair: pair[1])


@pytest.mark.parametrize("factor", [1.5, 2.0])
def test_killed_again_and_again_with_rare_checkpoints(tmp_path: Path, factor: float) -> None:
    kills = [("/v1/actor/step", 2), ("/v1/worker/poll", 7), ("/v1/actor/ack", 5), ("/v1/actor/sync_end", 2)]
    run_with_kills(tmp_path / "run", factor, kills, every=2)
