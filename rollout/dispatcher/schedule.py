"""The policy's decisions become commands: classes told, waiting trajectories started, pending turns moved.

The dispatcher calls `run` after every event, and `turn` for the turns that a policy follows.
"""

from __future__ import annotations

from rollout.dispatcher.config import DispatcherConfig
from rollout.dispatcher.groups import Groups
from rollout.dispatcher.pool import WorkerPool
from rollout.dispatcher.records import Episode, EpisodeState, Group, Worker
from rollout.dispatcher.sync import SyncState, WeightSync
from rollout.policy.base import Policy
from rollout.policy.jobs import Job
from rollout.types import (
    AnyCommand,
    LengthEstimated,
    MoveTrajectory,
    PriorityClass,
    SetClass,
    StartTrajectory,
    TurnEnded,
    TurnReady,
)

_IN_ORDER = "in the order of admission"
"""Why one is started of whom the policy has nothing to say."""


class Schedule:
    """Nothing of its own but the number of the last change of classes."""

    def __init__(
        self, config: DispatcherConfig, policy: Policy, pool: WorkerPool, groups: Groups, sync: WeightSync
    ) -> None:
        self._config = config
        self._policy = policy
        self._pool = pool
        self._groups = groups
        self._sync = sync
        self._epoch = 0

    def turn(self, event: TurnReady | TurnEnded, out: list[AnyCommand]) -> None:
        """A turn is wanted, or has ended."""
        if not self._policy.wants_turns:
            return
        if isinstance(event, TurnEnded):
            self._policy.turn_ended(
                event.trajectory_id, event.turn, event.context_tokens, event.output_tokens, self._pool.now
            )
        else:
            self._policy.turn_ready(event.trajectory_id, event.turn, event.context_tokens, self._pool.now)
        self.run(out)

    def estimated(self, event: LengthEstimated, out: list[AnyCommand]) -> None:
        """The predictor answered."""
        if self._policy.wants_turns:
            self._policy.estimated(event.trajectory_id, event.turn, event.remaining_tokens)
            self.run(out)

    def run(self, out: list[AnyCommand]) -> None:
        """Let the policy decide, tell the workers, and start what may start; starts may change the policy's mind."""
        started: list[Episode] = []
        while True:
            changed = self._policy.decide(self._pool.now)
            # What was told at a start may have been a passing thought: the policy compares with its last decision only.
            self._tell(changed + [e.job for e in started if e.job is not None and self._misled(e)], out)
            if self._policy.moves and self._move(out):
                # Where a job has gone to it has another standing; what that makes others wish to do waits.
                self._tell(self._policy.decide(self._pool.now), out)
            started = self._start(out)
            if not started:
                return

    def _tell(self, jobs: list[Job], out: list[AnyCommand]) -> None:
        """Classes or ranks of `jobs` changed."""
        self._epoch += bool(jobs)
        for job in jobs:
            episode = self._pool.episodes[job.trajectory_id]
            if episode.state is EpisodeState.WAITING:
                self._pool.requeue(episode)
            elif self._misled(episode):
                parked = job.priority is PriorityClass.PARKED
                if parked is not (episode.told[0] is PriorityClass.PARKED):
                    self._pool.parked(episode, parked)
                episode.told = (job.priority, job.rank)
                out.append(
                    SetClass(
                        worker=episode.worker,
                        trajectory_id=job.trajectory_id,
                        priority=job.priority,
                        epoch=self._epoch,
                        rank=job.rank,
                        cause=job.cause,
                    )
                )

    def _misled(self, episode: Episode) -> bool:
        """Whether its worker knows another class or rank than the policy's."""
        job = episode.job
        return job is not None and episode.told != (job.priority, job.rank) and self._obeys(episode)

    def _obeys(self, episode: Episode) -> bool:
        return self._pool.workers[episode.worker].capabilities.priority

    def _start(self, out: list[AnyCommand]) -> list[Episode]:
        """Start queued trajectories, and return them; evaluations also while a sync waits for them."""
        started: list[Episode] = []
        for episode in self._pool.startable(
            train=not self._sync.active, evaluate=self._sync.state in (SyncState.IDLE, SyncState.DUE)
        ):
            started.append(episode)
            episode.version = self._groups.version
            owner = episode.owner
            priority, rank, cause = PriorityClass.HIGH, 0, "an evaluation: a sync may be waiting for it"
            if (job := episode.job) is not None:
                priority, rank, cause = job.priority, job.rank, job.cause or _IN_ORDER
            self._pool.open(episode, self._config.deadline_s)
            if isinstance(owner, Group):
                self._groups.age(owner)
            if not self._obeys(episode):
                priority, rank = PriorityClass.LOW, 0
            episode.told = (priority, rank)
            out.append(
                StartTrajectory(
                    worker=episode.worker,
                    trajectory_id=episode.trajectory_id,
                    group_id=owner.group_id if isinstance(owner, Group) else owner.eval_id,
                    task_id=episode.task_id,
                    purpose=episode.purpose,
                    priority=priority,
                    rank=rank,
                    cause=cause,
                    placed=episode.placed,
                )
            )
        return started

    def _move(self, out: list[AnyCommand]) -> bool:
        """Jobs go to other workers: those that wait by a new place in a queue, pending turns by a command. Whether any.

        None while weights change: both ends would have to be paused alike.
        """
        moves, self._policy.moves = self._policy.moves, []
        moved = False
        for move in moves:
            episode = self._pool.episodes.get(move.job.trajectory_id)
            target = self._pool.workers.get(move.to)
            if episode is None or episode.job is not move.job or target is None or not target.usable:
                continue
            if episode.state is EpisodeState.WAITING:
                self._pool.rehome(episode, move.to, move.cause)
            elif episode.state is EpisodeState.RUNNING and self._can_move(episode, target):
                self._pool.move(episode, move.to)
                out.append(
                    MoveTrajectory(
                        worker=move.job.worker, trajectory_id=episode.trajectory_id, to=move.to, cause=move.cause
                    )
                )
            else:
                continue
            self._policy.moved(move.job, move.to)
            moved = True
        return moved

    def _can_move(self, episode: Episode, target: Worker) -> bool:
        able = target.capabilities.migration and self._pool.workers[episode.worker].capabilities.migration
        return able and len(target.open) < self._config.max_trajectories and not self._sync.active
