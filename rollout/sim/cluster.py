"""The simulated cluster: events go to the live dispatcher, its commands to simulated workers and trainer.

`simulate(config)` is one run. It ends with the optimizer's last step; the dispatcher admits no group that no step would
train, so what was submitted and what was trained can be compared whole.
"""

from __future__ import annotations

from collections.abc import Callable

from envclient.base.errors import InvariantError
from rollout.dispatcher import Dispatcher
from rollout.policy.lengths import TrueLengths
from rollout.policy.staleness import version_span
from rollout.sim.clock import Clock
from rollout.sim.config import SimConfig
from rollout.sim.cost import engine_cost, train_cost
from rollout.sim.metrics import Ledger, Result
from rollout.sim.policies import dispatcher_config, whole_policy
from rollout.sim.sandboxes import Sandboxes
from rollout.sim.trainer import SimTrainer
from rollout.sim.worker import Play, SimWorker
from rollout.sim.workload import Dice, Script, Workload, make_workload
from rollout.types import (
    AbortTrajectory,
    AnyCommand,
    AnyEvent,
    Capabilities,
    CloseBatch,
    ClosePrompt,
    DeliverGroup,
    DropTrajectories,
    EventRow,
    FetchPrompts,
    GrantSync,
    MoveTrajectory,
    PauseWorker,
    PromptSubmitted,
    ResumeWorker,
    RunStarted,
    SealGroup,
    SetClass,
    StartTrajectory,
    StopRun,
    Tick,
    TrajectoryEnded,
    TrajectoryStatus,
    WorkerJoined,
    WorkerLost,
)

_QUIET_S = 3600.0
"""Seconds beyond the deadline of trajectories without any event but ticks: a deadlock."""


class Cluster:
    """One simulated run.

    Args:
        label: name of the policy in the result; default: its own.
        record: called with every row of the run's events, as a live run writes them to `events.jsonl`.
        watch: called after every event, for tests.
    """

    def __init__(
        self,
        config: SimConfig,
        *,
        workload: Workload | None = None,
        label: str = "",
        record: Callable[[EventRow], None] | None = None,
        watch: Callable[[Cluster], None] | None = None,
    ) -> None:
        self.config = config
        self.clock = Clock()
        self.workload = workload or make_workload(config)
        self.policy = whole_policy(config)
        self.dispatcher = Dispatcher(dispatcher_config(config), TrueLengths(self._truth))
        self.label = label or config.policy.name
        self.moved = 0
        self.cost = engine_cost(config.model, config.engine)
        train = train_cost(config)
        self.ledger = Ledger(config, self.cost, train, self.clock)
        self.trainer = SimTrainer(
            self.clock,
            train,
            replicas=config.trainer.replicas,
            streaming=config.trainer.streaming,
            report=self.send,
            group_s=self.ledger.group_s,
            group_tokens=self.ledger.group_tokens,
            on_step=self._step_made,
        )
        self.workers: dict[str, SimWorker] = {}
        self.players: dict[str, Play] = {}
        self._scripts: dict[str, Script] = {}
        self.sandboxes = Sandboxes(config.environment.sandboxes)
        self._record = record
        self._watch = watch
        self._rows = 0
        self._position = 0
        self._done = False
        self._heard_s = 0.0
        self._accidents = Dice(config.workload, config.failures, config.seed).of(3)

    def run(self) -> Result:
        """Raises: InvariantError: a broken promise, a deadlock, or a run that the dispatcher stopped."""
        self.send(RunStarted(version=0, constants=self.dispatcher.config.recorded()))
        for number in range(self.config.workers):
            self._join(f"w{number}")
        self.trainer.begin()
        self.clock.after(self.policy.tick_s, self._tick)
        if self.config.failures.worker_mtbf_s > 0:
            self._plan_accident()
        while not self._done and self.clock.step():
            pass
        return self.ledger.result(self)

    # ---------------------------------------------------------------------------------------------------- events

    def send(self, event: AnyEvent) -> None:
        """An event on its way to the dispatcher."""
        self.clock.after(self.config.control_s, lambda: self._handle(event))

    def _handle(self, event: AnyEvent) -> None:
        if self._done:
            return
        if not isinstance(event, Tick):
            self._heard_s = self.clock.now
        if isinstance(event, TrajectoryEnded) and self._too_old(event):
            self.ledger.discarded(event.trajectory_id)
        commands = self.dispatcher.handle(event, self.clock.now)
        if self._record is not None:
            self._rows += 1
            self._record(EventRow(seq=self._rows, now=self.clock.now, event=event, commands=commands))
        for command in commands:
            self._obey(command)
        if self._watch is not None:
            self._watch(self)

    def _too_old(self, event: TrajectoryEnded) -> bool:
        """It ended well, but under more weight versions than may train."""
        span = version_span(event.first_version, event.last_version)
        return event.status is TrajectoryStatus.FINISHED and span > self.config.group.max_version_span

    def _tick(self) -> None:
        if self.clock.now - self._heard_s > self.config.group.deadline_s + _QUIET_S:
            raise InvariantError(f"deadlock at {self.clock.now:.0f} s: {self.dispatcher.statistics()}")
        self._handle(Tick())
        self.clock.after(self.policy.tick_s, self._tick)

    def _obey(self, command: AnyCommand) -> None:
        match command:
            case StartTrajectory() | PauseWorker() | ResumeWorker():
                self.clock.after(self.config.control_s, lambda: self._tell(command))
            case AbortTrajectory() | SetClass() | MoveTrajectory():
                if isinstance(command, AbortTrajectory) and command.status is TrajectoryStatus.DISCARDED:
                    self.ledger.discarded(command.trajectory_id)
                self.clock.after(self.config.control_s, lambda: self._tell_player(command))
            case FetchPrompts(count=count):
                for _ in range(count):
                    name = f"p{self._position:06d}"
                    self._position += 1
                    self.send(PromptSubmitted(prompt_id=name, task_id=name, epoch=0))
            case DeliverGroup():
                self.ledger.delivered(command)
                self.trainer.deliver(command)
            case CloseBatch():
                self.trainer.close(command)
            case GrantSync(version=version):
                self.trainer.granted(version)
            case SealGroup():
                self.ledger.sealed(command)
            case ClosePrompt():
                self._forget(self.ledger.closed(command))
            case DropTrajectories(trajectory_ids=names):
                self.ledger.dropped(names)
                self._forget(names)
            case StopRun(cause=cause):
                raise InvariantError(f"the dispatcher stopped the run at {self.clock.now:.0f} s: {cause}")

    def _tell(self, command: StartTrajectory | PauseWorker | ResumeWorker) -> None:
        worker = self.workers.get(command.worker)
        if worker is None:
            return
        match command:
            case StartTrajectory():
                self.players[command.trajectory_id] = worker.start(command)
                self.ledger.started(command.trajectory_id, self._script(command.trajectory_id))
            case PauseWorker(version=version):
                worker.pause(version)
            case ResumeWorker(version=version):
                worker.resume(version)

    def _tell_player(self, command: AbortTrajectory | SetClass | MoveTrajectory) -> None:
        """To wherever the trajectory is: it may be on its way between two workers."""
        play = self.players.get(command.trajectory_id)
        if play is None or play.ended:
            return
        match command:
            case AbortTrajectory():
                play.worker.abort(play, command)
            case SetClass():
                play.worker.set_class(play, command)
            case MoveTrajectory(to=to):
                target = self.workers.get(to)
                if target is not None:
                    self.moved += 1
                    play.worker.move(play, target)

    def _step_made(self, step: int) -> None:
        self.ledger.step_made(step, self.workers.values(), self.trainer)
        if step >= self.config.steps:
            # The dispatcher's answer to the last StepFinished still counts.
            self.clock.after(2 * self.config.control_s, self._finish)

    def _finish(self) -> None:
        self._done = True

    # --------------------------------------------------------------------------------------------------- workers

    def _join(self, name: str) -> None:
        engine, policy = self.config.engine, self.policy
        worker = SimWorker(
            name,
            self.config,
            self.cost,
            self.clock,
            policy=policy,
            version=self.dispatcher.version,
            sandboxes=self.sandboxes,
            script_of=self._script,
            report=self.send,
        )
        self.workers[name] = worker
        self.send(
            WorkerJoined(
                worker=name,
                slots=engine.slots,
                version=worker.version,
                capabilities=Capabilities(priority=policy.priority, tiers=policy.tiers, migration=engine.migration),
                kv_tokens=self.cost.kv_tokens,
                host_kv_tokens=self.cost.host_tokens,
            )
        )

    def _plan_accident(self) -> None:
        wait_s = float(self._accidents.exponential(self.config.failures.worker_mtbf_s))
        self.clock.after(wait_s, self._accident)

    def _accident(self) -> None:
        """A worker dies, unless it is the last one."""
        alive = sorted(self.workers)
        if len(alive) > 1:
            name = alive[int(self._accidents.integers(len(alive)))]
            worker = self.workers.pop(name)
            self.ledger.lost(worker)
            worker.lose()
            self.send(WorkerLost(worker=name, cause="simulated failure"))
            self.clock.after(self.config.failures.worker_restart_s, lambda: self._join(name))
        self._plan_accident()

    # --------------------------------------------------------------------------------------------------- scripts

    def _script(self, trajectory_id: str) -> Script:
        script = self._scripts.get(trajectory_id)
        if script is None:
            prompt, group_attempt, member, attempt = trajectory_id.split(".")
            script = self.workload.script(int(prompt[1:]), int(member), 1000 * int(group_attempt) + int(attempt))
            self._scripts[trajectory_id] = script
        return script

    def _forget(self, trajectories: list[str]) -> None:
        for name in trajectories:
            self.players.pop(name, None)
            self._scripts.pop(name, None)

    def _truth(self, trajectory_id: str) -> tuple[int, int]:
        """(output tokens in all, context tokens at its end), for the oracle."""
        script = self._script(trajectory_id)
        return script.generated, script.context_tokens


def simulate(config: SimConfig) -> Result:
    """Run `config` to its end."""
    return Cluster(config).run()
