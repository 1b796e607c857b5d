"""The simulated actor: replicas that take groups, an optimizer step when the batch is closed, a sync of the weights."""

from __future__ import annotations

from collections.abc import Callable

from rollout.sim.clock import Clock
from rollout.sim.cost import TrainCost
from rollout.types import (
    AnyEvent,
    CloseBatch,
    DeliverGroup,
    GroupAcknowledged,
    GroupRequested,
    StepFinished,
    SyncFinished,
    SyncRequested,
)


class SimTrainer:
    """Asks as a real actor does.

    Args:
        group_s: seconds of forward and backward of a group on one replica, by group id.
        group_tokens: its trained tokens.
        on_step: called when a step is finished.
    """

    def __init__(
        self,
        clock: Clock,
        cost: TrainCost,
        *,
        replicas: int,
        streaming: bool,
        report: Callable[[AnyEvent], None],
        group_s: Callable[[str], float],
        group_tokens: Callable[[str], int],
        on_step: Callable[[int], None],
    ) -> None:
        self.step = 1
        self.busy_s = 0.0
        """Replica-seconds of forward and backward, and of the optimizer, over the replicas' number."""
        self.sync_s = 0.0
        """Seconds from asking for a sync to its end."""
        self._clock = clock
        self._cost = cost
        self._replicas = replicas
        self._streaming = streaming
        self._report = report
        self._group_s = group_s
        self._group_tokens = group_tokens
        self._on_step = on_step
        self._closed: set[int] = set()
        self._later_s = 0.0
        """Work put off until the batch is complete, without streaming."""
        self._asked_sync_s = 0.0

    def begin(self) -> None:
        self._closed.clear()
        for replica in range(self._replicas):
            self._report(GroupRequested(step=self.step, replica=replica))

    def deliver(self, command: DeliverGroup) -> None:
        seconds = self._group_s(command.group_id)
        self.busy_s += seconds / self._replicas
        if not self._streaming:
            self._later_s += seconds / self._replicas
            seconds = 0.0
        self._clock.after(seconds, lambda: self._trained(command))

    def _trained(self, command: DeliverGroup) -> None:
        tokens = self._group_tokens(command.group_id)
        step, replica = command.step, command.replica
        self._report(GroupAcknowledged(step=step, replica=replica, group_id=command.group_id, tokens=tokens))
        self._report(GroupRequested(step=step, replica=replica))

    def close(self, command: CloseBatch) -> None:
        if command.step != self.step or command.replica in self._closed:
            return
        self._closed.add(command.replica)
        if len(self._closed) == self._replicas:
            self.busy_s += self._cost.optimizer_s
            later, self._later_s = self._later_s, 0.0
            self._clock.after(later + self._cost.optimizer_s, self._stepped)

    def _stepped(self) -> None:
        self._report(StepFinished(step=self.step))
        self._on_step(self.step)
        self._asked_sync_s = self._clock.now
        self._report(SyncRequested(version=self.step))

    def granted(self, version: int) -> None:
        if version == self.step:
            self._clock.after(self._cost.sync_s, self._synced)

    def _synced(self) -> None:
        self.sync_s += self._clock.now - self._asked_sync_s
        self._report(SyncFinished(version=self.step))
        self.step += 1
        self.begin()
