"""Has the disk write while the tools still compute: without it the kernel saves most of the work for the last fsync."""

from __future__ import annotations

import os
import threading
from types import TracebackType

FLUSH_BYTES = 128_000_000
"""What is written to a file before the disk is told to go on with it."""


class Flusher:
    """A thread that syncs files of which enough was written. It makes nothing durable: who needs that fsyncs himself.

    The block's end waits for it, and raises what the disk answered: an error is told only once, to whoever syncs first.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._unwritten: dict[int, int] = {}
        self._ending = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="ckpt-flush", daemon=True)

    def __enter__(self) -> Flusher:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def wrote(self, fd: int, count: int) -> None:
        """So many bytes went into the open file. Any thread.

        Raises:
            OSError: of an earlier sync.
        """
        with self._changed:
            if self._error is not None:
                raise self._error
            self._unwritten[fd] = self._unwritten.get(fd, 0) + count
            if self._unwritten[fd] >= FLUSH_BYTES:
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ending or self._due() is not None)
                if self._ending or self._error is not None:
                    return
                fd = self._due()
                assert fd is not None
                self._unwritten[fd] = 0
            try:
                os.fdatasync(fd)
            except OSError as error:
                self._error = error

    def _due(self) -> int | None:
        return next((fd for fd, count in self._unwritten.items() if count >= FLUSH_BYTES), None)
