"""Command line and environment of one SGLang server, on CPU and on GPU.

What the adapter must be sure of is set here and cannot be overridden; everything else can be, by
`rollout.worker.engine_args`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from envclient.base.errors import ConfigError
from rollout.config import ModelConfig, WorkerConfig
from rollout.engine_args import given_arguments
from rollout.rope import check_context, read_rope

CPU_SITE = Path(__file__).parent / "sglang_cpu"
CONTEXT_MARGIN = 16
_DTYPES = ("float32", "bfloat16")
# Arguments that would make the reported log-probs those of another distribution than the trainer's.
_UNREPRODUCIBLE = {
    "rl-on-policy-target": "it computes log-probs in bfloat16",
    "enable-custom-logit-processor": "it changes the distribution",
    "preferred-sampling-params": "sampling comes with each request",
    "speculative-algorithm": "drafted tokens come with other log-probs",
    "quantization": "quantised weights are not the trainer's",
    "enable-lora": "the trainer does not know the adapter",
}
_OTHER_PARALLEL = (
    "pp-size",
    "pipeline-parallel-size",
    "dp-size",
    "data-parallel-size",
    "dp",
    "ep-size",
    "expert-parallel-size",
    "ep",
    "enable-dp-attention",
    "nnodes",
)


def has_cuda() -> bool:
    """Whether this machine has an NVIDIA GPU that this process may use, without importing torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
    return not hidden and Path("/dev/nvidiactl").exists()


def server_arguments(*, model_path: str, model: ModelConfig, worker: WorkerConfig, seed: int) -> list[str]:
    """argv of the server after the program, without port and key.

    Raises:
        ConfigError: `engine_args` holds a name that is set here, or one that spoils the log-probs.
    """
    if model.dtype not in _DTYPES:
        raise ConfigError(f"model.dtype is {model.dtype!r}", f"choose one of {', '.join(_DTYPES)}")
    rope = read_rope(Path(model_path), model.yarn)
    check_context(model.context_length, rope, model_path)
    fixed: dict[str, Any] = {
        "model-path": model_path,
        "host": "127.0.0.1",
        "dtype": model.dtype,
        # SGLang stops a request short of its own limit; the real one is kept by the worker.
        "context-length": model.context_length + CONTEXT_MARGIN,
        "max-running-requests": worker.slots,
        "max-total-tokens": worker.kv_tokens,
        "random-seed": seed,
        "radix-cache-backend": "venus",
        "sampling-backend": "pytorch",
        "skip-server-warmup": True,
        "skip-tokenizer-init": True,
    }
    # The scheduler of an idle engine would spin on a core that the trainer needs.
    defaults: dict[str, Any] = {"log-level": "warning", "sleep-on-idle": True}
    if not has_cuda():
        fixed["device"] = "cpu"
        defaults |= {
            "attention-backend": "torch_native",
            "cuda-graph-backend-decode": "disabled",
            "cuda-graph-backend-prefill": "disabled",
            "mem-fraction-static": 0.1,
        }
    if rope.factor != 1.0:
        fixed["json-model-override-args"] = json.dumps(rope.engine_override())
    given = given_arguments(worker)
    for name in given:
        if name in fixed or name in ("port", "api-key", "admin-api-key", "config"):
            raise ConfigError(
                f"rollout.worker.engine_args.{name} is set by the worker itself",
                "remove it (see model.* and rollout.worker.*)",
            )
        if name in _UNREPRODUCIBLE:
            raise ConfigError(f"rollout.worker.engine_args.{name} cannot be used: {_UNREPRODUCIBLE[name]}", "remove it")
        if name in _OTHER_PARALLEL:
            raise ConfigError(
                f"rollout.worker.engine_args.{name}: an engine's weights are synced under tensor parallelism only",
                "remove it and use tp-size, or more workers",
            )
    argv: list[str] = []
    for name, value in (defaults | given | fixed).items():
        argv += _argument(name, value)
    return argv


def _argument(name: str, value: Any) -> list[str]:
    if value is True:
        return [f"--{name}"]
    if value is False or value is None:
        return []
    if isinstance(value, (list, tuple)):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", str(value)]


def server_environment(
    *, token: str, extensions: Path, ranks: int = 1, inherited: Mapping[str, str] = os.environ, cuda: bool | None = None
) -> dict[str, str]:
    """Environment of the server process of `ranks` tensor-parallel ranks; nothing here leaks into the worker's own."""
    env = dict(inherited)
    env |= {
        "VENUS_TOKEN": token,
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
        # SGLang renames its processes; without this that overwrites /proc/PID/environ, by which a run's are found.
        "SPT_NOENV": "1",
        # A kill during a JIT build leaves a stale lock in the shared folder and later builds wait for ever.
        "TORCH_EXTENSIONS_DIR": str(extensions),
        # With 1 the log-probs would be those before temperature.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        "SGLANG_PLUGINS": "venus",
        # Longer than the client keeps an idle connection: a request must never race with the server closing it.
        "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",
        # CONTEXT_MARGIN may reach beyond the model's positions; no token of a trajectory does.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    if not (has_cuda() if cuda is None else cuda):
        path = env.get("PYTHONPATH", "")
        env |= {
            "OMP_NUM_THREADS": "1",
            # Weights in huge pages: they are received in a third less of the processor's time.
            "THP_MEM_ALLOC_ENABLE": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": f"{CPU_SITE}{os.pathsep}{path}" if path else str(CPU_SITE),
        }
        if ranks > 1:
            # SGLang wants one set of cores a rank, and by itself takes no more ranks than there are NUMA nodes.
            cores = sorted(os.sched_getaffinity(0))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
    return env
