"""The trained groups of a run, exactly as the actor took them: `rollouts/step_000001.r0.msgpack`, one file a replica.

Off by default (`run.save_rollouts`). For studying what was trained, and for benchmarks and tests that replay it.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import msgspec

from rollout.types import TrainGroup

FOLDER = "rollouts"


class RolloutLog:
    """Writer of one replica; a step made again after a resume replaces its file."""

    def __init__(self, run_dir: Path, replica: int, enabled: bool) -> None:
        self._folder = run_dir / FOLDER
        self._replica = replica
        self._enabled = enabled
        self._step = -1
        self._file: BinaryIO | None = None
        if enabled:
            self._folder.mkdir(exist_ok=True)

    def write(self, group: TrainGroup) -> None:
        """Append `group`, length first (8 bytes, little-endian)."""
        if not self._enabled:
            return
        if self._file is None or group.step != self._step:
            self.close()
            self._step = group.step
            self._file = open(self._folder / f"step_{group.step:06d}.r{self._replica}.msgpack", "wb")  # noqa: SIM115
        raw = msgspec.msgpack.encode(group)
        self._file.write(len(raw).to_bytes(8, "little") + raw)
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_rollouts(run_dir: Path) -> dict[int, list[TrainGroup]]:
    """Step → the groups that were trained in it, over all replicas; empty when the run did not save them."""
    steps: dict[int, list[TrainGroup]] = {}
    for path in sorted((run_dir / FOLDER).glob("step_*.msgpack")):
        raw, at = path.read_bytes(), 0
        while at < len(raw):
            size = int.from_bytes(raw[at : at + 8], "little")
            group = msgspec.msgpack.decode(raw[at + 8 : at + 8 + size], type=TrainGroup)
            steps.setdefault(group.step, []).append(group)
            at += 8 + size
    return steps
