"""A cluster small enough for arithmetic by hand: the real dispatcher, policies and slots, one token a second.

Messages take no time, KV costs nothing (its capacity is only told to the policy), tools take the seconds they are
given, and a preempted turn goes on where it was cut. Every group is admitted at 0, the lengths are known to the policy.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rollout.dispatcher import Dispatcher, DispatcherConfig
from rollout.policy.lengths import TrueLengths
from rollout.policy.registry import policy_class
from rollout.policy.settings import PolicySettings
from rollout.policy.slots import SlotPolicy, make_slots
from rollout.types import (
    AnyCommand,
    AnyEvent,
    Capabilities,
    FetchPrompts,
    MoveTrajectory,
    PromptSubmitted,
    RunStarted,
    SealGroup,
    SetClass,
    SourceExhausted,
    StartTrajectory,
    Tick,
    TrajectoryEnded,
    TrajectoryStatus,
    TurnEnded,
    TurnReady,
    WorkerJoined,
)

Script = Sequence[tuple[int, int]]
"""Turns of (tokens, seconds of the tool after it); the last tool is not waited for."""
Row = tuple[int, str, str]
"""(second, what happens, group.member): `run` and `stop` a turn (also when it is preempted), `end` the trajectory."""


@dataclass(eq=False)
class _Play:
    name: str
    """Trajectory id."""
    script: Script
    worker: str
    turn: int = 0
    left: int = 0
    """Tokens of its turn that are not generated."""
    context: int = 0
    output: int = 0
    ran_at: int = -1
    """Since when its turn runs; −1: it does not."""

    @property
    def short(self) -> str:
        prompt, _, member, _ = self.name.split(".")
        return f"{prompt[1:]}.{member}"


class SmallCluster:
    """Plays `groups` (one list of scripts each, all of one size) to their end under a whole policy.

    Args:
        slots: of each worker.
        batch: groups of a step (B), for the policies that look ahead.
        prompt_tokens: context at the start of every trajectory.
        keys: other policy settings.
    """

    def __init__(
        self,
        policy: str,
        groups: Sequence[Sequence[Script]],
        *,
        slots: int = 1,
        batch: int = 1,
        workers: int = 1,
        kv_tokens: int = 0,
        prompt_tokens: int = 1,
        **keys: Any,
    ) -> None:
        settings = PolicySettings(name=policy, **{"buffer_tokens": 0, "growth_tokens": 0, **keys})
        config = DispatcherConfig(
            group_size=len(groups[0]),
            batch=batch,
            async_factor=len(groups) / batch,
            workers=workers,
            deadline_s=1e6,
            policy=settings,
        )
        self.dispatcher = Dispatcher(config, TrueLengths(self._truth))
        self.dispatcher.policy.lengths = TrueLengths(self._truth)
        self.trace: list[Row] = []
        self.sealed_at: list[int] = []
        """Second at which each group was complete, ascending."""
        self._groups = groups
        self._prompt_tokens = prompt_tokens
        self._now = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._posted = 0
        self._plays: dict[str, _Play] = {}
        self._ended = 0
        rule = policy_class(settings).slot_rule(settings)
        self._slots: dict[str, SlotPolicy] = {f"w{number}": make_slots(rule, slots) for number in range(workers)}
        self._send(RunStarted(version=0))
        can = Capabilities(priority=True, migration=True)
        for name in self._slots:
            self._send(WorkerJoined(worker=name, slots=slots, version=0, capabilities=can, kv_tokens=kv_tokens))
        self._after(1, self._tick)
        while self._heap and self._ended < len(groups) * len(groups[0]):
            self._now, _, act = heapq.heappop(self._heap)
            act()

    def t_next(self, batch: int) -> int:
        """Second at which `batch` groups were complete."""
        return self.sealed_at[batch - 1]

    def _truth(self, trajectory_id: str) -> tuple[int, int]:
        prompt, _, member, _ = trajectory_id.split(".")
        output = sum(tokens for tokens, _ in self._groups[int(prompt[1:])][int(member)])
        return output, self._prompt_tokens + output

    def _after(self, seconds: int, act: Callable[[], None]) -> None:
        self._posted += 1
        heapq.heappush(self._heap, (self._now + seconds, self._posted, act))

    def _tick(self) -> None:
        self._send(Tick())
        self._after(1, self._tick)

    def _send(self, event: AnyEvent) -> None:
        for command in self.dispatcher.handle(event, float(self._now)):
            self._obey(command)

    def _obey(self, command: AnyCommand) -> None:
        match command:
            case FetchPrompts():
                for number in range(len(self._groups)):
                    self._send(PromptSubmitted(prompt_id=f"p{number}", task_id="t", epoch=0))
                self._send(SourceExhausted())
            case StartTrajectory(trajectory_id=name, worker=worker):
                prompt, _, member, _ = name.split(".")
                play = _Play(name, self._groups[int(prompt[1:])][int(member)], worker, context=self._prompt_tokens)
                self._plays[name] = play
                self._run(worker, self._slots[worker].set_class(name, command.priority, command.rank))
                self._ready(play)
            case SetClass(trajectory_id=name, worker=worker):
                if name in self._plays:
                    self._run(worker, self._slots[worker].set_class(name, command.priority, command.rank))
            case MoveTrajectory(trajectory_id=name, worker=worker, to=to):
                raise AssertionError(f"{name} is moved from {worker} to {to}: not modelled here")
            case SealGroup():
                self.sealed_at.append(self._now)
            case _:
                pass

    def _ready(self, play: _Play) -> None:
        """It wants its next turn."""
        play.left = play.script[play.turn][0]
        play.turn += 1
        self._run(play.worker, self._slots[play.worker].turn_ready(play.name, play.context))
        self._send(TurnReady(trajectory_id=play.name, turn=play.turn, context_tokens=play.context))

    def _run(self, worker: str, started: list[str]) -> None:
        """Turns start; running ones are preempted for the sake of waiting ones."""
        slots = self._slots[worker]
        while True:
            for name in started:
                play = self._plays[name]
                play.ran_at = self._now
                self._note("run", play)
                self._after(play.left, lambda play=play, since=self._now: self._complete(play, since))  # type: ignore[misc]
            victims = slots.take_victims()
            if not victims:
                return
            started = []
            for name in victims:
                play = self._plays[name]
                play.left -= self._now - play.ran_at
                play.ran_at = -1
                self._note("stop", play)
                started += slots.turn_preempted(name)

    def _complete(self, play: _Play, since: int) -> None:
        """Its turn ends, unless it was preempted since."""
        if play.ran_at != since or self._now - since != play.left:
            return
        play.ran_at = -1
        tokens, tool_s = play.script[play.turn - 1]
        self._note("stop", play)
        self._run(play.worker, self._slots[play.worker].turn_ended(play.name))
        context, play.context, play.output = play.context, play.context + tokens, play.output + tokens
        ended = TurnEnded(
            trajectory_id=play.name, turn=play.turn, context_tokens=context, output_tokens=tokens, version=0
        )
        self._send(ended)
        if play.turn < len(play.script):
            self._after(tool_s, lambda: self._ready(play))
            return
        self._ended += 1
        self._note("end", play)
        self._run(play.worker, self._slots[play.worker].trajectory_ended(play.name))
        self._send(
            TrajectoryEnded(
                trajectory_id=play.name,
                worker=play.worker,
                status=TrajectoryStatus.FINISHED,
                reward=0.0,
                first_version=0,
                last_version=0,
                generated_tokens=play.output,
                turns=play.turn,
            )
        )

    def _note(self, what: str, play: _Play) -> None:
        self.trace.append((self._now, what, play.short))

    def runs(self) -> list[tuple[int, int, str]]:
        """(from, until, group.member) of every stretch without a preemption, in the order of their beginnings."""
        began: dict[str, int] = {}
        found = []
        for second, what, name in self.trace:
            if what == "run":
                began[name] = second
            elif what == "stop" and (since := began.pop(name)) < second:
                found.append((since, second, name))
        return sorted(found)


def busiest(groups: Sequence[Sequence[Script]], slots: int) -> int:
    """A bound of any schedule of `groups`: the longest script with its tools, or all tokens over all slots."""
    scripts = [script for group in groups for script in group]
    chain = max(sum(tokens + tool for tokens, tool in script) - script[-1][1] for script in scripts)
    return max(chain, math.ceil(sum(tokens for script in scripts for tokens, _ in script) / slots))
