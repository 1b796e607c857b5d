"""Under torchrun: train a run's saved groups again with nothing to wait for; writes the seconds it took."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from envclient.base import configs
from envclient.base.files import write_json_atomic
from megatron_venus import setup
from megatron_venus.config import VenusConfig
from megatron_venus.rollout_log import read_rollouts
from rollout.types import BatchCounts


def main() -> None:
    run_dir, folder = Path(sys.argv[1]), Path(sys.argv[2])
    path = run_dir / "config.yaml"
    config = configs.build(VenusConfig, [(str(path), configs.read_yaml(path))])
    parts = setup.build(config, folder, "", None)
    started = time.monotonic()
    for step, groups in sorted(read_rollouts(run_dir).items()):
        tokens = sum(parts.stream.add(group) for group in groups)
        sequences = sum(len(group.sequences) for group in groups)
        parts.stream.finish(step, BatchCounts(groups=len(groups), sequences=sequences, tokens=tokens))
    write_json_atomic(folder / "train_alone.json", {"seconds": time.monotonic() - started})
    setup.leave()


if __name__ == "__main__":
    main()
