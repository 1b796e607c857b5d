"""Workers and their queues: placement, start order, the limit on open trajectories, deadlines.

The dispatcher enqueues episodes, pops those that may start, and reports their ends; it alone emits the commands.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from envclient.base.errors import InvariantError
from rollout.dispatcher.records import Episode, EpisodeState, Worker
from rollout.policy.placement import least_loaded
from rollout.types import Purpose


class WorkerPool:
    """All workers that are alive, and every episode that is waiting, running or kept by its group."""

    def __init__(self, *, workers: int, max_trajectories: int) -> None:
        self._wanted = workers
        self._max_trajectories = max_trajectories
        self._numbers = 0
        self.now = 0.0
        """Seconds; set by the dispatcher before each event."""
        self._deadlines: list[tuple[float, int, EpisodeState, Episode]] = []
        self.workers: dict[str, Worker] = {}
        self.episodes: dict[str, Episode] = {}
        self.complete = False
        """Whether the configured number of workers has joined once."""

    def join(self, worker: Worker) -> None:
        self.workers[worker.name] = worker
        self.complete = self.complete or len(self.workers) >= self._wanted

    def lose(self, name: str) -> list[Episode]:
        """Remove a worker; its episodes that have not ended, in queue order, those being aborted last.

        Whoever moves them in this order has moved all members of a group before an aborted one can close it.
        """
        worker = self.workers.pop(name)
        left = list(worker.open.values())
        left += [episode for _, _, episode in worker.queue if episode.state is EpisodeState.WAITING]
        return sorted(left, key=lambda episode: (episode.state is EpisodeState.ABORTING, episode.key))

    def place(self) -> str | None:
        """Worker for new episodes: the least loaded one of those that sample under the current version."""
        return least_loaded((w.name, w.load) for w in self.workers.values() if w.usable)

    def enqueue(self, episode: Episode, worker: str) -> None:
        episode.worker = worker
        self.episodes[episode.trajectory_id] = episode
        target = self.workers[worker]
        self._numbers += 1
        heapq.heappush(target.queue, (episode.key, self._numbers, episode))
        target.queued += 1

    def startable(self, *, train: bool, evaluate: bool) -> Iterator[Episode]:
        """Take episodes out of the queues while their workers have room; the caller calls `open` for each."""
        for worker in self.workers.values():
            queue = worker.queue
            while worker.usable and queue and len(worker.open) < self._max_trajectories:
                episode = queue[0][2]
                if episode.state is EpisodeState.WAITING:
                    if not (train if episode.purpose is Purpose.TRAIN else evaluate):
                        break
                    heapq.heappop(queue)
                    worker.queued -= 1
                    yield episode
                else:
                    heapq.heappop(queue)

    def open(self, episode: Episode, within_s: float) -> None:
        """The episode starts on its worker, and becomes due after `within_s`."""
        episode.state = EpisodeState.RUNNING
        self.workers[episode.worker].open[episode.trajectory_id] = episode
        self._push_deadline(episode, within_s)

    def abort(self, episode: Episode, within_s: float) -> None:
        """A running episode was asked to end, and becomes due again after `within_s`."""
        episode.state = EpisodeState.ABORTING
        self._push_deadline(episode, within_s)

    def cancel(self, episode: Episode) -> None:
        """A waiting episode will not start."""
        episode.state = EpisodeState.ENDED
        self.workers[episode.worker].queued -= 1
        self.forget(episode)

    def end(self, episode: Episode) -> None:
        """Its worker reported its end; it stays known (so that a repeated report is recognised) until `forget`."""
        episode.state = EpisodeState.ENDED
        self.workers[episode.worker].open.pop(episode.trajectory_id)

    def forget(self, episode: Episode) -> None:
        episode.state = EpisodeState.ENDED
        self.episodes.pop(episode.trajectory_id, None)

    def due(self) -> Iterator[Episode]:
        """Episodes whose latest deadline has passed, each once."""
        while self._deadlines and self._deadlines[0][0] <= self.now:
            _, _, state, episode = heapq.heappop(self._deadlines)
            if episode.state is state:
                yield episode

    def _push_deadline(self, episode: Episode, within_s: float) -> None:
        self._numbers += 1
        heapq.heappush(self._deadlines, (self.now + within_s, self._numbers, episode.state, episode))

    def audit(self) -> None:
        """Recount. Raises InvariantError."""
        for worker in self.workers.values():
            if len(worker.open) > self._max_trajectories:
                raise InvariantError(f"worker {worker.name} has {len(worker.open)} trajectories open")
            live = sum(1 for _, _, episode in worker.queue if episode.state is EpisodeState.WAITING)
            if live != worker.queued:
                raise InvariantError(f"worker {worker.name} counts {worker.queued} waiting trajectories of {live}")
            for episode in worker.open.values():
                if episode.worker != worker.name or episode.state not in (EpisodeState.RUNNING, EpisodeState.ABORTING):
                    raise InvariantError(f"{episode.trajectory_id} is open on {worker.name} but {episode.state.value}")
