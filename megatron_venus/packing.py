"""Sequences of a group become packed micro-batches under a token budget.

Enters: `TrainSequence`s as the coordinator hands them over. Leaves: `PackedBatch`es for the model's forward and the
loss, called by the gradient stream. A packed batch is the `thd` layout: sequences laid end to end in one row, each with
positions from 0, so that no padding is computed. Prompt and tool tokens are context only; they never enter the loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from envclient.base.errors import InvariantError
from megatron_venus.partition import micro_batches
from rollout.types import TrainSequence


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """One micro-batch: T tokens of context, N of them followed by a loss token."""

    input_ids_T: Tensor
    position_ids_T: Tensor
    lengths: list[int]
    """Of each sequence; they sum to T."""
    rows_N: Tensor
    """Row of [0, T) whose output predicts the loss token."""
    targets_N: Tensor
    """The loss tokens, as sampled."""
    behaviour_N: Tensor
    """log μ: the engine's log-probs of the loss tokens."""
    advantages_N: Tensor
    """Of each loss token's sequence."""
    sequence_N: Tensor
    """Each loss token's sequence: its place in `lengths` and `members`. No sequence is split over two batches."""
    members: list[int]
    """Place of each packed sequence in what was given to `pack`."""
    log_old_N: Tensor | None = None
    """log π_old, where it is not the training forward itself; filled in by the gradient stream."""
    log_ref_N: Tensor | None = None
    """log π_ref, where KL is asked for; filled in by the gradient stream."""

    @classmethod
    def empty(cls) -> PackedBatch:
        """One token and no loss: keeps a process in step with others that have a batch more."""
        none, zero = torch.zeros(0), torch.zeros(1, dtype=torch.long)
        return cls(
            input_ids_T=zero,
            position_ids_T=zero,
            lengths=[1],
            rows_N=none.long(),
            targets_N=none.long(),
            behaviour_N=none,
            advantages_N=none,
            sequence_N=none.long(),
            members=[],
        )

    def to(self, device: torch.device) -> PackedBatch:
        moved = {
            entry.name: value.to(device)
            for entry in fields(self)
            if isinstance(value := getattr(self, entry.name), Tensor)
        }
        return replace(self, **moved)


def check(sequence: TrainSequence) -> None:
    """Mask, log-probs and tokens must be of one length, and a response needs a prompt to be predicted from.

    Raises:
        InvariantError: names the trajectory.
    """
    tokens = len(sequence.response_ids)
    if not tokens == len(sequence.loss_mask) == len(sequence.logprobs):
        raise InvariantError(
            f"trajectory {sequence.trajectory_id}: {tokens} response tokens, {len(sequence.loss_mask)} mask entries "
            f"and {len(sequence.logprobs)} log-probs"
        )
    if tokens and not sequence.prompt_ids:
        raise InvariantError(f"trajectory {sequence.trajectory_id}: empty prompt")


def needed_length(sequence: TrainSequence) -> int:
    """Tokens of context that the loss needs: all before the last loss token; 0 without one."""
    for place in range(len(sequence.loss_mask) - 1, -1, -1):
        if sequence.loss_mask[place]:
            return len(sequence.prompt_ids) + place
    return 0


def pack(sequences: Sequence[TrainSequence], budget_tokens: int, multiple: int = 1) -> list[PackedBatch]:
    """Micro-batches of at most `budget_tokens` tokens; a longer sequence gets one of its own.

    Sequences without a loss token are left out. Their tokens are levelled over the micro-batches, largest first, and
    the number is a multiple of `multiple` while there are sequences enough: see `partition`.
    """
    needed = [(member, needed_length(sequence)) for member, sequence in enumerate(sequences)]
    waiting = [(member, length) for member, length in needed if length]
    parts = micro_batches([length for _, length in waiting], budget_tokens, multiple)
    return [_packed([waiting[place] for place in part], sequences) for part in parts]


def _packed(items: Sequence[tuple[int, int]], sequences: Sequence[TrainSequence]) -> PackedBatch:
    ids: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    targets: list[int] = []
    behaviour: list[float] = []
    advantages: list[float] = []
    owners: list[int] = []
    for place_in_batch, (member, length) in enumerate(items):
        sequence = sequences[member]
        start, prompt = len(ids), len(sequence.prompt_ids)
        ids += (sequence.prompt_ids + sequence.response_ids)[:length]
        positions += range(length)
        loss_places = [place for place, in_loss in enumerate(sequence.loss_mask) if in_loss]
        # The output at a token predicts the next one, hence − 1.
        rows += [start + prompt + place - 1 for place in loss_places]
        targets += [sequence.response_ids[place] for place in loss_places]
        behaviour += [sequence.logprobs[place] for place in loss_places]
        advantages += [sequence.advantage] * len(loss_places)
        owners += [place_in_batch] * len(loss_places)
    return PackedBatch(
        input_ids_T=torch.tensor(ids),
        position_ids_T=torch.tensor(positions),
        lengths=[length for _, length in items],
        rows_N=torch.tensor(rows),
        targets_N=torch.tensor(targets),
        behaviour_N=torch.tensor(behaviour, dtype=torch.float32),
        advantages_N=torch.tensor(advantages, dtype=torch.float32),
        sequence_N=torch.tensor(owners),
        members=[member for member, _ in items],
    )
