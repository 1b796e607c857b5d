"""The policy as a Megatron-core model with its optimizer: this process's part of one replica.

Built once by `train`, from the Hugging Face folder that the engines load too. The gradient stream runs it forward and
backward, weight sync and checkpoints read its weights under Hugging Face's names. What tensor, pipeline, context and
expert parallelism do to batches, log-probs and weights ends in this class: its callers see whole sequences and whole
tensors.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import (
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_venus.adapters import shards
from megatron_venus.adapters.layout import Layout
from megatron_venus.adapters.model import PolicyModel, build_chunks, transformer_config
from megatron_venus.adapters.slices import Slice, slice_of
from megatron_venus.architecture import Architecture
from megatron_venus.config import OptimizerConfig
from megatron_venus.loss import token_log_probs
from megatron_venus.packing import PackedBatch
from megatron_venus.weight_map import check_complete, hf_from_megatron, megatron_from_hf
from rollout.rope import Rope

log = logging.getLogger("venus.actor")
LossOf = Callable[[PackedBatch, Tensor, Tensor], Tensor]
"""(batch, log π [N], entropy [N]) → summed loss of a micro-batch."""


class Actor:
    """Model pieces, gradient buffers and optimizer of this process.

    `weights` is the whole Hugging Face checkpoint, or what fills `chunks` in another way; every process passes the
    same.
    """

    def __init__(
        self,
        arch: Architecture,
        weights: dict[str, Tensor] | Callable[[Actor], None],
        optimizer: OptimizerConfig,
        layout: Layout,
        *,
        rope: Rope,
        dtype: str,
        seed: int,
    ) -> None:
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        self.arch = arch
        self.layout = layout
        self.rope = rope
        self.dtype = getattr(torch, dtype)
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        config = transformer_config(arch, self.dtype, layout.parallel)
        self.chunks: list[PolicyModel] = build_chunks(arch, rope, config)
        self._owners = self._all_names()
        self._mark_cut()
        if callable(weights):
            weights(self)
        else:
            self.load_weights(weights, "of the actor")
        half = self.dtype != torch.float32
        self._wrapped = [
            DistributedDataParallel(
                config,
                # Without overlap the sum over replicas happens once, in `reduce_gradient`, when the batch is complete.
                DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
                Float16Module(config, chunk) if half else chunk,
            )
            for chunk in (chunk.to(self.device) for chunk in self.chunks)
        ]
        self.optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=optimizer.lr,
                weight_decay=optimizer.weight_decay,
                adam_beta1=optimizer.beta1,
                adam_beta2=optimizer.beta2,
                adam_eps=optimizer.eps,
                clip_grad=optimizer.clip_grad,
                bf16=half,
                params_dtype=self.dtype,
                use_distributed_optimizer=True,
            ),
            self._wrapped,
        )

    # ---------------------------------------------------------------------------------------------------- weights

    def _named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """This process's parameters under their names in the whole model."""
        parallel = self.layout.parallel
        before = self.arch.experts // parallel.expert * self.layout.expert_rank
        for chunk in self.chunks:
            for name, param in chunk.named_parameters():
                yield shards.global_name(name, chunk, before), param

    def _all_names(self) -> list[tuple[str, int]]:
        """Every parameter of the model with the stage that exports it, in the model's order; the same everywhere."""
        mine = [name for name, _ in self._named_parameters()]
        # With the experts of the same stage that other processes hold.
        group = parallel_state.get_expert_model_parallel_group()
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, mine, group=group)
        mine = list(dict.fromkeys(name for part in parts for name in part))
        named: list[Any] = [None] * self.layout.parallel.pipeline
        dist.all_gather_object(named, mine, group=parallel_state.get_pipeline_model_parallel_group())
        owners = [(name, stage) for stage, names in enumerate(named) for name in names]
        # With tied weights the last stage has a copy of the embedding, for the output layer.
        return sorted(
            ((name, stage) for name, stage in owners if not self._is_copy(name)), key=lambda item: _place(item[0])
        )

    def _is_copy(self, name: str) -> bool:
        return self.arch.tied and name == "output_layer.weight"

    def parts(self) -> dict[str, Tensor]:
        """This process's parameters under their names in the whole model, a tied output layer's copy left out."""
        return {name: param for name, param in self._named_parameters() if not self._is_copy(name)}

    @torch.no_grad()
    def load_weights(self, weights: dict[str, Tensor], source: str) -> None:
        """Replace the model's weights (not the optimizer's master copy: only before the optimizer is built)."""
        check_complete(weights, self.arch, source)
        tensor = self.layout.parallel.tensor
        for name, param in self._named_parameters():
            whole = megatron_from_hf(
                "embedding.word_embeddings.weight" if self._is_copy(name) else name, weights, self.arch
            )
            param.copy_(shards.part_of(name, whole, self.layout.tensor_rank, tensor))

    def _mark_cut(self) -> None:
        """Megatron marks a parameter when it initialises it; its gradient norm counts only the first of several
        tensor-parallel processes' unmarked ones."""
        for name, param in self._named_parameters():
            dim = shards.cut_dim(name)
            cut = dim is not None or shards.is_expert(name)
            if self.layout.parallel.tensor > 1 and cut and not hasattr(param, "tensor_model_parallel"):
                set_tensor_model_parallel_attributes(param, True, dim or 0, 1)

    @torch.no_grad()
    def hf_tensors(self, value: Callable[[Tensor], Tensor] = lambda param: param) -> Iterator[tuple[str, Tensor]]:
        """`value` of every parameter (by default itself), whole, under Hugging Face's names; detached, often views.

        Every process of the replica must run through it at the same time: one parameter is gathered after another.
        """
        mine = dict(self._named_parameters())
        for name, stage in self._owners:
            part = value(mine[name]).detach() if name in mine and stage == self.layout.stage else None
            if stage == self.layout.stage and shards.is_expert(name):
                part = self._of_expert(name, part)
            whole = self._gathered(name, part, stage)
            yield from hf_from_megatron(name, whole, self.arch).items()

    def _of_expert(self, name: str, part: Tensor | None) -> Tensor:
        """The expert's parameter, from the process that has the expert."""
        owner = shards.expert_of(name) // (self.arch.experts // self.layout.parallel.expert)
        return _broadcast(part, owner, parallel_state.get_expert_model_parallel_group(), self.device)

    def _gathered(self, name: str, part: Tensor | None, stage: int) -> Tensor:
        parallel = self.layout.parallel
        whole = part
        if part is not None and shards.cut_dim(name) is not None and parallel.tensor > 1:
            parts = [torch.empty_like(part) for _ in range(parallel.tensor)]
            dist.all_gather(parts, part.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
            whole = shards.whole_of(name, parts)
        return _broadcast(whole, stage, parallel_state.get_pipeline_model_parallel_group(), self.device)

    # --------------------------------------------------------------------------------------------------- gradient

    def forward_backward(self, batches: Sequence[PackedBatch], loss_of: LossOf, temperature: float) -> None:
        """Add the gradient of the summed losses. `loss_of` is called on the last stage, for every micro-batch once.

        Every process of the replica calls it with the same batches. They are dealt to the replica's lanes, and where
        processes would wait for one another, filled up with empty ones.
        """
        with contextlib.ExitStack() as stack:
            for wrapped in self._wrapped:
                stack.enter_context(wrapped.no_sync())
            self._run(batches, loss_of, temperature, forward_only=False)

    @torch.no_grad()
    def log_probs(self, batches: Sequence[PackedBatch], temperature: float) -> list[tuple[Tensor, Tensor]]:
        """(log π [N], entropy [N]) of every batch, in order, on every process of the replica."""
        found: list[tuple[Tensor, Tensor]] = []

        def keep(batch: PackedBatch, log_pi: Tensor, entropy: Tensor) -> Tensor:
            found.append((log_pi.cpu(), entropy.cpu()))
            return log_pi.sum()

        self._run(batches, keep, temperature, forward_only=True)
        layout = self.layout
        lanes: list[Any] = [None] * dist.get_world_size(layout.peers)
        dist.all_gather_object(lanes, (layout.lane, found) if layout.counts_losses else None, group=layout.peers)
        by_lane = dict(lane for lane in lanes if lane is not None)
        results = [by_lane[index % layout.lanes][index // layout.lanes] for index in range(len(batches))]
        return [(log_pi.to(self.device), entropy.to(self.device)) for log_pi, entropy in results]

    def _run(self, batches: Sequence[PackedBatch], loss_of: LossOf, temperature: float, *, forward_only: bool) -> None:
        mine = [batch.to(self.device) for batch in self._dealt(batches)]
        if not mine:
            return
        # Float16Module would widen the last hidden states, before they are gathered.
        as_computed = {"fp32_output": False} if self.dtype != torch.float32 else {}

        def step(source: Iterator[PackedBatch], wrapped: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            batch = next(source)
            part = self._slice(batch)
            hidden = wrapped(
                part.input_ids_t[None], part.position_ids_t[None], None, packed_seq_params=part.params, **as_computed
            )

            def finish(hidden_T1h: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
                tokens = torch.zeros((), dtype=torch.int)
                if not len(batch.targets_N):
                    return hidden_T1h.float().sum() * 0.0, tokens, {}
                log_pi, entropy = self._log_probs(hidden_T1h, batch, part, temperature)
                return loss_of(batch, log_pi, entropy), tokens, {}

            return hidden, finish

        sources = [iter(mine) for _ in self.chunks]
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=sources if len(sources) > 1 else sources[0],
            model=self._wrapped if len(sources) > 1 else self._wrapped[0],
            num_microbatches=len(mine),
            seq_length=1,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _dealt(self, batches: Sequence[PackedBatch]) -> list[PackedBatch]:
        """This lane's micro-batches: as many as the other lanes have, and a number that the schedule accepts."""
        lanes, parallel = self.layout.lanes, self.layout.parallel
        share = -(-len(batches) // lanes)
        if parallel.virtual_stages > 1:
            share = -(-share // parallel.pipeline) * parallel.pipeline
        mine = list(batches[self.layout.lane :: lanes])
        return mine + [PackedBatch.empty()] * (share - len(mine))

    def _slice(self, batch: PackedBatch) -> Slice:
        parallel = self.layout.parallel
        return slice_of(
            batch,
            context=parallel.context,
            context_rank=self.layout.context_rank,
            sequence_parts=parallel.tensor if parallel.sequence else 1,
        )

    def _log_probs(
        self, hidden_T1h: Tensor, batch: PackedBatch, part: Slice, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """log π and entropy of all N loss tokens, on every process that holds a part of the last stage."""
        model, tensor = self.chunks[-1], self.layout.parallel.tensor
        rows = model.rows_of(hidden_T1h).index_select(0, part.rows_n)
        group = parallel_state.get_tensor_model_parallel_group() if tensor > 1 else None
        log_pi, entropy = token_log_probs(
            rows, batch.targets_N[part.places_n], model.output_weight(), temperature, group
        )
        if self.layout.parallel.context == 1:
            return log_pi, entropy
        # Each process has its own tokens' numbers: all get all of them, so that a loss may look at whole sequences.
        context = parallel_state.get_context_parallel_group()
        both = torch.stack([log_pi, entropy.detach()], 1)
        spread = torch.zeros(len(batch.targets_N), 2, dtype=both.dtype, device=both.device)
        both = reduce_from_tensor_model_parallel_region(spread.index_copy(0, part.places_n, both), group=context)
        return both[:, 0], both[:, 1].detach()

    def reduce_gradient(self, divisor: int) -> None:
        """Sum the gradient over replicas and divide it by their divisors' sum. `divisor`: of this replica's groups."""
        mine = divisor if self.layout.counts_groups else 0
        finalize_model_grads(self._wrapped, torch.tensor(mine, dtype=torch.long, device=self.device))

    def set_learning_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def gradient_is_finite(self) -> bool:
        """Whether the reduced gradient of every process is; all get the same answer."""
        # The largest magnitude is finite only where every element is; `isfinite` would need a copy of the buffer.
        largest = [torch.linalg.vector_norm(buffer.grad_data, ord=math.inf) for buffer in self.buffers()]
        flag = (~torch.stack(largest).isfinite()).any().float()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return flag.item() == 0.0

    def zero_gradient(self) -> None:
        for wrapped in self._wrapped:
            wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()

    def buffers(self) -> list[Any]:
        """Megatron's gradient buffers."""
        return [buffer for wrapped in self._wrapped for buffer in (*wrapped.buffers, *wrapped.expert_parallel_buffers)]


def _broadcast(tensor: Tensor | None, source: int, group: Any, device: torch.device) -> Tensor:
    """The tensor of process `source` of the group, on every one of it."""
    if group.size() > 1:
        shape = [(tensor.shape, tensor.dtype) if tensor is not None else None]
        dist.broadcast_object_list(shape, group=group, group_src=source)
        assert shape[0] is not None
        tensor = tensor.contiguous() if tensor is not None else torch.empty(shape[0][0], dtype=shape[0][1])
        tensor = tensor.to(device)
        dist.broadcast(tensor, group=group, group_src=source)
    assert tensor is not None
    return tensor


def _place(name: str) -> tuple[int, int]:
    """Order of parameters in the model: embedding, layers by number, the rest; stable within a layer."""
    if name.startswith("embedding."):
        return 0, 0
    layer = shards.layer_of(name)
    return (1, layer) if layer is not None else (2, 0)
