"""The actor of the benchmark `weight_sync`: `… MODEL ENGINE_URL SCHEDULER_PID ROUNDS`; or its raw peer: `… PORT`."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from envclient.base.processes import die_with_parent
from envclient.base.wire import token_from_environment
from megatron_venus.config import SyncConfig
from rollout.protocol import EngineAddress
from tests.benchmarks.weight_sync import BUCKET_MB
from tests.numerics import kit
from tests.numerics.memory import extra_bytes, reset_peak

TIMEOUT = timedelta(seconds=120)


def main(model: Path, engine_url: str, scheduler: int, rounds: int) -> None:
    from megatron_venus.weight_sync import WeightSync

    actor = kit.make_actor(model)
    export = kit.make_export(actor)
    config = SyncConfig(bucket_mb=BUCKET_MB, verify_first=0)
    sync = WeightSync(export, actor.arch, config, token_from_environment())
    engines = [EngineAddress(worker="w0", engine_url=engine_url)]
    sync.send(0, engines)  # joins, and both sides' first use of everything
    raw = RawPeer([[message.nbytes for message in bucket.messages] for bucket in sync.buckets])
    raw.broadcast()
    found: dict[str, Any] = {"sync_s": [], "raw_s": [], "phases": []}
    extra = {"actor": 0, "engine": 0}
    for version in range(1, rounds + 1):
        found["raw_s"].append(raw.broadcast())
        reset_peak()
        reset_peak(scheduler)
        result = sync.send(version, engines)
        extra = {
            "actor": max(extra["actor"], sync.kept_bytes + extra_bytes()),
            "engine": max(extra["engine"], extra_bytes(scheduler)),
        }
        found["sync_s"].append(result.seconds["total"])
        found["phases"].append(result.seconds)
    sync.verify()
    raw.close()
    sync.close()
    found |= {
        "bytes": sum(bucket.nbytes for bucket in sync.buckets),
        "bucket_bytes": sync.bucket_bytes,
        "extra_buckets": {who: nbytes / sync.bucket_bytes for who, nbytes in extra.items()},
    }
    print(json.dumps(found))


class RawPeer:
    """A process that receives broadcasts of the sync's bytes, in the same messages, again and again, and nothing else.

    `buckets`: bytes of every bucket's messages.
    """

    def __init__(self, buckets: list[list[int]]) -> None:
        self._buckets = buckets
        store = dist.TCPStore("127.0.0.1", 0, 2, True, TIMEOUT, wait_for_workers=False)
        command = [sys.executable, "-m", "tests.benchmarks._sync_actor", str(store.port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(buckets) + "\n")
        self._process.stdin.flush()
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("raw", store), 0, 2, TIMEOUT)
        self._memory = torch.ones(sum(map(sum, buckets)), dtype=torch.uint8)

    def broadcast(self) -> float:
        """Seconds of sending all of them."""
        started = time.monotonic()
        _pass(self._group, self._memory, self._buckets)
        return time.monotonic() - started

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def receive(port: int) -> None:
    """The other side of `RawPeer`."""
    die_with_parent()
    buckets: list[list[int]] = json.loads(sys.stdin.readline())
    memory = torch.zeros(sum(map(sum, buckets)), dtype=torch.uint8)
    store = dist.TCPStore("127.0.0.1", port, 2, False, TIMEOUT)
    group = dist.ProcessGroupGloo(dist.PrefixStore("raw", store), 1, 2, TIMEOUT)
    while True:
        _pass(group, memory, buckets)


def _pass(group: Any, memory: torch.Tensor, buckets: list[list[int]]) -> None:
    """From and to memory that exists, a bucket's messages at once: the most that the transport gives."""
    messages = iter(memory.split([size for bucket in buckets for size in bucket]))
    for bucket in buckets:
        works = [group.broadcast(next(messages), 0) for _ in bucket]
        for work in works:
            work.wait()
    group.barrier().wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    if len(sys.argv) == 2:
        receive(int(sys.argv[1]))
    else:
        main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
