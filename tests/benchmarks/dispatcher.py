"""The dispatcher's own speed: events per second and latency, and how the cost of an event grows with the run.

A world of 64 workers in steady state: trajectories take turns (as many as SWE agents take), end, are sealed, trained
and replaced. Only CPU time inside `handle` counts: other processes on the machine do not. `events_per_s` and `p99_us`
are those with 8,192 trajectories in flight under the most demanding of the measured policies; `ratio` is the cost of an
event with 512 in flight over the cost with 65,536 (1: flat; 0.5: it doubled).
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable
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
    TrajectoryEnded,
    TrajectoryStatus,
    TurnEnded,
    TurnReady,
    WeightsAcknowledged,
    WorkerJoined,
    WorkerPaused,
)

Say = Callable[[str], None]
MEASURED = tuple(name for name in ("action", "paper", "venus") if name in POLICIES)
WORKERS = 64
GROUP = 8
TURNS = 40
SMALL, TYPICAL, LARGE = 512, 8192, 65536


class Steady:
    """Feeds a dispatcher with `trajectories` in flight."""

    def __init__(self, policy: str, trajectories: int) -> None:
        groups = trajectories // GROUP
        self.config = DispatcherConfig(
            group_size=GROUP,
            batch=groups // 2,
            async_factor=2.0,
            workers=WORKERS,
            max_trajectories=trajectories,
            deadline_s=1e9,
            max_refills=10**9,
            policy=PolicySettings(name=policy),
        )
        self.dispatcher = Dispatcher(self.config)
        self.random = random.Random(0)
        self.now = 0.0
        self.version = 0
        self.prompts = 0
        self.open: dict[str, list[Any]] = {}
        """Trajectory → [worker, turns done, context, first version, whether its turn is ready, parked]."""
        self.playing: list[str] = []
        self.pending: list[AnyEvent] = []
        self.costs_ns: list[int] = []
        self.send(RunStarted(version=0))
        for number in range(WORKERS):
            per_worker = trajectories // WORKERS
            joined = WorkerJoined(
                worker=f"w{number}",
                slots=64,
                version=0,
                capabilities=Capabilities(priority=True, tiers=True, migration=True),
                kv_tokens=per_worker * 25_000,
                host_kv_tokens=per_worker * 50_000,
            )
            self.send(joined)
        self.send(GroupRequested(step=1, replica=0))

    def send(self, event: AnyEvent) -> None:
        self.pending.append(event)
        while self.pending:
            event = self.pending.pop(0) if len(self.pending) < 64 else self.pending.pop()
            self.now += 0.001
            began = time.thread_time_ns()
            commands = self.dispatcher.handle(event, self.now)
            self.costs_ns.append(time.thread_time_ns() - began)
            for command in commands:
                self.obey(command)

    def obey(self, command: AnyCommand) -> None:
        match command:
            case FetchPrompts(count=count):
                for _ in range(count):
                    self.prompts += 1
                    name = f"p{self.prompts:06d}"
                    self.pending.append(PromptSubmitted(prompt_id=name, task_id=name, epoch=0))
            case StartTrajectory(trajectory_id=name):
                parked = command.priority is PriorityClass.PARKED
                # Not all began together: a run in steady state has trajectories at every age.
                self.open[name] = [command.worker, 0, 13_500, self.version, False, parked]
                self.playing.append(name)
            case SetClass(trajectory_id=name, priority=priority):
                if name in self.open:
                    self.open[name][5] = priority is PriorityClass.PARKED
            case MoveTrajectory(trajectory_id=name, to=to):
                if name in self.open:
                    self.open[name][0] = to
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
        """A random trajectory that is not parked does its next thing."""
        for _ in range(64):
            place = self.random.randrange(len(self.playing))
            name = self.playing[place]
            job = self.open[name]
            if not job[5] or job[4]:
                break
        _, turns, context, first, ready, _ = job
        if not ready:
            job[4] = True
            self.send(TurnReady(trajectory_id=name, turn=turns + 1, context_tokens=context))
            return
        output = self.random.randrange(50, 400)
        job[1], job[2], job[4] = turns + 1, context + output + 500, False
        turn = turns + 1
        self.send(
            TurnEnded(trajectory_id=name, turn=turn, context_tokens=context, output_tokens=output, version=self.version)
        )
        if self.random.randrange(TURNS) == 0 and name in self.open:
            self.playing[place] = self.playing[-1]
            self.playing.pop()
            del self.open[name]
            self.send(
                TrajectoryEnded(
                    trajectory_id=name,
                    worker=job[0],
                    status=TrajectoryStatus.FINISHED,
                    reward=float(self.random.randrange(2)),
                    first_version=max(first, self.version - 1),
                    last_version=self.version,
                    generated_tokens=250 * turn,
                    turns=turn,
                )
            )


def measure(policy: str, trajectories: int, events: int) -> dict[str, float]:
    """Steady state of `trajectories` in flight: a warm-up, then `events` events."""
    world = Steady(policy, trajectories)
    for _ in range(max(2 * trajectories, 4000)):
        world.play()
    world.dispatcher.audit()
    world.costs_ns.clear()
    gc.collect()
    gc.freeze()
    while len(world.costs_ns) < events:
        world.play()
    gc.unfreeze()
    world.dispatcher.audit()
    costs = sorted(world.costs_ns)
    total_s = sum(costs) / 1e9
    return {
        "trajectories": trajectories,
        "in_flight": len(world.open),
        "events": len(costs),
        "events_per_s": len(costs) / total_s,
        "mean_us": total_s / len(costs) * 1e6,
        "p50_us": costs[len(costs) // 2] / 1e3,
        "p99_us": costs[int(len(costs) * 0.99)] / 1e3,
        "max_us": costs[-1] / 1e3,
    }


def run(quick: bool, say: Say) -> dict[str, Any]:
    """Every policy at three sizes; `--quick` measures 20,000 events each instead of 100,000."""
    events = 20_000 if quick else 100_000
    found: dict[str, dict[str, Any]] = {}
    for policy in MEASURED:
        sizes = {}
        for trajectories in (SMALL, TYPICAL, LARGE):
            sizes[str(trajectories)] = row = measure(policy, trajectories, events)
            say(f"{policy} {trajectories}: {row['events_per_s']:.0f} events/s, p99 {row['p99_us']:.0f} µs")
        ratio = sizes[str(SMALL)]["mean_us"] / sizes[str(LARGE)]["mean_us"]
        found[policy] = {"ratio": ratio, "sizes": sizes}
    slowest = min(found, key=lambda name: float(found[name]["sizes"][str(TYPICAL)]["events_per_s"]))
    steepest = min(found, key=lambda name: float(found[name]["ratio"]))
    typical = found[slowest]["sizes"][str(TYPICAL)]
    return {
        "benchmark": "dispatcher",
        "ratio": found[steepest]["ratio"],
        "baseline": "cost of an event with 512 trajectories in flight, over its cost with 65,536 (worst policy)",
        "events_per_s": typical["events_per_s"],
        "p99_us": typical["p99_us"],
        "slowest_policy": slowest,
        "steepest_policy": steepest,
        "sizes": {
            "workers": WORKERS,
            "trajectories": [SMALL, TYPICAL, LARGE],
            "events": events,
            "subset": "20,000 of the 100,000 events" if quick else "all",
        },
        "policies": found,
    }
