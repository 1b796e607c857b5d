"""The dispatcher's own speed: events per second and latency, and how the cost of an event grows with the run.

A world of 64 workers whose KV is short: trajectories take turns (as many as SWE agents take), end, are sealed, trained
and replaced; each makes an event every 5 s, and the clock ticks every second. Before the measurement a fast-forward
(few turns that append much) brings every trajectory to another age and fills the engines, and two events of each let
the policy settle. Only CPU time inside `handle` counts: other processes on the machine do not, but for the caches that
they share with it.

`events_per_s` and `p99_us` are those with 8,192 open trajectories under the slowest policy; `ratio` is the cost of
an event with 512 open over the cost with 65,536 under the steepest one (1: flat; 0.5: it doubled). What happens in a
world changes with its age (young ones change more classes), so both are measured over the same age: the small one in
many fresh worlds, each over as many events of a trajectory as the large one. Workers are as many at every size, so a
large world's hold more trajectories each, and a policy may have more to decide about them: `commands_per_event` tells
that from a slower event.
"""

from __future__ import annotations

import gc
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rollout.dispatcher import Dispatcher, DispatcherConfig
from rollout.policy.registry import POLICIES
from rollout.policy.settings import PolicySettings
from rollout.types import (
    AnyCommand,
    AnyEvent,
    Capabilities,
    CloseBatch,
    ClosePrompt,
    DeliverGroup,
    FetchPrompts,
    GrantSync,
    GroupAcknowledged,
    GroupRequested,
    MoveTrajectory,
    PauseWorker,
    PriorityClass,
    PromptSubmitted,
    ResumeWorker,
    RunStarted,
    SetClass,
    StartTrajectory,
    StepFinished,
    StopRun,
    SyncFinished,
    SyncRequested,
    Tick,
    TrajectoryEnded,
    TrajectoryStatus,
    TurnEnded,
    TurnReady,
    WeightsAcknowledged,
    WorkerJoined,
    WorkerPaused,
)

Say = Callable[[str], None]
MEASURED = tuple(name for name in POLICIES if name != "oracle")
WORKERS = 64
GROUP = 8
PROMPT_TOKENS = 13_500
KV_TOKENS = 6_000
"""Of its worker's engine, for each open trajectory, without a host cache: less than half of what they hold."""
EVENT_S = 5.0
"""Seconds between two events of a trajectory."""
FAST_EVENTS, SETTLE_EVENTS = 2, 2
"""Of the fast-forward, and after it, for each open trajectory."""
SMALL, TYPICAL, LARGE = SIZES = 512, 8192, 65536
ROUNDS = 5
SMALL_WORLDS = 8
"""In each round."""
QUICK_LARGE = ("paper", "venus")
"""Policies that `--quick` measures with 65,536 too."""
TICKS = 5
"""That must have passed: `program_aware` checks at every fifth only."""


@dataclass(frozen=True)
class Pace:
    """How trajectories live."""

    turns: int
    """Mean."""
    output_tokens: int
    """Mean of a turn."""
    observation_tokens: int


REAL = Pace(turns=40, output_tokens=225, observation_tokens=500)
FAST = Pace(turns=2, output_tokens=4_500, observation_tokens=10_000)
"""As many tokens in fewer turns."""


@dataclass(slots=True)
class Playing:
    """A trajectory that has started."""

    name: str
    worker: str
    version: int
    parked: bool
    turns: int = 0
    output: int = 0
    context: int = PROMPT_TOKENS
    ready: bool = False
    """It wants a slot, or generates."""


class Steady:
    """Feeds a dispatcher with `trajectories` open, and as many that wait for a place or for their siblings."""

    def __init__(self, policy: str, trajectories: int, seed: int) -> None:
        self.config = DispatcherConfig(
            group_size=GROUP,
            batch=trajectories // GROUP,
            async_factor=2.0,
            max_version_span=2,
            workers=WORKERS,
            max_trajectories=trajectories // WORKERS,
            deadline_s=1e9,
            max_refills=10**9,
            policy=PolicySettings(name=policy),
        )
        self.dispatcher = Dispatcher(self.config)
        self.random = random.Random(seed)
        self.now = 0.0
        self.version = 0
        self.prompts = 0
        self.pace = FAST
        self.open: dict[str, Playing] = {}
        self.playing: list[Playing] = []
        """The same, in any order."""
        self.pending: deque[AnyEvent] = deque()
        self.event_s = EVENT_S / trajectories
        self.tick_due_s = 1.0
        self.costs_ns: list[int] = []
        """Of every event but ticks, whose number is a matter of time."""
        self.ticks_ns: list[int] = []
        self.commands = 0
        """Of the events in `costs_ns`."""
        self.send(RunStarted(version=0))
        for number in range(WORKERS):
            joined = WorkerJoined(
                worker=f"w{number}",
                slots=64,
                version=0,
                capabilities=Capabilities(priority=True, tiers=True, migration=True),
                kv_tokens=self.config.max_trajectories * KV_TOKENS,
            )
            self.send(joined)
        self.send(GroupRequested(step=1, replica=0))

    def send(self, event: AnyEvent) -> None:
        self.pending.append(event)
        while self.pending:
            event = self.pending.popleft()
            self.now += self.event_s
            began = time.thread_time_ns()
            commands = self.dispatcher.handle(event, self.now)
            cost_ns = time.thread_time_ns() - began
            if isinstance(event, Tick):
                self.ticks_ns.append(cost_ns)
            else:
                self.costs_ns.append(cost_ns)
                self.commands += len(commands)
            for command in commands:
                self.obey(command)

    def forget(self) -> None:
        """Begin to measure anew."""
        self.costs_ns.clear()
        self.ticks_ns.clear()
        self.commands = 0

    def obey(self, command: AnyCommand) -> None:
        match command:
            case FetchPrompts(count=count):
                for _ in range(count):
                    self.prompts += 1
                    name = f"p{self.prompts:06d}"
                    self.pending.append(PromptSubmitted(prompt_id=name, task_id=name, epoch=0))
            case StartTrajectory(trajectory_id=name):
                parked = command.priority is PriorityClass.PARKED
                self.open[name] = started = Playing(name, command.worker, self.version, parked)
                self.playing.append(started)
            case SetClass(trajectory_id=name, priority=priority):
                if name in self.open:
                    self.open[name].parked = priority is PriorityClass.PARKED
            case MoveTrajectory(trajectory_id=name, to=to):
                if name in self.open:
                    self.open[name].worker = to
            case DeliverGroup(step=step, group_id=group):
                self.pending.append(GroupAcknowledged(step=step, replica=0, group_id=group, tokens=1))
                self.pending.append(GroupRequested(step=step, replica=0))
            case CloseBatch(step=step):
                self.pending += [StepFinished(step=step), SyncRequested(version=step)]
            case PauseWorker(worker=worker, version=version):
                self.pending.append(WorkerPaused(worker=worker, version=version))
            case GrantSync(version=version):
                self.pending.append(SyncFinished(version=version))
            case ResumeWorker(worker=worker, version=version):
                self.version = version
                self.pending.append(WeightsAcknowledged(worker=worker, version=version))
                if worker == "w0":
                    self.pending.append(GroupRequested(step=version + 1, replica=0))
            case StopRun(cause=cause):
                raise AssertionError(f"the dispatcher stopped: {cause}")
            case ClosePrompt() | _:
                pass

    def play(self) -> None:
        """A random trajectory does its next thing: a parked one's tool returns, but it generates nothing."""
        if self.now >= self.tick_due_s:
            self.tick_due_s = self.now + 1.0
            self.send(Tick())
        for _ in range(64):
            place = self.random.randrange(len(self.playing))
            job = self.playing[place]
            if not (job.parked and job.ready):
                break
        turn = job.turns + 1
        job.ready = not job.ready
        if job.ready:
            self.send(TurnReady(trajectory_id=job.name, turn=turn, context_tokens=job.context))
            return
        output, context = round(self.pace.output_tokens * self.random.uniform(0.25, 1.75)), job.context
        job.turns, job.output, job.context = turn, job.output + output, context + output + self.pace.observation_tokens
        self.send(
            TurnEnded(
                trajectory_id=job.name, turn=turn, context_tokens=context, output_tokens=output, version=self.version
            )
        )
        if self.random.randrange(self.pace.turns) == 0:
            self.playing[place] = self.playing[-1]
            self.playing.pop()
            del self.open[job.name]
            self.send(
                TrajectoryEnded(
                    trajectory_id=job.name,
                    worker=job.worker,
                    status=TrajectoryStatus.FINISHED,
                    reward=float(self.random.randrange(2)),
                    first_version=max(job.version, self.version - 1),
                    last_version=self.version,
                    generated_tokens=job.output,
                    turns=turn,
                )
            )


def settled(policy: str, trajectories: int, seed: int) -> Steady:
    """A world with `trajectories` open, ready to be measured."""
    world = Steady(policy, trajectories, seed)
    for pace, plays in ((FAST, FAST_EVENTS * trajectories), (REAL, SETTLE_EVENTS * trajectories)):
        world.pace = pace
        for _ in range(plays):
            world.play()
    world.dispatcher.audit()
    world.forget()
    return world


@dataclass(slots=True)
class Measured:
    """One policy at one size."""

    world: Steady
    """The latest one."""
    costs_ns: list[int] = field(default_factory=list)
    ticks_ns: list[int] = field(default_factory=list)
    commands: int = 0
    rounds_ns: list[float] = field(default_factory=list)

    def round(self, worlds: Iterable[Steady], events: int, ticks: int) -> None:
        """Play as many events in every world, and until so many ticks have passed in all rounds."""
        done = len(self.costs_ns)
        for world in worlds:
            self.world = world
            while len(world.costs_ns) < events or len(self.ticks_ns) + len(world.ticks_ns) < ticks:
                world.play()
            self.costs_ns += world.costs_ns
            self.ticks_ns += world.ticks_ns
            self.commands += world.commands
            world.forget()
        self.rounds_ns.append(fmean(self.costs_ns[done:]))

    def row(self) -> dict[str, float]:
        """The mean is that of the best round (the least disturbed one), plus the mean tick by the share of events that
        ticks are; the percentiles are those of all rounds."""
        tick_ns = fmean(self.ticks_ns)
        costs = sorted(self.costs_ns)
        mean_us = (min(self.rounds_ns) + tick_ns * self.world.event_s) / 1e3
        return {
            "open": len(self.world.open),
            "parked": sum(job.parked for job in self.world.open.values()),
            "events": len(costs),
            "commands_per_event": self.commands / len(costs),
            "events_per_s": 1e6 / mean_us,
            "mean_us": mean_us,
            "slowest_round_us": max(self.rounds_ns) / 1e3,
            "p50_us": costs[len(costs) // 2] / 1e3,
            "p99_us": costs[int(len(costs) * 0.99)] / 1e3,
            "max_us": costs[-1] / 1e3,
            "ticks": len(self.ticks_ns),
            "tick_us": tick_ns / 1e3,
        }


def measure(policy: str, events: int, sizes: Sequence[int]) -> dict[int, dict[str, float]]:
    """The policy at every size: rounds in turn, so that whatever else the machine does meets all sizes alike."""
    found = {trajectories: Measured(settled(policy, trajectories, seed=0)) for trajectories in sizes}
    gc.collect()
    gc.freeze()
    for number in range(ROUNDS):
        ticks = TICKS if number == ROUNDS - 1 else 0
        for trajectories, measured in found.items():
            if trajectories == SMALL:
                seeds = range(1 + number * SMALL_WORLDS, 1 + (number + 1) * SMALL_WORLDS)
                measured.round((settled(policy, SMALL, seed) for seed in seeds), events * SMALL // LARGE, ticks)
            else:
                measured.round([measured.world], events // ROUNDS, ticks)
    gc.unfreeze()
    for measured in found.values():
        measured.world.dispatcher.audit()
    return {trajectories: measured.row() for trajectories, measured in found.items()}


def run(quick: bool, say: Say) -> dict[str, Any]:
    """Every live policy at three sizes. `--quick` plays fewer events, and the largest size for two policies only."""
    events = 65_536 if quick else 163_840
    found: dict[str, dict[str, Any]] = {}
    for policy in MEASURED:
        sizes = SIZES if policy in QUICK_LARGE or not quick else (SMALL, TYPICAL)
        rows = measure(policy, events, sizes)
        for trajectories, row in rows.items():
            speed = f"{row['events_per_s']:.0f} events/s, p99 {row['p99_us']:.0f} µs"
            say(f"{policy} {trajectories}: {speed}, {row['commands_per_event']:.2f} commands an event")
        found[policy] = {"sizes": {str(trajectories): row for trajectories, row in rows.items()}}
        if LARGE in rows:
            found[policy]["ratio"] = rows[SMALL]["mean_us"] / rows[LARGE]["mean_us"]
    slowest = min(found, key=lambda name: float(found[name]["sizes"][str(TYPICAL)]["events_per_s"]))
    steepest = min((name for name in found if "ratio" in found[name]), key=lambda name: float(found[name]["ratio"]))
    typical = found[slowest]["sizes"][str(TYPICAL)]
    return {
        "benchmark": "dispatcher",
        "ratio": found[steepest]["ratio"],
        "baseline": "cost of an event with 512 open trajectories, over its cost with 65,536 (worst policy)",
        "events_per_s": typical["events_per_s"],
        "p99_us": typical["p99_us"],
        "slowest_policy": slowest,
        "steepest_policy": steepest,
        "sizes": {
            "workers": WORKERS,
            "trajectories": list(SIZES),
            "events": events,
            "subset": f"a fifth of the events; 65,536 trajectories under {', '.join(QUICK_LARGE)} only"
            if quick
            else "all",
        },
        "policies": found,
    }
