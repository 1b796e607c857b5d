"""What a simulated run adds up to. The headline is trained tokens per hour beside the trained and submitted lengths:
a policy that drops long groups looks fast, and only the lengths tell."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from rollout.sim.clock import Clock
from rollout.sim.config import SimConfig
from rollout.sim.cost import EngineCost, TrainCost
from rollout.sim.engine import ENGINE_SUMS, EngineStatistics
from rollout.sim.fairness import CLASSES, classes, discard_shares, drift, shares
from rollout.sim.trainer import SimTrainer
from rollout.sim.worker import SimWorker, Stage
from rollout.sim.workload import Script
from rollout.types import ClosePrompt, DeliverGroup, PromptStatus, SealGroup

if TYPE_CHECKING:
    from rollout.sim.cluster import Cluster


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers of a run. Rates are those of the steps `counted`; lengths are generated tokens of a trajectory."""

    policy: str
    seed: int
    steps: int
    hours: float
    """Simulated, all steps."""
    counted: int
    """Steps in the rates: without the first ones (the cluster fills) and the last ones (it drains)."""
    trained_tokens_per_hour: float
    groups_per_hour: float
    step_s: float
    """Mean."""
    t_next_s: float
    """Mean seconds from new weights until the last group of the next batch was ready."""
    trained_length: float
    submitted_length: float
    length_ratio: float
    """trained / submitted; far from 1: the policy chooses what it trains."""
    length_ks: float
    """Kolmogorov-Smirnov distance of the two distributions."""
    device_hit_rate: float
    """Prompt tokens found on the device, of those sent."""
    host_hit_rate: float
    """Copied from the host cache."""
    known_hit_rate: float
    """Found on device or host, of the tokens that had been in the engine before."""
    recomputed_tokens: int
    """Prefilled a second time."""
    active_batch: float
    """Mean requests in an engine, of its slots."""
    discarded: int
    failed: int
    resampled: int
    filtered_groups: int
    lost_groups: int
    """Failed or discarded."""
    retractions: int
    preempted: int
    """Turns that gave up their slot, or were interrupted by a sync."""
    moved: int
    """Trajectories that went on on another worker."""
    peak_sandboxes: int
    trainer_busy: float
    """Share of the time."""
    sync_s: float
    """Mean seconds of a sync, waiting for the pause included."""
    stage_share: dict[str, float]
    """Share of the trajectories' time by stage: lease, open, turn (queue and generation), tool, score."""
    prefill_share: float
    """Of the engines' busy time."""
    engine_busy: float
    rollout_goodput: float
    """Trained tokens of the tokens that engines computed: the rest is prefill, and what was thrown away."""
    turn_wait_s: float
    """Mean seconds that a turn waits for a slot and for KV memory, each time it waits."""
    environment_goodput: float
    """Share of the sandboxes' time in which they work (open, tool, score): else their trajectory waits or generates."""
    lease_wait_s: float
    """Mean seconds that a trajectory waits for its sandbox."""
    trainer_wait_s: float
    """Mean seconds of a step in which the actor waits for groups."""
    mixture: list[float]
    """Consumed by the steps counted: shares of the submitted stream's quarters by length, shortest first."""
    mixture_drift: float
    """Largest distance of the mixture trained so far from the one declared so far: see `rollout.sim.fairness`."""
    discard_shares: list[float]
    """Share of the trajectories discarded, by decile of their length."""
    step_times_s: list[float]
    trained_lengths: list[int]
    submitted_lengths: list[int]

    def row(self) -> dict[str, Any]:
        """Without the lists, for tables and `--json`."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return {key: value for key, value in plain.items() if key not in _LISTS}


_LISTS = ("step_times_s", "trained_lengths", "submitted_lengths")


def ks_distance(a: list[int], b: list[int]) -> float:
    """max |F_a − F_b|; 0 when one is empty."""
    if not a or not b:
        return 0.0
    x, y = np.sort(a), np.sort(b)
    points = np.concatenate([x, y])
    below_x = np.searchsorted(x, points, side="right") / len(x)
    below_y = np.searchsorted(y, points, side="right") / len(y)
    return float(np.max(np.abs(below_x - below_y)))


class Ledger:
    """Keeps what the result needs, and what a group costs to train."""

    def __init__(self, config: SimConfig, engine: EngineCost, train: TrainCost, clock: Clock) -> None:
        self._config = config
        self._cost = train
        self._clock = clock
        self._scripts: dict[str, tuple[int, int]] = {}
        """Trajectory → (generated, tokens in all), of those that may still train."""
        self._first_seen = 0
        """Tokens that must be prefilled at least once: prompts once a group, and observations."""
        self._groups: set[str] = set()
        self._started = 0
        self._submitted: dict[str, int] = {}
        """Trajectory → generated tokens of the first attempt at each member."""
        self._members: dict[str, list[str]] = {}
        self._sealed_s: dict[str, float] = {}
        self._ready_s: dict[int, float] = {}
        self._trained: dict[int, list[int]] = {}
        self._trained_prompts: dict[int, list[str]] = {}
        self._discarded: set[str] = set()
        self._marks: list[_Mark] = []
        self._lost = EngineStatistics()
        self._lost_stage_s = dict.fromkeys(Stage, 0.0)
        self._lost_preempted = 0
        self._groups_lost = dict.fromkeys(PromptStatus, 0)

    # ----------------------------------------------------------------------------------------------- the run tells

    def started(self, trajectory_id: str, script: Script) -> None:
        self._scripts[trajectory_id] = (script.generated, script.context_tokens)
        self._first_seen += sum(script.appended[:-1])
        self._started += 1
        group = trajectory_id.rsplit(".", 2)[0]
        if group not in self._groups:
            self._groups.add(group)
            self._first_seen += script.prompt_tokens
        if trajectory_id.endswith(".0"):
            self._submitted.setdefault(trajectory_id, script.generated)

    def sealed(self, command: SealGroup) -> None:
        self._members[command.group_id] = command.members
        self._sealed_s[command.group_id] = self._clock.now

    def group_s(self, group_id: str) -> float:
        return sum(self._cost.sequence_s(self._scripts[name][1]) for name in self._members[group_id])

    def group_tokens(self, group_id: str) -> int:
        return sum(self._scripts[name][0] for name in self._members[group_id])

    def delivered(self, command: DeliverGroup) -> None:
        ready = self._sealed_s[command.group_id]
        self._ready_s[command.step] = max(ready, self._ready_s.get(command.step, 0.0))

    def closed(self, command: ClosePrompt) -> list[str]:
        """Trajectories that nothing will ask for again."""
        members = self._members.pop(command.group_id, [])
        if command.status is PromptStatus.ACCEPTED:
            self._trained.setdefault(command.step, []).extend(self._scripts[name][0] for name in members)
            self._trained_prompts.setdefault(command.step, []).append(command.prompt_id)
        else:
            self._groups_lost[command.status] += 1
        self.dropped(members)
        return members

    def discarded(self, trajectory_id: str) -> None:
        self._discarded.add(trajectory_id)

    def dropped(self, trajectories: Iterable[str]) -> None:
        for name in trajectories:
            self._scripts.pop(name, None)

    def lost(self, worker: SimWorker) -> None:
        _add(self._lost, worker.engine.statistics)
        for stage, seconds in worker.statistics.stage_s.items():
            self._lost_stage_s[stage] += seconds
        self._lost_preempted += worker.statistics.preempted

    def step_made(self, step: int, workers: Iterable[SimWorker], trainer: SimTrainer) -> None:
        total = EngineStatistics()
        _add(total, self._lost)
        for worker in workers:
            _add(total, worker.engine.statistics)
        self._marks.append(_Mark(self._clock.now, total, trainer.busy_s))

    # ------------------------------------------------------------------------------------------------------- result

    def result(self, cluster: Cluster) -> Result:
        config = self._config
        marks = self._marks
        tail = int(np.ceil(config.group.async_factor - 1.0 - 1e-9))
        last = max(1, len(marks) - tail)
        first = min(config.skip_steps, last - 1)
        zero = _Mark(0.0, EngineStatistics(), 0.0)
        begin, end = (marks[first - 1] if first else zero), marks[last - 1]
        span_s = end.now_s - begin.now_s
        counted = range(first + 1, last + 1)
        trained = [n for step in self._trained for n in self._trained[step]]
        tokens = sum(sum(self._trained.get(step, [])) for step in counted)
        engine = _difference(end.engine, begin.engine)
        stage_s = dict(self._lost_stage_s)
        preempted = self._lost_preempted
        for worker in cluster.workers.values():
            preempted += worker.statistics.preempted
            for stage, seconds in worker.statistics.stage_s.items():
                stage_s[stage] += seconds
        whole_s = sum(stage_s.values()) or 1.0
        times = [b.now_s - a.now_s for a, b in zip([zero, *marks], marks, strict=False)]
        busy_s = engine.prefill_s + engine.decode_s
        available_s = span_s * config.workers
        submitted = list(self._submitted.values())
        statistics = cluster.dispatcher.statistics()
        sent = engine.sent_tokens or 1
        mean_trained, mean_submitted = _mean(trained), _mean(submitted)
        prefilled = marks[-1].engine.prefill_tokens
        total_sent = marks[-1].engine.sent_tokens
        known = max(1, total_sent - self._first_seen)
        engaged_s = sum(stage_s[stage] for stage in (Stage.OPEN, Stage.TOOL, Stage.SCORE))
        sync_s = cluster.trainer.sync_s / max(1, len(marks) - 1)
        kinds = classes(self._prompt_lengths(), CLASSES)
        consumed = [kinds[prompt] for step in counted for prompt in self._trained_prompts.get(step, [])]
        hits = marks[-1].engine.device_hit_tokens + marks[-1].engine.host_hit_tokens
        return Result(
            policy=cluster.label,
            seed=config.seed,
            steps=len(marks),
            hours=marks[-1].now_s / 3600,
            counted=len(counted),
            trained_tokens_per_hour=tokens / span_s * 3600,
            groups_per_hour=len(counted) * config.group.batch / span_s * 3600,
            step_s=span_s / len(counted),
            t_next_s=_mean([max(0.0, self._ready_s[s] - (marks[s - 2].now_s if s > 1 else 0.0)) for s in counted]),
            trained_length=mean_trained,
            submitted_length=mean_submitted,
            length_ratio=mean_trained / mean_submitted if mean_submitted else 0.0,
            length_ks=ks_distance(trained, submitted),
            device_hit_rate=engine.device_hit_tokens / sent,
            host_hit_rate=engine.host_hit_tokens / sent,
            known_hit_rate=min(1.0, hits / known),
            recomputed_tokens=max(0, prefilled - self._first_seen),
            active_batch=engine.batch_s / available_s,
            discarded=int(statistics["trajectories_discarded"]),
            failed=int(statistics["trajectories_failed"]),
            resampled=int(statistics["trajectories_resampled"]),
            filtered_groups=self._groups_lost[PromptStatus.FILTERED],
            lost_groups=self._groups_lost[PromptStatus.FAILED] + self._groups_lost[PromptStatus.DISCARDED],
            retractions=engine.retractions,
            preempted=preempted,
            moved=cluster.moved,
            peak_sandboxes=cluster.sandboxes.peak,
            trainer_busy=(end.trainer_s - begin.trainer_s) / span_s,
            sync_s=sync_s,
            stage_share={stage.value: seconds / whole_s for stage, seconds in stage_s.items()},
            prefill_share=engine.prefill_s / busy_s if busy_s else 0.0,
            engine_busy=busy_s / available_s,
            rollout_goodput=tokens / max(1, engine.prefill_tokens + engine.decode_tokens),
            turn_wait_s=engine.wait_s / max(1, engine.admissions),
            environment_goodput=engaged_s / ((engaged_s + stage_s[Stage.TURN]) or 1.0),
            lease_wait_s=stage_s[Stage.LEASE] / max(1, self._started),
            trainer_wait_s=max(0.0, (span_s - (end.trainer_s - begin.trainer_s)) / len(counted) - sync_s),
            mixture=shares(consumed, CLASSES),
            mixture_drift=drift(
                kinds, sorted(kinds), [self._trained_prompts[s] for s in sorted(self._trained_prompts)]
            ),
            discard_shares=discard_shares(self._submitted, self._discarded),
            step_times_s=times,
            trained_lengths=trained,
            submitted_lengths=submitted,
        )

    def _prompt_lengths(self) -> dict[str, float]:
        """Mean generated tokens of each prompt's first trajectories."""
        found: dict[str, list[int]] = {}
        for name, tokens in self._submitted.items():
            found.setdefault(name.partition(".")[0], []).append(tokens)
        return {prompt: sum(tokens) / len(tokens) for prompt, tokens in found.items()}


class _Mark:
    """Sums at the end of a step."""

    def __init__(self, now_s: float, engine: EngineStatistics, trainer_s: float) -> None:
        self.now_s = now_s
        self.engine = engine
        self.trainer_s = trainer_s


def _add(into: EngineStatistics, other: EngineStatistics) -> None:
    for name in ENGINE_SUMS:
        setattr(into, name, getattr(into, name) + getattr(other, name))


def _difference(a: EngineStatistics, b: EngineStatistics) -> EngineStatistics:
    result = EngineStatistics()
    for name in ENGINE_SUMS:
        setattr(result, name, getattr(a, name) - getattr(b, name))
    return result


def _mean(values: list[int] | list[float]) -> float:
    return float(sum(values) / len(values)) if values else 0.0
