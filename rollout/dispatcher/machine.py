"""The coordinator's state machine. Pure: `handle(event, now)` returns the commands; nothing else changes it.

What the shell around it must know:
* Events are handled one at a time; their commands are executed in order. Events may be repeated (retries on the wire):
  repeats change nothing, but a repeated request is answered again.
* A trajectory ends by its worker's TrajectoryEnded (or by WorkerLost). AbortTrajectory only asks for it: a report of
  FINISHED that crossed the abort on the wire still counts, judged by its own versions.
* The shell keeps the tokens of every reported trajectory until DropTrajectories names it, or its group's prompt is
  closed by ClosePrompt (ACCEPTED).
* A GroupRequested that cannot be answered waits in here (one a replica). When the shell's long poll ran out meanwhile,
  it may ignore the DeliverGroup or CloseBatch that comes later: the replica's next request is answered again.
* The actor syncs after every optimizer step, then asks for the next step's groups. Step s + 1 is filled only under
  version s (or when replica 0 asks for it without a sync: then the weights of step s are not coming).
* Finite source: once it is exhausted and nothing is in flight, the last batch closes short; a request after that is
  answered by a CloseBatch of 0 groups, and StopRun with an empty cause is emitted once. Syncs and evaluations still work
  after that. After a StopRun with a cause every event is ignored.
"""

from __future__ import annotations

from rollout.dispatcher.config import DispatcherConfig
from rollout.types import AnyCommand, AnyEvent


class Dispatcher:
    """Decides everything between prompt source, workers and actor."""

    def __init__(self, config: DispatcherConfig) -> None:
        self.config = config
        self.version = 0
        """Weight version acknowledged by every worker."""
        self.step = 1
        """Optimizer step whose batch is being filled."""
        self.stopped: str | None = None
        """Cause of StopRun ('' when the source was drained)."""

    def handle(self, event: AnyEvent, now: float) -> list[AnyCommand]:
        """Commands that `event` causes at time `now` (seconds, monotonic, never smaller than before)."""
        raise NotImplementedError

    def counts(self) -> dict[str, int]:
        """Prompts by PromptStatus value, plus `submitted`, since RunStarted (requeued ones included)."""
        raise NotImplementedError

    def statistics(self) -> dict[str, float]:
        """groups_ready, groups_running, groups_taken, trajectories_running, trajectories_waiting, trajectories_done,
        turns_done, resamples, discards, failures, …"""
        raise NotImplementedError

    @property
    def phase(self) -> str:
        """One word for people: starting, rollout, train, sync, eval, done."""
        raise NotImplementedError

    def check_invariants(self) -> None:
        """Cheap promises, O(1): the prompts' identity and the gate. Raises InvariantError."""

    def audit(self) -> None:
        """Everything that can be recounted, O(state): for tests. Raises InvariantError."""
