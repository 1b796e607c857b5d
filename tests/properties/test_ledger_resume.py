"""The ledger under kills: a random run of the real dispatcher, stopped between any two transactions and resumed."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.coordinator.ledger import Ledger, RunKey
from rollout.coordinator.source import TaskOrder
from rollout.dispatcher import Dispatcher, DispatcherConfig
from rollout.types import (
    AbortTrajectory,
    AnyEvent,
    Capabilities,
    CloseBatch,
    DeliverGroup,
    EventRow,
    FetchPrompts,
    GrantSync,
    GroupAcknowledged,
    GroupRequested,
    PauseWorker,
    PromptStatus,
    ResumeWorker,
    SourceExhausted,
    StartTrajectory,
    StepFinished,
    StopRun,
    SyncFinished,
    SyncRequested,
    TrajectoryEnded,
    TrajectoryStatus,
    WeightsAcknowledged,
    WorkerJoined,
    WorkerPaused,
)

EXAMPLES = 2000 if os.environ.get("VENUS_LONG") else 150
KEY = RunKey(seed=1, tasks="digest")


class World:
    """One life of a coordinator: the dispatcher, the ledger, a worker and an actor, all in this thread."""

    def __init__(self, path: Path, config: DispatcherConfig, tasks: int, step: int, rng: random.Random) -> None:
        self.rng = rng
        self.dispatcher = Dispatcher(config)
        self.ledger = Ledger(path, KEY, "run")
        self.source = TaskOrder([f"t{i}" for i in range(tasks)], seed=3, epochs=1)
        started = self.ledger.resume(step)
        assert self.ledger.identity().faults == ()
        self.position = self.ledger.next_position
        self.seq = 0
        self.running: dict[str, int] = {}
        self.version = step
        self.checkpoint = step
        self.drained = False
        self.inbox: list[AnyEvent] = [
            started,
            WorkerJoined(worker="w", slots=4, version=step, capabilities=Capabilities()),
        ]
        self.inbox.append(GroupRequested(step=step + 1, replica=0))

    def live(self, transactions: int) -> bool:
        """Run until drained (True) or until `transactions` batches are durable (False)."""
        for _ in range(transactions):
            self._one_batch()
            if self.drained:
                return True
            assert self.inbox or self.running, "the world is stuck"
        return False

    def _one_batch(self) -> None:
        rows: list[EventRow] = []
        for _ in range(self.rng.randint(1, 4)):
            if self.running and (not self.inbox or self.rng.random() < 0.7):
                event: AnyEvent = self._end(self.rng.choice(sorted(self.running)))
            elif self.inbox:
                event = self.inbox.pop(0)
            else:
                break
            self._decide(event, rows)
        self.ledger.commit(rows)
        for row in rows:
            self._act(row)

    def _decide(self, event: AnyEvent, rows: list[EventRow]) -> None:
        pending = [event]
        while pending:
            event = pending.pop(0)
            commands = self.dispatcher.handle(event, float(self.seq))
            rows.append(EventRow(seq=self.seq, now=float(self.seq), event=event, commands=commands))
            self.seq += 1
            for command in commands:
                if isinstance(command, FetchPrompts):
                    for _ in range(command.count):
                        prompt = self.source.at(self.position)
                        pending.append(prompt or SourceExhausted())
                        self.position += prompt is not None

    def _end(self, trajectory_id: str) -> TrajectoryEnded:
        first = self.running.pop(trajectory_id)
        status = self.rng.choices(
            [TrajectoryStatus.FINISHED, TrajectoryStatus.FAILED, TrajectoryStatus.TRUNCATED], [8, 1, 1]
        )[0]
        return TrajectoryEnded(
            trajectory_id=trajectory_id,
            worker="w",
            status=status,
            reward=float(self.rng.randint(0, 1)),
            first_version=first,
            last_version=self.version,
            generated_tokens=5,
            turns=2,
        )

    def _act(self, row: EventRow) -> None:
        for command in row.commands:
            match command:
                case StartTrajectory():
                    self.running[command.trajectory_id] = self.version
                case AbortTrajectory():
                    if self.running.pop(command.trajectory_id, None) is not None:
                        self.inbox.append(
                            TrajectoryEnded(
                                trajectory_id=command.trajectory_id,
                                worker="w",
                                status=command.status,
                                reward=0.0,
                                first_version=-1,
                                last_version=-1,
                                generated_tokens=0,
                                turns=0,
                            )
                        )
                case DeliverGroup():
                    self.inbox.append(
                        GroupAcknowledged(step=command.step, replica=0, group_id=command.group_id, tokens=9)
                    )
                    self.inbox.append(GroupRequested(step=command.step, replica=0))
                case CloseBatch():
                    if command.counts.groups:
                        self.inbox.append(StepFinished(step=command.step))
                        self.inbox.append(SyncRequested(version=command.step))
                case PauseWorker():
                    self.inbox.append(WorkerPaused(worker="w", version=command.version))
                case GrantSync():
                    self.inbox.append(SyncFinished(version=command.version))
                case ResumeWorker():
                    self.version = command.version
                    self.inbox.append(WeightsAcknowledged(worker="w", version=command.version))
                    self.inbox.append(GroupRequested(step=command.version + 1, replica=0))
                    if self.rng.random() < 0.5:
                        self.checkpoint = command.version
                case StopRun():
                    assert command.cause == "", command.cause
                    self.drained = True


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    lives=st.lists(st.integers(1, 60), max_size=6),
    factor=st.sampled_from([1.0, 1.5, 2.0]),
    batch=st.integers(1, 3),
    size=st.integers(1, 3),
    tasks=st.integers(1, 12),
    filtered=st.booleans(),
)
def test_a_run_killed_between_transactions_trains_every_prompt_once(
    seed: int, lives: list[int], factor: float, batch: int, size: int, tasks: int, filtered: bool
) -> None:
    rng = random.Random(seed)
    config = DispatcherConfig(
        group_size=size, batch=batch, async_factor=factor, filter_zero_variance=filtered and size > 1
    )
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        path = Path(folder) / "ledger.sqlite"
        checkpoint = 0
        for life in [*lives, 10**6]:
            world = World(path, config, tasks, checkpoint, rng)
            drained = world.live(life)
            identity = world.ledger.identity()
            assert identity.faults == ()
            total = sum(identity.counts[status.value] for status in PromptStatus)
            assert total == identity.counts["submitted"]
            trained = world.ledger.trained()
            world.ledger.close()
            checkpoint = world.checkpoint
            if drained:
                break
        assert drained
        assert identity.counts["submitted"] == tasks
        assert identity.counts["running"] == 0
        prompts = [prompt for _, prompt in trained]
        assert len(set(prompts)) == len(prompts) == identity.counts["accepted"]


@settings(max_examples=EXAMPLES // 3, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(1, 40), epochs=st.integers(1, 3))
def test_the_order_of_tasks_is_a_permutation_an_epoch_and_needs_no_memory(seed: int, count: int, epochs: int) -> None:
    tasks = [f"t{i}" for i in range(count)]
    order = TaskOrder(tasks, seed, epochs)
    for epoch in range(epochs):
        prompts = [order.at(epoch * count + i) for i in range(count)]
        assert sorted(p.task_id for p in prompts if p) == sorted(tasks)
        assert {p.epoch for p in prompts if p} == {epoch}
    assert order.at(count * epochs) is None
    anew = TaskOrder(tasks, seed, epochs)
    for position in random.Random(seed).sample(range(count * epochs), min(count * epochs, 9)):
        assert anew.at(position) == order.at(position)
