"""A test run's result, read from what the sandbox answered."""

from __future__ import annotations

import json

import msgspec

from envclient.base.errors import VenusError
from envclient.types import ExecResult, ExecStatus

NOT_ITS_OWN = (126, 137)
"""Exit codes of a KILLED run that say nothing about the code: its fork was refused, or somebody else killed it."""


class SandboxError(VenusError):
    """The verifier itself failed: no verdict about the code, never a reward of 0."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the covering tests say about the function in the sandbox."""

    ok: bool
    message: str
    """First line of the first failure; `Timeout` for a run that was killed for its use of the processor or of time."""
    failed: list[str] = []
    """Node ids; only the first one unless all tests were asked for."""
    test: str = ""
    compiled: bool = True
    hung: bool = False
    """The run ended before its end: nothing is known about single tests."""
    by_clock: bool = False
    """Killed by the wall clock, which depends on the machine's load: not to be remembered."""


def read_verdict(result: ExecResult) -> Verdict:
    """The verdict in the answer of `venus-test`.

    Raises:
        SandboxError: the answer is none; carries the last line of what came instead.
            Also a run that did not start or that somebody else killed.
    """
    if result.status is ExecStatus.TIMED_OUT:
        return Verdict(ok=False, message="Timeout", hung=True, by_clock=True)
    if result.status is ExecStatus.KILLED and result.exit_code not in NOT_ITS_OWN:
        return Verdict(ok=False, message="Timeout", hung=True)
    if result.status is ExecStatus.EXITED and not result.output:
        # The server always says something: the code under test ended its process.
        return Verdict(ok=False, message="Exit", hung=True)
    try:
        row = json.loads(result.output)
        if result.exit_code == 0:
            return msgspec.convert(row, Verdict)
        reason = str(row["error"])
    except (ValueError, KeyError, TypeError):
        text = result.output.decode(errors="replace").strip()
        reason = text.splitlines()[-1] if text else f"exit code {result.exit_code}"
    raise SandboxError(f"venus-test gave no verdict: {reason}", "see the environment service's log")
