"""Evaluations: one trajectory a task under the current weights, outside gate and counts. A sync waits for their end."""

from __future__ import annotations

from collections import deque

from rollout.dispatcher.pool import WorkerPool
from rollout.dispatcher.records import Episode, EpisodeState, Evaluation
from rollout.types import AnyCommand, EvalRequested, FinishEval


class Evaluations:
    """Those that wait, run and have ended; a repeated request of an ended one is answered again."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._order = 0
        self._pending: deque[EvalRequested] = deque()
        self._finished: dict[str, FinishEval] = {}
        self.running: dict[str, Evaluation] = {}

    def request(self, event: EvalRequested, out: list[AnyCommand]) -> None:
        if event.eval_id in self._finished:
            out.append(self._finished[event.eval_id])
        elif event.eval_id not in self.running and all(event.eval_id != e.eval_id for e in self._pending):
            self._pending.append(event)

    def begin(self, version: int, out: list[AnyCommand]) -> None:
        """Queue the trajectories of every waiting evaluation, spread over the workers."""
        while self._pending:
            event = self._pending.popleft()
            self._order += 1
            evaluation = Evaluation(
                order=self._order, eval_id=event.eval_id, version=version, missing=len(event.task_ids)
            )
            self.running[event.eval_id] = evaluation
            for member, task_id in enumerate(event.task_ids):
                self._sample(evaluation, member, task_id, attempt=0)
            self._finish(evaluation, out)

    def _sample(self, evaluation: Evaluation, member: int, task_id: str, attempt: int) -> None:
        episode = Episode(
            trajectory_id=f"{evaluation.eval_id}.{member}.{attempt}",
            task_id=task_id,
            owner=evaluation,
            member=member,
            attempt=attempt,
        )
        evaluation.slots[member] = episode
        self._pool.enqueue(episode, *self._pool.place())

    def restart(self, episode: Episode, evaluation: Evaluation) -> None:
        """The episode's worker is gone: another one plays it again."""
        if episode.state is EpisodeState.WAITING:
            self._pool.enqueue(episode, *self._pool.place())
            return
        self._pool.forget(episode)
        self._sample(evaluation, episode.member, episode.task_id, episode.attempt + 1)

    def ended(self, evaluation: Evaluation, out: list[AnyCommand]) -> None:
        """One of its trajectories was reported, well or failed."""
        evaluation.missing -= 1
        self._finish(evaluation, out)

    def _finish(self, evaluation: Evaluation, out: list[AnyCommand]) -> None:
        if evaluation.missing:
            return
        del self.running[evaluation.eval_id]
        for episode in evaluation.slots.values():
            self._pool.forget(episode)
        done = FinishEval(
            eval_id=evaluation.eval_id,
            version=evaluation.version,
            trajectory_ids=[episode.trajectory_id for episode in evaluation.slots.values()],
        )
        self._finished[evaluation.eval_id] = done
        out.append(done)
