"""Runs one benchmark and prints its JSON as the last line."""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import time
from pathlib import Path

import tests.benchmarks
from envclient.base.errors import ConfigError, main_guard
from envclient.base.files import write_json_atomic

REQUIRED = ("benchmark", "ratio", "baseline", "sizes")


def main() -> int:
    """Entry point; returns the exit code."""
    names = sorted(m.name for m in pkgutil.iter_modules(tests.benchmarks.__path__) if not m.name.startswith("_"))
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=tests.benchmarks.__doc__)
    parser.add_argument("name", help=f"one of: {', '.join(names)}")
    parser.add_argument("--quick", action="store_true", help="a stated subset, within 5 minutes")
    parser.add_argument("--json", type=Path, help="also write the JSON object to this file")
    arguments = parser.parse_args()
    if arguments.name not in names:
        raise ConfigError(f"benchmark {arguments.name!r} is not known", f"one of: {', '.join(names)}")
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", file=sys.stderr, flush=True)

    result = importlib.import_module(f"tests.benchmarks.{arguments.name}").run(arguments.quick, say)
    missing = [key for key in REQUIRED if key not in result]
    assert not missing, f"benchmark {arguments.name} does not report {missing}"
    if arguments.json:
        write_json_atomic(arguments.json, result)
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    main_guard(main)
