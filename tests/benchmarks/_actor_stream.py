"""Under torchrun: the actor's loop against the benchmark's coordinator; every replica writes when it did what."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from envclient.base import configs
from envclient.base.files import write_json_atomic
from envclient.base.wire import token_from_environment
from megatron_venus import setup
from megatron_venus.config import VenusConfig
from megatron_venus.coordinator_link import CoordinatorLink
from megatron_venus.train import add_groups
from rollout.types import TrainGroup


def main() -> None:
    run_dir, url = Path(sys.argv[1]), sys.argv[2]
    path = run_dir / "config.yaml"
    config = configs.build(VenusConfig, [(str(path), configs.read_yaml(path))])
    parts = setup.build(config, run_dir, token_from_environment(), None)
    link = CoordinatorLink(url, token_from_environment(), parts.layout.replica, config.actor)
    stream, optimizer = parts.stream, parts.stream.actor.optimizer
    add, update = stream.add, optimizer.step
    row: dict[str, Any] = {}

    # Seconds of the machine's monotonic clock, which the coordinator's process reads too.
    def timed_add(group: TrainGroup) -> int:
        started = time.monotonic()
        tokens = add(group)
        row["groups"][group.group_id] = [started, time.monotonic()]
        return tokens

    def timed_update() -> Any:
        row["optimizer"] = time.monotonic()
        return update()

    stream.add, optimizer.step = timed_add, timed_update  # type: ignore[method-assign]
    rows = []
    for step in range(1, config.run.steps + 1):
        row, seconds = {"groups": {}}, {"time/wait_s": 0.0, "time/train_s": 0.0}
        counts = add_groups(step, link, parts, seconds)
        row["closed"] = time.monotonic()
        result = stream.finish(step, counts)
        row["end"] = time.monotonic()
        rows.append(row)
        if parts.layout.head and parts.layout.replica == 0:
            link.report_step(step, skipped=result.skipped, counts=counts, metrics=result.metrics | seconds)
    if parts.layout.head:
        write_json_atomic(run_dir / f"replica{parts.layout.replica}.json", rows)
    setup.leave()


if __name__ == "__main__":
    main()
