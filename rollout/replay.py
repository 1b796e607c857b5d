"""`python -m rollout.replay runs/NAME/events.jsonl`: derive every decision of a run again from its recorded events.

Each RunStarted (the run's beginning and every resume) begins with a fresh dispatcher, made from the constants that it
carries; in a file that has none, from the `config.yaml` beside it, the one of the last resume. A simulation's events
are replayed alike. Exit code 0 when every row's commands are the recorded ones, 1 with the first row that differs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from envclient.base.configs import section
from envclient.base.errors import ConfigError, main_guard
from rollout.config import RolloutConfig, RunConfig
from rollout.dispatcher import Dispatcher, DispatcherConfig
from rollout.types import AnyCommand, EventRow, Record, RunStarted


class Difference(Record, frozen=True, kw_only=True):
    """The first row whose recorded commands the dispatcher does not give."""

    row: EventRow
    derived: list[AnyCommand]


def read_rows(path: Path) -> Iterator[EventRow]:
    """Rows of `events.jsonl`. A last line that was cut by a kill is left out.

    Raises:
        ConfigError: a line that is no row, by number.
    """
    decoder = msgspec.json.Decoder(EventRow)
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path}:{number}: {error}", "was it written by this version?") from None


def first_difference(
    rows: Iterable[EventRow], unrecorded: Callable[[], DispatcherConfig]
) -> tuple[int, Difference | None]:
    """Number of rows that agree, and the first one that does not.

    Args:
        unrecorded: the constants of a start that carries none.

    Raises:
        ConfigError: the rows do not begin with a start, or one of its constants is not known.
    """
    dispatcher: Dispatcher | None = None
    agreed = 0
    for row in rows:
        if isinstance(row.event, RunStarted):
            constants = row.event.constants
            dispatcher = Dispatcher(DispatcherConfig.from_recorded(constants) if constants else unrecorded())
        if dispatcher is None:
            raise ConfigError(f"row {row.seq} comes before any RunStarted", "give the whole events.jsonl of a run")
        derived = dispatcher.handle(row.event, row.now)
        if derived != row.commands:
            return agreed, Difference(row=row, derived=derived)
        agreed += 1
    return agreed, None


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rollout.replay", description="Derive a run's decisions again.")
    parser.add_argument("events", type=Path, help="runs/NAME/events.jsonl")
    path: Path = parser.parse_args().events
    if not path.is_file():
        raise ConfigError(f"{path}: no such file", "give the events.jsonl of a run")
    config_path = path.parent / "config.yaml"
    agreed, difference = first_difference(read_rows(path), lambda: _beside(config_path))
    if difference is None:
        print(f"{agreed} rows: every decision is derived again")
        return 0
    row = difference.row
    print(f"{agreed} rows agree; row {row.seq} differs")
    print(f"event     {msgspec.json.encode(row.event).decode()}")
    print(f"recorded  {msgspec.json.encode(row.commands).decode()}")
    print(f"derived   {msgspec.json.encode(difference.derived).decode()}")
    starts = [each.event for each in read_rows(path) if isinstance(each.event, RunStarted)]
    if len(starts) > 1 and not all(start.constants for start in starts):
        print(f"note      the run was resumed, and {config_path.name} may have changed then: that differs too")
    return 1


def _beside(config_path: Path) -> DispatcherConfig:
    """The constants that `config.yaml` gives now."""
    run = section(config_path, "run", RunConfig)
    return DispatcherConfig.from_config(section(config_path, "rollout", RolloutConfig), steps=run.steps)


if __name__ == "__main__":
    main_guard(_main)
