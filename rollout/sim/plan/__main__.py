"""`python -m rollout.sim.plan`: how to split a cluster for the most trained tokens per hour, and what to buy next."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envclient.base.configs import read_yaml, to_yaml
from envclient.base.errors import ConfigError, main_guard
from envclient.base.files import write_atomic
from rollout.sim.__main__ import seed_list
from rollout.sim.config import PRESETS
from rollout.sim.labels import policy_keys
from rollout.sim.plan.answer import answer, as_json
from rollout.sim.plan.config import PlanConfig, plan_config
from rollout.sim.plan.measure import Simulations
from rollout.sim.plan.report import text
from rollout.sim.policies import policy_names
from rollout.sim.recordings import measured

_EPILOG = """keys to begin with: cluster.gpus, cluster.hbm_gb, cluster.host_gb_per_node, cluster.sandboxes, prices.gpu,
sim.group.batch, search.async_factors=[1.0]; all of them: --show-config. A rate is one of the simulator's cost model:
compare plans by it, and put sim.trainer.efficiency (MFU) and sim.model's times of your own."""


def arguments(argv: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(prog="python -m rollout.sim.plan", description=__doc__, epilog=_EPILOG)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="32b", help="model to begin with")
    parser.add_argument("--workload", default="", help="swe, sessions, or the folder of a run of your own (runs/NAME)")
    parser.add_argument("--policy", default="", help=f"NAME or NAME:KEY=VALUE:…, of {', '.join(policy_names())}")
    parser.add_argument("--seeds", default="", help="0,1,2 or 0-4; rates are medians over them")
    parser.add_argument("--config", type=Path, help="YAML file with keys of rollout.sim.plan.config.PlanConfig")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="override a key; repeatable")
    parser.add_argument("--quick", action="store_true", help="one seed and short simulations: minutes, not an hour")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at once, each in a process of its own")
    parser.add_argument("--json", type=Path, help="write the whole answer to this file")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write PNG plots and plan.html into this folder")
    parser.add_argument("--show-config", action="store_true", help="print the resolved config and stop")
    return parser.parse_args(argv)


def overrides(args: Any) -> list[str]:
    """Of the options that stand for keys; `--set` goes last."""
    found: list[str] = []
    if args.workload in ("swe", "sessions"):
        found.append(f"sim.workload.kind={args.workload}")
    elif args.workload:
        found += ["sim.workload.kind=from_run", f"sim.workload.run={args.workload}"]
    if args.policy:
        found += [f"sim.{key}" for key in policy_keys(args.policy)]
    if args.seeds:
        found.append(f"seeds={seed_list(args.seeds)}")
    return [*found, *args.set]


def question(args: Any) -> PlanConfig:
    if args.jobs < 1:
        raise ConfigError(f"--jobs is {args.jobs}", "give at least 1")
    for option, folder in (("--out", args.out), ("--json", args.json.parent if args.json else None)):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise ConfigError(f"{option}: {str(folder)!r} is no folder", "name another one")
    layers: list[tuple[str, Any]] = []
    if args.config is not None:
        layers.append((str(args.config), read_yaml(args.config)))
    config = plan_config(args.preset, quick=args.quick, layers=layers, overrides=overrides(args))
    workload = config.sim.workload
    if workload.kind != "from_run":
        return config
    layers.insert(0, (f"run {workload.run}", {"sim": measured(workload.run)}))
    return plan_config(args.preset, quick=args.quick, layers=layers, overrides=overrides(args))


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    config = question(args)
    if args.show_config:
        sys.stdout.write(to_yaml(config))
        return 0
    for folder in (args.out, args.json.parent if args.json else None):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
    found = answer(config, Simulations(config, jobs=args.jobs))
    print(text(found))
    if args.json is not None:
        write_atomic(args.json, as_json(found))
    if args.out is not None:
        from rollout.sim.plan.page import write

        for path in write(found, args.out):
            print(f"wrote {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    main_guard(main)
