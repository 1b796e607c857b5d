"""Sample groups from admission to their end: members, lost members, sealing, versions and classes.

The dispatcher passes a trajectory's end in; sealed groups go to the batch, untrained ones give their credit back.
"""

from __future__ import annotations

import math

from envclient.base.errors import InvariantError
from rollout.dispatcher.batch import Ages, TrainBatch
from rollout.dispatcher.config import DispatcherConfig
from rollout.dispatcher.pool import WorkerPool
from rollout.dispatcher.records import Episode, EpisodeState, Group, GroupState
from rollout.policy.advantages import rewards_equal
from rollout.policy.base import Policy
from rollout.policy.gate import Gate
from rollout.policy.jobs import JobGroup
from rollout.policy.staleness import is_stale, version_span
from rollout.types import (
    AbortTrajectory,
    AnyCommand,
    ClosePrompt,
    DropTrajectories,
    PromptStatus,
    SealGroup,
    TrajectoryEnded,
    TrajectoryStatus,
)


class Groups:
    """All groups that are generating, ready or taken."""

    def __init__(
        self,
        config: DispatcherConfig,
        pool: WorkerPool,
        gate: Gate,
        batch: TrainBatch,
        ages: Ages,
        policy: Policy,
    ) -> None:
        self._config = config
        self._pool = pool
        self._gate = gate
        self._batch = batch
        self._ages = ages
        self._policy = policy
        self.version = 0
        """Weight version acknowledged by every worker."""
        self._admitted = 0
        self.live: dict[str, Group] = {}
        """By group id: every group whose prompt is running."""
        self.generating = 0
        self.closed = dict.fromkeys(PromptStatus, 0)
        """Prompts by the status they ended with."""
        self.untrained = dict.fromkeys(PromptStatus, 0)
        """The same, of groups that left untrained since the last optimizer step."""
        self.last_cause = ""
        self.resamples = 0
        self.lost = dict.fromkeys(TrajectoryStatus, 0)
        """Trajectories that did not become members, by what they were judged to be."""

    # ------------------------------------------------------------------------------------------------ generation

    def admit(self, prompt_id: str, task_id: str, attempt: int) -> None:
        """The prompt takes a credit and its K trajectories queue up."""
        self._gate.held += 1
        self._admitted += 1
        group_id = f"{prompt_id}.{attempt}"
        size = self._config.group_size
        jobs = JobGroup(order=self._admitted, group_id=group_id, size=size, admitted=self.version)
        group = Group(order=self._admitted, group_id=group_id, prompt_id=prompt_id, task_id=task_id, jobs=jobs)
        group.slots = [None] * size
        group.resamples = [0] * size
        group.missing = size
        self.live[group.group_id] = group
        self.generating += 1
        for member in range(size):
            self._sample(group, member, attempt=0)

    def _sample(self, group: Group, member: int, attempt: int) -> None:
        """Queue a new attempt at `member` with its siblings."""
        self._enqueue(
            Episode(
                trajectory_id=f"{group.group_id}.{member}.{attempt}",
                task_id=group.task_id,
                owner=group,
                member=member,
                attempt=attempt,
            ),
            group,
        )

    def _enqueue(self, episode: Episode, group: Group) -> None:
        placed = f"with group {group.group_id}"
        if group.worker not in self._pool.workers:
            group.worker, placed = self._pool.place()
        group.slots[episode.member] = episode
        self._pool.enqueue(episode, group.worker, placed)

    def restart(self, episode: Episode, group: Group, out: list[AnyCommand]) -> None:
        """The episode's worker is gone: sample it elsewhere. That is no fault of the member, so it is not counted."""
        state = episode.state
        if group.state is not GroupState.GENERATING:
            self._pool.forget(episode)
        elif state is EpisodeState.WAITING:
            self._enqueue(episode, group)
        elif state is EpisodeState.ABORTING and episode.fate is not None:
            self.member_lost(episode, group, episode.fate, episode.cause, out)
        else:
            self._pool.forget(episode)
            self._sample(group, episode.member, episode.attempt + 1)
            self.age(group)

    # ---------------------------------------------------------------------------------------------------- ends

    def member_ended(self, episode: Episode, group: Group, event: TrajectoryEnded, out: list[AnyCommand]) -> None:
        """A worker's report about a trajectory of a group."""
        if group.state is not GroupState.GENERATING:
            self._forget(episode, out)
            return
        status, cause = self._judge(episode, event)
        if status is not TrajectoryStatus.FINISHED:
            self.member_lost(episode, group, status, cause, out)
            return
        episode.reward = event.reward
        episode.tokens = event.generated_tokens
        episode.context_tokens = event.context_tokens
        if event.first_version >= 0:
            episode.version = event.first_version
        group.missing -= 1
        self._settle(group, out)

    def _judge(self, episode: Episode, event: TrajectoryEnded) -> tuple[TrajectoryStatus, str]:
        """What a reported trajectory is to its group: FINISHED makes it a member, whatever else is lost."""
        status = event.status
        if status is TrajectoryStatus.ABORTED:
            return episode.fate or TrajectoryStatus.FAILED, episode.cause or event.cause or "aborted by its worker"
        if status is TrajectoryStatus.TRUNCATED and event.generated_tokens == 0:
            return status, "the prompt fills the context"
        if status is TrajectoryStatus.TRUNCATED and not self._config.train_truncated:
            return status, "truncated, and truncated trajectories do not train"
        if status in (TrajectoryStatus.FINISHED, TrajectoryStatus.TRUNCATED):
            if not math.isfinite(event.reward):
                return TrajectoryStatus.FAILED, f"its reward is {event.reward}"
            span = version_span(event.first_version, event.last_version)
            if span > self._config.max_version_span:
                return TrajectoryStatus.DISCARDED, f"it was sampled under {span} weight versions"
            return TrajectoryStatus.FINISHED, ""
        return status, event.cause or status.value

    def member_lost(
        self, episode: Episode, group: Group, status: TrajectoryStatus, cause: str, out: list[AnyCommand]
    ) -> None:
        """Sample the member anew, or let `on_lost_member` decide."""
        self._forget(episode, out)
        self.lost[status] += 1
        member = episode.member
        if status is not TrajectoryStatus.TRUNCATED and group.resamples[member] < self._config.max_resamples:
            group.resamples[member] += 1
            self.resamples += 1
            self._sample(group, member, episode.attempt + 1)
            self.age(group)
        elif self._config.on_lost_member == "shrink" and len(group.episodes) > 2:
            group.slots[member] = None
            group.missing -= 1
            self._settle(group, out)
        else:
            fate = PromptStatus.DISCARDED if status is TrajectoryStatus.DISCARDED else PromptStatus.FAILED
            self._close_untrained(group, fate, f"{episode.trajectory_id}: {cause}", out)

    def _settle(self, group: Group, out: list[AnyCommand]) -> None:
        self.age(group)
        if group.missing == 0:
            self._seal(group, out)

    def _seal(self, group: Group, out: list[AnyCommand]) -> None:
        members = group.episodes
        rewards = [episode.reward for episode in members]
        if self._config.filter_zero_variance and rewards_equal(rewards):
            self._close_untrained(group, PromptStatus.FILTERED, f"all rewards are {rewards[0]:g}", out)
            return
        self.generating -= 1
        rule = self._config.advantage
        out.append(
            SealGroup(
                group_id=group.group_id,
                prompt_id=group.prompt_id,
                task_id=group.task_id,
                members=[episode.trajectory_id for episode in members],
                advantages=rule.of_group(rule.shaped(rewards, [episode.tokens for episode in members])),
            )
        )
        self._batch.add(group)

    def _close_untrained(self, group: Group, status: PromptStatus, cause: str, out: list[AnyCommand]) -> None:
        """The group's credit returns at once; siblings that still run are aborted."""
        self.generating -= 1
        self._gate.held -= 1
        self._ages.move(group, None)
        self.untrained[status] += 1
        self.last_cause = cause
        ended = []
        for episode in group.episodes:
            if episode.state is EpisodeState.WAITING:
                self._pool.cancel(episode)
            elif episode.state is EpisodeState.RUNNING:
                self.abort(episode, TrajectoryStatus.ABORTED, TrajectoryStatus.ABORTED, "its group is closed", out)
            elif episode.trajectory_id in self._pool.episodes and episode.state is EpisodeState.ENDED:
                ended.append(episode.trajectory_id)
        self._close(group, status, cause, -1, out)
        if ended:
            out.append(DropTrajectories(trajectory_ids=ended))

    def trained(self, group: Group, step: int, out: list[AnyCommand]) -> None:
        """An optimizer step was made with the group; its credit returns with the step's weights."""
        self._close(group, PromptStatus.ACCEPTED, "", step, out)

    def _close(self, group: Group, status: PromptStatus, cause: str, step: int, out: list[AnyCommand]) -> None:
        group.state = GroupState.CLOSED
        del self.live[group.group_id]
        self.closed[status] += 1
        for episode in group.episodes:
            if episode.state is EpisodeState.ENDED:
                self._pool.forget(episode)
        out.append(
            ClosePrompt(prompt_id=group.prompt_id, group_id=group.group_id, status=status, cause=cause, step=step)
        )

    def _forget(self, episode: Episode, out: list[AnyCommand]) -> None:
        self._pool.forget(episode)
        out.append(DropTrajectories(trajectory_ids=[episode.trajectory_id]))

    # ---------------------------------------------------------------------------------------- versions and classes

    def abort(
        self,
        episode: Episode,
        report_as: TrajectoryStatus,
        fate: TrajectoryStatus,
        cause: str,
        out: list[AnyCommand],
    ) -> None:
        """Ask the worker to end a running trajectory; `fate` is what that makes of it."""
        self._pool.abort(episode, self._config.abort_grace_s)
        episode.fate = fate
        episode.cause = cause
        out.append(
            AbortTrajectory(worker=episode.worker, trajectory_id=episode.trajectory_id, status=report_as, cause=cause)
        )

    def discard_stale(self, version: int, out: list[AnyCommand]) -> None:
        """Before workers go on under `version`: end the trajectories whose span would become larger than S."""
        limit = self._config.max_version_span
        for group in self._ages.until(version - limit):
            for episode in group.episodes:
                if episode.state is EpisodeState.RUNNING and is_stale(episode.version, version, limit):
                    cause = f"begun under version {episode.version}, it would span more than {limit} at {version}"
                    self.abort(episode, TrajectoryStatus.DISCARDED, TrajectoryStatus.DISCARDED, cause, out)

    def age(self, group: Group) -> None:
        """The group's episodes changed: recompute its oldest version."""
        oldest = min((episode.version for episode in group.episodes if episode.version >= 0), default=None)
        if oldest != group.oldest:
            self._ages.move(group, oldest)
        self._policy.age(group.jobs, oldest)

    def promote(self, version: int) -> None:
        """`version` is current: groups for which it is the last valid one are promoted, and overdue ones."""
        self.version = self._policy.version = version
        for group in self._ages.until(version - self._config.max_version_span + 1):
            self._policy.age(group.jobs, group.oldest)
        for group in self.live.values():
            if group.oldest is None and group.state is GroupState.GENERATING:
                self._policy.age(group.jobs, None)

    def audit(self) -> None:
        """Recount. Raises InvariantError."""
        states = [group.state for group in self.live.values()]
        counted = {state: states.count(state) for state in GroupState}
        found = (counted[GroupState.GENERATING], counted[GroupState.READY], counted[GroupState.TAKEN])
        if found != (self.generating, len(self._batch.ready), len(self._batch.taken)):
            raise InvariantError(f"groups generating, ready, taken: recounted {found}")
        for group in self.live.values():
            ended = sum(1 for episode in group.episodes if episode.state is EpisodeState.ENDED)
            if group.missing != len(group.episodes) - ended:
                raise InvariantError(f"group {group.group_id} misses {group.missing} members, {ended} have ended")
            aged = group.oldest is not None and group.order in self._ages.by_version.get(group.oldest, {})
            if group.state is not GroupState.TAKEN and group.oldest is not None and not aged:
                raise InvariantError(f"group {group.group_id} is missing among the ages")
        if sum(size for _, size in self._ages.sizes()) > len(self.live):
            raise InvariantError("a closed group is left among the ages")
