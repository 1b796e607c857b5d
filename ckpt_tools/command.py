"""What the five commands share: the frame of a program, its progress line, and the flags that mean the same in each."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import torch

from ckpt_tools.layout import Layout
from ckpt_tools.output import gigabytes
from envclient.base.errors import main_guard


def parser(name: str, description: str | None, epilog: str) -> argparse.ArgumentParser:
    """An argument parser that prints the module's text as it stands."""
    return argparse.ArgumentParser(
        prog=f"python -m ckpt_tools.{name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_layout(arguments: argparse.ArgumentParser) -> None:
    """Flags of the layout whose ranks' parts become chunks of their own."""
    group = arguments.add_argument_group("cut (any layout can load any cut; it decides what a rank has to read)")
    group.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks (1)")
    group.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline stages (1)")
    group.add_argument("--ep", type=int, default=1, metavar="N", help="expert-parallel ranks (1)")


def layout_of(options: argparse.Namespace) -> Layout:
    return Layout(tensor=options.tp, pipeline=options.pp, expert=options.ep)


def add_hf(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument(
        "--hf", type=Path, metavar="DIR", help="folder with config.json and tokenizer (the hf/ beside the checkpoint)"
    )


def add_writing(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument("--dry-run", action="store_true", help="check everything, say what would be written, stop")
    arguments.add_argument("--quiet", action="store_true", help="no progress on stderr")


def run(main: Callable[[], int | None]) -> None:
    """`main` as a program: one-line errors, SIGTERM leaves as Ctrl-C does (nothing half-written stays)."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    # Two threads move bytes; torch's own would only get in their way.
    torch.set_num_threads(1)
    main_guard(main)


class Progress:
    """A line on stderr, at most every second: share, bytes, speed, what is at hand. Threads may call it."""

    def __init__(
        self, total_bytes: int, verb: str, *, quiet: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._verb, self._quiet, self._clock = max(1, total_bytes), verb, quiet, clock
        self._lock = threading.Lock()
        self._started = self._said = clock()
        self._done = 0

    def add(self, nbytes: int, what: str) -> None:
        """`nbytes` more are done, the last of them of `what`."""
        with self._lock:
            self._done += nbytes
            now = self._clock()
            if now - self._said >= 1.0:
                self._said = now
                self._say(now, what)

    def end(self) -> None:
        with self._lock:
            self._say(self._clock(), "done")

    def _say(self, now: float, what: str) -> None:
        if self._quiet:
            return
        speed = self._done / max(1e-9, now - self._started)
        share = 100 * self._done // self._total
        line = (
            f"[{share:3d} %] {self._verb} {gigabytes(self._done)} of {gigabytes(self._total)}, {speed / 1e6:.0f} MB/s"
        )
        print(f"{line}, {what}", file=sys.stderr, flush=True)
