"""Gradients streamed group by group against the same actor that waits for the whole batch, on the same arrivals.

A tiny model is trained by the real loop (`add_groups`, then `finish`) under torchrun, its groups handed out over HTTP.
Arrivals are recorded from a seed with the spacing that generation gives them: trajectories with a long tail of lengths
take the slots of an engine in order, each for as long as it has tokens, and a group arrives with its last member. The
recording is stretched so that training a batch with everything ready, measured first in the same run, is `load` of the
time until the last group arrives. Every recording is played twice, one after the other: as it is, and with all groups
held back until the last one.

`ratio` is the time of the waiting steps over that of the streamed ones. `tail_in_groups`: from the last arrival to the
start of the optimizer's update, in units of that group's own forward-backward; the median over the recordings. Where
groups come faster than one is trained the tail holds a queue: `floor_in_groups` is what a replica without any overhead
would have, from the same forward-backward times. `overhead_ms` says where the rest of the tail goes: from the
arrival to the group's start where the replica was free, from its end to the news that the batch is closed, from there
to the update.
"""

from __future__ import annotations

import heapq
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from envclient.base.configs import to_yaml
from megatron_venus.config import ActorConfig, VenusConfig
from rollout.config import FactoryConfig, ModelConfig, RolloutConfig, RunConfig
from rollout.protocol import NextGroupRequest
from rollout.types import NextGroup, NoGroupYet, TrainGroup, TrainSequence
from tests.numerics import kit
from tests.numerics.fake_coordinator import TOKEN, FakeCoordinator, serving

GROUPS, SIZE, SLOTS = 16, 8, 32
LOAD = 0.3
"""Training in generation's time; the quickstart's is 0.1."""
PROMPT, SHORTEST, LONGEST = 24, 32, 1000
MEDIAN_LOG, SIGMA = 5.3, 0.7
"""Of the lengths in tokens, lognormal: median 200, one in forty above 800."""
WARM, ALL_READY = 1, 2
"""The first steps: the library's first call, and the measurement with everything ready."""
TIMEOUT_S = 1200


def run(quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    """`--quick`: one replica and five recordings; otherwise eight, and two replicas too."""
    recordings = 5 if quick else 8
    results = {replicas: _measure(replicas, recordings, say) for replicas in ((1,) if quick else (1, 2))}
    return {
        "benchmark": "actor_stream",
        "ratio": results[1]["ratio"],
        "baseline": "the same actor and arrivals, every group held back until the last one has arrived",
        "sizes": {
            "recordings": recordings,
            "groups": GROUPS,
            "trajectories_a_group": SIZE,
            "load": LOAD,
            "subset": "one replica, 5 of 8 recordings" if quick else "all",
        },
        "tail_in_groups": results[1]["tail_in_groups"],
        "by_replicas": {str(replicas): result for replicas, result in results.items()},
    }


def record(seed: int) -> list[tuple[float, list[int]]]:
    """(arrival in units of one token's generation, response lengths) of a batch's groups, in the order of arrival."""
    generator = random.Random(seed)
    slots, groups = [0.0] * SLOTS, []
    for _ in range(GROUPS):
        drawn = (int(generator.lognormvariate(MEDIAN_LOG, SIGMA)) for _ in range(SIZE))
        lengths = [max(SHORTEST, min(LONGEST, length)) for length in drawn]
        ends = []
        for length in lengths:
            ends.append(heapq.heappop(slots) + length)
            heapq.heappush(slots, ends[-1])
        groups.append((max(ends), lengths))
    return sorted(groups, key=lambda group: group[0])


def make_group(name: str, step: int, lengths: list[int], generator: random.Random) -> TrainGroup:
    """Trajectories of these lengths: turns of 48 generated tokens and 16 of a tool."""
    prompt = [generator.randrange(kit.VOCABULARY) for _ in range(PROMPT)]
    sequences = [
        TrainSequence(
            trajectory_id=f"{name}.{member}",
            prompt_ids=prompt,
            response_ids=[generator.randrange(kit.VOCABULARY) for _ in range(length)],
            loss_mask=[int(place % 64 < 48) for place in range(length)],
            logprobs=[-4.5 * int(place % 64 < 48) for place in range(length)],
            spans=[],
            advantage=generator.choice((-1.0, 1.0)),
            reward=0.0,
        )
        for member, length in enumerate(lengths)
    ]
    return TrainGroup(group_id=name, prompt_id=name, task_id=name, step=step, sequences=sequences)


@dataclass
class PacedCoordinator(FakeCoordinator):
    """Hands a group out when it has arrived. From step `ALL_READY` + 1 on, odd steps stream and even ones hold back."""

    recorded: list[list[float]] = field(default_factory=list)
    """Of each step: arrivals of its groups, ascending, in the recording's unit."""
    began: dict[int, float] = field(default_factory=dict)
    """Step → when the first replica asked for a group of it (seconds of the monotonic clock)."""

    def next_group(self, request: NextGroupRequest) -> NextGroup:
        if request.step > ALL_READY and len(self.metrics) < ALL_READY:
            return NoGroupYet(step=request.step)  # a replica was faster than the report that sets the pace
        self.began.setdefault(request.step, time.monotonic())
        return super().next_group(request)

    def take(self, step: int) -> TrainGroup | None:
        number = len(self.recorded[step - 1]) - len(self._waiting[step - 1])
        due = self.arrivals(step)
        if number == len(due) or time.monotonic() < (due[number] if streams(step) else due[-1]):
            return None
        return super().take(step)

    def arrivals(self, step: int) -> list[float]:
        """When each group of `step` arrives, in seconds of the monotonic clock."""
        recorded, began = self.recorded[step - 1], self.began[step]
        if step <= ALL_READY:
            return [began] * len(recorded)
        train_s = self.metrics[ALL_READY - 1]["time/train_s"]
        return [began + arrival * train_s / LOAD / recorded[-1] for arrival in recorded]


def streams(step: int) -> bool:
    return step <= ALL_READY or step % 2 == 1


def _measure(replicas: int, recordings: int, say: Callable[[str], None]) -> dict[str, Any]:
    generator = random.Random(0)
    batches: list[list[TrainGroup]] = []
    recorded: list[list[float]] = []
    for seed in [0, 0, *(seed for seed in range(recordings) for _ in range(2))]:
        groups, step = record(seed), len(batches) + 1
        batches.append([make_group(f"s{step}g{n}", step, lengths, generator) for n, (_, lengths) in enumerate(groups)])
        recorded.append([arrival for arrival, _ in groups])
    coordinator = PacedCoordinator(batches=batches, recorded=recorded)
    with tempfile.TemporaryDirectory(prefix="venus-actor-stream-") as root:
        say(f"{replicas} replica(s), {len(batches)} steps of {GROUPS} groups")
        run_dir = Path(root)
        _run_actor(run_dir, replicas, coordinator)
        files = [run_dir / f"replica{replica}.json" for replica in range(replicas)]
        rows = [msgspec.json.decode(file.read_bytes()) for file in files]
    steps = {step: _step_of(step, coordinator, [row[step - 1] for row in rows]) for step in range(1, len(batches) + 1)}
    streamed = [steps[step] for step in steps if step > ALL_READY and streams(step)]
    held = [steps[step] for step in steps if step > ALL_READY and not streams(step)]
    for number, (one, other) in enumerate(zip(streamed, held, strict=True)):
        say(
            f"recording {number}: streamed {one['step_s']:.2f} s, waiting {other['step_s']:.2f} s; tail "
            f"{one['tail_in_groups']:.2f} groups (floor {one['floor_in_groups']:.2f}), waiting "
            f"{other['tail_in_groups']:.2f}"
        )

    def median(of: list[dict[str, float]], key: str) -> float:
        return round(statistics.median(step[key] for step in of), 3)

    return {
        "ratio": round(sum(step["step_s"] for step in held) / sum(step["step_s"] for step in streamed), 3),
        "tail_in_groups": median(streamed, "tail_in_groups"),
        "floor_in_groups": median(streamed, "floor_in_groups"),
        "overhead_in_groups": median(streamed, "overhead_in_groups"),
        "tails_in_groups": [round(step["tail_in_groups"], 3) for step in streamed],
        "floors_in_groups": [round(step["floor_in_groups"], 3) for step in streamed],
        "overhead_ms": {
            part: round(1e3 * statistics.median(step[f"{part}_s"] for step in streamed), 1)
            for part in ("hand_out", "close", "reduce")
        },
        "waiting_tail_in_groups": median(held, "tail_in_groups"),
        "group_s": median(streamed, "last_group_s"),
        "train_s": round(steps[ALL_READY]["step_s"], 3),
        "streamed_step_s": median(streamed, "step_s"),
        "waiting_step_s": median(held, "step_s"),
    }


def _step_of(step: int, coordinator: PacedCoordinator, rows: list[dict[str, Any]]) -> dict[str, float]:
    """Numbers of one step from all replicas' rows."""
    arrivals = dict(
        zip((group.group_id for group in coordinator.batches[step - 1]), coordinator.arrivals(step), strict=True)
    )
    work = {name: end - start for row in rows for name, (start, end) in row["groups"].items()}
    last_group, last = max(arrivals.items(), key=lambda arrival: arrival[1])
    own = work[last_group]
    ends = []
    for row in rows:
        free = coordinator.began[step]
        for name in sorted(row["groups"], key=lambda name: row["groups"][name]):
            free = max(free, arrivals[name] if streams(step) else last) + work[name]
        ends.append(free)
    tail, floor = (max(row["optimizer"] for row in rows) - last) / own, (max(ends) - last) / own
    # Of the replica that trained the last arrival.
    row = next(row for row in rows if last_group in row["groups"])
    start = row["groups"][last_group][0]
    free = max((other for _, other in row["groups"].values() if other < start), default=0.0)
    return {
        "hand_out_s": start - max(last, free),
        "close_s": row["closed"] - row["groups"][last_group][1],
        "reduce_s": row["optimizer"] - row["closed"],
        "step_s": max(row["end"] for row in rows) - coordinator.began[step],
        "tail_in_groups": tail,
        "floor_in_groups": floor,
        "overhead_in_groups": tail - floor,
        "last_group_s": own,
    }


def _run_actor(run_dir: Path, replicas: int, coordinator: PacedCoordinator) -> None:
    model = kit.make_model(run_dir / "model", layers=3, hidden=128, positions=PROMPT + LONGEST)
    nothing = FactoryConfig(factory="nothing:nothing")
    config = VenusConfig(
        run=RunConfig(steps=len(coordinator.batches)),
        model=ModelConfig(path=str(model), context_length=PROMPT + LONGEST),
        rollout=RolloutConfig(tasks=nothing, agent=nothing),
        actor=ActorConfig(ranks=replicas, micro_batch_tokens=2048),
    )
    (run_dir / "config.yaml").write_text(to_yaml(config))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(replicas)]
    with serving(coordinator):
        subprocess.run(
            [*torchrun, "-m", "tests.benchmarks._actor_stream", str(run_dir), coordinator.url],
            check=True,
            stdout=sys.stderr,
            env=os.environ | {"OMP_NUM_THREADS": "1", "VENUS_TOKEN": TOKEN, "PYTHONWARNINGS": "ignore"},
            timeout=TIMEOUT_S,
        )
