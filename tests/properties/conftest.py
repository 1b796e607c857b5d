"""Prints how many steps the property worlds of the dispatcher made."""

from __future__ import annotations

import pytest

from tests.properties.dispatcher_checks import CheckedWorld


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if CheckedWorld.handled:
        terminalreporter.write_line(f"dispatcher worlds: {CheckedWorld.handled:,} steps, every one checked")
