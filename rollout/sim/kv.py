"""A worker's KV memory: prompts shared by a group, one tail a trajectory, reference tiers, LRU, and a host cache.

The radix tree of an agent workload is flat: a group's prompt, and below it one tail for each of its trajectories. A
tail that is not in use shrinks from its end (leaves go first), and the prompt can go once no tail is left on it. Tiers
and budgets are those of `rollout.policy.tiers`; plain LRU keeps all pages in one tier.
The host cache is written through: it holds copies, LRU, and survives eviction from the device.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict

from envclient.base.errors import InvariantError
from rollout.policy.tiers import UNUSED, budget, shared_tier


class Node:
    """A prompt (parent None) or a tail."""

    __slots__ = ("children", "host", "locks", "name", "parent", "resident", "stamp", "tier", "tiers")

    def __init__(self, name: str, parent: Node | None) -> None:
        self.name = name
        self.parent = parent
        self.resident = 0
        """Tokens on the device: the first ones of the node."""
        self.host = 0
        """Tokens in the host cache, also the first ones."""
        self.locks = 0
        """Requests that use it now."""
        self.tier = UNUSED
        self.tiers = [0, 0, 0]
        """Of a prompt: number of its tails by their reference tier; its own tier is the highest with any."""
        self.stamp = 0
        self.children = 0
        """Of a prompt: tails with resident tokens."""


class KvMemory:
    """Device and host memory of one worker, in tokens."""

    def __init__(self, capacity: int, host_capacity: int) -> None:
        self.capacity = capacity
        self.host_capacity = host_capacity
        self.locked = 0
        """Tokens in use by requests."""
        self.evictable = [0, 0, 0]
        """Tokens not in use, by tier."""
        self.evicted = 0
        """Tokens evicted so far."""
        self._stamp = 0
        self._heap: list[tuple[int, int, str]] = []
        """(tier, stamp, name); an entry that is not its node's latest is dropped when met."""
        self._nodes: dict[str, Node] = {}
        self._host: OrderedDict[str, Node] = OrderedDict()
        self._host_used = 0

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def used(self) -> int:
        unused, low, high = self.evictable
        return self.locked + unused + low + high

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def budget(self, tier: int) -> int:
        """Tokens that a request may take which evicts pages of tiers up to `tier`."""
        return budget(self.capacity, self.locked, self.evictable, tier)

    def tail(self, prompt: str, trajectory: str) -> Node:
        """The node of a trajectory (made when new)."""
        node = self._nodes.get(trajectory)
        if node is None:
            parent = self._nodes.get(prompt)
            if parent is None:
                parent = self._nodes[prompt] = Node(prompt, None)
            node = self._nodes[trajectory] = Node(trajectory, parent)
        return node

    def match(self, tail: Node, prompt_tokens: int, context: int) -> tuple[int, int]:
        """Leading tokens of `context` on the device, and on device or host together."""
        parent = tail.parent
        assert parent is not None
        device = parent.resident
        if device == prompt_tokens:
            device += min(tail.resident, context - prompt_tokens)
        known = max(parent.resident, parent.host)
        if known == prompt_tokens:
            known += min(max(tail.resident, tail.host), context - prompt_tokens)
        return min(device, context), min(max(device, known), context)

    # --------------------------------------------------------------------------------------------------- changes

    def lock(self, tail: Node, prompt_tokens: int, context: int) -> None:
        """A request takes its whole context; the caller has checked `budget` and then calls `reclaim`."""
        parent = tail.parent
        assert parent is not None
        self._lock(parent, prompt_tokens)
        self._lock(tail, context - prompt_tokens)

    def _lock(self, node: Node, tokens: int) -> None:
        if node.locks == 0:
            self.evictable[node.tier] -= node.resident
            self.locked += tokens
            if node.parent is not None and node.resident == 0 and tokens > 0:
                node.parent.children += 1
            node.resident = tokens
        elif node.resident < tokens:
            self.locked += tokens - node.resident
            node.resident = tokens
        node.locks += 1

    def grow(self, tokens: int) -> None:
        """Running requests have `tokens` more; each adds its own to its tail by `unlock`."""
        self.locked += tokens

    def unlock(self, tail: Node, context: int, prompt_tokens: int, computed: int) -> None:
        """The request ended; of its `context` (with what `grow` added) the first `computed` tokens stay as cache."""
        parent = tail.parent
        assert parent is not None
        tokens = context - prompt_tokens
        if tail.resident == 0 and tokens > 0:
            parent.children += 1
        tail.resident = tokens
        tail.locks -= 1
        self.locked -= tokens
        self.evictable[tail.tier] += tokens
        self.shrink(tail, max(0, computed - prompt_tokens))
        self._queue(tail)
        self._unlock_prompt(parent)
        self._to_host(parent, parent.resident)
        self._to_host(tail, tail.resident)

    def shrink(self, tail: Node, tokens: int) -> None:
        """Only the first `tokens` of a tail that is not in use were computed."""
        gone = tail.resident - tokens
        if gone <= 0 or tail.locks:
            return
        tail.resident = tokens
        self.evictable[tail.tier] -= gone
        if tokens == 0 and tail.parent is not None:
            tail.parent.children -= 1

    def drop(self, tail: Node, context: int, prompt_tokens: int) -> None:
        """The request was retracted: its pages are freed and not kept as cache."""
        parent = tail.parent
        assert parent is not None
        if tail.resident:
            parent.children -= 1
        tail.resident = 0
        tail.locks -= 1
        self.locked -= context - prompt_tokens
        self._unlock_prompt(parent)

    def _unlock_prompt(self, prompt: Node) -> None:
        prompt.locks -= 1
        if prompt.locks == 0:
            self.locked -= prompt.resident
            self.evictable[prompt.tier] += prompt.resident
            self._queue(prompt)

    def set_tier(self, tail: Node, tier: int) -> None:
        """The trajectory's reference: UNUSED when it ended. A shared prompt has the highest of its tails' tiers."""
        parent = tail.parent
        assert parent is not None
        if tier == tail.tier:
            return
        parent.tiers[tail.tier] -= 1
        parent.tiers[tier] += 1
        self._retier(tail, tier)
        highest = shared_tier(parent.tiers)
        if highest != parent.tier:
            self._retier(parent, highest)

    def _retier(self, node: Node, tier: int) -> None:
        if node.locks == 0:
            self.evictable[node.tier] -= node.resident
            self.evictable[tier] += node.resident
        node.tier = tier
        if node.locks == 0 and node.resident:
            self._queue(node, touch=False)

    def _queue(self, node: Node, *, touch: bool = True) -> None:
        if touch or not node.stamp:
            self._stamp += 1
            node.stamp = self._stamp
        if node.resident and (node.parent is not None or node.children == 0):
            heapq.heappush(self._heap, (node.tier, node.stamp, node.name))

    def reclaim(self) -> None:
        """Evict until what is used fits the device. Raises: InvariantError: what is in use alone does not fit."""
        over = self.used - self.capacity
        while over > 0:
            if not self._heap:
                raise InvariantError(f"KV memory of {self.capacity} tokens has {self.locked} locked, nothing to evict")
            tier, stamp, name = self._heap[0]
            node = self._nodes.get(name)
            if (
                node is None
                or node.locks
                or node.tier != tier
                or node.stamp != stamp
                or not node.resident
                or node.children
            ):
                heapq.heappop(self._heap)
                continue
            taken = node.resident if node.parent is None else min(over, node.resident)
            node.resident -= taken
            self.evictable[tier] -= taken
            self.evicted += taken
            over -= taken
            if node.resident == 0:
                heapq.heappop(self._heap)
                if node.parent is not None:
                    node.parent.children -= 1
                    if node.parent.children == 0 and node.parent.locks == 0:
                        self._queue(node.parent, touch=False)

    def flush(self) -> None:
        """Drop everything that is not in use, on device and host (the weights changed)."""
        for node in self._nodes.values():
            node.host = 0
            if node.locks == 0:
                self.evictable[node.tier] -= node.resident
                if node.parent is not None and node.resident:
                    node.parent.children -= 1
                node.resident = 0
        self._host.clear()
        self._host_used = 0
        self._heap.clear()

    # ------------------------------------------------------------------------------------------------------ host

    def import_host(self, tail: Node, prompt_tokens: int, tokens: int) -> None:
        """The first `tokens` of a context came from another worker's host memory."""
        assert tail.parent is not None
        if tokens >= prompt_tokens:
            self._to_host(tail.parent, prompt_tokens)
            self._to_host(tail, tokens - prompt_tokens)

    def _to_host(self, node: Node, tokens: int) -> None:
        if not self.host_capacity:
            return
        if node.name in self._host:
            self._host.move_to_end(node.name)
        else:
            self._host[node.name] = node
        if tokens > node.host:
            self._host_used += tokens - node.host
            node.host = tokens
        while self._host_used > self.host_capacity:
            oldest = next(iter(self._host.values()))
            taken = min(oldest.host, self._host_used - self.host_capacity)
            oldest.host -= taken
            self._host_used -= taken
            if oldest.host == 0:
                del self._host[oldest.name]

    # ----------------------------------------------------------------------------------------------------- audit

    def check_invariants(self) -> None:
        """Recount, O(nodes). Raises InvariantError."""
        evictable = [0, 0, 0]
        for node in self._nodes.values():
            if node.locks == 0:
                evictable[node.tier] += node.resident
            if node.locks < 0 or node.resident < 0 or node.children < 0:
                raise InvariantError(f"KV node {node.name} has {node.locks} locks and {node.resident} tokens")
        if evictable != self.evictable:
            raise InvariantError(f"KV memory counts {self.evictable} evictable tokens of {evictable}")
        if self.used > self.capacity:
            raise InvariantError(f"KV memory of {self.capacity} tokens holds {self.used}")
        if self._host_used != sum(node.host for node in self._host.values()) or self._host_used > self.host_capacity:
            raise InvariantError(f"the host cache of {self.host_capacity} tokens counts {self._host_used}")
