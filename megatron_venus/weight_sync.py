"""New weights from the actor into every engine: broadcast in buckets, and proof that they arrived.

Enters: a version and the engines, all paused by the coordinator. Leaves: engines that hold exactly the actor's weights,
and the seconds each phase took. Called by rank 0 after each optimizer step.

Rank 0 is rank 0 of a process group with the engines (gloo on CPU, NCCL on GPUs); SGLang joins through
`/init_weights_update_group` and receives through `/update_weights_from_distributed`. SGLang only logs a warning for a
name it does not know, so names are compared with the engine's own parameters before the first broadcast, and after the
first `verify_first` syncs every tensor's checksum, computed inside the engine, with the actor's.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import torch
import torch.distributed as dist
from torch import Tensor

from envclient.base.errors import InvariantError, WireError
from envclient.base.ports import listen, port_of
from megatron_venus.config import SyncConfig
from megatron_venus.weight_map import checksum, engine_name, engine_tensors
from rollout.protocol import EngineAddress

log = logging.getLogger("venus.sync")
T = TypeVar("T")
NamedTensors = Callable[[], Iterable[tuple[str, Tensor]]]
_group_numbers = itertools.count()


class _Engine:
    """HTTP side of one engine."""

    def __init__(self, address: EngineAddress, token: str, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self._http = httpx.Client(
            base_url=address.engine_url,
            headers={"authorization": f"Bearer {token}"},
            timeout=timeout_s,
            trust_env=False,
        )

    def __str__(self) -> str:
        return f"engine of worker {self.address.worker} ({self.address.engine_url})"

    def post(self, path: str, **fields: Any) -> Any:
        """POST `fields` as JSON; the engine's answer.

        Raises:
            WireError: no answer in time, or the engine refused; names the engine.
        """
        try:
            response = self._http.post(path, json=fields)
        except httpx.TimeoutException:
            raise WireError(
                f"{self}: {path} not answered within {self.timeout_s:g} s",
                "actor.sync.timeout_s bounds it; see its log",
            ) from None
        except httpx.HTTPError as error:
            raise WireError(f"{self}: {path}: {type(error).__name__} {error}", "see the worker's log") from None
        if response.status_code != 200:
            raise WireError(
                f"{self}: {path}: HTTP {response.status_code} {response.text[:500]}", "see the worker's log"
            )
        return response.json() if response.content else {}

    def checksums(self) -> dict[str, str]:
        """Engine parameter name → checksum, computed inside the engine from the tensors it samples with."""
        ranks = self.post("/weights_checker", action="venus_checksum")["ranks"]
        if len(ranks) != 1:
            raise InvariantError(f"{self}: {len(ranks)} tensor-parallel ranks; weight sync knows engines of one")
        checksums: dict[str, str] = ranks[0]["checksums"]
        return checksums

    def close(self) -> None:
        self._http.close()


class WeightSync:
    """The engines that take part, and their process group; both are made anew when the set of engines changes.

    `tensors` yields the actor's current weights under Hugging Face's names.
    """

    def __init__(
        self,
        tensors: NamedTensors,
        config: SyncConfig,
        token: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tensors = tensors
        self._config = config
        self._token = token
        self._clock = clock
        self._engines: list[_Engine] = []
        self._group: Any = None
        self._group_name = ""
        self._done = 0

    def send(self, version: int, addresses: Sequence[EngineAddress]) -> dict[str, float]:
        """Bring every engine to `version`; returns seconds by phase.

        Raises:
            WireError: an engine did not answer in time or refused; names it.
            InvariantError: an engine holds other parameters than the actor, or a tensor arrived wrong; names both.
        """
        started = self._clock()
        seconds = {"connect": 0.0, "verify": 0.0}
        # A scripted engine lives in its worker's process and holds no weights.
        addresses = [address for address in addresses if not address.engine_url.startswith("scripted:")]
        if [engine.address for engine in self._engines] != list(addresses):
            self._connect(addresses)
            seconds["connect"] = self._clock() - started
        begun = self._clock()
        self._broadcast(version)
        seconds["broadcast"] = self._clock() - begun
        self._done += 1
        if self._done <= self._config.verify_first:
            begun = self._clock()
            self.verify()
            seconds["verify"] = self._clock() - begun
        seconds["total"] = self._clock() - started
        log.info("version %d on %d engines: %s", version, len(addresses), seconds)
        return seconds

    def verify(self) -> None:
        """Compare every tensor's checksum, computed inside each engine, with the actor's.

        Raises:
            InvariantError: names the engine and the first tensor that differs.
        """
        ours = {name: checksum(tensor) for name, tensor in engine_tensors(self._tensors()).items()}
        theirs = self._answers({engine: _start(engine.checksums) for engine in self._engines})
        for engine, checksums in theirs.items():
            for name, value in ours.items():
                if checksums.get(name) != value:
                    raise InvariantError(f"{engine}: tensor {name!r} differs from the actor's after the weight sync")

    def close(self) -> None:
        """Leave the group; engines that are gone are not waited for."""
        if self._group is not None:
            for engine in self._engines:
                _start(engine.post, "/destroy_weights_update_group", group_name=self._group_name)
            dist.destroy_process_group(self._group)
        for engine in self._engines:
            engine.close()
        self._group, self._engines = None, []

    # ------------------------------------------------------------------------------------------------- connecting

    def _connect(self, addresses: Sequence[EngineAddress]) -> None:
        self.close()
        self._engines = [_Engine(address, self._token, self._config.timeout_s) for address in addresses]
        if not self._engines:
            return
        self._check_names()
        self._group_name = f"venus-{os.getpid()}-{next(_group_numbers)}"
        host = _address_towards(addresses[0].engine_url)
        listener = listen(host)
        port = port_of(listener)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        size = 1 + len(self._engines)
        joins = {
            engine: _start(
                engine.post,
                "/init_weights_update_group",
                master_address=host,
                master_port=port,
                rank_offset=rank,
                world_size=size,
                group_name=self._group_name,
                backend=backend,
            )
            for rank, engine in enumerate(self._engines, start=1)
        }
        timeout = timedelta(seconds=self._config.timeout_s)
        # The store takes over the open socket: the port is never free in between.
        store = dist.TCPStore(
            host, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        group = _start(_join_group, store, backend, size, self._group_name, timeout)
        self._answers(joins)
        self._group = group.result(self._config.timeout_s)

    def _check_names(self) -> None:
        """Both sides must hold the same parameters, else a broadcast would silently leave some untouched."""
        ours = {engine_name(name) for name, _ in self._tensors()}
        for engine in self._engines:
            theirs = engine.checksums().keys()
            if unknown := sorted(ours - theirs):
                raise InvariantError(f"{engine} has no parameter for the actor's tensor {unknown[0]!r}")
            if unfed := sorted(theirs - ours):
                raise InvariantError(f"{engine}: its parameter {unfed[0]!r} would never be updated by the actor")

    # ------------------------------------------------------------------------------------------------ broadcasting

    def _broadcast(self, version: int) -> None:
        if not self._engines:
            return
        buckets = buckets_of(self._tensors(), int(self._config.bucket_mb * 1e6))
        bucket = next(buckets)
        while bucket:
            following = next(buckets, [])
            flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in bucket])
            fields = {
                "names": [name for name, _ in bucket],
                "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
                "shapes": [list(tensor.shape) for _, tensor in bucket],
                "group_name": self._group_name,
                "load_format": "flattened_bucket",
                # The engine's cache belongs to the old weights; it is dropped once, with the last bucket.
                "flush_cache": not following,
                "weight_version": None if following else str(version),
            }
            updates = {
                engine: _start(engine.post, "/update_weights_from_distributed", **fields) for engine in self._engines
            }
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            work = self._group.broadcast([flat], options)
            self._answers(updates)
            work.wait(timedelta(seconds=self._config.timeout_s))
            bucket = following

    def _answers(self, futures: dict[_Engine, Future[T]]) -> dict[_Engine, T]:
        """All engines' answers; the first error at once, silence after the timeout, each naming its engine."""
        # The HTTP client has the same timeout and the better message: leave it a moment.
        done, waiting = wait(futures.values(), self._config.timeout_s + 5.0, FIRST_EXCEPTION)
        for future in done:
            future.result()
        if waiting:
            silent = next(engine for engine, future in futures.items() if future in waiting)
            raise WireError(f"{silent}: no answer within {self._config.timeout_s:g} s", "see the worker's log")
        return {engine: future.result() for engine, future in futures.items()}


def buckets_of(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors of one type, together at most `bucket_bytes`; a larger tensor gets a bucket of its own."""
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and (filled + size > bucket_bytes or bucket[0][1].dtype != tensor.dtype):
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor))
        filled += size
    if bucket:
        yield bucket


def _start(function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
    """Call `function` in a thread that never keeps the process alive: it may be blocked on a dead engine."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _address_towards(url: str) -> str:
    """This machine's address as the host of `url` sees it (no packet is sent)."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        return str(probe.getsockname()[0])


def _join_group(store: Any, backend: str, size: int, name: str, timeout: timedelta) -> Any:
    """A process group beside the replicas' own: torch offers no public way to have two worlds in one process.

    The key prefix must be the one SGLang's `init_custom_process_group` uses, or the two never meet.
    """
    from torch.distributed import distributed_c10d as c10d

    group, _ = c10d._new_process_group_helper(
        size, 0, [], c10d.Backend(backend), dist.PrefixStore(name, store), group_name=name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group
