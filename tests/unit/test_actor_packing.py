"""Packing loses no loss token, adds none, and keeps to its budget, whatever comes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envclient.base.errors import InvariantError
from megatron_venus import packing
from rollout.types import TrainSequence


def sequence(name: int, prompt: list[int], response: list[tuple[int, bool]]) -> TrainSequence:
    return TrainSequence(
        trajectory_id=str(name),
        prompt_ids=prompt,
        response_ids=[token for token, _ in response],
        loss_mask=[int(bit) for _, bit in response],
        logprobs=[-float(place + 1) if bit else 0.0 for place, (_, bit) in enumerate(response)],
        spans=[],
        advantage=float(name + 1),
        reward=0.0,
    )


TOKENS = st.integers(0, 99)
SEQUENCES = st.lists(
    st.tuples(st.lists(TOKENS, min_size=1, max_size=6), st.lists(st.tuples(TOKENS, st.booleans()), max_size=12)),
    max_size=8,
).map(lambda items: [sequence(index, *item) for index, item in enumerate(items)])


@given(SEQUENCES, st.integers(1, 60))
def test_loss_tokens_and_their_contexts(sequences: list[TrainSequence], budget: int) -> None:
    batches = packing.pack(sequences, budget)
    expected = []
    for item in sequences:
        whole = item.prompt_ids + item.response_ids
        for place, in_loss in enumerate(item.loss_mask):
            if in_loss:
                end = len(item.prompt_ids) + place
                expected.append((tuple(whole[:end]), whole[end], item.logprobs[place], item.advantage))
    found = []
    for batch in batches:
        ids, starts = batch.input_ids_T.tolist(), [0]
        for length in batch.lengths:
            starts.append(starts[-1] + length)
        assert starts[-1] == len(ids)
        assert batch.position_ids_T.tolist() == [place for length in batch.lengths for place in range(length)]
        assert len(ids) <= budget or len(batch.lengths) == 1
        values = (batch.rows_N, batch.targets_N, batch.behaviour_N, batch.advantages_N)
        for row, target, behaviour, advantage in zip(*(tensor.tolist() for tensor in values), strict=True):
            start = max(start for start in starts if start <= row)
            found.append((tuple(ids[start : row + 1]), target, behaviour, advantage))
    assert sorted(found) == sorted(expected)


def test_broken_sequences_are_named() -> None:
    good = sequence(0, [1], [(2, True)])
    packing.check(good)
    with pytest.raises(InvariantError, match="trajectory 7: 1 response tokens, 1 mask entries and 2 log-probs"):
        broken = sequence(7, [1], [(2, True)])
        broken.logprobs.append(0.0)
        packing.check(broken)
    with pytest.raises(InvariantError, match="trajectory 8: empty prompt"):
        packing.check(sequence(8, [], [(2, True)]))
