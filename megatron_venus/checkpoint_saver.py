"""Saves the actor while training goes on: a copy in host memory, files in the background, a manifest last.

`save` holds the training loop only for the copy. A thread of every process then writes its process's file; when all are
complete and durable, rank 0's writes what belongs to the whole, the export, and at the very end the manifest. A kill at
any moment leaves the checkpoint before it, and a folder without a manifest, which the next start removes. No process is
forked: a killed rank leaves no writer behind.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist

from envclient.base.errors import PreflightError, VenusError
from envclient.base.files import fsync_dir
from megatron_venus.adapters.megatron import Actor
from megatron_venus.checkpoint_index import Manifest, checkpoint_dir, find_all, remove_unfinished, write_manifest
from megatron_venus.checkpoint_snapshot import Snapshot
from megatron_venus.config import CheckpointConfig
from megatron_venus.hf_folder import copy_companions, state_dtype, write_weights
from megatron_venus.weight_map import checksum
from rollout.rope import Rope

log = logging.getLogger("venus.checkpoint")
_GRACE_S = 20.0
"""How long a run that failed waits for the save in flight."""
_MARGIN_BYTES = 64_000_000
"""Kept free beside what is written."""


class CheckpointSaver:
    """One a process; all processes make and call it at the same places of the loop.

    As a context manager it ends with no save in flight. `hf_source` is the folder whose config and tokenizer go with
    the weights.
    """

    def __init__(self, run_dir: Path, actor: Actor, config: CheckpointConfig, *, hf_source: Path) -> None:
        self._run_dir, self._actor, self._config, self._hf_source = run_dir, actor, config, hf_source
        # The threads meet in a group of their own: the loop's collectives go on beside theirs.
        timeout = datetime.timedelta(seconds=config.timeout_s)
        self._group = dist.new_group(backend="gloo", timeout=timeout)
        self._leader = dist.get_rank() == 0
        self._thread: threading.Thread | None = None
        self._failure: VenusError | None = None
        if self._leader:
            for name in remove_unfinished(run_dir):
                log.warning("removed %s: its save was not finished", name)

    def __enter__(self) -> CheckpointSaver:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.finish()
        elif self._thread:
            self._thread.join(_GRACE_S)
            if self._thread.is_alive():
                log.warning("a save in flight is left unfinished; the next start removes it")

    def save(self, step: int, nonfinite_steps: int) -> None:
        """Take the checkpoint of `step` as the actor is now; returns when training may go on.

        Raises:
            PreflightError: the disk has no room for it.
            VenusError: the save before this one failed, or (without `background`) this one.
        """
        started = time.monotonic()
        self.finish()
        copying = time.monotonic()
        snapshot = self._take(step, nonfinite_steps)
        now = time.monotonic()
        log.info("checkpoint of step %d: waited %.1f s, copied %.1f s", step, copying - started, now - copying)
        self._thread = threading.Thread(target=self._complete, args=(snapshot,), name="checkpoint", daemon=True)
        self._thread.start()
        if not self._config.background:
            self.finish()

    def check(self) -> None:
        """Does not wait.

        Raises:
            VenusError: a save in the background failed.
        """
        if self._failure:
            raise self._failure

    def finish(self) -> None:
        """Wait until the save in flight, if there is one, is complete.

        Raises:
            VenusError: it failed.
        """
        if self._thread:
            self._thread.join()
            self._thread = None
        self.check()

    def _take(self, step: int, nonfinite_steps: int) -> Snapshot:
        folder = checkpoint_dir(self._run_dir, step)
        if self._leader:
            # A broken folder of the same step: a kill while saving, then a resume from before it.
            shutil.rmtree(folder, ignore_errors=True)
            (folder / "megatron").mkdir(parents=True)
        dist.barrier(group=self._group)
        snapshot = Snapshot.take(folder, step, self._actor, nonfinite_steps, leader=self._leader)
        self._check_room(snapshot)
        return snapshot

    def _check_room(self, snapshot: Snapshot) -> None:
        export = sum(tensor.nbytes for tensor in snapshot.weights.values()) if self._config.export else 0
        free = shutil.disk_usage(snapshot.folder).free if self._leader else 0
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (snapshot.stored_bytes + export, free), group=self._group)
        needed, free = sum(nbytes for nbytes, _ in parts) + _MARGIN_BYTES, parts[0][1]
        if free < needed:
            if self._leader:
                shutil.rmtree(snapshot.folder)
            raise PreflightError(
                f"checkpoint of step {snapshot.step} needs {needed / 1e9:.2f} GB,"
                f" {snapshot.folder.parent} has {free / 1e9:.2f} GB free",
                f"make room: actor.checkpoint.keep={self._config.keep} checkpoints and one more must fit",
            )

    # --------------------------------------------------------------------------------------------- in the background

    def _complete(self, snapshot: Snapshot) -> None:
        started = time.monotonic()
        try:
            written = self._together(snapshot.write)
            self._together(lambda: self._write_whole(snapshot, written) if self._leader else None)
        except VenusError as error:
            self._failure = error
            log.error("%s", error)
        else:
            log.info("checkpoint of step %d is complete after %.1f s", snapshot.step, time.monotonic() - started)

    def _together(self, work: Callable[[], Any]) -> list[Any]:
        """Results of every process's `work`, by rank; a failure on any of them is everyone's.

        Raises:
            VenusError: names the rank and what went wrong.
        """
        result, problem = None, ""
        try:
            result = work()
        except Exception as error:
            root = _root(error)
            if not isinstance(root, OSError):
                log.exception("a defect, not the disk's fault")
            problem = f"{type(root).__name__}: {root}"
        parts: list[Any] = [None] * dist.get_world_size()
        try:
            dist.all_gather_object(parts, (result, problem), group=self._group)
        except Exception as error:  # mostly a RuntimeError: a process is gone, or took longer than the timeout
            raise VenusError(
                f"a checkpoint was not finished: {problem or f'another process did not do its part ({error})'}",
                f"see its log; actor.checkpoint.timeout_s={self._config.timeout_s:g}",
            ) from None
        for rank, (_, problem) in enumerate(parts):
            if problem:
                raise VenusError(
                    f"a checkpoint was not finished: rank {rank}: {problem}", "see that rank's log and disk"
                )
        return [result for result, _ in parts]

    def _write_whole(self, snapshot: Snapshot, written: list[Any]) -> None:
        folder = snapshot.folder
        snapshot.close(written)
        copy_companions(self._hf_source, folder / "hf")
        _keep_rope(folder / "hf" / "config.json", self._actor.rope)
        state_dtype(folder / "hf" / "config.json", self._actor.dtype)
        if self._config.export:
            write_weights(folder / "hf", snapshot.weights)
        checksums = {name: checksum(tensor) for name, tensor in snapshot.weights.items()}
        write_manifest(folder, Manifest(step=snapshot.step, weights=checksums, files=_make_durable(folder)))
        _retain(self._run_dir, self._config.keep)


def _root(error: BaseException) -> BaseException:
    """The system's own word, where there is one: torch reports a full disk as a wrong position in its file."""
    at: BaseException | None = error
    while at and not isinstance(at, OSError):
        at = at.__cause__ or at.__context__
    return at or error


def _keep_rope(path: Path, rope: Rope) -> None:
    """Positions stretched by the run's config belong to the exported model."""
    config = json.loads(path.read_text())
    if changed := rope.config_fields(config):
        path.write_text(json.dumps(config | changed, indent=2) + "\n")


def _make_durable(folder: Path) -> dict[str, int]:
    """Path in the folder → bytes, of every file in it; all of them on disk when this returns."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    for inner in (folder / "megatron", folder / "hf", folder, folder.parent):
        fsync_dir(inner)
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _retain(run_dir: Path, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints, and every broken folder."""
    kept = {checkpoint.path for checkpoint in find_all(run_dir)[-max(1, keep) :]}
    for folder in (run_dir / "checkpoints").glob("step_*"):
        if folder not in kept:
            log.info("removing %s", folder.name)
            shutil.rmtree(folder, ignore_errors=True)
