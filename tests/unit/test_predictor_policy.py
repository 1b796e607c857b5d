"""The predictor's answers in the policies: they change the order, by their record, and nothing without them."""

from __future__ import annotations

import msgspec
import pytest

from rollout.dispatcher import Dispatcher, DispatcherConfig
from rollout.policy.jobs import Job, JobGroup
from rollout.policy.lengths import OnlineLengths, TrueLengths
from rollout.policy.predictions import PredictedLengths
from rollout.policy.settings import PolicySettings
from rollout.replay import first_difference
from rollout.types import (
    POLICY_NAMES,
    AnyCommand,
    AnyEvent,
    Capabilities,
    EventRow,
    LengthEstimated,
    PriorityClass,
    PromptSubmitted,
    RunStarted,
    SetClass,
    Tick,
    TurnEnded,
    TurnReady,
    WorkerJoined,
)

LIVE = [name for name in POLICY_NAMES if name != "oracle"]


class Stage:
    """Three groups of one trajectory, batch 1, so that one group is critical; the log is what a replay reads."""

    def __init__(self, policy: str) -> None:
        settings = PolicySettings(name=policy, growth_tokens=500)
        self.config = DispatcherConfig(group_size=1, batch=1, async_factor=3.0, policy=settings)
        self.dispatcher = Dispatcher(self.config)
        self.rows: list[EventRow] = []
        self.send(RunStarted(version=0))
        capabilities = Capabilities(priority=True)
        self.send(WorkerJoined(worker="w0", slots=4, version=0, capabilities=capabilities, kv_tokens=100_000))
        for number in range(3):
            self.send(PromptSubmitted(prompt_id=f"p{number}", task_id="t", epoch=0))
        for number in range(3):
            self.send(TurnReady(trajectory_id=self.name(number), turn=1, context_tokens=50))
            self.send(
                TurnEnded(trajectory_id=self.name(number), turn=1, context_tokens=50, output_tokens=10, version=0)
            )

    @staticmethod
    def name(number: int) -> str:
        return f"p{number}.0.0.0"

    def send(self, event: AnyEvent) -> list[AnyCommand]:
        now = float(len(self.rows))
        commands = self.dispatcher.handle(event, now)
        self.dispatcher.audit()
        self.rows.append(EventRow(seq=len(self.rows), now=now, event=event, commands=commands))
        return commands

    def estimate(self, number: int, remaining: float, turn: int = 1) -> list[AnyCommand]:
        return self.send(
            LengthEstimated(trajectory_id=self.name(number), turn=turn, remaining_tokens=remaining, latency_s=0.1)
        )


def test_an_answer_makes_a_short_group_critical_and_a_replay_agrees() -> None:
    stage = Stage("paper")
    stage.estimate(0, 4000.0)
    commands = stage.estimate(2, 20.0)
    classes = {c.trajectory_id: c.priority for c in commands if isinstance(c, SetClass)}
    assert classes.pop(stage.name(2)) is PriorityClass.HIGH
    assert all(priority is PriorityClass.LOW for priority in classes.values())
    decoder = msgspec.json.Decoder(EventRow)
    written = [decoder.decode(msgspec.json.encode(row)) for row in stage.rows]
    assert first_difference(written, lambda: stage.config) == (len(stage.rows), None)
    without = [row for row in written if not isinstance(row.event, LengthEstimated)]
    with_tick = [*without, msgspec.structs.replace(written[-1], event=Tick())]
    assert first_difference(with_tick, lambda: stage.config)[1] is not None, "the answers are what decided"


@pytest.mark.parametrize("policy", LIVE)
def test_answers_that_are_late_or_of_nobody_change_nothing(policy: str) -> None:
    stage = Stage(policy)
    assert stage.estimate(0, 5.0, turn=0) == stage.estimate(0, 5.0, turn=2) == stage.estimate(9, 5.0) == []
    stage.send(TurnReady(trajectory_id=stage.name(0), turn=2, context_tokens=70))
    stage.send(TurnEnded(trajectory_id=stage.name(0), turn=2, context_tokens=70, output_tokens=9, version=0))
    assert stage.estimate(0, 5.0, turn=1) == []
    kept = [row for row in stage.rows if not isinstance(row.event, LengthEstimated)]
    assert first_difference(kept, lambda: stage.config) == (len(kept), None), "as if they had never come"


@pytest.mark.parametrize("policy", LIVE)
def test_answers_only_reorder(policy: str) -> None:
    """Every policy takes them; no trajectory is started twice, aborted or lost by them."""
    stage = Stage(policy)
    before = stage.dispatcher.statistics()
    for number, remaining in ((0, 1.0), (1, 1e6), (2, 40.0), (0, 9e5)):
        assert all(isinstance(command, SetClass) for command in stage.estimate(number, remaining))
    assert stage.dispatcher.statistics() == before


def job(name: str = "a", *, turns: int = 1, output: int = 10, context: int = 100) -> Job:
    made = Job(trajectory_id=name, group=JobGroup(order=0, group_id="g"), member=0, worker="w0")
    made.turns, made.output_tokens, made.context_tokens = turns, output, context
    return made


def test_without_answers_the_embedded_estimate_stands() -> None:
    alone, beside = OnlineLengths(growth_tokens=300), PredictedLengths(OnlineLengths(growth_tokens=300))
    for number in range(60):
        one = job(f"j{number}", turns=0, output=0, context=50 + number)
        for lengths in (alone, beside):
            lengths.observe(one)
            lengths.finished(one, 5 * number)
            lengths.dropped(one)
        assert alone.estimate(one) == beside.estimate(one)
    assert alone.samples == beside.samples


def test_a_prediction_falls_by_what_is_generated_and_is_forgotten_at_the_end() -> None:
    lengths = PredictedLengths(TrueLengths(lambda name: (10_000, 10_100)))
    lengths.predictor_error = 0.0
    one = job()
    lengths.predicted(one, 200.0)
    assert lengths.estimate(one)[0] == pytest.approx(200.0)
    one.output_tokens += 150
    assert lengths.estimate(one)[0] == pytest.approx(50.0)
    one.output_tokens += 100
    assert lengths.estimate(one)[0] == pytest.approx(1.0), "floor 1"
    lengths.dropped(one)
    assert lengths.estimate(one) == (10_000 - one.output_tokens, 10_100.0)


def test_the_context_grows_with_the_tokens() -> None:
    lengths = PredictedLengths(TrueLengths(lambda name: (1010, 3100)))
    lengths.predictor_error = 0.0
    one = job()
    assert lengths.estimate(one) == (1000.0, 3100.0)
    lengths.predicted(one, 500.0)
    assert lengths.estimate(one) == (pytest.approx(500.0), pytest.approx(100 + 1500))


@pytest.mark.parametrize(("said", "share"), [(90.0, 1.0), (3000.0, 0.0)])
def test_who_was_right_lately_weighs_more(said: float, share: float) -> None:
    """The embedded side says 1,000 for ends that are 90: a predictor that knows it takes over, a worse one does not."""
    lengths = PredictedLengths(TrueLengths(lambda name: (1010, 1100)))
    for number in range(400):
        one = job(f"j{number}")
        lengths.predicted(one, said)
        lengths.finished(one, 100)
        lengths.dropped(one)
    found = lengths.embedded_error / (lengths.embedded_error + lengths.predictor_error)
    assert abs(found - share) < 0.4 and (found > 0.5) == (share > 0.5)
    if share:
        assert lengths.predictor_error < 0.05
    assert not lengths._open, "nothing is kept of what has ended"
