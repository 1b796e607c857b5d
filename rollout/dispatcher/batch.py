"""The batch being filled: ready groups go to the actor's replicas one by one, until B are acknowledged.

The dispatcher adds sealed groups and passes requests and acknowledgements on; answers come back as commands.
"""

from __future__ import annotations

from bisect import insort

from rollout.dispatcher.config import DispatcherConfig
from rollout.dispatcher.records import Group, GroupState
from rollout.policy.hand_out import largest_of_equal
from rollout.policy.staleness import leaves_room_for_older
from rollout.types import AnyCommand, BatchCounts, CloseBatch, DeliverGroup

REMEMBERED_BATCHES = 16
"""Closed batches whose counts are kept for replicas that ask again."""


class Ages:
    """Groups not handed out yet (generating or ready) by their oldest version."""

    def __init__(self) -> None:
        self.by_version: dict[int, dict[int, Group]] = {}
        """version → admission order → group."""

    def move(self, group: Group, oldest: int | None) -> None:
        """Record the group's new oldest version; None takes it out."""
        if group.oldest is not None:
            bucket = self.by_version.get(group.oldest, {})
            bucket.pop(group.order, None)
            if not bucket:
                self.by_version.pop(group.oldest, None)
        group.oldest = oldest
        if oldest is not None:
            self.by_version.setdefault(oldest, {})[group.order] = group

    def until(self, version: int) -> list[Group]:
        """Groups whose oldest version is at most `version`, in admission order."""
        found = [group for v, bucket in self.by_version.items() if v <= version for group in bucket.values()]
        return sorted(found, key=lambda group: group.order)

    def sizes(self) -> list[tuple[int, int]]:
        """(version, number of groups), ascending."""
        return sorted((version, len(bucket)) for version, bucket in self.by_version.items())


class TrainBatch:
    """The batch of `step`."""

    def __init__(self, config: DispatcherConfig, ages: Ages, step: int) -> None:
        self._config = config
        self._ages = ages
        self.step = step
        self.opened = True
        """False from the step's beginning until the weights before it are current: nothing is handed out."""
        self.ready: list[tuple[int, int, Group]] = []
        """Ascending by (oldest version, admission order)."""
        self.taken: list[Group] = []
        """Handed out for `step`, in that order."""
        self.unacknowledged: dict[int, Group] = {}
        """By replica."""
        self.closed: BatchCounts | None = None
        self._waiting: dict[int, int] = {}
        """Replica → step it waits for."""
        self._sequences = 0
        self._tokens = 0
        self._past: dict[int, BatchCounts] = {}

    @property
    def free(self) -> int:
        """Places that no group has taken."""
        return self._config.batch - len(self.taken)

    def add(self, group: Group) -> None:
        """A group was sealed."""
        group.state = GroupState.READY
        insort(self.ready, (group.oldest if group.oldest is not None else 0, group.order, group))

    def request(self, step: int, replica: int) -> bool:
        """A replica asks; answered by `serve`. A late repeat never replaces a newer request.

        Returns False when the step's batch is not known any more.
        """
        if step < self.step and step not in self._past:
            return False
        self._waiting[replica] = max(step, self._waiting.get(replica, step))
        return True

    def acknowledge(self, step: int, replica: int, group_id: str, tokens: int) -> None:
        """The replica added the group's gradient. Anything but its unacknowledged group is a repeat."""
        group = self.unacknowledged.get(replica)
        if step != self.step or group is None or group.group_id != group_id:
            return
        del self.unacknowledged[replica]
        self._sequences += len(group.episodes)
        self._tokens += tokens

    def serve(self, *, drained: bool, out: list[AnyCommand]) -> None:
        """Answer every waiting replica that can be answered. `drained`: no other group will ever become ready."""
        for replica, step in sorted(self._waiting.items()):
            if step < self.step:
                self._answer(replica, CloseBatch(step=step, replica=replica, counts=self._past[step]), out)
            elif step == self.step and self.opened:
                self._serve_one(replica, drained, out)

    def _serve_one(self, replica: int, drained: bool, out: list[AnyCommand]) -> None:
        group, cause = self.unacknowledged.get(replica), "it has not acknowledged it yet"
        if group is None and self.closed is None and (group := self._take(replica)) is not None:
            cause = f"the largest of those that come first: {group.context_tokens} tokens"
        if group is not None:
            deliver = DeliverGroup(step=self.step, replica=replica, group_id=group.group_id, cause=cause)
            self._answer(replica, deliver, out)
            return
        full = self.free == 0 or (drained and not self.ready)
        if self.closed is None and full and not self.unacknowledged:
            self.closed = BatchCounts(groups=len(self.taken), sequences=self._sequences, tokens=self._tokens)
        if self.closed is not None:
            self._answer(replica, CloseBatch(step=self.step, replica=replica, counts=self.closed), out)

    def _answer(self, replica: int, command: AnyCommand, out: list[AnyCommand]) -> None:
        del self._waiting[replica]
        out.append(command)

    def _take(self, replica: int) -> Group | None:
        """The next ready group: of those with the oldest version the largest one.

        None when there is none, or when the places left belong to older groups.
        """
        if not self.ready or self.free == 0:
            return None
        oldest = self.ready[0][0]
        if self._config.include_promoted and not leaves_room_for_older(
            oldest,
            self._ages.sizes(),
            free=self.free,
            step=self.step,
            batch=self._config.batch,
            max_span=self._config.max_version_span,
        ):
            return None
        sizes = ((version, group.context_tokens) for version, _, group in self.ready)
        _, _, group = self.ready.pop(largest_of_equal(sizes, self.free))
        self._ages.move(group, None)
        group.state = GroupState.TAKEN
        self.taken.append(group)
        self.unacknowledged[replica] = group
        return group

    def finish(self) -> list[Group]:
        """The optimizer made the step: its groups. The next batch begins, not opened."""
        assert self.closed is not None
        groups, self.taken = self.taken, []
        self._past[self.step] = self.closed
        self._past.pop(self.step - REMEMBERED_BATCHES, None)
        self.step += 1
        self.opened = False
        self.closed = None
        self._sequences = self._tokens = 0
        return groups
