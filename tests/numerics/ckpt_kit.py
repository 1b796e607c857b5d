"""Megatron's own side of the checkpoint tests: a bare model of any family, loaded by Megatron from a folder.

Run as a module under torchrun it is one tensor-parallel rank: `python -m tests.numerics.ckpt_kit HF CKPT OUT`.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_venus.architecture import Architecture, architecture_in
from megatron_venus.config import ParallelConfig
from tests.numerics import kit
from tests.numerics.resume_kit import SETTINGS, train


def make_model(arch: Architecture, dtype: torch.dtype, *, tensor_parallel: int = 1) -> Any:
    """A GPTModel with the layers that the actor uses on a CPU; its weights are whatever memory held."""
    parallel = ParallelConfig(tensor=tensor_parallel)
    kit.start_megatron(parallel)
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_venus.adapters.model import transformer_config

    base = transformer_config(arch, dtype, parallel)
    settable = [field.name for field in dataclasses.fields(TransformerConfig) if field.init]
    values = {name: getattr(base, name) for name in settable if not name.endswith("init_method")}
    values |= {"add_qkv_bias": arch.qkv_bias, "qk_layernorm": arch.qk_norm}
    if arch.experts:
        values |= {"num_moe_experts": arch.experts, "moe_ffn_hidden_size": arch.expert_feed_forward}
        values |= {"moe_router_topk": arch.experts_per_token, "moe_grouped_gemm": False}
    spec = get_gpt_layer_local_spec(
        num_experts=arch.experts or None, qk_layernorm=arch.qk_norm, normalization="RMSNorm"
    )
    return GPTModel(
        config=TransformerConfig(**values),
        transformer_layer_spec=spec,
        vocab_size=arch.vocabulary,
        max_sequence_length=arch.max_positions,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
    )


def load(model: Any, folder: Path) -> None:
    """Fill the model from the distributed checkpoint in `folder`, through Megatron."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    # ShardedObjects are Transformer Engine's fp8 state: empty here, and not part of a checkpoint of weights.
    wanted = {
        name: value
        for name, value in model.sharded_state_dict(metadata=metadata).items()
        if not isinstance(value, ShardedObject)
    }
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float("nan"))
    model.load_state_dict(dist_checkpointing.load({"model": wanted}, str(folder))["model"], strict=False)


def train_from_both(hf: Path, checkpoint: Path, parallel: ParallelConfig) -> None:
    """An actor that starts from the distributed checkpoint makes the same step as one from HF's files, to the bit."""
    actors = [kit.make_actor(hf, SETTINGS, parallel=parallel, megatron=start) for start in (None, checkpoint)]
    for actor in actors:
        train(actor, 1, 1)
    ours, reference = ([param for chunk in actor.chunks for param in chunk.parameters()] for actor in reversed(actors))
    assert len(ours) > 10
    for param, expected in zip(ours, reference, strict=True):
        assert torch.equal(param, expected)
        assert hasattr(param, "tensor_model_parallel") == hasattr(expected, "tensor_model_parallel")


def rank(hf: Path, checkpoint: Path, out: Path) -> None:
    """Load as one of two tensor-parallel ranks; rank r leaves its parts in OUT.r."""
    from megatron_venus.adapters import cpu

    cpu.install()
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(1)
    model = make_model(architecture_in(hf, "HF"), torch.float32, tensor_parallel=2)
    load(model, checkpoint / "megatron")
    parts = {name: param.detach().clone() for name, param in model.named_parameters()}
    torch.save(parts, out.with_suffix(f".{dist.get_rank()}"))
    train_from_both(hf, checkpoint, ParallelConfig(tensor=2, sequence=True))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank(*map(Path, sys.argv[1:]))
