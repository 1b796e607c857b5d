"""A batch's gradient, summed group by group as groups arrive, scaled once when the batch is closed.

Enters: sealed groups, in any order and unevenly over replicas. Leaves: one optimizer step and its metrics. Called by
the training loop: `add` for each group, `finish` when the coordinator has closed the batch.

    g = (1 / denominator) · Σ_groups Σ_tokens factor · ∇ℓ

The left factor is unknown until the batch is closed, so `add` only sums (inside `no_sync`: nothing is reduced yet) and
`finish` reduces over replicas, divides by the global denominator, clips and steps.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
from torch import Tensor

from envclient.base.errors import InvariantError, VenusError
from megatron_venus import packing
from megatron_venus.adapters.megatron import Actor
from megatron_venus.config import LossConfig, OptimizerConfig
from megatron_venus.loss import LossTokens, TokenSums, batch_loss
from megatron_venus.loss.aggregation import denominator
from megatron_venus.loss.kl import ESTIMATORS
from megatron_venus.loss.penalty import moments, normalised, squares, to_go
from megatron_venus.loss.sequences import sequence_sum
from megatron_venus.packing import PackedBatch
from megatron_venus.reference import FrozenReference
from rollout.policy.advantages import AdvantageRule
from rollout.types import BatchCounts, TrainGroup, TrainSequence

log = logging.getLogger("venus.actor")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What an optimizer step did; the same on every replica."""

    skipped: bool
    """The gradient was not finite: the weights did not change."""
    metrics: dict[str, float]


@dataclass(kw_only=True, slots=True)
class _Counted:
    """This replica's part of the batch."""

    groups: int = 0
    sequences: int = 0
    tokens: int = 0
    span_max: int = 0
    """Versions that a trajectory sampled under, at most: v_last − v_first + 1."""
    staleness_max: int = 0
    """Trainer version (step − 1) minus a trajectory's oldest sampling version, at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Groups of this replica whose gradient makes one optimizer update, and that update's denominator here."""

    batches: list[PackedBatch]
    """Still to be run; empty when they were streamed."""
    denominator: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """A group that waits for the batch to be closed."""

    group_id: str
    sequences: int
    tokens: int
    batches: list[PackedBatch]


class GradientStream:
    """Owner of the gradient between two optimizer steps.

    Groups are run forward and backward as they arrive, save where the algorithm cannot: several updates a batch, or
    advantages normalised over it. Then only what can be known (log-probs of π_old and of the reference) is computed on
    arrival.

    Denominators count every loss token handed out; with `skip_zero_advantage` the forward pass of sequences whose
    gradient is exactly zero is left out, and then the per-token metrics are means over the remaining ones.
    """

    def __init__(
        self,
        actor: Actor,
        loss: LossConfig,
        optimizer: OptimizerConfig,
        *,
        temperature: float,
        micro_batch_tokens: int,
        skip_zero_advantage: bool,
        advantage: AdvantageRule | None = None,
        reference: FrozenReference | None = None,
        nonfinite_steps: int = 0,
    ) -> None:
        """`reference` is needed exactly where the loss config asks for KL."""
        if (reference is None) != (loss.kl.place == "none"):
            raise InvariantError(f"actor.loss.kl.place={loss.kl.place}, and the reference is {reference}")
        self.actor = actor
        self._loss = loss
        self._optimizer = optimizer
        self._temperature = temperature
        self._micro_batch_tokens = micro_batch_tokens
        self._rule = advantage or AdvantageRule()
        self._reference = reference
        self._streams = loss.updates_per_batch == 1 and not self._rule.needs_batch
        # A zero advantage makes a zero gradient only where nothing is added to the loss or to the advantage later.
        self._skip_zero_advantage = skip_zero_advantage and not self._rule.needs_batch and reference is None
        self.nonfinite_steps = nonfinite_steps
        """Updates skipped since the start of the run."""
        self._nonfinite_in_row = 0
        self._counted = _Counted()
        self._sums = TokenSums()
        self._kept: list[_Kept] = []
        actor.zero_gradient()

    # ------------------------------------------------------------------------------------------------- on arrival

    def add(self, group: TrainGroup) -> int:
        """Add the group's summed gradient; returns its number of loss tokens, for the acknowledgement."""
        counted = self._counted
        tokens = 0
        for sequence in group.sequences:
            packing.check(sequence)
            tokens += sum(sequence.loss_mask)
            if sequence.spans:
                versions = [span.version for span in sequence.spans]
                counted.span_max = max(counted.span_max, max(versions) - min(versions) + 1)
                counted.staleness_max = max(counted.staleness_max, group.step - 1 - min(versions))
        counted.groups += 1
        counted.sequences += len(group.sequences)
        counted.tokens += tokens
        batches = self._prepared(group)
        if self._streams:
            self._run(batches)
        else:
            sequences = len(group.sequences)
            self._kept.append(_Kept(group_id=group.group_id, sequences=sequences, tokens=tokens, batches=batches))
        return tokens

    @torch.no_grad()
    def _prepared(self, group: TrainGroup) -> list[PackedBatch]:
        """Micro-batches with all log-probs that the loss needs and the training forward does not give."""
        sequences = [s for s in group.sequences if s.advantage != 0.0 or not self._skip_zero_advantage]
        packed = packing.pack(sequences, self._micro_batch_tokens, self.actor.layout.parallel.micro_batch_multiple())
        batches = [batch.to(self.actor.device) for batch in packed]
        loss = self._loss
        in_reward = loss.kl.place == "reward"
        if not loss.bypass and (loss.updates_per_batch > 1 or in_reward):
            old = self._log_probs(batches)
            batches = [replace(batch, log_old_N=log_old) for batch, log_old in zip(batches, old, strict=True)]
        if self._reference is not None:
            with self._reference.in_place():
                reference = self._log_probs(batches)
            batches = [replace(batch, log_ref_N=log_ref) for batch, log_ref in zip(batches, reference, strict=True)]
        return self._penalised(sequences, batches) if in_reward else batches

    def _penalised(self, sequences: Sequence[TrainSequence], batches: list[PackedBatch]) -> list[PackedBatch]:
        """Advantages of R_i − β Σ_t KL_t in the group; where the batch normalises them, of R_i − β Σ_{s ≥ t} KL_s at
        each token (REINFORCE++). KL is estimated between π_old and the reference."""
        kl_config, rule = self._loss.kl, self._rule
        penalties = []
        for batch in batches:
            old = batch.behaviour_N if batch.log_old_N is None else batch.log_old_N
            assert batch.log_ref_N is not None
            penalties.append(kl_config.coefficient * ESTIMATORS[kl_config.estimator](batch.log_ref_N - old))
        if rule.needs_batch:
            return [
                replace(batch, advantages_N=batch.advantages_N - to_go(penalty, batch.sequence_N))
                for batch, penalty in zip(batches, penalties, strict=True)
            ]
        rewards = rule.shaped([s.reward for s in sequences], [sum(s.loss_mask) for s in sequences])
        for batch, penalty in zip(batches, penalties, strict=True):
            for member, value in zip(batch.members, sequence_sum(penalty, batch.sequence_N).tolist(), strict=True):
                rewards[member] -= value
        advantages = torch.tensor(rule.of_group(rewards), dtype=torch.float32, device=self.actor.device)
        return [replace(b, advantages_N=advantages[b.members][b.sequence_N]) for b in batches]

    def _log_probs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        return [log_pi for log_pi, _ in self.actor.log_probs(batches, self._temperature)]

    def _run(self, batches: Sequence[PackedBatch]) -> None:
        """Add the batches' summed gradient."""
        self.actor.forward_backward(batches, self._loss_of, self._temperature)

    def _loss_of(self, batch: PackedBatch, log_pi: Tensor, entropy: Tensor) -> Tensor:
        """Summed loss of a micro-batch; its sums are added."""
        tokens = LossTokens(
            log_pi=log_pi,
            entropy=entropy,
            behaviour=batch.behaviour_N,
            advantages=batch.advantages_N,
            sequence_N=batch.sequence_N,
            log_old=batch.log_old_N if self._loss.updates_per_batch > 1 else None,
            log_ref=batch.log_ref_N,
        )
        loss, sums = batch_loss(tokens, self._loss)
        self._sums.add(sums)
        return loss

    # ------------------------------------------------------------------------------------------- batch is closed

    def finish(self, step: int, counts: BatchCounts) -> StepResult:
        """Close the batch: reduce, scale once, clip, step. Every replica calls it with the same `counts`.

        Raises:
            InvariantError: the replicas together have not seen exactly the batch that the coordinator closed.
            VenusError: too many non-finite gradients in a row.
        """
        self._check_counts(counts)
        lr = self._optimizer.lr * min(1.0, step / max(1, self._optimizer.warmup_steps))
        self.actor.set_learning_rate(lr)
        parts = self._parts()
        denominators = self._summed([float(part.denominator) for part in parts])
        norms = []
        for part, whole in zip(parts, denominators, strict=True):
            # With few groups an update may have none of them on any replica: Adam would still move by its momentum.
            if whole or len(parts) == 1:
                self._run(part.batches)
                norms.append(self._update(step, part.denominator))
        made = [norm for norm in norms if norm is not None]
        metrics = self._metrics(self._reduced_sums(), counts) | {"lr": lr}
        if made:
            metrics["grad_norm"] = sum(made) / len(made)
        if self._loss.updates_per_batch > 1:
            metrics["updates"] = float(len(made))
        metrics["nonfinite_steps"] = float(self.nonfinite_steps)
        self._counted, self._sums, self._kept = _Counted(), TokenSums(), []
        return StepResult(skipped=not made, metrics=metrics)

    def _parts(self) -> list[_Part]:
        """What each update of this batch is made of on this replica.

        A kept batch is divided by the order of its group ids, on all replicas: neither the order of arrival nor the
        replicas' shares leave a trace.
        """
        if self._streams:
            return [_Part(batches=[], denominator=self._denominator(self._counted.tokens, self._counted.sequences))]
        kept = sorted(self._normalised() if self._rule.needs_batch else self._kept, key=lambda group: group.group_id)
        updates, everyones = self._loss.updates_per_batch, self._everyones([group.group_id for group in kept])
        update_of = {group_id: place * updates // len(everyones) for place, group_id in enumerate(everyones)}
        parts = []
        for update in range(updates):
            groups = [group for group in kept if update_of[group.group_id] == update]
            tokens, sequences = sum(group.tokens for group in groups), sum(group.sequences for group in groups)
            batches = [batch for group in groups for batch in group.batches]
            parts.append(_Part(batches=batches, denominator=self._denominator(tokens, sequences)))
        return parts

    def _everyones(self, group_ids: list[str]) -> list[str]:
        """Group ids of all replicas, in order."""
        gathered: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, group_ids)
        return sorted({group_id for part in gathered for group_id in part})

    def _denominator(self, tokens: int, sequences: int) -> int:
        norm = self._loss.norm_tokens
        return denominator(self._loss.aggregation, tokens=tokens, sequences=sequences, norm_tokens=norm)

    def _normalised(self) -> list[_Kept]:
        """The kept groups with advantages normalised over the tokens of the whole batch, on all replicas."""
        mine = [batch.advantages_N for group in self._kept for batch in group.batches]
        number, total = self._summed([*moments(mine)])
        mean = total / max(1.0, number)
        (squared,) = self._summed([squares(mine, mean)])
        std = math.sqrt(squared / max(1.0, number - 1.0))
        return [
            replace(
                group,
                batches=[replace(b, advantages_N=normalised(b.advantages_N, mean, std)) for b in group.batches],
            )
            for group in self._kept
        ]

    def _update(self, step: int, divisor: int) -> float | None:
        """Reduce, scale, clip, step; the gradient's norm, or None when it was not finite and nothing changed."""
        self.actor.reduce_gradient(divisor)
        norm = None
        if self.actor.gradient_is_finite():
            self._nonfinite_in_row = 0
            norm = float(self.actor.optimizer.step()[1])
        else:
            self.nonfinite_steps += 1
            self._nonfinite_in_row += 1
            log.warning("step %d: the gradient is not finite, the weights stay as they are", step)
            if self._nonfinite_in_row >= self._optimizer.max_nonfinite_steps:
                raise VenusError(
                    f"step {step}: {self._nonfinite_in_row} gradients in a row were not finite",
                    "lower actor.optimizer.lr; the bound is actor.optimizer.max_nonfinite_steps",
                )
        self.actor.zero_gradient()
        return norm

    def _summed(self, values: list[float], *, once: bool | None = None) -> list[float]:
        """Over all replicas. A replica's processes all have its values: those of one count, by default the head's."""
        counts = self.actor.layout.head if once is None else once
        tensor = torch.tensor(values if counts else [0.0] * len(values), dtype=torch.float64, device=self.actor.device)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def _largest(self, values: list[float]) -> list[float]:
        """Over all replicas."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.actor.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def _check_counts(self, counts: BatchCounts) -> None:
        counted = self._counted
        groups, sequences, tokens = self._summed([counted.groups, counted.sequences, counted.tokens])
        seen = BatchCounts(groups=int(groups), sequences=int(sequences), tokens=int(tokens))
        if seen != counts:
            raise InvariantError(f"the replicas trained {seen}, the coordinator closed the batch with {counts}")

    def _reduced_sums(self) -> TokenSums:
        """Sums and maxima over all replicas."""
        counted = self._counted
        added = [entry.name for entry in fields(TokenSums) if entry.name != "gap_max"]
        once = self.actor.layout.counts_losses
        values = self._summed([getattr(self._sums, name) for name in added], once=once)
        span, staleness, gap = self._largest([counted.span_max, counted.staleness_max, self._sums.gap_max])
        counted.span_max, counted.staleness_max = int(span), int(staleness)
        return TokenSums(**dict(zip(added, values, strict=True)), gap_max=gap)

    def _metrics(self, sums: TokenSums, counts: BatchCounts) -> dict[str, float]:
        """Means over the batch. `loss` is aggregated over all loss tokens, the others are means over those that went
        through the model."""
        forwarded = max(1.0, sums.tokens)
        metrics = {
            "loss": sums.loss / max(1, self._denominator(counts.tokens, counts.sequences)),
            "entropy": sums.entropy / forwarded,
            "kl": sums.kl / forwarded,
            "clip_frac": sums.clipped / forwarded,
            "logprob_gap/mean_abs": sums.gap / forwarded,
            "logprob_gap/max": sums.gap_max,
            "staleness/span_max": float(self._counted.span_max),
            "staleness/max": float(self._counted.staleness_max),
            "tokens/trained": float(counts.tokens),
            "tokens/forwarded": sums.tokens,
        }
        if self._reference is not None:
            metrics["kl_ref"] = sums.kl_ref / forwarded
        if self._loss.correction.weight != "none" or self._loss.correction.reject != "none":
            metrics["correction/weight_mean"] = sums.weight / forwarded
            metrics["correction/rejected"] = sums.rejected / forwarded
        return metrics
