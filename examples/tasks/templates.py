"""Sandbox templates of the libraries: sources mounted read-only, a warm pytest server as the warm-up process."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from envclient.types import Template
from examples.tasks.libraries import Library, library_named, root
from examples.tasks.records import RepairRecord

LIBRARY_INSIDE = "/library"
_SERVER = Path(__file__).with_name("pytest_server.py")
_SERVER_INSIDE = "/tasks/pytest_server.py"
TEST, COVERAGE = "venus-test", "venus-coverage"
"""Applets of the warm pytest server."""


def template(library: Library) -> Template:
    """The template of `library`, fetching it when it is not there."""
    arguments = [LIBRARY_INSIDE, library.package, library.import_mode, *library.tests]
    return Template(
        name=library.folder,
        mounts=[(str(root(library).resolve()), LIBRARY_INSIDE), (str(_SERVER.resolve()), _SERVER_INSIDE)],
        warmup=[sys.executable, _SERVER_INSIDE, *arguments],
        # A fixed hash seed: the order of sets must not change a test's message between runs.
        env={"PYTHONHASHSEED": "0", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        memory_bytes=1 << 30,
    )


def templates_of(records: Iterable[RepairRecord]) -> list[Template]:
    """One template for every library that `records` name."""
    return [template(library_named(name)) for name in sorted({record.library for record in records})]
