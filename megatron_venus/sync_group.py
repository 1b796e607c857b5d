"""The process group of a weight sync: this process is rank 0, every tensor-parallel rank of every engine follows.

Gloo on CPU, NCCL on GPUs. SGLang's ranks join through `/init_weights_update_group`, each engine with the rank of its
first one. Members wait for one another no longer than the sync's timeout, so that one that is stuck holds nobody up
for good; after any failure the group is left and another one made.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from envclient.base.errors import WireError
from envclient.base.ports import listen, port_of
from megatron_venus.sync_engine import MARGIN_S, EnginesFailed, SyncEngine, answers, start

_numbers = itertools.count()


class SyncGroup:
    """A group of rank 0 with `engines`, whose `ranks` are known.

    Raises:
        EnginesFailed: an engine did not join.
    """

    def __init__(self, engines: Sequence[SyncEngine], timeout_s: float) -> None:
        self.engines = list(engines)
        self._timeout = timedelta(seconds=timeout_s)
        # The engines' plug-in reads the timeout from the name.
        self.name = f"venus-{os.getpid()}-{next(_numbers)}-timeout-{max(1, round(timeout_s * 1000))}ms"
        self._group: Any = None
        host = _address_towards(engines[0].address.engine_url)
        listener = listen(host)
        port = port_of(listener)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        offsets = list(itertools.accumulate((engine.ranks for engine in engines), initial=1))
        joins = {
            engine: start(
                engine.post,
                "/init_weights_update_group",
                master_address=host,
                master_port=port,
                rank_offset=offset,
                world_size=offsets[-1],
                group_name=self.name,
                backend=backend,
            )
            for engine, offset in zip(engines, offsets, strict=False)
        }
        # The store takes over the open socket: the port is never free in between.
        store = dist.TCPStore(
            host, port, offsets[-1], True, self._timeout, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        joined = start(_join, store, backend, offsets[-1], self.name, self._timeout)
        answers(joins)
        try:
            self._group = joined.result(timeout_s + MARGIN_S)
        except (RuntimeError, TimeoutError) as error:
            raise EnginesFailed(self._all_to_blame(error)) from None

    def send(self, message: Tensor) -> Any:
        """Begin to broadcast to every member, who must be asked to receive it; the work to wait for."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        # As bytes: gloo does not know every type.
        return self._group.broadcast([message.reshape(-1).view(torch.uint8)], options)

    def wait_sent(self, works: Sequence[Any], updates: Mapping[SyncEngine, Future[Any]]) -> None:
        """Until the messages' memory may be used again; `updates` are the requests that make the engines receive them.

        Raises:
            EnginesFailed: an engine refused its request or is gone; the group is of no use any more.
        """

        def wait_all() -> None:
            for work in works:
                work.wait(self._timeout)

        sent = start(wait_all)
        waiting: set[Future[Any]] = {sent, *updates.values()}
        while sent in waiting:
            # An engine that refuses makes this side wait in vain.
            done, waiting = wait(waiting, self._timeout.total_seconds() + MARGIN_S, FIRST_COMPLETED)
            if not done or any(future.exception() for future in done):
                break
        if not sent.done() or sent.exception() is not None:
            error = sent.exception() if sent.done() else None
            self._abort()
            answers(updates)
            raise EnginesFailed(self._all_to_blame(error))

    def leave(self, gone: Collection[SyncEngine] = ()) -> None:
        """Out of it; the engines leave too, but for those that are `gone`, and nobody is waited for long."""
        leaving = [
            start(engine.post, "/destroy_weights_update_group", group_name=self.name)
            for engine in self.engines
            if engine not in gone
        ]
        self._abort()
        wait(leaving, MARGIN_S)

    def _abort(self) -> None:
        """Close this side's connections: whoever waits for this process in the group is told at once."""
        if self._group is not None:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group(self._group)
            self._group = None

    def _all_to_blame(self, error: BaseException | None) -> dict[SyncEngine, WireError]:
        return {engine: WireError(f"{engine}: the broadcast failed: {error}") for engine in self.engines}


def _address_towards(url: str) -> str:
    """This machine's address as the host of `url` sees it (no packet is sent)."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname or "127.0.0.1", parts.port or 80))
        return str(probe.getsockname()[0])


def _join(store: Any, backend: str, size: int, name: str, timeout: timedelta) -> Any:
    """A process group beside the replicas' own: torch offers no public way to have two worlds in one process.

    The key prefix must be the one SGLang's `init_custom_process_group` uses, or the two never meet.
    """
    from torch.distributed import distributed_c10d as c10d

    group, _ = c10d._new_process_group_helper(
        size, 0, [], c10d.Backend(backend), dist.PrefixStore(name, store), group_name=name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(size)}
    return group
