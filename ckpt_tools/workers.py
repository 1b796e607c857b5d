"""A few threads that move bytes; the first failure, or Ctrl-C, ends all of them at their next block."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """Ends a job whose result nobody waits for any more."""


class Workers:
    """Runs one list of jobs; a job calls `check` before each block."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._stopping = threading.Event()

    def check(self) -> None:
        """Raises `Stopped` when the jobs' results are not wanted any more."""
        if self._stopping.is_set():
            raise Stopped

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Results of the jobs, in their order; the first exception of any of them."""
        pool = ThreadPoolExecutor(self._threads, "ckpt")
        try:
            # In the caller's context: torch's options, such as `torch.save` without CRC, are a thread's own otherwise.
            futures = [pool.submit(contextvars.copy_context().run, job) for job in jobs]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            return [future.result() for future in futures]
        finally:
            self._stopping.set()
            pool.shutdown(cancel_futures=True)
