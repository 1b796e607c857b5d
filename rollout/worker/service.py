"""The rollout worker: joins the coordinator, plays the trajectories it is sent, pauses around weight updates.

Commands come in over the mail, reports go out. Everything runs in one task group: an engine that dies, a coordinator
that is gone or a broken promise ends the worker with that error, and every sandbox is released on the way out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import msgspec

from envclient.base.errors import InvariantError, VenusError, WireError
from envclient.base.wire import Client
from rollout.config import RolloutConfig
from rollout.policy.registry import policy_class
from rollout.policy.settings import PolicySettings
from rollout.policy.slots import CLASS_RULES, make_slots
from rollout.protocol import Agent, Empty, Engine, JoinRequest
from rollout.types import (
    AbortTrajectory,
    Capabilities,
    MoveTrajectory,
    PauseWorker,
    ResumeWorker,
    SetClass,
    StartTrajectory,
    Trajectory,
    WeightsAcknowledged,
    WorkerCommand,
    WorkerPaused,
)
from rollout.worker.agent_loop import AgentLoop, EngineFailed, cancelled
from rollout.worker.estimates import Estimates
from rollout.worker.mail import Mail
from rollout.worker.scheduler import SlotScheduler

log = logging.getLogger("venus.worker")
_JOIN_S = 60.0
_LAST_WORDS_S = 5.0


class RolloutWorker:
    """One worker over a running engine.

    Args:
        coordinator: client of the coordinator.
        version: weight version that the engine has loaded.
        predictor: client of the predictor, where there is one.
    """

    def __init__(
        self,
        *,
        name: str,
        engine: Engine,
        agent: Agent,
        coordinator: Client,
        config: RolloutConfig,
        context_length: int,
        version: int,
        predictor: Client | None = None,
    ) -> None:
        self._name = name
        self._engine = engine
        self._agent = agent
        self._coordinator = coordinator
        self._config = config
        settings = PolicySettings.from_config(config.policy)
        policy = policy_class(settings)
        self._slot_rule = policy.slot_rule(settings)
        self._slots = SlotScheduler(
            engine,
            make_slots(self._slot_rule, config.worker.slots),
            version=version,
            temperature=config.sampling.temperature,
        )
        self._mail = Mail(coordinator, name, self._take)
        self.estimates: Estimates | None = None
        if predictor is not None:
            asking = config.predictor
            self.estimates = Estimates(
                predictor,
                self._mail.report,
                context_tokens=asking.context_tokens,
                timeout_s=asking.timeout_s,
                most=asking.max_questions,
            )
        self._loop = AgentLoop(
            agent,
            self._slots,
            context_length=context_length,
            report_turn=self._mail.report,
            report_ready=self._mail.report if policy.wants_turns else None,
            estimates=self.estimates,
        )
        self._tasks: asyncio.TaskGroup | None = None
        self._playing: dict[str, asyncio.Future[Trajectory] | None] = {}
        """Episodes that are not reported yet; None: about to begin."""
        self._started: set[str] = set()
        self._aborts: dict[str, AbortTrajectory] = {}
        self._updates: asyncio.Queue[PauseWorker | ResumeWorker] = asyncio.Queue()

    async def run(self) -> None:
        """Join and work until cancelled.

        Raises:
            VenusError: the engine died, the coordinator is gone, or a promise was broken; the first cause.
        """
        await self._join()
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._watch_engine())
                self._tasks.create_task(self._update_weights())
                self._tasks.create_task(self._mail.run())
        except BaseExceptionGroup as group:
            raise _first_cause(group) from group

    async def _join(self) -> None:
        request = JoinRequest(
            worker=self._name,
            engine_url=self._engine.url,
            slots=self._config.worker.slots,
            version=self._slots.version,
            capabilities=self._capabilities,
            kv_tokens=self._config.worker.kv_tokens,
            host_kv_tokens=self._config.worker.host_kv_tokens,
        )
        give_up = asyncio.get_running_loop().time() + _JOIN_S
        while True:
            try:
                await self._coordinator.call("/v1/worker/join", request, Empty)
                log.info("joined under version %d with engine %s", self._slots.version, self._engine.url)
                return
            except WireError as error:
                if asyncio.get_running_loop().time() > give_up:
                    raise WireError(f"worker {self._name} cannot join: {error.message}", error.remedy) from None
                await asyncio.sleep(0.5)

    @property
    def _capabilities(self) -> Capabilities:
        """The engine's; classes are obeyed by the slots, whatever the engine can do."""
        engine = self._engine.capabilities
        if self._slot_rule in CLASS_RULES:
            return msgspec.structs.replace(engine, priority=True)
        return engine

    # --------------------------------------------------------------------------------------------- commands

    def _take(self, command: WorkerCommand) -> None:
        match command:
            case StartTrajectory():
                self._start(command)
            case AbortTrajectory():
                self._abort(command)
            case PauseWorker() | ResumeWorker():
                self._updates.put_nowait(command)
            case SetClass():
                if command.trajectory_id in self._playing:
                    self._slots.set_class(command.trajectory_id, command.priority, command.rank)
            case MoveTrajectory():
                raise InvariantError(f"{command.trajectory_id} cannot move to {command.to}: no migration was offered")

    def _start(self, start: StartTrajectory) -> None:
        assert self._tasks is not None
        if start.trajectory_id not in self._started:
            self._started.add(start.trajectory_id)
            self._playing[start.trajectory_id] = None
            self._slots.set_class(start.trajectory_id, start.priority, start.rank)
            self._tasks.create_task(self._play(start), name=start.trajectory_id)

    def _abort(self, abort: AbortTrajectory) -> None:
        # One that is not playing has been reported already; that report stands.
        if abort.trajectory_id in self._playing and abort.trajectory_id not in self._aborts:
            self._aborts[abort.trajectory_id] = abort
            if (episode := self._playing[abort.trajectory_id]) is not None:
                episode.cancel()

    async def _play(self, start: StartTrajectory) -> None:
        trajectory_id = start.trajectory_id
        trajectory: Trajectory | None = None
        try:
            if trajectory_id not in self._aborts:
                self._playing[trajectory_id] = episode = asyncio.ensure_future(self._loop.run(start))
                trajectory = await episode
        except asyncio.CancelledError:
            if trajectory_id not in self._aborts:
                raise
        except EngineFailed as error:
            await self._blame_engine(error)
        finally:
            del self._playing[trajectory_id]
            self._slots.trajectory_ended(trajectory_id)
        if (abort := self._aborts.pop(trajectory_id, None)) is not None:
            trajectory = cancelled(start, abort.status, abort.cause)
        assert trajectory is not None
        self._mail.report(trajectory)

    async def _update_weights(self) -> None:
        """Pauses and resumes, one after the other."""
        while True:
            command = await self._updates.get()
            if isinstance(command, PauseWorker):
                try:
                    await self._slots.pause()
                except WireError as error:
                    await self._blame_engine(EngineFailed(error.message, error.remedy))
                log.info("paused for version %d: %s", command.version, self._slots.statistics())
                self._mail.report(WorkerPaused(worker=self._name, version=command.version))
            else:
                self._slots.resume(command.version)
                self._mail.report(WeightsAcknowledged(worker=self._name, version=command.version))
                log.info("resumed under version %d; agent: %s", command.version, self._agent.statistics())

    # ------------------------------------------------------------------------------------------------ the end

    async def _watch_engine(self) -> None:
        raise VenusError(f"worker {self._name}: {await self._engine.wait_dead()}")

    async def _blame_engine(self, error: EngineFailed) -> None:
        """An engine that died says more than the request that failed with it."""
        try:
            reason = await asyncio.wait_for(self._engine.wait_dead(), _LAST_WORDS_S)
        except TimeoutError:
            raise error from None
        raise VenusError(f"worker {self._name}: {reason}")


def _causes(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _causes(error)
        else:
            yield error


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """What to tell: an error of ours if there is one."""
    causes = list(_causes(group))
    return next((error for error in causes if isinstance(error, VenusError)), causes[0])
