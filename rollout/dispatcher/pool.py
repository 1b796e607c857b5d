"""Workers and their queues: placement, start order, the limit on open trajectories, deadlines.

The dispatcher enqueues episodes, pops those that may start, and reports their ends; it alone emits the commands.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from envclient.base.errors import InvariantError
from rollout.dispatcher.records import Episode, EpisodeState, Group, Worker
from rollout.policy.base import Policy
from rollout.policy.jobs import Job, WorkerView
from rollout.policy.placement import least_loaded
from rollout.types import PriorityClass, Purpose, WorkerJoined

_PARKED_AGAIN_S = 1.0


class WorkerPool:
    """All workers that are alive, and every episode that is waiting, running or kept by its group.

    It tells the policy of every job that comes to a worker, starts, or leaves.
    """

    def __init__(self, *, workers: int, max_trajectories: int, policy: Policy) -> None:
        self._wanted = workers
        self._max_trajectories = max_trajectories
        self._policy = policy
        self._numbers = 0
        self.now = 0.0
        """Seconds; set by the dispatcher before each event."""
        self._deadlines: list[tuple[float, int, EpisodeState, Episode]] = []
        self.workers: dict[str, Worker] = {}
        self._touched: set[str] = set()
        """Workers on which an episode may have become startable; the others are not looked at."""
        self.episodes: dict[str, Episode] = {}
        self.complete = False
        """Whether the configured number of workers has joined once."""

    def join(self, event: WorkerJoined, *, usable: bool) -> None:
        self._numbers += 1
        self.workers[event.worker] = Worker(
            number=self._numbers,
            name=event.worker,
            slots=event.slots,
            usable=usable,
            capabilities=event.capabilities,
        )
        self.complete = self.complete or len(self.workers) >= self._wanted
        self._policy.join(
            WorkerView(
                name=event.worker,
                slots=event.slots,
                kv_tokens=event.kv_tokens,
                host_kv_tokens=event.host_kv_tokens,
                migration=event.capabilities.migration,
            )
        )

    def lose(self, name: str) -> list[Episode]:
        """Remove a worker; its episodes that have not ended, in queue order, those being aborted last.

        Whoever moves them in this order has moved all members of a group before an aborted one can close it.
        """
        worker = self.workers.pop(name)
        left = [*worker.open.values(), *worker.waiting.values()]
        for episode in left:
            self._leave(episode)
        self._policy.lose(name)
        return sorted(left, key=lambda episode: (episode.state is EpisodeState.ABORTING, episode.key))

    @property
    def usable(self) -> bool:
        """Whether any worker samples under the current version."""
        return any(worker.usable for worker in self.workers.values())

    def place(self) -> tuple[str, str]:
        """Worker for new episodes, and why: the least loaded one of those that sample under the current version."""
        name, load = least_loaded((w.name, w.load) for w in self.workers.values() if w.usable) or ("", 0)
        return name, f"fewest trajectories: {load}"

    def enqueue(self, episode: Episode, worker: str, placed: str) -> None:
        episode.worker, episode.placed = worker, placed
        self.episodes[episode.trajectory_id] = episode
        self.workers[worker].waiting[episode.trajectory_id] = episode
        if isinstance(episode.owner, Group):
            episode.job = Job(
                trajectory_id=episode.trajectory_id, group=episode.owner.jobs, member=episode.member, worker=worker
            )
            self._policy.add(episode.job)
        self.requeue(episode)

    def requeue(self, episode: Episode) -> None:
        """A waiting episode gets its place in the queue, or loses it while it is parked."""
        job = episode.job
        if job is not None and job.priority is PriorityClass.PARKED:
            episode.ticket = 0
            return
        self._numbers += 1
        episode.ticket = self._numbers
        key: tuple[int, ...] = episode.key
        if job is not None and self._policy.wants_turns:
            key = (key[0], int(job.priority is not PriorityClass.HIGH), job.rank, *key[1:])
        heapq.heappush(self.workers[episode.worker].queue, (key, episode.ticket, episode))
        self._touched.add(episode.worker)

    def touch(self) -> None:
        """What may start has changed on every worker."""
        self._touched.update(self.workers)

    def startable(self, *, train: bool, evaluate: bool) -> Iterator[Episode]:
        """Take episodes out of the queues while their workers have room; the caller calls `open` for each."""
        touched = [worker for name in self._touched if (worker := self.workers.get(name)) is not None]
        self._touched.clear()
        for worker in sorted(touched, key=lambda worker: worker.number):
            queue = worker.queue
            while worker.usable and queue and len(worker.open) < self._max_trajectories:
                _, ticket, episode = queue[0]
                if episode.ticket == ticket:
                    if not (train if episode.purpose is Purpose.TRAIN else evaluate):
                        self._touched.add(worker.name)
                        break
                    heapq.heappop(queue)
                    del worker.waiting[episode.trajectory_id]
                    episode.ticket = 0
                    yield episode
                else:
                    heapq.heappop(queue)

    def open(self, episode: Episode, within_s: float) -> None:
        """The episode starts on its worker, and becomes due after `within_s`."""
        episode.state = EpisodeState.RUNNING
        self.workers[episode.worker].open[episode.trajectory_id] = episode
        if episode.job is not None:
            self._policy.start(episode.job, self.now)
        self._push_deadline(episode, within_s)

    def abort(self, episode: Episode, within_s: float) -> None:
        """A running episode was asked to end, and becomes due again after `within_s`."""
        episode.state = EpisodeState.ABORTING
        self._leave(episode)
        self._push_deadline(episode, within_s)

    def cancel(self, episode: Episode) -> None:
        """A waiting episode will not start."""
        del self.workers[episode.worker].waiting[episode.trajectory_id]
        self.forget(episode)

    def end(self, episode: Episode) -> None:
        """Its worker reported its end; it stays known (so that a repeated report is recognised) until `forget`."""
        episode.state = EpisodeState.ENDED
        self.workers[episode.worker].open.pop(episode.trajectory_id)
        self._touched.add(episode.worker)
        self._leave(episode)

    def forget(self, episode: Episode) -> None:
        episode.state = EpisodeState.ENDED
        self._leave(episode)
        self.episodes.pop(episode.trajectory_id, None)

    def _leave(self, episode: Episode) -> None:
        """Nothing is decided about it any more."""
        episode.ticket = 0
        if episode.job is not None:
            self._policy.remove(episode.job)
            episode.job = None

    def move(self, episode: Episode, to: str) -> None:
        """A running episode goes on on another worker."""
        del self.workers[episode.worker].open[episode.trajectory_id]
        self._touched.add(episode.worker)
        episode.worker = to
        self.workers[to].open[episode.trajectory_id] = episode

    def rehome(self, episode: Episode, to: str, cause: str) -> None:
        """A waiting episode will start on another worker."""
        del self.workers[episode.worker].waiting[episode.trajectory_id]
        episode.worker, episode.placed = to, cause
        self.workers[to].waiting[episode.trajectory_id] = episode
        self.requeue(episode)

    def parked(self, episode: Episode, parked: bool) -> None:
        """A running episode is parked, or is not any more: its deadline does not count the time between."""
        if parked:
            episode.parked_at_s = self.now
        elif episode.parked_at_s is not None:
            episode.parked_s += self.now - episode.parked_at_s
            episode.parked_at_s = None

    def due(self) -> Iterator[Episode]:
        """Episodes whose latest deadline has passed, each once."""
        while self._deadlines and self._deadlines[0][0] <= self.now:
            _, _, state, episode = heapq.heappop(self._deadlines)
            if episode.state is not state:
                continue
            if state is EpisodeState.RUNNING:
                parked_s = episode.parked_s + (0 if episode.parked_at_s is None else self.now - episode.parked_at_s)
                more_s = parked_s - episode.forgiven_s
                if more_s > 0 or episode.parked_at_s is not None:
                    episode.forgiven_s = parked_s
                    self._push_deadline(episode, max(more_s, _PARKED_AGAIN_S))
                    continue
            yield episode

    def _push_deadline(self, episode: Episode, within_s: float) -> None:
        self._numbers += 1
        heapq.heappush(self._deadlines, (self.now + within_s, self._numbers, episode.state, episode))

    def audit(self) -> None:
        """Recount. Raises InvariantError."""
        for worker in self.workers.values():
            if len(worker.open) > self._max_trajectories:
                raise InvariantError(f"worker {worker.name} has {len(worker.open)} trajectories open")
            tickets = {ticket for _, ticket, _ in worker.queue}
            for episode in worker.waiting.values():
                parked = episode.job is not None and episode.job.priority is PriorityClass.PARKED
                if episode.state is not EpisodeState.WAITING or parked is (episode.ticket in tickets):
                    raise InvariantError(f"{episode.trajectory_id} waits {episode.state.value}, parked: {parked}")
            for episode in worker.open.values():
                if episode.worker != worker.name or episode.state not in (EpisodeState.RUNNING, EpisodeState.ABORTING):
                    raise InvariantError(f"{episode.trajectory_id} is open on {worker.name} but {episode.state.value}")
        waiting = sum(len(worker.waiting) for worker in self.workers.values())
        running = sum(1 for w in self.workers.values() for e in w.open.values() if e.job is not None)
        evaluations = sum(1 for w in self.workers.values() for e in w.waiting.values() if e.job is None)
        if len(self._policy.jobs) != waiting - evaluations + running:
            raise InvariantError(f"the policy knows {len(self._policy.jobs)} jobs of {waiting - evaluations + running}")
        self._policy.check_invariants()
