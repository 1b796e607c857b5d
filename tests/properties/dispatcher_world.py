"""An adversarial world around the dispatcher: workers, an actor with replicas and a prompt source, all under control of
the test, that check every command against what they know themselves.

Reports of a worker travel in order, but arrive when the test says so: ends and aborts cross on the way.
"""

from __future__ import annotations

import math

from rollout.dispatcher import Dispatcher
from rollout.types import (
    Capabilities,
    EvalRequested,
    GroupAcknowledged,
    GroupRequested,
    LengthEstimated,
    PriorityClass,
    PromptStatus,
    PromptSubmitted,
    RunStarted,
    SourceExhausted,
    StepFinished,
    SyncFinished,
    SyncRequested,
    Tick,
    TrajectoryEnded,
    TrajectoryStatus,
    TurnEnded,
    TurnReady,
    WeightsAcknowledged,
    WorkerJoined,
    WorkerLost,
)
from tests.properties.dispatcher_checks import SCORED, CheckedWorld, Episode, Worker


class World(CheckedWorld):
    """The moves that a test can make."""

    # --------------------------------------------------------------------------------------------------- moves

    def join(self) -> None:
        name = f"w{self.joined}"
        self.joined += 1
        self.workers[name] = Worker(name, self.dispatcher.version, self.priority)
        self.send(
            WorkerJoined(
                worker=name,
                slots=4,
                version=self.dispatcher.version,
                capabilities=Capabilities(priority=self.priority, migration=self.migration),
                kv_tokens=self.kv_tokens,
            )
        )

    def lose(self, choice: int) -> None:
        """Not the last one that holds current weights."""
        if not self.workers:
            return
        newest = max(worker.version for worker in self.workers.values())
        fit = [worker for worker in self.workers.values() if worker.version == newest]
        names = [name for name in self.workers if len(fit) > 1 or self.workers[name] not in fit]
        if not names:
            return
        worker = self.workers.pop(names[choice % len(names)])
        self.departed.extend(event for event in worker.outbox if isinstance(event, TrajectoryEnded))
        self.begun = {t: v for t, v in self.begun.items() if self.located.get(t) != worker.name}
        self.located = {t: name for t, name in self.located.items() if name != worker.name}
        self.held_up.update(dict.fromkeys(self.workers, self.dispatcher.version))
        self.acknowledge(worker.name)
        self.send(WorkerLost(worker=worker.name, cause="killed by the test"))
        assert not self.stop_cause or "no other one can take over" in self.stop_cause

    def acknowledge(self, name: str) -> None:
        """The worker samples under the new weights, or never will: the last one returns the credits."""
        self.unacknowledged.discard(name)
        if self.phase == "acknowledging" and not self.unacknowledged:
            self.phase = "train"
            self.version = self.step - 1
            self.consumed = {group: step for group, step in self.consumed.items() if step > self.version}

    def deliver_prompt(self) -> bool:
        if not self.fetch:
            return False
        if self.prompts_left == 0:
            self.fetch = 0
            self.exhausted = True
            self.send(SourceExhausted())
            return True
        if self.prompts_left is not None:
            self.prompts_left -= 1
        self.fetch -= 1
        prompt_id = f"p{self.position:06d}"
        self.position += 1
        self.submitted[prompt_id] = PromptStatus.RUNNING
        self.send(PromptSubmitted(prompt_id=prompt_id, task_id=f"task{prompt_id}", epoch=0))
        return True

    def playable(self) -> list[tuple[Worker, Episode]]:
        """Open trajectories that are not stuck in their tool; an abort ends also those."""
        return [
            (worker, episode)
            for worker in self.workers.values()
            for episode in worker.open.values()
            if episode.abort is not None or not self.stuck(episode.trajectory_id)
        ]

    def sample(self, choice: int) -> None:
        """A trajectory that is not parked goes on: it wants a turn, or generates it under its worker's weights."""
        playing = [pair for pair in self.playable() if not pair[0].paused and not self.parked(pair[1])]
        if playing:
            self.advance(*playing[choice % len(playing)])

    def parked(self, episode: Episode) -> bool:
        return self.classes[episode.trajectory_id][0] is PriorityClass.PARKED

    def advance(self, worker: Worker, episode: Episode) -> None:
        if not episode.ready:
            episode.ready = True
            event = TurnReady(
                trajectory_id=episode.trajectory_id, turn=episode.turns + 1, context_tokens=episode.context
            )
            worker.outbox.append(event)
            return
        self.generate(worker, episode)
        episode.ready = False
        episode.turns += 1
        worker.outbox.append(
            TurnEnded(
                trajectory_id=episode.trajectory_id,
                turn=episode.turns,
                context_tokens=episode.context,
                output_tokens=self.turn_tokens,
                version=worker.version,
            )
        )
        episode.context += 5

    def estimate(self, choice: int, ahead: int, remaining: float) -> None:
        """The predictor answers about a trajectory that has ever started, or about one that never was.

        An open one's answer comes after what its worker has reported before it, and is about the turn that many beyond
        its latest; any other one's comes at once.
        """
        names = [*self.classes, "nobody"]
        name = names[choice % len(names)]
        holder = next((worker for worker in self.workers.values() if name in worker.open), None)
        turn = holder.open[name].turns + ahead if holder is not None else ahead
        event = LengthEstimated(trajectory_id=name, turn=turn, remaining_tokens=remaining, latency_s=0.1)
        if holder is not None:
            holder.outbox.append(event)
        else:
            self.send(event)

    def generate(self, worker: Worker, episode: Episode) -> None:
        if self.turn_tokens:
            episode.first = worker.version if episode.first < 0 else episode.first
            episode.last = worker.version
            episode.tokens += self.turn_tokens

    def end(self, choice: int, status: TrajectoryStatus, reward: float | None, *, parked: bool = True) -> bool:
        """A trajectory ends (reward None: unlike its neighbour's); on a paused worker only what has generated.

        A negative choice ends the one that started last, and starves the others. A parked one can end by its tool,
        unless `parked` is False: then nothing happens. One that is TRUNCATED by an even choice before it has generated
        had a prompt that fills the context.
        """
        playing = self.playable()
        if choice < 0:
            playing.sort(key=lambda pair: pair[1].place)
        if not playing:
            return False
        worker, episode = playing[choice % len(playing)]
        if episode.abort is None and not parked and self.parked(episode):
            return False
        if episode.abort is not None:
            status = episode.abort if status is not TrajectoryStatus.FINISHED or episode.tokens == 0 else status
        elif status in SCORED and episode.tokens == 0 and (status is TrajectoryStatus.FINISHED or choice % 2):
            if worker.paused or self.parked(episode):
                return False
            self.generate(worker, episode)
        self.report(worker, episode, status, reward)
        return True

    def finish(self, trajectory: str, status: TrajectoryStatus, *, generate: bool = True) -> None:
        """A certain trajectory ends, unless it is parked or its worker paused; an aborted one as it was asked to."""
        for worker, episode in self.playable():
            if episode.trajectory_id != trajectory:
                continue
            if episode.abort is not None:
                self.report(worker, episode, episode.abort, None)
            elif not worker.paused and not self.parked(episode):
                if generate:
                    self.generate(worker, episode)
                self.report(worker, episode, status, None)

    def report(self, worker: Worker, episode: Episode, status: TrajectoryStatus, reward: float | None) -> None:
        """The end goes into the worker's outbox (reward None: unlike its neighbour's)."""
        del worker.open[episode.trajectory_id]
        worker.outbox.append(
            TrajectoryEnded(
                trajectory_id=episode.trajectory_id,
                worker=worker.name,
                status=status,
                reward=float(episode.trajectory_id.split(".")[-2]) if reward is None else reward,
                first_version=episode.first,
                last_version=episode.last,
                generated_tokens=episode.tokens,
                turns=1,
                cause="the test said so" if status is TrajectoryStatus.FAILED else "",
            )
        )

    def deliver_report(self, choice: int) -> bool:
        boxes = [worker.outbox for worker in self.workers.values() if worker.outbox]
        boxes += [self.departed] if self.departed else []
        if not boxes:
            return False
        event = boxes[choice % len(boxes)].popleft()
        if isinstance(event, WeightsAcknowledged):
            self.acknowledge(event.worker)
        self.send(event)
        return True

    def replica(self, choice: int) -> bool:
        """A replica does its next thing."""
        index = choice % len(self.replicas)
        replica = self.replicas[index]
        if self.phase != "train":
            return False
        if replica.closed and index and choice % 2:
            replica.waiting = True  # ahead of rank 0
            self.send(GroupRequested(step=self.step + 1, replica=index))
        elif replica.group:
            group, replica.group = replica.group, ""
            tokens = sum(self.reported[member].generated_tokens for member in self.sealed[group])
            self.acked.append((group, tokens))
            self.send(GroupAcknowledged(step=self.step, replica=index, group_id=group, tokens=tokens))
        elif replica.closed or (replica.waiting and choice % 3):
            return False
        else:
            replica.waiting = True  # also a second time: the long poll ran out
            self.send(GroupRequested(step=self.step, replica=index))
        return True

    def actor(self) -> bool:
        """Rank 0 goes on: step, sync."""
        if self.phase == "train" and self.acked and all(replica.closed for replica in self.replicas):
            finished = self.step
            self.step += 1
            self.steps_done += 1
            for replica in self.replicas:
                replica.closed = False
            self.acked = []
            self.phase = "sync_due"
            self.send(StepFinished(step=finished))
        elif self.phase == "sync_due":
            self.phase = "sync_asked"
            self.send(SyncRequested(version=self.step - 1))
        elif self.phase == "broadcast":
            self.phase = "acknowledging"
            self.send(SyncFinished(version=self.step - 1))
        else:
            return False
        return True

    def evaluate(self, samples: int) -> None:
        self.evals += 1
        self.send(EvalRequested(eval_id=f"eval{self.evals}", task_ids=[f"held{i}" for i in range(samples)]))

    def repeat(self, choice: int) -> None:
        """An event arrives a second time."""
        recent = [
            event
            for event, _, _ in self.log[-40:]
            if not isinstance(
                event, RunStarted | WorkerJoined | WorkerLost | Tick | TurnReady | TurnEnded | SourceExhausted
            )
        ]
        if recent:
            event = recent[choice % len(recent)]
            kept = dict(self.reported)
            self.send(event)
            if isinstance(event, TrajectoryEnded) and event.trajectory_id not in kept:
                assert event.trajectory_id not in self.reported, "tokens of a repeated report are kept for ever"

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.send(Tick())

    # ---------------------------------------------------------------------------------------------------- fairness

    def drain(self, steps: int) -> None:
        """From here on everything goes well: `steps` more steps must be made, or the finite source must run dry."""
        while len(self.workers) < self.config.workers:
            self.join()
        goal = self.steps_done + steps
        turn = idle = 0
        patience = 2 + math.ceil(self.config.deadline_s / 5.0)  # until stuck trajectories are aborted
        while self.steps_done < goal and self.stop_cause is None:
            moved = False
            while self.deliver_prompt():
                moved = True
            while self.deliver_report(turn):
                moved = True
            for _ in range(len(self.playable())):
                turn += 1
                moved |= self.end(turn, TrajectoryStatus.FINISHED, reward=None, parked=False)
                while self.deliver_report(turn):
                    moved = True
            for index, replica in enumerate(self.replicas):
                if not (replica.waiting or replica.closed):
                    moved |= self.replica(index)
            moved |= self.actor()
            idle = 0 if moved else idle + 1
            if idle and (idle <= 2 or (self.waits_for_deadline() and idle <= patience)):  # some decide at intervals
                self.tick(5.0)
                continue
            assert moved, f"deadlock: phase {self.phase}, {self.dispatcher.statistics()}, {self.dispatcher.counts()}"

    def waits_for_deadline(self) -> bool:
        return any(self.stuck(name) for worker in self.workers.values() for name in worker.open)

    def check_end(self) -> None:
        """No tokens are kept for nothing, and the same events give the same commands."""
        if not self.stop_cause:
            live = {member for group in self.in_flight for member in self.sealed.get(group, [])}
            for trajectory in self.reported:
                group = self.group_of[trajectory]
                assert trajectory in live or group in self.in_flight or group in self.running_evals, (
                    f"{trajectory} is kept for nothing"
                )
        again = Dispatcher(self.config)
        for event, now, commands in self.log:
            assert again.handle(event, now) == commands
