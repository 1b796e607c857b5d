"""Megatron's model pieces: config, layer specs and the class, the same on CPU and GPU but for the layers' own kernels.

On a GPU the layers are Transformer Engine's (not verified here), without one the local ones with `PackedSdpa` and
`RmsNorm`. Built by the actor.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt import gpt_layer_specs as layer_specs
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from envclient.base.errors import InvariantError
from megatron_venus.architecture import Architecture
from megatron_venus.config import ParallelConfig
from rollout.rope import Rope


class PolicyModel(GPTModel):  # type: ignore[misc]
    """GPT model whose forward pass ends at the last norm; the loss multiplies chosen rows by `output_weight`."""

    def _postprocess(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states

    def rows_of(self, hidden_T1h: Tensor) -> Tensor:
        """[T, 1, h] as the last layer leaves it → [T, h] with all of this process's tokens.

        The vocabulary is split over the tensor-parallel processes: the rows' gradient is summed over them on its way
        back.
        """
        if self.config.sequence_parallel:
            hidden_T1h = gather_from_sequence_parallel_region(hidden_T1h)
        elif self.config.tensor_model_parallel_size > 1:
            hidden_T1h = copy_to_tensor_model_parallel_region(hidden_T1h)
        return hidden_T1h[:, 0]

    def output_weight(self) -> Tensor:
        """[vocabulary, h], or this process's part of the vocabulary."""
        tied = self.share_embeddings_and_output_weights
        weight: Tensor = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        return weight


def build_chunks(arch: Architecture, rope: Rope, config: TransformerConfig) -> list[PolicyModel]:
    """The pieces of the model that this process holds: one, or one per virtual stage."""
    if rope.factor != 1.0:
        _stretch(config, rope)
    virtual = config.virtual_pipeline_model_parallel_size
    if virtual and config.batch_p2p_comm:
        # Megatron 0.16.1 then gives silently wrong numbers between two stages.
        raise InvariantError("virtual stages with batched sends between stages give wrong numbers: never built")
    chunks = []
    for piece in range(virtual or 1):
        vp_stage = piece if virtual else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
        chunk = PolicyModel(
            config=config,
            transformer_layer_spec=_layer_spec(config, vp_stage),
            vocab_size=arch.vocabulary,
            max_sequence_length=rope.positions,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=arch.tied,
            position_embedding_type="rope" if rope.factor == 1.0 else "yarn",
            rotary_base=rope.theta,
            vp_stage=vp_stage,
        )
        chunks.append(chunk)
    return chunks


def _stretch(config: TransformerConfig, rope: Rope) -> None:
    """Tell Megatron of YaRN; it takes these numbers from attributes that its config class does not declare."""
    scaling: dict[str, Any] = {
        "rotary_scaling_factor": rope.factor,
        "original_max_position_embeddings": rope.original_length,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        # Its attention factor is (0.1 · mscale · ln s + 1) / (0.1 · mscale_all_dim · ln s + 1).
        "mscale": (rope.attention_factor - 1.0) / (0.1 * math.log(rope.factor)),
        "mscale_all_dim": 0.0,
        "correction_range_round_to_int": True,
    }
    for name, value in scaling.items():
        setattr(config, f"yarn_{name}", value)
    # Transformer Engine's fused rotary kernel for packed batches knows no attention factor and would leave it out.
    config.apply_rope_fusion = False


def _layer_spec(config: TransformerConfig, vp_stage: int | None) -> Any:
    if torch.cuda.is_available():
        # Experts one by one: their parameters then have the names that `weight_map` and `shards` know.
        return layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True
        )
    from megatron_venus.adapters.attention import PackedSdpa, RmsNorm

    spec = layer_specs.get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RmsNorm
    attention = layer.self_attention.submodules
    attention.q_layernorm = attention.k_layernorm = RmsNorm
    attention.core_attention = PackedSdpa
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=RmsNorm)


def transformer_config(arch: Architecture, dtype: torch.dtype, parallel: ParallelConfig) -> TransformerConfig:
    """Megatron's config of this model in this layout."""
    on_gpu = torch.cuda.is_available()
    interleaved = parallel.virtual_stages > 1
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
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence and parallel.tensor > 1,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_stages if interleaved else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=1,
        # `build_chunks` refuses virtual stages with batched sends.
        overlap_p2p_comm=interleaved,
        batch_p2p_comm=not interleaved,
        batch_p2p_sync=on_gpu,
        # Packed micro-batches differ in length: the stages tell each other.
        variable_seq_lengths=parallel.pipeline > 1,
        moe_token_dispatcher_type="alltoall",
        num_moe_experts=arch.experts or None,
        moe_ffn_hidden_size=arch.expert_feed_forward or None,
        moe_router_topk=arch.experts_per_token or 2,
        # softmax over the chosen experts only, or over all of them before choosing.
        moe_router_pre_softmax=not arch.router_normalised,
        moe_router_dtype="fp32",
        # What the engine samples with is trained as it is: nothing pushes the router towards balance.
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        recompute_granularity="full" if parallel.recompute else None,
        recompute_method="uniform" if parallel.recompute else None,
        recompute_num_layers=1 if parallel.recompute else None,
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
