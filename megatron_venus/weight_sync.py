"""New weights from the actor into every engine: broadcast in buckets, and proof that they arrived.

Enters: a version and the engines, all paused by the coordinator. Leaves: engines that hold exactly the actor's weights,
the seconds each phase took, and the workers whose engines are lost. Called by rank 0 after each optimizer step.

Weights go in buckets, one request to each engine a bucket, and a bucket in messages: a large tensor by itself, small
ones together. What lies whole in this process is sent from where it lies; the rest is gathered from the actor's
processes into one of two slots while the other one is sent. So a sync holds two messages here and at most one bucket in
an engine, whatever the size of the model. SGLang only logs a warning for a name it does not know, so names and shapes
are compared with the engine's own parameters when its group is made, and after an engine's first `verify_first`
syncs every tensor's checksum, computed inside it, with the actor's. An engine that is dead, stuck or refuses is given
up with its name; the others get the whole version in a new group.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from torch import Tensor

from envclient.base.errors import InvariantError, WireError
from megatron_venus.architecture import Architecture
from megatron_venus.bucket import Bucket, buckets_of
from megatron_venus.config import SyncConfig
from megatron_venus.engine_digests import EngineDigests
from megatron_venus.send_ring import SendRing
from megatron_venus.sync_engine import EngineGone, EnginesFailed, SyncEngine, answers, start
from megatron_venus.sync_group import SyncGroup
from megatron_venus.sync_result import SyncResult
from megatron_venus.weight_source import WeightSource
from rollout.engine_layout import EngineLayout
from rollout.protocol import EngineAddress

log = logging.getLogger("venus.sync")
PHASES = ("connect", "gather", "broadcast", "load", "verify", "failed")
"""Asking the engines and joining them; copying weights out of the actor's processes; sending; waiting for engines to
load what was sent; comparing checksums; attempts that an engine spoilt, whole."""


class WeightSync:
    """The engines that take part, and their process group; both are made anew when the set of engines changes."""

    def __init__(
        self,
        source: WeightSource,
        arch: Architecture,
        config: SyncConfig,
        token: str,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._arch = arch
        self._config = config
        self._token = token
        self._clock = clock
        self._engines: list[SyncEngine] = []
        self._group: SyncGroup | None = None
        self._seconds: dict[str, float] = {}
        self._verified: dict[EngineAddress, int] = {}
        """Engine → number of syncs after which its checksums were compared."""
        self._kept_ring: SendRing | None = None
        self.buckets = list(buckets_of(source.infos, int(config.bucket_mb * 1e6)))
        self.bucket_bytes = max(bucket.nbytes for bucket in self.buckets)
        """Bytes of the largest bucket: about `bucket_mb`, or the largest tensor if that is larger."""

    @functools.cached_property
    def _largest_gathered(self) -> int:
        """Bytes of the largest message that must be gathered; like whatever asks what lies whole, on rank 0 only."""
        messages = [message for bucket in self.buckets for message in bucket.messages]
        return max((message.nbytes for message in messages if message.whole(self._source) is None), default=0)

    @property
    def kept_bytes(self) -> int:
        """Bytes held from one sync to the next."""
        return self._kept_ring.nbytes if self._kept_ring is not None else 0

    def send(self, version: int, addresses: Sequence[EngineAddress]) -> SyncResult:
        """Bring every engine to `version`, or give it up.

        Raises:
            WireError: no engine is left; names all and why.
            InvariantError: an engine holds other parameters than the actor, or a tensor arrived wrong; names both.
        """
        started = self._clock()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        # A scripted engine lives in its worker's process and holds no weights.
        left = [address for address in addresses if not address.engine_url.startswith("scripted:")]
        lost: dict[str, str] = {}
        refused: set[str] = set()
        while left:
            before, begun = dict(self._seconds), self._clock()
            try:
                self._attempt(version, left)
                break
            except EnginesFailed as failure:
                self.close([engine for engine, error in failure.errors.items() if isinstance(error, EngineGone)])
                for engine, error in failure.errors.items():
                    worker = engine.address.worker
                    # One that is alive may have suffered from a broken group: it gets a second chance.
                    if isinstance(error, EngineGone) or worker in refused:
                        log.error("version %d: worker %s is given up: %s", version, worker, error)
                        lost[worker] = str(error)
                        self._verified.pop(engine.address, None)
                    refused.add(worker)
                left = [address for address in left if address.worker not in lost]
                if not left:
                    raise WireError(f"no engine took version {version}: {'; '.join(lost.values())}") from None
                self._seconds = before
                self._lap("failed", begun)
        self._seconds["total"] = self._clock() - started
        log.info(
            "version %d on %d engines, %d lost: %s",
            version,
            len(left),
            len(lost),
            ", ".join(f"{phase} {seconds:.3f} s" for phase, seconds in self._seconds.items()),
        )
        return SyncResult(seconds=self._seconds, lost=lost)

    def verify(self, engines: Sequence[SyncEngine] | None = None) -> None:
        """Compare every tensor's checksum, computed inside each engine (by default all), with the actor's.

        Raises:
            InvariantError: names the engine and the first tensor that differs.
            EnginesFailed: an engine did not answer.
        """
        asked = {engine: start(engine.checksums) for engine in (self._engines if engines is None else engines)}
        digests = {ranks: EngineDigests(layout) for ranks, layout in self._layouts().items()}
        ring = self._ring()
        for bucket in self.buckets:
            for message in bucket.messages:
                whole = message.whole(self._source)
                tensors = message.views(ring.take(message.nbytes)[0]) if whole is None else [whole]
                if whole is None:
                    self._source.read(range(message.start, message.start + len(tensors)), tensors)
                for info, tensor in zip(message.infos, tensors, strict=True):
                    for digest in digests.values():
                        digest.add(info.name, tensor)
        ours = {ranks: digest.finish() for ranks, digest in digests.items()}
        for engine, theirs in answers(asked).items():
            for rank, (mine, its) in enumerate(zip(ours[engine.ranks], theirs, strict=True)):
                for name, value in mine.items():
                    if its.get(name) != value:
                        where = f" (rank {rank})" if engine.ranks > 1 else ""
                        raise InvariantError(
                            f"{engine}{where}: tensor {name!r} differs from the actor's after the weight sync"
                        )

    def close(self, gone: Collection[SyncEngine] = ()) -> None:
        """Leave the group and the engines; those that are `gone` are not told."""
        if self._group is not None:
            self._group.leave(gone)
        for engine in self._engines:
            engine.close()
        self._group, self._engines = None, []

    # ----------------------------------------------------------------------------------------------- one attempt

    def _attempt(self, version: int, addresses: Sequence[EngineAddress]) -> None:
        begun = self._clock()
        if [engine.address for engine in self._engines] != list(addresses):
            self.close()
            self._engines = [SyncEngine(address, self._token, self._config.timeout_s) for address in addresses]
        if self._group is None:
            # Also finds an engine that is stuck, before the others wait for it in a broadcast.
            self._check(answers({engine: start(engine.layout) for engine in self._engines}))
            self._group = SyncGroup(self._engines, self._config.timeout_s)
        begun = self._lap("connect", begun)
        self._broadcast(version, self._group)
        first = self._config.verify_first
        if new := [engine for engine in self._engines if self._verified.get(engine.address, 0) < first]:
            begun = self._clock()
            self.verify(new)
            self._lap("verify", begun)
            for engine in new:
                self._verified[engine.address] = self._verified.get(engine.address, 0) + 1

    def _check(self, layouts: dict[SyncEngine, dict[str, str]]) -> None:
        """Both sides must hold the same parameters, else a broadcast would silently leave some untouched."""
        infos = self._source.infos
        dtype = str(infos[0].dtype).removeprefix("torch.")
        tensors = [(info.name, info.shape) for info in infos]
        expected = {ranks: layout.shapes(tensors) for ranks, layout in self._layouts().items()}
        for engine, theirs in layouts.items():
            ours = {name: f"{dtype}{list(shape)}" for name, shape in expected[engine.ranks].items()}
            if unknown := sorted(ours.keys() - theirs.keys()):
                raise InvariantError(f"{engine} has no parameter for the actor's tensor {unknown[0]!r}")
            if unfed := sorted(theirs.keys() - ours.keys()):
                raise InvariantError(f"{engine}: its parameter {unfed[0]!r} would never be updated by the actor")
            for name, mine in ours.items():
                if theirs[name] != mine:
                    raise InvariantError(f"{engine}: its parameter {name!r} is {theirs[name]}, the actor's {mine}")

    def _broadcast(self, version: int, group: SyncGroup) -> None:
        ring = self._ring()
        loading: dict[SyncEngine, Future[Any]] = {}
        for number, bucket in enumerate(self.buckets, start=1):
            # The engines may still be loading the bucket before: they take this request up when they are done.
            updates = self._ask(version, bucket, group, last=number == len(self.buckets))
            begun, waited = self._clock(), self._seconds["broadcast"]
            works: list[Any] = []
            self._source.read(bucket.gathered(self._source), self._sending(bucket, group, ring, works, updates))
            self._lap("gather", begun)
            self._seconds["gather"] -= self._seconds["broadcast"] - waited
            begun = self._clock()
            group.wait_sent(works, updates)
            begun = self._lap("broadcast", begun)
            answers(loading)
            self._lap("load", begun)
            loading = updates
        begun = self._clock()
        answers(loading)
        self._lap("load", begun)

    def _sending(
        self,
        bucket: Bucket,
        group: SyncGroup,
        ring: SendRing,
        works: list[Any],
        updates: dict[SyncEngine, Future[Any]],
    ) -> Iterator[Tensor]:
        """Send the bucket's messages in order; yields the tensors to be gathered, in the ring."""
        for message in bucket.messages:
            whole = message.whole(self._source)
            if whole is None:
                memory, before = ring.take(message.nbytes)
                # Waiting costs a thread, so only where needed; one that failed raises in the bucket's last wait.
                if not all(work.is_completed() for work in before):
                    begun = self._clock()
                    group.wait_sent(before, updates)
                    self._lap("broadcast", begun)
                yield from message.views(memory)
                works.append(group.send(memory))
                ring.sent_by(works[-1])
            else:
                works.append(group.send(whole))

    def _ask(self, version: int, bucket: Bucket, group: SyncGroup, *, last: bool) -> dict[SyncEngine, Future[Any]]:
        """Make every engine receive the bucket."""
        fields = {
            "names": [info.name for info in bucket.infos],
            "dtypes": [str(info.dtype).removeprefix("torch.") for info in bucket.infos],
            "shapes": [list(info.shape) for info in bucket.infos],
            "group_name": group.name,
            "load_format": "flattened_bucket",
            # The engine's cache belongs to the old weights; it is dropped once, with the last bucket.
            "flush_cache": last,
            "weight_version": str(version) if last else None,
        }
        return {engine: start(engine.post, "/update_weights_from_distributed", **fields) for engine in self._engines}

    def _ring(self) -> SendRing:
        """Room for two of the largest messages that must be gathered, or an eighth of a bucket; none of it in use."""
        if self._kept_ring is not None:
            self._kept_ring.clear()
            return self._kept_ring
        nbytes = max(2 * self._largest_gathered, self.bucket_bytes // 8) if self._largest_gathered else 0
        ring = SendRing(nbytes, self._source.device)
        # Fresh pages cost a CPU as much as what is copied into them. A GPU's allocator has its pages already, and what
        # is not held between two syncs is the training step's.
        if self._source.device.type == "cpu":
            self._kept_ring = ring
        return ring

    def _layouts(self) -> dict[int, EngineLayout]:
        """By the engines' number of ranks."""
        return {
            ranks: EngineLayout(kv_heads=self._arch.kv_heads, experts=self._arch.experts, ranks=ranks)
            for ranks in {engine.ranks for engine in self._engines}
        }

    def _lap(self, phase: str, begun: float) -> float:
        """Count the time since `begun` towards `phase`; now."""
        now = self._clock()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + now - begun
        return now
