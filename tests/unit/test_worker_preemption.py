"""Classes on a worker: HIGH preempts LOW through the engine's abort, PARKED waits; no token is lost or made twice."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envclient.base.wire import Client
from rollout.adapters.scripted_engine import ScriptedEngine
from rollout.config import PolicyConfig, RolloutConfig, WorkerConfig
from rollout.policy.slots import make_slots
from rollout.types import PriorityClass, SetClass, Trajectory, TurnEnded, TurnReady
from rollout.worker.scheduler import SlotScheduler
from rollout.worker.service import RolloutWorker
from tests.unit.test_worker_service import FakeCoordinator, serving
from tests.unit.worker_kit import ToyAgent, make_loop, order, run, until

HIGH, LOW, PARKED = PriorityClass.HIGH, PriorityClass.LOW, PriorityClass.PARKED


@settings(max_examples=60, deadline=None)
@given(
    changes=st.lists(
        st.tuples(st.integers(0, 6), st.integers(0, 4), st.sampled_from(list(PriorityClass)), st.integers(-2, 2)),
        max_size=25,
    ),
    pauses=st.sets(st.integers(0, 24), max_size=3),
    slots=st.integers(1, 3),
    rule=st.sampled_from(["priority", "rank"]),
)
def test_any_classes_at_any_time_change_no_token(
    changes: list[tuple[int, int, PriorityClass, int]], pauses: set[int], slots: int, rule: str
) -> None:
    async def scenario(disturbed: bool) -> list[Trajectory]:
        agent, engine = ToyAgent(turns=4), ScriptedEngine(seed=3, stop_every=4)
        await engine.start()
        loop, scheduler = make_loop(engine, agent, slots=slots, policy=rule)
        names = [f"p0.0.{member}.0" for member in range(5)]
        playing = [asyncio.ensure_future(loop.run(order(name))) for name in names]
        for number, (steps, member, priority, rank) in enumerate(changes if disturbed else []):
            for _ in range(steps):
                await asyncio.sleep(0)
            scheduler.set_class(names[member], priority, rank)
            if number in pauses:
                await scheduler.pause()
                assert scheduler.statistics()["in_engine"] == 0
                scheduler.resume(scheduler.version + 1)
        for name in names:
            scheduler.set_class(name, LOW, 0)
        trajectories = await asyncio.gather(*playing)
        assert scheduler._policy.statistics() == {"running": 0, "waiting": 0, "held": 0}
        return trajectories

    for one, other in zip(run(scenario(True)), run(scenario(False)), strict=True):
        assert (one.response_ids, one.loss_mask, one.logprobs) == (other.response_ids, other.loss_mask, other.logprobs)
        assert sum(span.end - span.start for span in one.spans) == sum(one.loss_mask)


def test_a_high_turn_takes_the_slot_of_a_low_one_which_goes_on_later() -> None:
    async def scenario() -> None:
        engine = ScriptedEngine(token_s=0.01, stop_every=10**9)
        await engine.start()
        scheduler = SlotScheduler(engine, make_slots("priority", 1), version=0, temperature=1.0)
        scheduler.set_class("urgent", HIGH, 0)
        low = asyncio.ensure_future(scheduler.turn("low", [1, 2, 3], max_new_tokens=40, stop_token_ids=[2]))
        await until(lambda: bool(engine._running))
        await asyncio.sleep(0.05)  # a few tokens; how many does not matter
        urgent = await scheduler.turn("urgent", [1, 2, 3], max_new_tokens=5, stop_token_ids=[2])
        assert len(urgent.token_ids) == 5 and not low.done()
        turn = await low
        assert turn.preempted_by == ["urgent"] and len(turn.pieces) == 2 and len(turn.token_ids) == 40
        calm = ScriptedEngine(stop_every=10**9)
        await calm.start()
        alone = SlotScheduler(calm, make_slots("action", 1), version=0, temperature=1.0)
        assert (await alone.turn("low", [1, 2, 3], max_new_tokens=40, stop_token_ids=[2])).token_ids == turn.token_ids

    run(scenario())


@pytest.mark.parametrize("name", ["action", "venus"])
def test_a_worker_obeys_the_policy_that_the_config_names(name: str) -> None:
    """It offers classes, reports wanted turns, and starts no turn of a parked trajectory."""

    async def scenario() -> None:
        coordinator, agent, engine = FakeCoordinator(), ToyAgent(turns=2), ScriptedEngine(stop_every=3)
        await engine.start()
        config = RolloutConfig(
            worker=WorkerConfig(slots=2, kv_tokens=777, host_kv_tokens=5), policy=PolicyConfig(name=name)
        )
        async with serving(coordinator) as url, Client(url, "token") as client:
            worker = RolloutWorker(
                name="w0",
                engine=engine,
                agent=agent,
                coordinator=client,
                config=config,
                context_length=400,
                version=0,
            )
            running = asyncio.ensure_future(worker.run())
            parked = SetClass(worker="w0", trajectory_id="a.0.0.0", priority=PARKED, epoch=1, cause="no room")
            await coordinator.send(order("a.0.0.0"), parked, order("b.0.0.0"))
            await coordinator.wait_report(Trajectory, 1)
            await asyncio.sleep(0.3)
            turns = {r.trajectory_id for r in coordinator.reports if isinstance(r, TurnEnded)}
            wanted = {r.trajectory_id for r in coordinator.reports if isinstance(r, TurnReady)}
            assert turns == ({"b.0.0.0"} if name == "venus" else {"a.0.0.0", "b.0.0.0"})
            assert wanted == ({"a.0.0.0", "b.0.0.0"} if name == "venus" else set())
            await coordinator.send(SetClass(worker="w0", trajectory_id="a.0.0.0", priority=LOW, epoch=2, cause="room"))
            await coordinator.wait_report(Trajectory, 2)
            running.cancel()
            await asyncio.wait([running])
        (join,) = coordinator.joins
        assert (join.capabilities.priority, join.kv_tokens, join.host_kv_tokens) == (name == "venus", 777, 5)

    run(scenario())
