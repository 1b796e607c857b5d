"""The agent loop on a scripted engine: tokens, masks and spans agree whatever interrupts; every end frees the lease."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envclient.base.errors import ConfigError, InvariantError, WireError
from rollout.adapters.scripted_engine import ScriptedEngine
from rollout.protocol import GenerateRequest, Generation
from rollout.types import StartTrajectory, Trajectory, TrajectoryStatus, TurnEnded
from rollout.worker.agent_loop import EngineFailed
from tests.unit.worker_kit import STOP, ToyAgent, make_loop, order, run, until


async def play(agent: ToyAgent, engine: ScriptedEngine | None = None, *, context_length: int = 200) -> Trajectory:
    engine = engine or ScriptedEngine()
    await engine.start()
    loop, _ = make_loop(engine, agent, context_length=context_length)
    return await loop.run(order())


def check(trajectory: Trajectory, agent: ToyAgent) -> None:
    """Lengths agree, spans cover the mask's ones, and the response is exactly what was sampled and observed."""
    length = len(trajectory.response_ids)
    assert length == len(trajectory.loss_mask) == len(trajectory.logprobs)
    covered = [0] * length
    for span in trajectory.spans:
        covered[span.start : span.end] = [1] * (span.end - span.start)
    assert covered == trajectory.loss_mask
    assert sum(s.end - s.start for s in trajectory.spans) == sum(trajectory.loss_mask)
    assert [s.version for s in trajectory.spans] == sorted(s.version for s in trajectory.spans)
    assert all(lp == 0.0 for lp, m in zip(trajectory.logprobs, trajectory.loss_mask, strict=True) if not m)
    rebuilt: list[int] = []
    for number, action in enumerate(agent.actions.get(trajectory.trajectory_id, [])):
        rebuilt += agent.observation if number else []
        rebuilt += action
    assert trajectory.response_ids[: len(rebuilt)] == rebuilt


def stops_after(count: int) -> ScriptedEngine:
    """Every turn is `count` tokens and a stop token."""

    def next_token(request: object, context: list[int]) -> int:
        tail = 0
        while context and context[-1] == 11:
            tail, context = tail + 1, context[:-1]
        return STOP if tail >= count else 11

    return ScriptedEngine(next_token=next_token)


def test_an_episode_is_recorded_as_sampled() -> None:
    agent = ToyAgent(turns=2)
    turns: list[TurnEnded] = []

    async def scenario() -> Trajectory:
        engine = stops_after(2)
        await engine.start()
        loop, _ = make_loop(engine, agent, report=turns.append)
        return await loop.run(order())

    trajectory = run(scenario())
    assert trajectory.status is TrajectoryStatus.FINISHED
    assert trajectory.prompt_ids == [5, 6]
    assert trajectory.response_ids == [11, 11, STOP, 7, 8, 9, 11, 11, STOP]
    assert trajectory.loss_mask == [1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert [(s.start, s.end, s.version) for s in trajectory.spans] == [(0, 3, 0), (6, 9, 0)]
    assert (trajectory.turns, trajectory.reward, trajectory.generated_tokens) == (2, 1.0, 6)
    assert [(t.turn, t.context_tokens, t.output_tokens) for t in turns] == [(1, 2, 3), (2, 8, 3)]
    assert trajectory.stats["tool_calls"] == 2.0
    assert trajectory.stats["sent_tokens"] == 2 + 8
    assert trajectory.stats["cached_tokens"] == 5
    check(trajectory, agent)


@pytest.mark.parametrize("silent", [1, 2])
def test_a_turn_without_a_token_is_a_turn(silent: int) -> None:
    """The engine ends the `silent`-th turn at once."""
    agent = ToyAgent(turns=2)
    turns: list[TurnEnded] = []

    class Silent(ScriptedEngine):
        asked = 0

        async def generate(self, request: GenerateRequest) -> Generation:
            self.asked += 1
            if self.asked == silent:
                return Generation(token_ids=[], logprobs=[], finish_reason="stop", cached_tokens=0)
            return await super().generate(request)

    async def scenario() -> Trajectory:
        engine = Silent(next_token=lambda request, context: STOP)
        await engine.start()
        loop, _ = make_loop(engine, agent, report=turns.append, version=3)
        return await loop.run(order())

    trajectory = run(scenario())
    assert (trajectory.status, trajectory.turns) == (TrajectoryStatus.FINISHED, 2)
    assert trajectory.response_ids == ([7, 8, 9, STOP] if silent == 1 else [STOP, 7, 8, 9])
    assert [(t.output_tokens, t.version) for t in turns] == ([(0, 3), (1, 3)] if silent == 1 else [(1, 3), (0, 3)])
    check(trajectory, agent)


@settings(max_examples=80, deadline=None)
@given(
    aborts=st.lists(st.integers(0, 12), max_size=8),
    members=st.integers(1, 5),
    slots=st.integers(1, 3),
    policy=st.sampled_from(["action", "trajectory"]),
    seed=st.integers(0, 99),
)
def test_any_number_of_updates_changes_no_token_and_loses_none(
    aborts: list[int], members: int, slots: int, policy: str, seed: int
) -> None:
    """Pauses at any moment: what is trained equals the undisturbed run's, only the spans tell of the versions."""

    async def scenario(interrupt: list[int]) -> tuple[list[Trajectory], ToyAgent]:
        agent = ToyAgent(turns=4)
        engine = ScriptedEngine(seed=seed, stop_every=4)
        await engine.start()
        loop, scheduler = make_loop(engine, agent, slots=slots, policy=policy)
        playing = [asyncio.ensure_future(loop.run(order(f"p0.0.{i}.0"))) for i in range(members)]
        for version, steps in enumerate(interrupt, 1):
            for _ in range(steps):
                await asyncio.sleep(0)
            await scheduler.pause()
            assert scheduler.statistics()["in_engine"] == 0
            await asyncio.sleep(0)
            scheduler.resume(version)
        trajectories = await asyncio.gather(*playing)
        assert scheduler.statistics() | {"version": 0} == {
            "running": 0,
            "waiting": 0,
            "held": 0,
            "in_engine": 0,
            "version": 0,
        }
        return trajectories, agent

    disturbed, agent = run(scenario(aborts))
    calm, _ = run(scenario([]))
    for one, other in zip(disturbed, calm, strict=True):
        check(one, agent)
        assert (one.response_ids, one.loss_mask, one.logprobs) == (other.response_ids, other.loss_mask, other.logprobs)
        assert one.status == other.status
    assert agent.opened == agent.closed


def test_a_turn_that_straddles_an_update_holds_two_spans() -> None:
    async def scenario() -> Trajectory:
        agent = ToyAgent(turns=1, max_new_tokens=10)
        tokens = asyncio.Semaphore(0)

        async def sleep(_: float) -> None:
            await tokens.acquire()

        engine = stops_after(5)
        engine._sleep = sleep
        await engine.start()
        loop, scheduler = make_loop(engine, agent)
        playing = asyncio.ensure_future(loop.run(order()))
        for _ in range(3):
            tokens.release()
        for _ in range(30):
            await asyncio.sleep(0)
        assert not tokens._value
        pausing = asyncio.ensure_future(scheduler.pause())
        await asyncio.sleep(0)
        for _ in range(9):
            tokens.release()
        await pausing
        scheduler.resume(1)
        return await playing

    trajectory = run(scenario())
    assert trajectory.response_ids == [11] * 5 + [STOP]
    assert [(s.start, s.end, s.version) for s in trajectory.spans] == [(0, 3, 0), (3, 6, 1)]


def test_a_turn_cut_by_its_length_is_truncated_and_scored() -> None:
    agent = ToyAgent(max_new_tokens=4)
    trajectory = run(play(agent, stops_after(9)))
    assert (trajectory.status, trajectory.stop_reason) == (TrajectoryStatus.TRUNCATED, "turn length")
    assert trajectory.response_ids == [11] * 4
    assert agent.scored == {"p000000.0.0.0": (TrajectoryStatus.TRUNCATED, "turn length")}
    assert agent.actions == {}


@pytest.mark.parametrize("context_length", range(1, 24))
def test_the_context_limit_truncates_and_is_never_passed(context_length: int) -> None:
    agent = ToyAgent(turns=9)
    trajectory = run(play(agent, stops_after(2), context_length=context_length))
    assert (trajectory.status, trajectory.stop_reason) == (TrajectoryStatus.TRUNCATED, "context length")
    assert len(trajectory.prompt_ids) + len(trajectory.response_ids) <= context_length
    assert not trajectory.loss_mask or trajectory.loss_mask[-1] == 1
    check(trajectory, agent)


@pytest.mark.parametrize("step", ["open", "act", "score"])
@pytest.mark.parametrize("error", [WireError("sandbox is gone"), ZeroDivisionError("agent bug")])
def test_a_failing_environment_or_agent_is_failed_with_its_cause(step: str, error: Exception) -> None:
    agent = ToyAgent(fail_at=step, error=error)
    trajectory = run(play(agent, stops_after(1)))
    assert (trajectory.status, trajectory.reward) == (TrajectoryStatus.FAILED, 0.0)
    assert str(error) in trajectory.stop_reason
    assert agent.closed == agent.opened
    check(trajectory, agent)


def test_a_close_that_fails_or_hangs_does_not_spoil_the_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout.worker.agent_loop._CLOSE_S", 0.05)
    for agent in (ToyAgent(fail_at="close"), ToyAgent(hang_at="close")):
        assert run(play(agent, stops_after(1))).status is TrajectoryStatus.FINISHED


@pytest.mark.parametrize("error", [ConfigError("no task 'x'"), InvariantError("log-probs are wrong")])
def test_what_is_not_the_trajectorys_fault_ends_the_worker(error: Exception) -> None:
    with pytest.raises(type(error)):
        run(play(ToyAgent(fail_at="open", error=error)))


def test_a_dead_engine_is_told_from_a_failed_sandbox() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(token_s=0.01)
        await engine.start()
        agent = ToyAgent()
        loop, _ = make_loop(engine, agent)
        playing = asyncio.ensure_future(loop.run(order()))
        await until(lambda: bool(engine._running))
        engine.die("out of memory")
        with pytest.raises(EngineFailed):
            await playing
        assert agent.closed == agent.opened

    run(scenario())


@pytest.mark.parametrize("moment", ["open", "generate", "wait", "act", "score"])
def test_cancellation_frees_slot_engine_and_lease(moment: str) -> None:
    async def scenario() -> None:
        agent = ToyAgent(hang_at=moment if moment in ("open", "act", "score") else "", turns=1)
        slow = moment in ("generate", "wait")
        engine = ScriptedEngine(token_s=0.005 if slow else 0.0, stop_every=1_000_000) if slow else stops_after(1)
        await engine.start()
        if slow:
            agent.max_new_tokens = 10_000
        loop, scheduler = make_loop(engine, agent, slots=1, context_length=20_000)
        names = [f"p0.0.{i}.0" for i in range(2)]
        tasks = [asyncio.ensure_future(loop.run(order(name))) for name in names]
        if slow:
            await until(lambda: scheduler.statistics()["waiting"] == 1 and bool(engine._running))
        else:
            await until(lambda: names[0] in agent.hung)
        victim = tasks[1] if moment == "wait" else tasks[0]
        victim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await victim
        assert (names[1] if moment == "wait" else names[0]) in agent.closed
        if moment == "generate":
            assert engine._running.keys() == {"p0.0.1.0/2"}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert agent.closed == agent.opened
        assert engine._running == {}
        assert scheduler.statistics() == {"running": 0, "waiting": 0, "held": 0, "in_engine": 0, "version": 0}

    run(scenario())


def test_action_slots_are_free_while_a_tool_runs_and_trajectory_slots_are_not() -> None:
    async def scenario(policy: str) -> int:
        agent = ToyAgent(hang_at="act")
        engine = stops_after(1)
        await engine.start()
        loop, _ = make_loop(engine, agent, slots=1, policy=policy)
        turns: list[StartTrajectory] = []
        loop._report_turn = turns.append  # type: ignore[assignment]
        tasks = [asyncio.ensure_future(loop.run(order(f"p0.0.{i}.0"))) for i in range(3)]
        for _ in range(200):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return len(turns)

    assert run(scenario("action")) == 3
    assert run(scenario("trajectory")) == 1
