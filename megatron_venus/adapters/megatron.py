"""The policy as a Megatron-core model with its optimizer: one data-parallel replica per rank.

Built once by `train`, from the Hugging Face folder that the engines load too. The gradient stream runs it forward and
backward, weight sync and checkpoints read its weights under Hugging Face's names. On a GPU the layers are Transformer
Engine's (not verified here), without one the local ones with `PackedSdpa`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as layer_specs
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_venus.config import OptimizerConfig
from megatron_venus.packing import PackedBatch
from megatron_venus.weight_map import Architecture, check_complete, hf_from_megatron, megatron_from_hf

log = logging.getLogger("venus.actor")
COLLECTIVE_TIMEOUT_S = 3600.0
"""A replica waits this long for another one; rank 0 may evaluate meanwhile, which takes minutes."""


@dataclass(kw_only=True)
class PackedParams(PackedSeqParams):  # type: ignore[misc]
    """Megatron's description of a packed batch, with the lengths as plain numbers for `PackedSdpa`."""

    lengths: list[int]


class PolicyModel(GPTModel):  # type: ignore[misc]
    """GPT model whose forward pass ends at the last norm; `logits_of` goes on from chosen rows only."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def logits_of(self, rows_nh: Tensor) -> Tensor:
        """[n, h] → [n, vocabulary]."""
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        logits, _ = self.output_layer(rows_nh[:, None], weight=weight)
        return logits[:, 0]


def join_process_group() -> None:
    """Rendezvous of the replicas (torchrun's environment) and Megatron's own groups."""
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if backend == "nccl":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


class Actor:
    """Model, gradient buffers and optimizer of this rank.

    `weights` must be the whole Hugging Face checkpoint; every rank passes the same.
    """

    def __init__(
        self, arch: Architecture, weights: dict[str, Tensor], optimizer: OptimizerConfig, *, dtype: str, seed: int
    ) -> None:
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)
        self.arch = arch
        self.dtype = getattr(torch, dtype)
        self.device = (
            torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        )
        self.replica: int = parallel_state.get_data_parallel_rank()
        self.replicas: int = parallel_state.get_data_parallel_world_size()
        config = _transformer_config(arch, self.dtype)
        self.model = PolicyModel(
            config=config,
            transformer_layer_spec=_layer_spec(),
            vocab_size=arch.vocabulary,
            max_sequence_length=arch.max_positions,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope",
            rotary_base=arch.rope_theta,
        )
        self.load_weights(weights, "of the actor")
        self.model.to(self.device)
        half = self.dtype != torch.float32
        self.ddp = DistributedDataParallel(
            config,
            # Without overlap the sum over replicas happens once, in finalize_model_grads, when the batch is complete.
            DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True),
            Float16Module(config, self.model) if half else self.model,
        )
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
            [self.ddp],
        )

    @torch.no_grad()
    def load_weights(self, weights: dict[str, Tensor], source: str) -> None:
        """Replace the model's weights (not the optimizer's master copy: only before the optimizer is built)."""
        check_complete(weights, self.arch, source)
        for name, param in self.model.named_parameters():
            param.copy_(megatron_from_hf(name, weights, self.arch))

    def hf_tensors(self, value: Callable[[Tensor], Tensor] = lambda param: param) -> Iterator[tuple[str, Tensor]]:
        """`value` of every parameter (by default itself) under Hugging Face's names, detached; views where possible."""
        for name, param in self.model.named_parameters():
            yield from hf_from_megatron(name, value(param).detach(), self.arch).items()

    def output_rows(self, batch: PackedBatch) -> Tensor:
        """The model's last hidden states at the rows that predict a loss token, [N, h]."""
        offsets = torch.tensor([0, *batch.lengths], device=self.device).cumsum(0, dtype=torch.int32)
        longest = max(batch.lengths)
        params = PackedParams(
            qkv_format="thd",
            cu_seqlens_q=offsets,
            cu_seqlens_kv=offsets,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            lengths=batch.lengths,
        )
        hidden_T1h = self.ddp(batch.input_ids_T[None], batch.position_ids_T[None], None, packed_seq_params=params)
        # Float16Module hands float32 out; the output layer wants its own dtype back.
        return hidden_T1h[:, 0].index_select(0, batch.rows_N).to(self.dtype)

    def set_learning_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def gradient_is_finite(self) -> bool:
        """Whether the reduced gradient of every replica is; all replicas get the same answer."""
        flag = torch.tensor(
            [0.0 if torch.isfinite(buffer.grad_data).all() else 1.0 for buffer in self._buffers()], device=self.device
        ).amax()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return flag.item() == 0.0

    def zero_gradient(self) -> None:
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _buffers(self) -> list[Any]:
        return [*self.ddp.buffers, *self.ddp.expert_parallel_buffers]


def _layer_spec() -> Any:
    if torch.cuda.is_available():
        return layer_specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    from megatron_venus.adapters.attention import PackedSdpa

    spec = layer_specs.get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = PackedSdpa
    return spec


def _transformer_config(arch: Architecture, dtype: torch.dtype) -> TransformerConfig:
    on_gpu = torch.cuda.is_available()
    return TransformerConfig(
        num_layers=arch.layers,
        hidden_size=arch.hidden,
        ffn_hidden_size=arch.feed_forward,
        num_attention_heads=arch.heads,
        num_query_groups=arch.kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        add_qkv_bias=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        # The gradient buffers hold plain sums: one division by the batch's tokens at the end, ALL loss terms included.
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=on_gpu,
        masked_softmax_fusion=on_gpu,
        bias_activation_fusion=on_gpu,
        bias_dropout_fusion=on_gpu,
        apply_rope_fusion=on_gpu,
    )
