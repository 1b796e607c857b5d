"""A simulated rollout worker: sandboxes, tools and turns around a simulated engine and the live slot policy.

It does what `rollout.worker` does (lease, turn, tool, …, score, release), obeys the dispatcher's commands, and reports
the same events. Nothing here decides anything: order comes from the slot policy, classes from the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from rollout.policy.slots import make_slots
from rollout.policy.tiers import UNUSED, tier_of
from rollout.sim.clock import Clock
from rollout.sim.config import SimConfig
from rollout.sim.cost import EngineCost
from rollout.sim.engine import WAITING, Request, SimEngine
from rollout.sim.kv import Node
from rollout.sim.policies import WholePolicy
from rollout.sim.sandboxes import Sandboxes
from rollout.sim.workload import Script
from rollout.types import (
    AbortTrajectory,
    AnyEvent,
    PriorityClass,
    SetClass,
    StartTrajectory,
    TrajectoryEnded,
    TrajectoryStatus,
    TurnEnded,
    TurnReady,
    WeightsAcknowledged,
    WorkerPaused,
)


class Stage(Enum):
    LEASE = "lease"
    OPEN = "open"
    TURN = "turn"
    """Waits for a slot or generates."""
    TOOL = "tool"
    SCORE = "score"


@dataclass(slots=True, kw_only=True, eq=False)
class Play:
    """A trajectory being played."""

    worker: SimWorker
    """Where it is."""
    trajectory_id: str
    group_id: str
    script: Script
    tail: Node
    priority: PriorityClass
    rank: int
    context: int
    stage: Stage = Stage.LEASE
    since_s: float = 0.0
    wanted_s: float = 0.0
    """Since when the turn waits for its slot."""
    turn: int = 0
    """Finished ones."""
    made: int = 0
    """Tokens of the running turn that an abort has handed back."""
    first_version: int = -1
    last_version: int = -1
    generated: int = 0
    request: Request | None = None
    epoch: int = -1
    ended: bool = False
    moving: bool = False
    """On its way between two workers."""
    moving_to: SimWorker | None = None
    """Where it goes as soon as no request of it is in the engine."""


class WorkerStatistics:
    """Sums over a worker's life, seconds."""

    def __init__(self) -> None:
        self.stage_s = dict.fromkeys(Stage, 0.0)
        self.turns = 0
        self.preempted = 0


class SimWorker:
    """One worker. `report` sends an event to the coordinator."""

    def __init__(
        self,
        name: str,
        config: SimConfig,
        cost: EngineCost,
        clock: Clock,
        *,
        policy: WholePolicy,
        version: int,
        sandboxes: Sandboxes,
        script_of: Callable[[str], Script],
        report: Callable[[AnyEvent], None],
    ) -> None:
        self.name = name
        self.version = version
        self.statistics = WorkerStatistics()
        self._clock = clock
        self._keep_kv = config.engine.kv_on_sync == "keep"
        self._environment = config.environment
        self._tiers = policy.tiers
        self._sandboxes = sandboxes
        self._script_of = script_of
        self._report = report
        self._slots = make_slots(policy.slots, config.engine.slots)
        self._reports_ready = policy.reports_ready
        self._move_token_s = cost.move_token_s
        self.engine = SimEngine(
            clock,
            cost,
            config.engine,
            priority=policy.priority,
            tiers=policy.tiers,
            on_finish=self._turn_done,
            on_abort=self._turn_aborted,
        )
        self.plays: dict[str, Play] = {}
        self._pausing: int | None = None
        """Version that a pause waits for, until the engine is empty."""
        self._paused = False
        self.lost = False

    # -------------------------------------------------------------------------------------------------- commands

    def start(self, command: StartTrajectory) -> Play:
        script = self._script_of(command.trajectory_id)
        tail = self.engine.kv.tail(command.group_id, command.trajectory_id)
        play = Play(
            worker=self,
            trajectory_id=command.trajectory_id,
            group_id=command.group_id,
            script=script,
            tail=tail,
            priority=command.priority,
            rank=command.rank,
            context=script.prompt_tokens,
            since_s=self._clock.now,
        )
        self.plays[play.trajectory_id] = play
        self._classify(play)
        self._sandboxes.lease(lambda: play.worker.leased(play))
        return play

    def abort(self, play: Play, command: AbortTrajectory) -> None:
        self.end(play, command.status, 0.0, command.cause)

    def set_class(self, play: Play, command: SetClass) -> None:
        if command.epoch <= play.epoch:
            return
        play.epoch = command.epoch
        play.priority = command.priority
        play.rank = command.rank
        if play.request is not None:
            self.engine.set_high(play.request, command.priority is PriorityClass.HIGH)
        self._classify(play)

    def _classify(self, play: Play) -> None:
        """Slots and engine get to know the trajectory's class."""
        self._refer(play)
        self._grant(self._slots.set_class(play.trajectory_id, play.priority, play.rank))

    def _refer(self, play: Play) -> None:
        """The trajectory's reference on its KV, by its class."""
        if self._tiers:
            self.engine.set_tier(play.tail, tier_of(play.priority))

    def pause(self, version: int) -> None:
        self._pausing = version
        self._paused = True
        self._slots.pause()
        if self._keep_kv:
            for play in self.plays.values():
                if play.request is not None and play.request.generated:
                    self._touch(play)
            self.engine.hold()
        else:
            self.engine.abort_all()
        self._check_paused()

    def _check_paused(self) -> None:
        if self._pausing is None or not (self._keep_kv or self.engine.empty):
            return
        version, self._pausing = self._pausing, None
        if not self._keep_kv:
            self.engine.kv.flush()
        self._report(WorkerPaused(worker=self.name, version=version))

    def resume(self, version: int) -> None:
        self.version = version
        self._paused = False
        self.engine.go_on()
        self._grant(self._slots.resume())
        self._report(WeightsAcknowledged(worker=self.name, version=version))

    def lose(self) -> None:
        """The process died: nothing of it is heard of again."""
        self.lost = True
        self.engine.stop()
        for play in self.plays.values():
            play.ended = True
            if play.stage is not Stage.LEASE:
                self._sandboxes.release()
        self.plays.clear()

    # ------------------------------------------------------------------------------------------- a trajectory's way

    def _enter(self, play: Play, stage: Stage) -> None:
        now = self._clock.now
        self.statistics.stage_s[play.stage] += now - play.since_s
        play.stage = stage
        play.since_s = now

    def leased(self, play: Play) -> bool:
        """A sandbox is free; False when the trajectory is not there any more to take it."""
        if play.ended:
            return False
        self._enter(play, Stage.OPEN)
        self._clock.after(self._environment.open_s, lambda: play.worker.next_turn(play))
        return True

    def next_turn(self, play: Play) -> None:
        if play.ended:
            return
        self._enter(play, Stage.TURN)
        play.wanted_s = self._clock.now
        if self._reports_ready:
            turn = play.turn + 1
            self._report(TurnReady(trajectory_id=play.trajectory_id, turn=turn, context_tokens=play.context))
        if not play.moving:
            self._grant(self._slots.turn_ready(play.trajectory_id, play.context))

    def _grant(self, started: list[str]) -> None:
        for trajectory_id in started:
            play = self.plays[trajectory_id]
            request = Request(
                trajectory_id,
                play.tail,
                prompt_tokens=play.script.prompt_tokens,
                context=play.context + play.made,
                output=play.script.outputs[play.turn] - play.made,
                high=play.priority is PriorityClass.HIGH,
                wanted_s=play.wanted_s,
            )
            play.request = request
            self.engine.submit(request)
        for victim in self._slots.take_victims():
            running = self.plays[victim].request
            assert running is not None
            self.engine.abort(running)

    def _sampled(self, play: Play, tokens: int) -> None:
        if tokens:
            play.generated += tokens
            self._touch(play)

    def _touch(self, play: Play) -> None:
        """It samples under the present version."""
        play.last_version = self.version
        if play.first_version < 0:
            play.first_version = self.version

    def _turn_done(self, request: Request) -> None:
        play = self.plays.get(request.trajectory)
        if play is None or play.request is not request:
            return  # it has ended: an abort and the turn's last token crossed
        play.request = None
        script = play.script
        output = script.outputs[play.turn]
        self._sampled(play, output - play.made)
        play.made = 0
        play.turn += 1
        self.statistics.turns += 1
        context = play.context
        play.context += output
        self._report(
            TurnEnded(
                trajectory_id=play.trajectory_id,
                turn=play.turn,
                context_tokens=context,
                output_tokens=output,
                version=self.version,
            )
        )
        self._grant(self._slots.turn_ended(play.trajectory_id))
        self._act(play)
        self._hand_over(play)
        self._check_paused()

    def _act(self, play: Play) -> None:
        script, turn = play.script, play.turn - 1
        self._enter(play, Stage.TOOL)
        if turn == script.stuck_after:
            return  # its deadline ends it
        tool_s = script.tools_s[turn]
        if turn == script.fails_after:
            self._clock.after(tool_s, lambda: play.worker.end(play, TrajectoryStatus.FAILED, 0.0, "simulated failure"))
        elif play.turn == script.turns:
            self._clock.after(0.0 if script.truncated else tool_s, lambda: play.worker.score(play))
        else:
            play.context += script.appended[turn]
            self._clock.after(tool_s, lambda: play.worker.next_turn(play))

    def score(self, play: Play) -> None:
        if play.ended:
            return
        self._enter(play, Stage.SCORE)
        status = TrajectoryStatus.TRUNCATED if play.script.truncated else TrajectoryStatus.FINISHED
        self._clock.after(self._environment.score_s, lambda: play.worker.end(play, status, play.script.reward, ""))

    def _turn_aborted(self, request: Request) -> None:
        """Out of the engine: by a pause (it queues again), a preemption, or because the trajectory has ended."""
        play = self.plays.get(request.trajectory)
        if play is not None and play.request is request:
            play.request = None
            made = request.context - play.context - play.made
            self._sampled(play, made)
            play.made += made
            self.statistics.preempted += 1
            play.wanted_s = self._clock.now
            if not self._hand_over(play):
                self._grant(self._slots.turn_preempted(play.trajectory_id))
        self._check_paused()

    # ----------------------------------------------------------------------------------------------- re-dispatch

    def move(self, play: Play, target: SimWorker) -> None:
        """Hand the trajectory over, a running turn first finished."""
        play.moving_to = target
        if play.request is None:
            self._hand_over(play)
        elif play.request.state == WAITING:
            self.engine.abort(play.request)

    def _hand_over(self, play: Play) -> bool:
        """With a copy of what is known of its KV, host memory to host memory; False when it does not go."""
        target, play.moving_to = play.moving_to, None
        if target is None or target.lost or target is self or play.moving or play.ended:
            return False
        del self.plays[play.trajectory_id]
        self._grant(self._slots.trajectory_ended(play.trajectory_id))
        prompt = play.script.prompt_tokens
        _, known = self.engine.kv.match(play.tail, prompt, play.context + play.made)
        self.engine.set_tier(play.tail, UNUSED)
        copied = known if target.engine.kv.host_capacity else 0
        play.worker = target
        play.moving = True
        target.plays[play.trajectory_id] = play
        play.tail = target.engine.kv.tail(play.group_id, play.trajectory_id)
        target._classify(play)
        version = self.version
        self._clock.after(copied * self._move_token_s, lambda: target.arrive(play, copied, version))
        return True

    def arrive(self, play: Play, copied: int, version: int) -> None:
        """The copy is here; one of other weights is refused."""
        play.moving = False
        if play.ended or play.worker is not self:
            return
        if version == self.version and not self._paused:
            self.engine.kv.import_host(play.tail, play.script.prompt_tokens, copied)
        if play.stage is Stage.TURN:
            self._grant(self._slots.turn_ready(play.trajectory_id, play.context))

    def end(self, play: Play, status: TrajectoryStatus, reward: float, cause: str) -> None:
        if play.ended:
            return
        self._enter(play, play.stage)
        play.ended = True
        del self.plays[play.trajectory_id]
        if play.stage is not Stage.LEASE:
            self._sandboxes.release()
        if play.request is not None:
            self.engine.abort(play.request)
        self.engine.set_tier(play.tail, UNUSED)
        self._grant(self._slots.trajectory_ended(play.trajectory_id))
        self._report(
            TrajectoryEnded(
                trajectory_id=play.trajectory_id,
                worker=self.name,
                status=status,
                reward=reward,
                first_version=play.first_version,
                last_version=play.last_version,
                generated_tokens=play.generated,
                context_tokens=play.context,
                turns=play.turn,
                cause=cause,
            )
        )

    def check_invariants(self) -> None:
        self.engine.check_invariants()
        self._slots.check_invariants()
