"""What binds a simulated run: the share of its time that each resource is what the next step waits for.

A step first waits until its last group is ready (the run measures that, `t_next_s`), then for training, then for the
weights. The first part is split by what the trajectories of unfinished groups wait for meanwhile, sampled every second
of virtual time: near the end of a step only stragglers are left, so what delays them counts most.
"""

from __future__ import annotations

from collections.abc import Mapping

from rollout.sim.cluster import Cluster
from rollout.sim.engine import WAITING
from rollout.sim.metrics import Result
from rollout.sim.worker import Play, Stage
from rollout.types import EventRow, PriorityClass, SyncFinished, SyncRequested

RESOURCES: dict[str, str] = {
    "training": "training GPUs",
    "sync": "weight sync",
    "sandboxes": "sandboxes",
    "slots": "slots of the engines",
    "kv": "KV memory",
    "engines": "generation speed",
    "environment": "tools and scoring",
}
"""Name and words of what may bind."""

_EVERY_S = 1.0


class Waiting:
    """`watch` and `record` of a `Cluster`; after its run ask for `shares`."""

    def __init__(self) -> None:
        self._seen_s = 0.0
        self._waits: dict[str, float] = {}
        """Share of the trajectories by what they waited for when last sampled."""
        self._sums = dict.fromkeys(RESOURCES, 0.0)
        self._syncing = False

    def record(self, row: EventRow) -> None:
        """Every event of the run: from the request of a sync to its end turns wait for the weights."""
        if isinstance(row.event, SyncRequested | SyncFinished):
            self._syncing = isinstance(row.event, SyncRequested)

    def watch(self, cluster: Cluster) -> None:
        now = cluster.clock.now
        if now - self._seen_s < _EVERY_S and self._waits:
            return
        for name, share in self._waits.items():
            self._sums[name] += share * (now - self._seen_s)
        self._seen_s = now
        found: dict[str, int] = {}
        for play in cluster.players.values():
            if not play.ended:
                name = _waits_for(play, self._syncing)
                found[name] = found.get(name, 0) + 1
        number = sum(found.values())
        self._waits = {name: count / number for name, count in found.items()}

    def shares(self, result: Result) -> dict[str, float]:
        """Share of a step's time by resource, together 1."""
        step_s = result.step_s or 1.0
        rollout = min(1.0, result.t_next_s / step_s)
        sync = min(1.0 - rollout, result.sync_s / step_s)
        known = sum(self._sums.values()) or 1.0
        shares = {name: rollout * seconds / known for name, seconds in self._sums.items()}
        shares["sync"] += sync
        shares["training"] += 1.0 - rollout - sync
        return shares


def _waits_for(play: Play, syncing: bool) -> str:
    match play.stage:
        case Stage.LEASE:
            return "sandboxes"
        case Stage.OPEN | Stage.TOOL | Stage.SCORE:
            return "environment"
    if play.request is not None:
        return "kv" if play.request.state == WAITING else "engines"
    if play.priority is PriorityClass.PARKED:
        return "kv"
    return "sync" if syncing else "slots"


def most_waited(shares: Mapping[str, float]) -> str:
    """The resource that is waited for most; the first one named where two are equal."""
    return max(RESOURCES, key=lambda name: shares.get(name, 0.0))
