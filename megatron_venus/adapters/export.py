"""Whole weights for rank 0's weight sync, gathered from the processes of its replica as it asks for them.

Rank 0 runs through the weights as often as the sync needs (names, broadcast, checksums). The other processes of its
replica serve these passes until it says that the sync is over; other replicas have no part in it.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from megatron_venus.adapters.megatron import Actor


class WeightExport:
    """`tensors` on rank 0 and `finish` on every process, once per sync."""

    def __init__(self, actor: Actor) -> None:
        self._actor = actor
        self._layout = actor.layout

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """One pass over all weights under Hugging Face's names; must be run through to its end."""
        self._layout.share(lambda: True)
        yield from self._actor.hf_tensors()

    def finish(self) -> None:
        """Rank 0: the sync is over. Its peers: serve until then. Other replicas: nothing."""
        if self._layout.replica != 0:
            return
        if self._layout.head:
            self._layout.share(lambda: False)
            return
        while self._layout.share(lambda: False):
            for _ in self._actor.hf_tensors():
                pass
