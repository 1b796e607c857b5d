"""What weight sync sees of an SGLang server, in a small process: `python -m tests.numerics.engine_double SHAPES LIES`.

Same endpoints and answers, same group, our own receiver; a model that is just its parameters, under the engine's names.
It receives like an engine of several ranks (LIES = `nowhere`) or, large tensors in place, of one (`place_in`).
`test_weight_sync` runs the same sync against a real server. What a real one cannot do on demand: `freeze_at=N` (stop
like a SIGSTOP when the Nth bucket of a sync is asked for), `refuse_at=N`, and tell its memory.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_venus.weight_map import checksum
from rollout.protocol import EngineAddress
from rollout.sglang_plugin.hooks import tensor_layout
from rollout.sglang_plugin.receive import Lies, group_timeout, nowhere, place_in, receive_bucket
from tests.numerics.memory import extra_bytes, reset_peak

FUSED = {"q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2)}
FUSED |= {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1)}


class Model:
    """Parameters of a dense model; `load_weights` takes Hugging Face tensors and, as SGLang's, ignores strangers."""

    def __init__(self, shapes: dict[str, list[int]]) -> None:
        rows: dict[str, dict[int, list[int]]] = {}
        for name, shape in shapes.items():
            fused, index = self._fused(name)
            rows.setdefault(fused, {})[index] = shape
        self._offsets: dict[str, int] = {}
        self.params: dict[str, Tensor] = {}
        for fused, parts in rows.items():
            start = 0
            for index in sorted(parts):
                self._offsets[f"{fused}/{index}"] = start
                start += parts[index][0]
            # SGLang fills the vocabulary up to 64s.
            start += -start % 64 if fused in ("model.embed_tokens.weight", "lm_head.weight") else 0
            self.params[fused] = torch.zeros(start, *parts[0][1:])

    @staticmethod
    def _fused(name: str) -> tuple[str, int]:
        *prefix, module, kind = name.split(".")
        fused, index = FUSED.get(module, (module, 0))
        return ".".join([*prefix, fused, kind]), index

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            fused, index = self._fused(name)
            if fused in self.params:
                start = self._offsets[f"{fused}/{index}"]
                self.params[fused][start : start + len(tensor)].copy_(tensor)


class Server:
    """One request at a time reaches the model, as with SGLang's scheduler."""

    def __init__(self, model: Model, lies: Lies) -> None:
        self.model = model
        self.lies = lies
        self.groups: dict[str, Any] = {}
        self.lock = threading.Lock()
        self.faults = {"freeze_at": 0, "refuse_at": 0}
        self.asked = 0

    def answer(self, path: str, fields: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            try:
                return 200, {"success": True, **(getattr(self, path.strip("/"))(**fields) or {})}
            except Exception as error:
                return 400, {"success": False, "message": str(error)}

    def weights_checker(self, action: str) -> dict[str, Any]:
        describe = {"venus_layout": tensor_layout, "venus_checksum": checksum}[action]
        return {"ranks": [{"checksums": {name: describe(value) for name, value in self.model.params.items()}}]}

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> None:
        from torch.distributed import distributed_c10d as c10d

        timeout = group_timeout(group_name)
        store = dist.TCPStore(master_address, master_port, world_size, False, timeout or timedelta(seconds=60))
        group, _ = c10d._new_process_group_helper(
            world_size,
            rank_offset,
            [],
            c10d.Backend(backend),
            dist.PrefixStore(group_name, store),
            group_name=group_name,
            timeout=timeout,
        )
        c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        self.groups[group_name] = group
        self.asked = 0

    def destroy_weights_update_group(self, group_name: str) -> None:
        dist.destroy_process_group(self.groups.pop(group_name))

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        group_name: str,
        load_format: str,
        flush_cache: bool,
        weight_version: str | None,
    ) -> None:
        assert load_format == "flattened_bucket"
        self.asked += 1
        if self.asked == self.faults["freeze_at"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.asked == self.faults["refuse_at"]:
            self.faults["refuse_at"] = 0
            raise ValueError("refused on demand")
        self.model.load_weights(receive_bucket(self.groups[group_name], names, dtypes, shapes, "cpu", self.lies))
        if weight_version is not None:
            assert flush_cache
            self.asked = 0

    def set_faults(self, **faults: int) -> None:
        self.faults |= faults

    def memory(self, reset: bool) -> dict[str, Any]:
        """Bytes at peak since the reset beyond those held at the reset."""
        if reset:
            reset_peak()
        return {"extra": extra_bytes()}


def main() -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = Model(json.loads(sys.argv[1]))
    server = Server(model, {"nowhere": nowhere, "place_in": place_in(model.params)}[sys.argv[2]])

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            fields = json.loads(self.rfile.read(int(self.headers["content-length"])) or b"{}")
            code, body = server.answer(self.path, fields)
            data = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Quiet."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(http.server_port, flush=True)
    http.serve_forever()


class Double:
    """A running double."""

    def __init__(self, worker: str, shapes: dict[str, list[int]], lies: str) -> None:
        command = [sys.executable, "-m", "tests.numerics.engine_double", json.dumps(shapes), lies]
        # Blocks of more than 64 kB go back to the system at once, so that peaks of memory show.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env=environment, cwd=Path(__file__).parents[2], text=True
        )
        self._worker = worker
        self._address: EngineAddress | None = None

    @property
    def address(self) -> EngineAddress:
        """Waits until it listens."""
        if self._address is None:
            assert self.process.stdout is not None
            port = self.process.stdout.readline().strip()
            self._address = EngineAddress(worker=self._worker, engine_url=f"http://127.0.0.1:{port}")
        return self._address

    def post(self, path: str, **fields: Any) -> dict[str, Any]:
        answer = httpx.post(f"{self.address.engine_url}/{path}", json=fields, timeout=30.0, trust_env=False)
        return dict(answer.raise_for_status().json())

    def checksums(self) -> dict[str, str]:
        return dict(self.post("weights_checker", action="venus_checksum")["ranks"][0]["checksums"])


@contextmanager
def doubles(shapes: dict[str, list[int]], *workers: str, lies: str = "nowhere") -> Iterator[list[Double]]:
    """Doubles of these workers, started together."""
    started = [Double(worker, shapes, lies) for worker in workers]
    try:
        yield started
    finally:
        for double in started:
            double.process.kill()
            double.process.wait(10)


if __name__ == "__main__":
    main()
