"""The warden: outlives a killed launcher just long enough to end everything the run started.

Started by the launcher as `python -m envclient.base.warden RUN_ID` with a pipe on stdin that only the launcher holds
open. When the pipe closes, whatever the reason, every process that carries the run's id is killed.
"""

from __future__ import annotations

import os
import signal
import sys

from envclient.base.processes import kill_run


def main() -> int:
    """Wait for end of file on stdin, then clean up."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    left = kill_run(sys.argv[1])
    return 1 if left else 0


if __name__ == "__main__":
    raise SystemExit(main())
