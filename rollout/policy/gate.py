"""PURE: the gate on groups in flight (paper §3): generating + ready + taken ≤ floor(async_factor · B).

A group holds a credit from admission until the weights of the step that trained it are acknowledged by all workers, so
no sample is born stale; one that leaves untrained gives it back at once, else async_factor 1.0 would deadlock.
"""

from __future__ import annotations


class Gate:
    """Credits: `held` by groups, `expected` by prompts that were asked of the source and have not come yet."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.expected = 0

    @property
    def free(self) -> int:
        return self.limit - self.held - self.expected
