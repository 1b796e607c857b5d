"""A batch's gradient, summed group by group as groups arrive, scaled once when the batch is closed.

Enters: sealed groups, in any order and unevenly over replicas. Leaves: one optimizer step and its metrics. Called by
the training loop: `add` for each group, `finish` when the coordinator has closed the batch.

    g = (1 / Σ_global m) · Σ_groups Σ_tokens m · ∇ℓ

The left factor is unknown until the batch is closed, so `add` only sums (inside `no_sync`: nothing is reduced yet) and
`finish` reduces over replicas, divides by the global token count, clips and steps.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads

from envclient.base.errors import InvariantError, VenusError
from megatron_venus import packing
from megatron_venus.adapters.megatron import Actor
from megatron_venus.config import LossConfig, OptimizerConfig
from megatron_venus.loss import LossTokens, TokenSums, batch_loss, token_log_probs
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


class GradientStream:
    """Owner of the gradient between two optimizer steps.

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
        nonfinite_steps: int = 0,
    ) -> None:
        self.actor = actor
        self._loss = loss
        self._optimizer = optimizer
        self._temperature = temperature
        self._micro_batch_tokens = micro_batch_tokens
        self._skip_zero_advantage = skip_zero_advantage
        self.nonfinite_steps = nonfinite_steps
        """Steps skipped since the start of the run."""
        self._nonfinite_in_row = 0
        self._counted = _Counted()
        self._sums = TokenSums()
        actor.zero_gradient()

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
        with self.actor.ddp.no_sync():
            for batch in packing.pack(self._trained(group), self._micro_batch_tokens):
                self._forward_backward(batch.to(self.actor.device))
        return tokens

    def _trained(self, group: TrainGroup) -> list[TrainSequence]:
        if not self._skip_zero_advantage:
            return group.sequences
        return [sequence for sequence in group.sequences if sequence.advantage != 0.0]

    def _forward_backward(self, batch: packing.PackedBatch) -> None:
        log_pi, entropy = token_log_probs(
            self.actor.output_rows(batch),
            batch.targets_N,
            self.actor.model.logits_of,
            self.actor.arch.vocabulary,
            self._temperature,
        )
        tokens = LossTokens(
            log_pi=log_pi,
            entropy=entropy,
            behaviour=batch.behaviour_N,
            advantages=batch.advantages_N,
            sequence_N=batch.sequence_N,
        )
        loss, sums = batch_loss(tokens, self._loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self._sums.add(sums)

    def finish(self, step: int, counts: BatchCounts) -> StepResult:
        """Close the batch: reduce, scale once, clip, step. Every replica calls it with the same `counts`.

        Raises:
            InvariantError: the replicas together have not seen exactly the batch that the coordinator closed.
            VenusError: too many non-finite gradients in a row.
        """
        mine = torch.tensor(self._counted.tokens, dtype=torch.int, device=self.actor.device)
        sums = self._reduce(counts)
        # Sums gradients over replicas and divides by the number of tokens, itself summed over replicas.
        finalize_model_grads([self.actor.ddp], mine)
        lr = self._optimizer.lr * min(1.0, step / max(1, self._optimizer.warmup_steps))
        metrics = self._metrics(sums, counts) | {"lr": lr}
        if self.actor.gradient_is_finite():
            self._nonfinite_in_row = 0
            self.actor.set_learning_rate(lr)
            _, norm, _ = self.actor.optimizer.step()
            metrics["grad_norm"] = float(norm)
            skipped = False
        else:
            skipped = True
            self.nonfinite_steps += 1
            self._nonfinite_in_row += 1
            log.warning("step %d: the gradient is not finite, the weights stay as they are", step)
            if self._nonfinite_in_row >= self._optimizer.max_nonfinite_steps:
                raise VenusError(
                    f"step {step}: {self._nonfinite_in_row} gradients in a row were not finite",
                    "lower actor.optimizer.lr; the bound is actor.optimizer.max_nonfinite_steps",
                )
        metrics["nonfinite_steps"] = float(self.nonfinite_steps)
        self._counted, self._sums = _Counted(), TokenSums()
        self.actor.zero_gradient()
        return StepResult(skipped=skipped, metrics=metrics)

    def _reduce(self, counts: BatchCounts) -> TokenSums:
        """Sums and counts over all replicas, checked against the coordinator's."""
        counted, device = self._counted, self.actor.device
        added = [name for name in (entry.name for entry in fields(TokenSums)) if name != "gap_max"]
        summed = torch.tensor(
            [counted.groups, counted.sequences, counted.tokens, *(getattr(self._sums, name) for name in added)],
            dtype=torch.float64,
            device=device,
        )
        largest = torch.tensor(
            [counted.span_max, counted.staleness_max, self._sums.gap_max], dtype=torch.float64, device=device
        )
        dist.all_reduce(summed)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        groups, sequences, tokens, *values = summed.tolist()
        seen = BatchCounts(groups=int(groups), sequences=int(sequences), tokens=int(tokens))
        if seen != counts:
            raise InvariantError(f"the replicas trained {seen}, the coordinator closed the batch with {counts}")
        counted.span_max, counted.staleness_max = (int(value) for value in largest[:2].tolist())
        return TokenSums(**dict(zip(added, values, strict=True)), gap_max=float(largest[2]))

    def _metrics(self, sums: TokenSums, counts: BatchCounts) -> dict[str, float]:
        """Means over the batch. `loss` is over all loss tokens, the others over those that went through the model."""
        forwarded = max(1.0, sums.tokens)
        return {
            "loss": sums.loss / max(1, counts.tokens),
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
