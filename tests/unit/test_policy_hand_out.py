"""Replicas that take the largest waiting group first end together; what a batch is made of stays the same."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from rollout.dispatcher import DispatcherConfig
from rollout.dispatcher.batch import Ages, TrainBatch
from rollout.dispatcher.records import Episode, Group
from rollout.policy.hand_out import largest_of_equal
from rollout.policy.jobs import JobGroup
from rollout.types import AnyCommand, DeliverGroup

Rule = Callable[[Sequence[tuple[int, int]], int], int]
READY = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), min_size=1, max_size=12)


@given(READY, st.integers(1, 14))
def test_a_choice_among_equals(items: list[tuple[int, int]], free: int) -> None:
    ready = sorted(items, key=lambda item: item[0])
    chosen = largest_of_equal(ready, free)
    assert ready[chosen][0] == ready[0][0] and chosen < free
    equals = [tokens for version, tokens in ready[:free] if version == ready[0][0]]
    assert ready[chosen][1] == max(equals)


def test_by_hand() -> None:
    ready = [(3, 10), (3, 30), (3, 30), (3, 50), (4, 99)]
    assert largest_of_equal(ready, 8) == 3
    assert largest_of_equal(ready, 3) == 1, "the first of equally large ones, among as many as there are places"
    assert largest_of_equal(ready, 1) == 0, "the last place is the first group's"


def load_of_longest(groups: Sequence[tuple[int, int]], replicas: int, rule: Rule) -> float:
    """Tokens of the replica that ends last ÷ their mean, when each takes a group as soon as it is free."""
    waiting, free_at = list(groups), [(0, replica) for replica in range(replicas)]
    while waiting:
        now, replica = heapq.heappop(free_at)
        _, tokens = waiting.pop(rule(waiting, len(waiting)))
        heapq.heappush(free_at, (now + tokens, replica))
    return max(free_at)[0] * replicas / sum(tokens for _, tokens in groups)


def test_replicas_end_together() -> None:
    """Batches of 32 groups whose tokens spread over 1 : 16, all ready when the batch opens, on 8 replicas."""
    generator = random.Random(3)
    ours = oldest_first = 0.0
    batches = 50
    for _ in range(batches):
        groups = [(0, int(1000 * 16 ** generator.random())) for _ in range(32)]
        ours += load_of_longest(groups, 8, largest_of_equal)
        oldest_first += load_of_longest(groups, 8, lambda *_: 0)
    print(f"largest first {ours / batches:.3f}, oldest first {oldest_first / batches:.3f} of the mean")
    assert ours / batches <= 1.05
    assert oldest_first / batches >= 1.2


def test_the_batch_hands_out_by_size() -> None:
    """Four groups wait when a batch of three opens: the fourth, although the largest, is the next batch's."""
    ages = Ages()
    batch = TrainBatch(DispatcherConfig(batch=3), ages, step=1)
    for order, tokens in enumerate((10, 40, 20, 90)):
        group = ready_group(order, tokens)
        ages.move(group, 0)
        batch.add(group)
    out: list[AnyCommand] = []
    for replica in range(3):
        assert batch.request(1, replica)
    batch.serve(drained=False, out=out)
    assert [(c.replica, c.group_id) for c in out if isinstance(c, DeliverGroup)] == [(0, "g1"), (1, "g2"), (2, "g0")]
    assert [group.group_id for _, _, group in batch.ready] == ["g3"]


def ready_group(order: int, tokens: int) -> Group:
    name = f"g{order}"
    group = Group(
        order=order, group_id=name, prompt_id=name, task_id=name, jobs=JobGroup(order=order, group_id=name), oldest=0
    )
    episode = Episode(trajectory_id=f"{name}.0", task_id=name, owner=group, member=0, attempt=0)
    episode.context_tokens = tokens
    group.slots.append(episode)
    return group
