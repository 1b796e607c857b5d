"""A weight sync from a Megatron actor into a real SGLang engine, against a raw broadcast of the same bytes.

For two sizes of a synthetic Qwen3: the actor's process sends its weights to the engine as in training (names, buckets,
loading, flush, acknowledgement), and between the syncs it broadcasts as many bytes, in messages of the same sizes, to a
process that only receives them into memory it has. `ratio` = bytes/s of the whole sync / bytes/s of the raw broadcast
right before it, the median over rounds (the machine's own speed drifts, and a fastest round is luck), the worse size;
`ratio_of_fastest` = the same of the fastest round of each. Memory: resident bytes at the peak of a sync beyond those
before it, and what is kept from sync to sync, in buckets, in the actor and in the engine's scheduler. After the last
sync every checksum is compared.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rollout.adapters.sglang_engine import SglangEngine
from rollout.config import ModelConfig, WorkerConfig
from tests.benchmarks.ckpt import make_checkpoint

Say = Callable[[str], None]
TOKEN = "token-of-the-benchmark"
BUCKET_MB = 512.0
"""Every bucket costs a request and its answer: 4 to 5 ms on CPU, whatever its size."""
# Qwen3-0.6B's layers with a small vocabulary.
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LAYERS = (8, 28)
QUICK_LAYERS = (4, 12)


def run(quick: bool, say: Say) -> dict[str, Any]:
    """Both sizes; `--quick` with 0.3 and 0.8 GB and fewer rounds, otherwise 0.6 and 1.8 GB."""
    # Freed memory goes back at once, so that the resident set is what is held.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    rounds = 5 if quick else 30
    sizes = []
    for layers in QUICK_LAYERS if quick else LAYERS:
        with tempfile.TemporaryDirectory(prefix="venus-sync-") as root:
            folder = Path(root) / "model"
            make_checkpoint(folder, CONFIG | {"num_hidden_layers": layers})
            say(f"{layers} layers: starting the engine")
            sizes.append(asyncio.run(_one_size(folder, Path(root), rounds, say)))
    return {
        "benchmark": "weight_sync",
        "ratio": min(size["ratio"] for size in sizes),
        "baseline": "gloo broadcast of as many bytes in messages of the same sizes, between the syncs",
        "sizes": {
            "bytes": [size["bytes"] for size in sizes],
            "bucket_bytes": [size["bucket_bytes"] for size in sizes],
            "rounds": rounds,
            "subset": "4 and 12 of the 8 and 28 layers, 5 of 30 rounds" if quick else "all",
        },
        "load_average": os.getloadavg()[0],
        "extra_buckets": max(max(size["extra_buckets"].values()) for size in sizes),
        "extra_within_two_buckets": all(max(size["extra_buckets"].values()) <= 2 for size in sizes),
        "by_size": sizes,
    }


async def _one_size(model: Path, folder: Path, rounds: int, say: Say) -> dict[str, Any]:
    engine = SglangEngine(
        model_path=str(model),
        model=ModelConfig(path=str(model), context_length=256),
        worker=WorkerConfig(slots=4, kv_tokens=1024),
        log=folder / "engine.log",
        token=TOKEN,
        seed=0,
    )
    try:
        await engine.start()
        say("syncing")
        command = [sys.executable, "-m", "tests.benchmarks._sync_actor", str(model), engine.url]
        command += [str(_scheduler()), str(rounds)]
        done = await asyncio.to_thread(
            subprocess.run,
            command,
            # As the launcher starts an actor; the raw peer has it of its parent.
            env=os.environ
            | {"VENUS_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1", "PYTHONWARNINGS": "ignore"},
            stdout=subprocess.PIPE,
            check=True,
            timeout=900,
        )
    finally:
        await engine.stop()
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    sync_s, raw_s = found["sync_s"], found["raw_s"]
    return {
        **found,
        "sync_bytes_per_s": found["bytes"] / statistics.median(sync_s),
        "raw_bytes_per_s": found["bytes"] / statistics.median(raw_s),
        "ratio": statistics.median(raw / sync for raw, sync in zip(raw_s, sync_s, strict=True)),
        "ratio_of_fastest": min(raw_s) / min(sync_s),
    }


def _scheduler() -> int:
    """Process of the engine's scheduler, which holds the weights: among this process's descendants."""
    parents: dict[int, int] = {}
    schedulers = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if (path / "cmdline").read_bytes().startswith(b"sglang::scheduler"):
                schedulers.append(int(path.name))
        except OSError:
            continue

    def ours(pid: int) -> bool:
        return pid == os.getpid() or (pid in parents and ours(parents[pid]))

    (found,) = [pid for pid in schedulers if ours(pid)]
    return found
