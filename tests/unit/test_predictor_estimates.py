"""Questions to the predictor: asked while tools run, never waited for, and counted whatever becomes of them."""

from __future__ import annotations

import asyncio
from typing import Any

from envclient.base.errors import WireError
from rollout.policy.slots import make_slots
from rollout.predictor.data import window
from rollout.protocol import PredictReply, PredictRequest
from rollout.types import LengthEstimated, Trajectory, TurnEnded
from rollout.worker.agent_loop import AgentLoop
from rollout.worker.estimates import Estimates
from rollout.worker.scheduler import SlotScheduler
from tests.unit.test_worker_agent_loop import stops_after
from tests.unit.worker_kit import ToyAgent, order, run


class ToyPredictor:
    """Takes the client's place: answers 100 less the tokens it is sent; `mode` is what it does instead."""

    def __init__(self, mode: str = "answers") -> None:
        self.mode = mode
        self.asked: list[PredictRequest] = []
        self.cancelled = 0

    async def call(self, path: str, request: PredictRequest, reply: Any, *, timeout_s: float) -> PredictReply:
        assert path == "/v1/predict"
        self.asked.append(request)
        if self.mode == "hangs":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if self.mode == "fails":
            raise WireError("predictor is gone")
        return PredictReply(remaining_tokens=None if self.mode == "untrained" else 100.0 - len(request.token_ids))


class Scene:
    """One episode of three turns on a scripted engine, with a predictor that may do anything."""

    def __init__(self, mode: str = "answers", *, most: int = 8, context_tokens: int = 200) -> None:
        self.now = 0.0
        self.predictor = ToyPredictor(mode)
        self.reports: list[Any] = []
        self.estimates = Estimates(
            self.predictor,  # type: ignore[arg-type]
            self.reports.append,
            context_tokens=context_tokens,
            timeout_s=1.0,
            most=most,
            clock=lambda: self.now,
        )

    def play(self, agent: ToyAgent | None = None) -> Trajectory:
        async def scenario() -> Trajectory:
            engine = stops_after(2)
            await engine.start()
            scheduler = SlotScheduler(engine, make_slots("action", 4), version=0, temperature=1.0)
            loop = AgentLoop(
                agent or ToyAgent(turns=3),
                scheduler,
                context_length=200,
                report_turn=self.reports.append,
                estimates=self.estimates,
            )
            return await loop.run(order())

        result: Trajectory = run(scenario())
        return result


def counts(trajectory: Trajectory) -> tuple[float, ...]:
    return tuple(trajectory.stats[f"estimates_{name}"] for name in ("asked", "used", "in_time", "lost"))


def test_every_turn_is_asked_about_with_its_context() -> None:
    scene = Scene()
    trajectory = scene.play()
    ids = trajectory.prompt_ids + trajectory.response_ids
    assert [(q.turn, q.token_ids) for q in scene.predictor.asked] == [(1, ids[:5]), (2, ids[:11]), (3, ids[:17])]
    # The last turn ends the episode before its answer; the other two are reported after their turns.
    answers = [(type(report), report.turn) for report in scene.reports]
    assert answers == [(TurnEnded, 1), (LengthEstimated, 1), (TurnEnded, 2), (LengthEstimated, 2), (TurnEnded, 3)] or (
        answers[-1] == (LengthEstimated, 3)
    )
    estimate = scene.reports[1]
    assert (estimate.trajectory_id, estimate.remaining_tokens) == (trajectory.trajectory_id, 95.0)
    asked, used, _, lost = counts(trajectory)
    assert asked == 3.0 and used + lost == 3.0


def test_of_a_long_context_only_what_is_read_is_sent() -> None:
    scene = Scene(context_tokens=8)
    trajectory = scene.play()
    ids = trajectory.prompt_ids + trajectory.response_ids
    assert [q.token_ids for q in scene.predictor.asked] == [ids[:5], window(ids[:11], 8), window(ids[:17], 8)]
    assert all(len(q.token_ids) <= 8 for q in scene.predictor.asked)


def test_nobody_waits_for_a_predictor_that_hangs() -> None:
    scene = Scene("hangs")
    trajectory = scene.play()
    assert (trajectory.turns, trajectory.reward) == (3, 1.0)
    assert counts(trajectory) == (3.0, 0.0, 0.0, 3.0)
    assert scene.predictor.cancelled >= 2, "a question that the next turn overtakes is withdrawn"
    assert all(isinstance(report, TurnEnded) for report in scene.reports)


def test_one_that_fails_is_left_alone_for_longer_and_longer() -> None:
    scene = Scene("fails")
    assert counts(scene.play()) == (1.0, 0.0, 0.0, 1.0)
    assert scene.estimates.statistics() == {
        "asked": 1.0,
        "lost": 1.0,
        "skipped": 2.0,
        "tool_p50_s": 0.0,
        "tool_p95_s": 0.0,
    }
    asked = []
    for second in range(1, 41):
        scene.now = float(second)
        before = len(scene.predictor.asked)
        scene.play()
        asked += [second] * (len(scene.predictor.asked) > before)
    assert asked == [1, 3, 7, 15, 31], "after 1, 2, 4, 8, 16 seconds"
    scene.predictor.mode = "answers"
    scene.now = 100.0
    assert counts(scene.play())[:2] >= (3.0, 2.0)


def test_an_untrained_one_is_asked_again_later() -> None:
    scene = Scene("untrained")
    assert counts(scene.play()) == (1.0, 0.0, 0.0, 1.0)


def test_questions_beyond_the_limit_are_skipped() -> None:
    scene = Scene(most=0)
    assert counts(scene.play()) == (0.0, 0.0, 0.0, 0.0)
    assert scene.estimates.statistics()["skipped"] == 3.0


def test_seconds_of_answers_and_tools_are_measured_apart() -> None:
    async def scenario() -> None:
        scene = Scene()
        scene.estimates.ask("a", 1, [1, 2])
        scene.now = 0.25
        await asyncio.sleep(0.01)
        scene.now = 2.0
        scene.estimates.tool_returned("a")
        scene.estimates.ask("a", 2, [1, 2, 3])
        scene.now = 3.0
        scene.estimates.tool_returned("a")
        await asyncio.sleep(0.01)
        assert [report.latency_s for report in scene.reports] == [0.25, 1.0]
        assert scene.estimates.take("a") == {
            "estimates_asked": 2.0,
            "estimates_used": 2.0,
            "estimates_in_time": 1.0,
            "estimates_lost": 0.0,
        }
        numbers = scene.estimates.statistics()
        assert (numbers["answer_p50_s"], numbers["tool_p50_s"]) == (0.625, 1.5)
        assert set(scene.estimates.take("a").values()) == {0.0}

    run(scenario())
