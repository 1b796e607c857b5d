"""What `rollout.worker.engine_args` says of an engine, for whoever starts one or reckons with its size."""

from __future__ import annotations

from typing import Any

from envclient.base.errors import ConfigError
from rollout.config import WorkerConfig

_TENSOR_PARALLEL = ("tp-size", "tensor-parallel-size", "tp")
"""SGLang's spellings of its tensor-parallel size."""


def given_arguments(worker: WorkerConfig) -> dict[str, Any]:
    """The arguments by SGLang's names, without dashes in front."""
    return {str(name).lstrip("-").replace("_", "-"): value for name, value in worker.engine_args.items()}


def tensor_parallel(worker: WorkerConfig) -> int:
    """Processes (on GPUs: devices) that one engine of `worker` consists of.

    Raises:
        ConfigError: not a positive number.
    """
    for name, value in given_arguments(worker).items():
        if name in _TENSOR_PARALLEL:
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"rollout.worker.engine_args.{name} is {value!r}", "give a number of processes")
            return value
    return 1
