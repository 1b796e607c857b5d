"""Finished training episodes of a run, tokens and turns: `predictor/episodes-000012.jsonl`, a file an optimizer step.

The coordinator writes every one that was scored, trained or not: a predictor that had seen only what was trained would
not know of the lengths that are filtered or come too late. `collect` and the refresh read them. Numbers of events tell
what was known when, so that a row needs no other file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from envclient.base.errors import ConfigError
from envclient.base.files import JsonlWriter
from rollout.types import (
    ClosePrompt,
    EventRow,
    Purpose,
    Record,
    RunStarted,
    StartTrajectory,
    StepFinished,
    Trajectory,
    TrajectoryEnded,
    TrajectoryStatus,
    TurnEnded,
)

FOLDER = "predictor"
_SCORED = (TrajectoryStatus.FINISHED, TrajectoryStatus.TRUNCATED)


class TurnRow(Record, frozen=True, kw_only=True):
    """A turn that ended."""

    seq: int
    """Number of the event."""
    context_tokens: int
    """Before the turn."""
    output_tokens: int


class EpisodeRow(Record, frozen=True, kw_only=True):
    """A finished episode. The first turn's context is the prompt."""

    trajectory_id: str
    group_id: str
    task_id: str
    started_seq: int
    ended_seq: int
    token_ids: list[int]
    """Prompt and response."""
    turns: list[TurnRow]


@dataclass(slots=True, kw_only=True)
class _Open:
    """A trajectory that has begun."""

    started_seq: int
    turns: list[TurnRow] = field(default_factory=list)
    reported: Trajectory | None = None


class EpisodeLog:
    """Writer of a run's files.

    Args:
        keep_steps: files kept; 0: all.
    """

    def __init__(self, run_dir: Path, keep_steps: int) -> None:
        self._folder = run_dir / FOLDER
        self._keep_steps = keep_steps
        self._folder.mkdir(exist_ok=True)
        self._file: JsonlWriter | None = None
        self._open: dict[str, dict[str, _Open]] = {}
        """Group → its trajectories that have begun, until its prompt is closed."""

    def reported(self, trajectory: Trajectory) -> None:
        """A worker reported this training trajectory; its TrajectoryEnded follows."""
        if (begun := self._begun(trajectory.trajectory_id)) is not None:
            begun.reported = trajectory

    def follow(self, row: EventRow) -> None:
        """A row of `events.jsonl` became durable."""
        event = row.event
        if isinstance(event, TurnEnded):
            if (begun := self._begun(event.trajectory_id)) is not None:
                turn = TurnRow(seq=row.seq, context_tokens=event.context_tokens, output_tokens=event.output_tokens)
                begun.turns.append(turn)
        elif isinstance(event, TrajectoryEnded):
            self._ended(event.trajectory_id, row.seq)
        elif isinstance(event, RunStarted):
            self._begin_file(event.version)
        elif isinstance(event, StepFinished):
            self._begin_file(event.step)
        for command in row.commands:
            if isinstance(command, StartTrajectory) and command.purpose is Purpose.TRAIN:
                self._open.setdefault(command.group_id, {})[command.trajectory_id] = _Open(started_seq=row.seq)
            elif isinstance(command, ClosePrompt):
                self._open.pop(command.group_id, None)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begun(self, trajectory_id: str) -> _Open | None:
        return self._open.get(trajectory_id.rsplit(".", 2)[0], {}).get(trajectory_id)

    def _ended(self, trajectory_id: str, seq: int) -> None:
        begun = self._begun(trajectory_id)
        trajectory = begun.reported if begun is not None else None
        if begun is None or trajectory is None or not begun.turns or trajectory.status not in _SCORED:
            return
        del self._open[trajectory.group_id][trajectory_id]
        row = EpisodeRow(
            trajectory_id=trajectory_id,
            group_id=trajectory.group_id,
            task_id=trajectory.task_id,
            started_seq=begun.started_seq,
            ended_seq=seq,
            token_ids=trajectory.prompt_ids + trajectory.response_ids,
            turns=begun.turns,
        )
        assert self._file is not None, "RunStarted is a run's first event"
        self._file.write(msgspec.json.encode(row))

    def _begin_file(self, step: int) -> None:
        self.close()
        self._file = JsonlWriter(self._folder / f"episodes-{step:06d}.jsonl")
        if self._keep_steps:
            for old in sorted(self._folder.glob("episodes-*.jsonl"))[: -self._keep_steps]:
                old.unlink()


def read_episodes(run_dir: Path) -> list[EpisodeRow]:
    """Episodes of a run that are kept, oldest first; a line cut by a kill (or being written) is left out.

    Raises:
        ConfigError: the run has none, or a line is none of this version's.
    """
    rows = []
    decoder = msgspec.json.Decoder(EpisodeRow)
    for path in sorted((run_dir / FOLDER).glob("episodes-*.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(keepends=True), start=1):
            if line.endswith(b"\n"):
                try:
                    rows.append(decoder.decode(line))
                except msgspec.DecodeError as error:
                    raise ConfigError(f"{path}:{number}: {error}", "was it written by this version?") from None
    if not rows:
        raise ConfigError(f"{run_dir} holds no episodes", "run with rollout.predictor.record=true")
    return rows
