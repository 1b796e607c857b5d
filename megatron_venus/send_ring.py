"""Memory in which messages lie one after another, round and round, from when they are gathered until they are sent."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ALIGNMENT = 64
"""Bytes; a message may be seen as any type."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lying:
    start: int
    stop: int
    sending: Any


class SendRing:
    """`nbytes` on `device`, for messages of at most that size; a `take` is followed by `sent_by`, if it is sent."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.nbytes = nbytes
        self._memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self._start = self._stop = 0
        """Of the newest message."""
        self._lying: deque[_Lying] = deque()

    def take(self, nbytes: int) -> tuple[Tensor, list[Any]]:
        """Bytes [nbytes] for the next message, and the sendings that must be over before they are written."""
        if nbytes > self.nbytes:
            raise ValueError(f"a message of {nbytes} bytes does not fit into a ring of {self.nbytes}")
        start = -(-self._stop // ALIGNMENT) * ALIGNMENT
        self._start = start if start + nbytes <= self.nbytes else 0
        self._stop = self._start + nbytes
        before = []
        # The oldest lies next: what lies in the way, and whatever is older still.
        while any(lying.start < self._stop and self._start < lying.stop for lying in self._lying):
            before.append(self._lying.popleft().sending)
        return self._memory[self._start : self._stop], before

    def sent_by(self, sending: Any) -> None:
        """The message taken last is in use until `sending` is over."""
        self._lying.append(_Lying(start=self._start, stop=self._stop, sending=sending))

    def clear(self) -> None:
        """Nothing in it is in use any more: what a broken group was sending never ends."""
        self._lying.clear()
