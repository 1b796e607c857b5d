"""The broadcast of new weights as the dispatcher sees it: wait for evaluations, pause, grant, resume, all acknowledged.

The dispatcher passes events on and asks what to do; no trajectory starts while a sync is `active`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

from rollout.types import AnyCommand, GrantSync, PauseWorker, ResumeWorker


class SyncState(Enum):
    IDLE = "idle"
    DUE = "due"
    """Asked for; evaluations finish first."""
    PAUSING = "pausing"
    BROADCAST = "broadcast"
    """Granted: the actor is sending."""
    RESUMING = "resuming"


class WeightSync:
    """At most one sync at a time; repeats of its events change nothing."""

    def __init__(self) -> None:
        self.state = SyncState.IDLE
        self.version = -1
        self._last = -1
        self._awaited: dict[str, None] = {}
        self.members: dict[str, None] = {}
        """Workers that take part, in the order of joining."""

    @property
    def active(self) -> bool:
        return self.state is not SyncState.IDLE

    @property
    def begun(self) -> bool:
        """Whether it is too late to take part."""
        return self.state in (SyncState.BROADCAST, SyncState.RESUMING)

    def request(self, version: int, out: list[AnyCommand]) -> None:
        if self.state is SyncState.BROADCAST and version == self.version:
            out.append(GrantSync(version=version, workers=list(self.members)))
        elif self.state is SyncState.IDLE and version > self._last:
            self.state = SyncState.DUE
            self.version = version

    def pause(self, workers: Iterable[str], out: list[AnyCommand]) -> None:
        """Nothing stands against it any more: pause every worker."""
        self.state = SyncState.PAUSING
        self.members = dict.fromkeys(workers)
        self._awaited = dict(self.members)
        out.extend(PauseWorker(worker=worker, version=self.version) for worker in self.members)

    def add(self, worker: str, out: list[AnyCommand]) -> None:
        """A worker joined: it takes part if the broadcast has not begun, else it waits for the next one."""
        if self.state is SyncState.PAUSING:
            self.members[worker] = self._awaited[worker] = None
            out.append(PauseWorker(worker=worker, version=self.version))

    def drop(self, worker: str, out: list[AnyCommand]) -> None:
        """A worker was lost."""
        self.members.pop(worker, None)
        self._awaited.pop(worker, None)
        self._grant(out)

    def worker_paused(self, worker: str, version: int, out: list[AnyCommand]) -> None:
        if self.state is SyncState.PAUSING and version == self.version:
            self._awaited.pop(worker, None)
            self._grant(out)

    def _grant(self, out: list[AnyCommand]) -> None:
        if self.state is SyncState.PAUSING and self.members and not self._awaited:
            self.state = SyncState.BROADCAST
            out.append(GrantSync(version=self.version, workers=list(self.members)))

    def resume(self, out: list[AnyCommand]) -> None:
        """Every engine has the weights."""
        self.state = SyncState.RESUMING
        self._awaited = dict(self.members)
        out.extend(ResumeWorker(worker=worker, version=self.version) for worker in self.members)

    def acknowledged(self, worker: str, version: int) -> bool:
        """Whether this was news: the worker samples under the new version."""
        if self.state is not SyncState.RESUMING or version != self.version or worker not in self._awaited:
            return False
        del self._awaited[worker]
        return True

    @property
    def complete(self) -> bool:
        return self.state is SyncState.RESUMING and bool(self.members) and not self._awaited

    def finish(self) -> None:
        self.state = SyncState.IDLE
        self._last = self.version
