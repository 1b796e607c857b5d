"""What a policy does to the stream it is given: which tasks it consumes when, and whose trajectories it discards.

A policy that takes short groups first looks fast and skews the training data for as long as long ones wait. Tasks are
classed by their length alone, the one thing by which policies choose.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TypeVar

CLASSES = 4
"""Classes of prompts by the mean generated tokens of their trajectories: equal shares of the submitted stream."""
DECILES = 10
"""Classes of trajectories by their generated tokens."""

Name = TypeVar("Name", str, int)


def classes(lengths: Mapping[Name, float], number: int) -> dict[Name, int]:
    """Each name's class by rank, 0 the shortest; classes differ by one member at most. Ties: by name."""
    ordered = sorted(lengths, key=lambda name: (lengths[name], name))
    return {name: rank * number // len(ordered) for rank, name in enumerate(ordered)}


def shares(members: Sequence[int], number: int) -> list[float]:
    """Share of each class."""
    return [members.count(each) / max(1, len(members)) for each in range(number)]


def drift(kinds: Mapping[str, int], stream: Sequence[str], steps: Sequence[Sequence[str]]) -> float:
    """Largest total variation distance, over the steps, of the classes trained so far from those declared so far.

    Args:
        kinds: prompt → class.
        stream: prompts in the order in which they were submitted.
        steps: prompts that each optimizer step trained; as many from the head of the stream were declared by then.
    """
    trained: list[int] = []
    worst = 0.0
    for step in steps:
        trained += [kinds[prompt] for prompt in step]
        declared = [kinds[prompt] for prompt in stream[: len(trained)]]
        pairs = zip(shares(trained, CLASSES), shares(declared, CLASSES), strict=True)
        worst = max(worst, sum(abs(a - b) for a, b in pairs) / 2)
    return worst


def discard_shares(lengths: Mapping[str, int], discarded: Collection[str]) -> list[float]:
    """By decile of length: share of the trajectories whose first attempt was discarded."""
    if not lengths:
        return [0.0] * DECILES
    decile = classes(lengths, DECILES)
    members = shares(list(decile.values()), DECILES)
    lost = [decile[name] for name in discarded if name in decile]
    return [lost.count(each) / len(lengths) / share if share else 0.0 for each, share in enumerate(members)]
