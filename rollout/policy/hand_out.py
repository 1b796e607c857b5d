"""PURE: which of the ready groups a replica of the actor gets next.

Replicas take groups at their own pace, and the optimizer waits for the last of them. A large group that begins when
the others are nearly through is what it waits for, so among groups of equal standing the largest goes first: with
everything ready this is Graham's longest-processing-time rule (1969), whose time on R replicas is at most
4/3 − 1/(3R) of the shortest.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice


def largest_of_equal(ready: Iterable[tuple[int, int]], free: int) -> int:
    """Index of the group to hand out.

    Only groups that stand like the first one are looked at, and no more than there are free places in the batch: the
    choice orders what is going to be in the batch as things stand, and the last place always goes to the first group.

    Args:
        ready: (oldest version, tokens) of each ready group, ascending in the version and then as admitted; not empty.
        free: places of the batch that no group has taken, at least 1.
    """
    best, first, most = 0, None, -1
    for index, (version, tokens) in enumerate(islice(ready, free)):
        if first is None:
            first = version
        if version != first:
            break
        if tokens > most:
            best, most = index, tokens
    return best
