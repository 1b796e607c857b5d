"""The ring a weight sync gathers into: no byte is handed out again while it is being sent."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_venus.send_ring import ALIGNMENT, SendRing

CPU = torch.device("cpu")


@given(st.lists(st.integers(1, 400), max_size=40), st.integers(400, 2000))
def test_what_is_being_sent_stays_as_it_was_written(sizes: list[int], nbytes: int) -> None:
    ring = SendRing(nbytes, CPU)
    in_use: dict[int, torch.Tensor] = {}
    for number, size in enumerate(sizes):
        memory, before = ring.take(size)
        assert memory.numel() == size and memory.storage_offset() % ALIGNMENT == 0
        for over in before:
            del in_use[over]  # a KeyError if it was named twice
        memory.fill_(number)
        assert all(bool((other == sending).all()) for sending, other in in_use.items())
        in_use[number] = memory
        ring.sent_by(number)


def test_small_messages_wait_for_nothing_until_the_ring_is_round() -> None:
    ring = SendRing(4 * ALIGNMENT, CPU)
    waited = []
    for number in range(6):
        waited.append(ring.take(ALIGNMENT)[1])
        ring.sent_by(number)
    assert waited == [[], [], [], [], [0], [1]]
    ring.clear()
    assert ring.take(ALIGNMENT)[1] == []


def test_a_message_larger_than_the_ring_is_refused() -> None:
    with pytest.raises(ValueError, match="message of 65 bytes does not fit into a ring of 64"):
        SendRing(64, CPU).take(65)
