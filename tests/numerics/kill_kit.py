"""Saves that do not reach their end: `python -m tests.numerics.kill_kit MODEL DIR` kills one at each file event.

Every event (a file opened for writing, a rename, a folder made or removed) is a point: a fork of this process resumes
from step 1, makes step 2, and is killed by SIGKILL just before the event, in whichever thread it happens; another fork
then starts as a run does. One more is killed in the middle of a file. The last line of the output is a JSON list.

`MODEL DIR RANK` under torchrun: of two tensor-parallel processes RANK is killed in the save of step 2, when it opens
its own file.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_venus.checkpoint_index import find_all, find_latest
from megatron_venus.config import CheckpointConfig, OptimizerConfig, ParallelConfig
from tests.numerics import kit, resume_kit

NEVER = 10**9
HALF_FILE = 100_000
"""Bytes after which the kernel ends the process of the last point."""


def forked(work: Callable[[], None]) -> int:
    """`work` in a child; its wait status."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def watch(folder: Path, kill_at: int, log: Path) -> None:
    """From now on note every file event under `folder`, and die just before event number `kill_at`."""
    events: list[str] = []

    def hook(event: str, arguments: Any) -> None:
        path = str(arguments[0]) if arguments else ""
        if event == "open":
            changes = isinstance(arguments[1], str) and any(letter in arguments[1] for letter in "wxa+")
        else:
            changes = event in ("os.rename", "os.mkdir", "shutil.rmtree", "shutil.copyfile")
        if changes and path.startswith(str(folder)):
            if len(events) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            events.append(f"{event} {Path(path).relative_to(folder)}")
            if kill_at == NEVER:
                fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.write(fd, f"{events[-1]}\n".encode())
                os.close(fd)

    sys.addaudithook(hook)


def first(model: Path, run_dir: Path) -> None:
    actor = kit.make_actor(model, resume_kit.SETTINGS)
    resume_kit.train(actor, 1, 1)
    kit.save_checkpoint(run_dir, 1, actor, hf_source=model)


def second(model: Path, run_dir: Path, kill_at: int, *, half_file: bool = False) -> None:
    from megatron_venus import checkpoint
    from megatron_venus.checkpoint_saver import CheckpointSaver

    actor = kit.make_actor(model, resume_kit.SETTINGS)
    found = find_latest(run_dir)
    assert found is not None
    checkpoint.load(found, actor)
    resume_kit.train(actor, 2, 2)
    with CheckpointSaver(run_dir, actor, CheckpointConfig(keep=1), hf_source=model) as saver:
        watch(run_dir / "checkpoints", kill_at, run_dir / "events")
        if half_file:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (HALF_FILE, HALF_FILE))
        saver.save(2, 0)
        resume_kit.train(actor, 3, 3)


def restart(model: Path, run_dir: Path) -> None:
    """What a run does at its start; leaves which steps it found and what is left in the folder."""
    from megatron_venus import checkpoint
    from megatron_venus.checkpoint_saver import CheckpointSaver

    complete = [found.step for found in find_all(run_dir)]
    found = find_latest(run_dir)
    assert found is not None
    actor = kit.make_actor(model, OptimizerConfig())
    before = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    with CheckpointSaver(run_dir, actor, CheckpointConfig(), hf_source=model):
        checkpoint.load(found, actor)
    after = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
    (run_dir / "found").write_text(json.dumps({"complete": complete, "before": before, "after": after}))


def one_rank(model: Path, run_dir: Path, victim: int) -> None:
    from megatron_venus.checkpoint_saver import CheckpointSaver

    def die(event: str, arguments: Any) -> None:
        if event == "open" and str(arguments[0]).endswith(".distcp"):
            os.kill(os.getpid(), signal.SIGKILL)

    actor = kit.make_actor(model, resume_kit.SETTINGS, parallel=ParallelConfig(tensor=2))
    with CheckpointSaver(run_dir, actor, CheckpointConfig(keep=1), hf_source=model) as saver:
        resume_kit.train(actor, 1, 1)
        saver.save(1, 0)
        resume_kit.train(actor, 2, 2)
        saver.finish()
        if dist.get_rank() == victim:
            sys.addaudithook(die)
        saver.save(2, 0)


def main(model: Path, root: Path) -> None:
    kit.cpu.install()
    # Before the forks, once for all of them.
    from megatron_venus import checkpoint_saver, grad_stream  # noqa: F401

    assert forked(lambda: first(model, root / "base")) == 0
    shutil.copytree(root / "base", root / "whole")
    assert forked(lambda: second(model, root / "whole", NEVER)) == 0
    events = (root / "whole" / "events").read_text().splitlines()
    results = []
    for point, event in enumerate([*events, "half a file"]):
        if event.startswith("os.mkdir"):
            continue  # many, and each is as the event after it
        run_dir = root / f"point{point}"
        shutil.copytree(root / "base", run_dir)
        half_file = point == len(events)
        status = forked(lambda: second(model, run_dir, NEVER if half_file else point, half_file=half_file))  # noqa: B023
        assert forked(lambda: restart(model, run_dir)) == 0  # noqa: B023
        found = json.loads((run_dir / "found").read_text())
        results.append({"event": event, "signal": os.WTERMSIG(status), **found})
        shutil.rmtree(run_dir)
    print(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        one_rank(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main(Path(sys.argv[1]), Path(sys.argv[2]))
