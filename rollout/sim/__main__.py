"""`python -m rollout.sim`: simulate scheduling policies on a modelled cluster and compare them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from envclient.base.configs import build, read_yaml, to_yaml
from envclient.base.errors import ConfigError, main_guard
from envclient.base.files import write_atomic
from rollout.sim.cluster import Cluster
from rollout.sim.config import PRESETS, SimConfig
from rollout.sim.labels import policy_keys
from rollout.sim.metrics import Result
from rollout.sim.policies import policy_names
from rollout.sim.recordings import measured
from rollout.sim.report import table
from rollout.types import EventRow


def seed_list(text: str) -> list[int]:
    """`3` is one seed, `0,1,2` a list, `0-4` a range."""
    try:
        found: list[int] = []
        for part in text.split(","):
            first, dash, last = part.partition("-")
            found += range(int(first), int(last) + 1) if dash else [int(first)]
        return found
    except ValueError:
        raise ConfigError(f"--seeds {text!r} is no list of seeds", "write 0,1,2 or 0-4") from None


def arguments(argv: Sequence[str] | None = None) -> Any:
    names = ", ".join(policy_names())
    parser = argparse.ArgumentParser(prog="python -m rollout.sim", description=__doc__, epilog=f"policies: {names}")
    parser.add_argument("--preset", choices=sorted(PRESETS), default="32b", help="model and GPUs to begin with")
    parser.add_argument("--config", type=Path, help="YAML file with keys of rollout.sim.config.SimConfig")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable")
    parser.add_argument(
        "--policies", default="", help="comma-separated, each NAME or NAME:KEY=VALUE:…; default: the config's"
    )
    parser.add_argument("--seeds", default="", help="0,1,2 or 0-4; default: the config's")
    parser.add_argument("--json", type=Path, help="write config and all results to this file")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write PNG plots into this folder")
    parser.add_argument("--events", type=Path, help="write the (last) run's events.jsonl, as a live run does")
    parser.add_argument("--show-config", action="store_true", help="print the resolved config and stop")
    return parser.parse_args(argv)


def run_one(config: SimConfig, label: str, events: Path | None = None) -> Result:
    """One policy, one seed; with `events` every event and its commands as rows of events.jsonl."""
    if events is None:
        return Cluster(config, label=label).run()
    encoder = msgspec.json.Encoder()
    events.parent.mkdir(parents=True, exist_ok=True)
    with events.open("wb") as file:

        def record(row: EventRow) -> None:
            file.write(encoder.encode(row) + b"\n")

        return Cluster(config, label=label, record=record).run()


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    layers: list[tuple[str, Any]] = [(f"preset {args.preset}", PRESETS[args.preset])]
    if args.config is not None:
        layers.append((str(args.config), read_yaml(args.config)))
    overrides = list(args.set)
    config = build(SimConfig, layers, overrides)
    if config.workload.kind == "from_run":
        layers.insert(1, (f"run {config.workload.run}", measured(config.workload.run)))
        config = build(SimConfig, layers, overrides)
    if args.show_config:
        sys.stdout.write(to_yaml(config))
        return 0
    policies = [name for name in args.policies.split(",") if name] or [config.policy.name]
    seeds = seed_list(args.seeds) if args.seeds else [config.seed]
    results = []
    for name in policies:
        for seed in seeds:
            began_s = time.perf_counter()
            each = build(SimConfig, layers, [*overrides, *policy_keys(name), f"seed={seed}"])
            results.append(run_one(each, name, args.events))
            took_s = time.perf_counter() - began_s
            rate = f"{results[-1].trained_tokens_per_hour / 1e6:.3f} Mtok/h"
            print(f"{name} seed {seed}: {rate}, {results[-1].hours:.1f} hours in {took_s:.1f} s", file=sys.stderr)
    print(table(results))
    if args.json is not None:
        document = {"config": msgspec.to_builtins(config), "results": [result.row() for result in results]}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(args.json, msgspec.json.format(msgspec.json.encode(document)) + b"\n")
    if args.plot is not None:
        from rollout.sim.plots import plot

        for path in plot(results, args.plot):
            print(f"wrote {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    main_guard(main)
