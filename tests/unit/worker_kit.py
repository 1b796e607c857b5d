"""A toy agent whose episodes count what happens to their leases, for tests of the worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from envclient.base.errors import VenusError, WireError
from rollout.policy.slots import make_slots
from rollout.protocol import Engine, Observation, Outcome
from rollout.types import PriorityClass, Purpose, StartTrajectory, TrajectoryStatus, TurnEnded
from rollout.worker.agent_loop import AgentLoop
from rollout.worker.scheduler import SlotScheduler

STOP = 2
TIMEOUT_S = 30.0


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """asyncio.run with a bound on the whole."""

    async def bounded() -> Any:
        async with asyncio.timeout(TIMEOUT_S):
            return await coroutine

    return asyncio.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until the condition holds; bounded by `run`."""
    while True:
        if condition():
            return
        await asyncio.sleep(0)


@dataclass
class ToyAgent:
    """`turns` turns, each answered by `observation`; `fail_at` is a step that raises, `hang_at` one that never ends."""

    turns: int = 3
    observation: list[int] = field(default_factory=lambda: [7, 8, 9])
    prompt: list[int] = field(default_factory=lambda: [5, 6])
    fail_at: str = ""
    hang_at: str = ""
    error: Exception = field(default_factory=lambda: WireError("sandbox is gone"))
    max_new_tokens: int = 6
    stop_token_ids: list[int] = field(default_factory=lambda: [STOP])
    opened: set[str] = field(default_factory=set)
    closed: set[str] = field(default_factory=set)
    actions: dict[str, list[list[int]]] = field(default_factory=dict)
    scored: dict[str, tuple[TrajectoryStatus, str]] = field(default_factory=dict)
    hung: set[str] = field(default_factory=set)

    def episode(self, task_id: str, trajectory_id: str, purpose: Purpose) -> ToyEpisode:
        return ToyEpisode(self, trajectory_id)

    def statistics(self) -> dict[str, float]:
        return {"open": float(len(self.opened - self.closed))}

    async def aclose(self) -> None:
        pass


@dataclass
class ToyEpisode:
    agent: ToyAgent
    name: str
    taken: int = 0

    async def _step(self, step: str) -> None:
        await asyncio.sleep(0)
        if self.agent.fail_at == step:
            raise self.agent.error
        if self.agent.hang_at == step:
            self.agent.hung.add(self.name)
            await asyncio.Event().wait()

    async def open(self) -> list[int]:
        self.agent.opened.add(self.name)
        await self._step("open")
        return list(self.agent.prompt)

    async def act(self, token_ids: Sequence[int]) -> Observation:
        await self._step("act")
        self.agent.actions.setdefault(self.name, []).append(list(token_ids))
        self.taken += 1
        done = self.taken >= self.agent.turns
        return Observation(token_ids=[] if done else list(self.agent.observation), done=done)

    async def score(self, status: TrajectoryStatus, stop_reason: str) -> Outcome:
        await self._step("score")
        self.agent.scored[self.name] = (status, stop_reason)
        return Outcome(reward=1.0, status=status, stop_reason=stop_reason, stats={"tool_calls": float(self.taken)})

    async def close(self) -> None:
        self.agent.closed.add(self.name)
        await self._step("close")


def order(name: str = "p000000.0.0.0") -> StartTrajectory:
    return StartTrajectory(
        worker="w0",
        trajectory_id=name,
        group_id=name.rsplit(".", 2)[0],
        task_id="task",
        purpose=Purpose.TRAIN,
        priority=PriorityClass.LOW,
    )


def make_loop(
    engine: Engine,
    agent: ToyAgent,
    *,
    slots: int = 4,
    policy: str = "action",
    context_length: int = 200,
    version: int = 0,
    report: Callable[[TurnEnded], None] = lambda turn: None,
) -> tuple[AgentLoop, SlotScheduler]:
    scheduler = SlotScheduler(engine, make_slots(policy, slots), version=version, temperature=1.0)
    return AgentLoop(agent, scheduler, context_length=context_length, report_turn=report), scheduler


__all__ = ["STOP", "ToyAgent", "VenusError", "make_loop", "order", "run", "until"]


def make_agent(*, environment: object, model_path: str, context_length: int, turns: int = 3) -> ToyAgent:
    """Factory in the form that `rollout.agent.factory` names."""
    return ToyAgent(turns=turns)
