"""Errors that a person reads: one line that names the field or option, the value and the remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn


class VenusError(Exception):
    """Base of every error that VenusRL raises on purpose.

    Args:
        message: one line: what is wrong, naming the field or option and its value.
        remedy: one short sentence that says what to do about it.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} ({self.remedy})" if self.remedy else self.message


class ConfigError(VenusError):
    """A key of the configuration is unknown, has the wrong type, or a value that cannot work."""


class PreflightError(VenusError):
    """The machine lacks something the run needs: a program, disk space, a port, a file."""


class WireError(VenusError):
    """A peer answered with an error, refused the token, or could not be reached in time."""


class InvariantError(VenusError):
    """A promise of the system was broken: a defect of ours, never of the user's input."""


def exit_with(error: VenusError) -> NoReturn:
    """Print `error` as one line on stderr and leave with exit code 2."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def main_guard(main: Callable[[], int | None]) -> NoReturn:
    """Run `main` as a program: a VenusError becomes one line and exit code 2, Ctrl-C exit code 130."""
    try:
        code = main() or 0
    except VenusError as error:
        exit_with(error)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(code)
