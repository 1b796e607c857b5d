"""What weight sync tells the coordinator. Free of torch, for those who only pass it on."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncResult:
    """What a sync did."""

    seconds: dict[str, float]
    """By phase, and `total`."""
    lost: dict[str, str] = field(default_factory=dict)
    """Worker whose engine did not get the weights → why."""
