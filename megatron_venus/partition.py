"""Lengths to micro-batches: few, under a token budget, with sums as even as they go. No torch, no state.

Called by `packing` for every group. Processes that meet in a collective wait for the longest of their micro-batches,
and the longest one sets the peak of memory: so sums are levelled, by the largest differencing method (Karmarkar and
Karp 1982, "The differencing method of set partitioning"); first fit decreasing is there for where level parts are too
large and packing tightly saves a micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Parts = list[list[int]]
"""Indices of the lengths in each part."""


def micro_batches(lengths: Sequence[int], budget: int, multiple: int = 1) -> Parts:
    """Parts of at most `budget` tokens, largest sum first; a length above the budget is a part of its own.

    Their number is the smallest that fits, raised to a multiple of `multiple` while there are lengths enough. Largest
    first: parts that neighbours compute at the same time are then of nearly the same size.
    """
    alone = [[index] for index, length in enumerate(lengths) if length >= budget]
    small = [index for index, length in enumerate(lengths) if length < budget]
    fitting = _fitting([lengths[index] for index in small], budget, len(alone), multiple)
    parts = alone + [[small[place] for place in part] for part in fitting]
    return sorted(parts, key=lambda part: -sum(lengths[index] for index in part))


def _fitting(short: Sequence[int], budget: int, alone: int, multiple: int) -> Parts:
    """Level parts of the `short` lengths, as few as fit the budget; with `alone` other parts they make a multiple."""
    fitted = first_fit(short, budget)
    for wanted in range(-(-sum(short) // budget), len(short) + 1):
        count = min(len(short), -(-(alone + wanted) // multiple) * multiple - alone)
        candidates = [level(short, count), fitted] if count == len(fitted) else [level(short, count)]
        for parts in candidates:
            if all(sum(short[place] for place in part) <= budget for part in parts):
                return parts
    raise AssertionError("a part for every length fits")


def first_fit(lengths: Sequence[int], budget: int) -> Parts:
    """Decreasing lengths, each into the first part with room: at most 11/9 of the fewest parts, and one."""
    parts: Parts = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        place = next((place for place, left in enumerate(room) if lengths[index] <= left), len(parts))
        if place == len(parts):
            parts.append([])
            room.append(budget)
        parts[place].append(index)
        room[place] -= lengths[index]
    return parts


def level(lengths: Sequence[int], count: int) -> Parts:
    """`count` parts with nearly equal sums; none is empty when there are as many lengths.

    Every length begins as a tuple of parts, itself and empty ones. The two tuples with the largest difference between
    their own parts are joined, large parts with small ones, until one is left.
    """
    if not lengths:
        return []
    # (minus the difference, its first index, [(sum, indices)] ascending)
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = [
        (-length, index, [(0, [])] * (count - 1) + [(length, [index])]) for index, length in enumerate(lengths)
    ]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, name, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        joined = [
            (total + other, part + rest) for (total, part), (other, rest) in zip(first, reversed(second), strict=True)
        ]
        joined.sort(key=lambda item: item[0])
        heapq.heappush(heap, (joined[0][0] - joined[-1][0], name, joined))
    return [part for _, part in heap[0][2]]
