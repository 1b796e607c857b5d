"""What the plan's tests measure of a real actor: bytes it holds, keeps for backward, and has alive at most.

Run as a module under torchrun it is one process: `python -m tests.numerics.plan_kit FOLDER OUT`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_venus import packing
from megatron_venus.architecture import read_architecture
from megatron_venus.config import ParallelConfig, VenusConfig
from megatron_venus.loss import log_probs
from megatron_venus.packing import PackedBatch
from megatron_venus.plan.memory import StageMemory, Target, memory_plan
from rollout.types import TrainSequence
from tests.numerics import kit
from tests.numerics.live_bytes import LiveBytes, kept_for_backward

TOKENS = 1024
"""Of the one micro-batch, all in one sequence."""
SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 640,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
CHUNK_ROWS = 64
"""Of logits: as in a large run, the loss goes through many chunks."""


def make_model(folder: Path, *, experts: int = 0, **shape: Any) -> Path:
    """Large enough for per-token bytes to be all that matters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    moe = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 320, "norm_topk_prob": True}
    if experts:
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE | moe | shape)).save_pretrained(folder)
    else:
        Qwen3ForCausalLM(Qwen3Config(**SHAPE | shape)).save_pretrained(folder)
    return folder


def planned(folder: Path, parallel: ParallelConfig, dtype: str, *, ranks: int = 1) -> StageMemory:
    """The plan's numbers of the last stage for `batch()` on a CPU."""
    config = VenusConfig()
    config.model.dtype, config.model.context_length = dtype, TOKENS
    config.actor.ranks, config.actor.parallel, config.actor.micro_batch_tokens = ranks, parallel, TOKENS
    target = Target(kind="host", capacity=1 << 40, source="test")
    return memory_plan(config, read_architecture(folder), target).stages[-1]


def batch(vocabulary: int) -> PackedBatch:
    """One micro-batch of TOKENS tokens, all of them in the loss."""
    random = torch.Generator().manual_seed(0)
    sequence = TrainSequence(
        trajectory_id="t",
        prompt_ids=[1],
        response_ids=torch.randint(0, vocabulary, (TOKENS,), generator=random).tolist(),
        loss_mask=[1] * TOKENS,
        logprobs=[-1.0] * TOKENS,
        reward=1.0,
        advantage=1.0,
        spans=[],
    )
    [packed] = packing.pack([sequence], TOKENS)
    return packed


def measure_states(actor: Any) -> dict[str, int]:
    """Bytes of weights, gradient buffers and optimizer state after a step."""
    actor.reduce_gradient(1)
    actor.optimizer.step()
    return {
        "weights": sum(_bytes(param) for chunk in actor.chunks for param in chunk.parameters()),
        "gradients": sum(_bytes(buffer.grad_data) for buffer in actor.buffers()),
        "optimizer": sum(_bytes(tensor) for tensor in _optimizer_tensors(actor)),
    }


def measure_activations(actor: Any) -> dict[str, int]:
    """Bytes kept by the forward pass, alive at most in a forward-backward pass, and alive at most in its loss: from the
    last norm's forward pass to the end of its backward pass."""
    packed = batch(actor.arch.vocabulary)
    part = actor._slice(packed)

    def forward() -> Tensor:
        return actor._wrapped[0](part.input_ids_t[None], part.position_ids_t[None], None, packed_seq_params=part.params)

    kept = kept_for_backward(forward, list(actor.chunks[0].parameters()))
    stream = kit.make_stream(actor, micro_batch_tokens=TOKENS)
    before, in_loss = 0, 0

    def begin(norm: Any, inputs: tuple[Tensor, ...]) -> None:
        nonlocal before
        before, live.peak = live.peak, live.now
        inputs[0].register_hook(end)

    def end(grad: Tensor) -> None:
        nonlocal in_loss
        in_loss = live.peak

    hook = actor.chunks[-1].decoder.final_layernorm.register_forward_pre_hook(begin)
    # What `index_select` does in place in its backward pass it does out of place where something is watching.
    with LiveBytes(lambda operation: operation != "aten.index_add.default") as live:
        stream._run([packed])
    hook.remove()
    return {"kept": kept, "peak": max(before, live.peak), "loss": in_loss}


def _optimizer_tensors(actor: Any) -> Iterator[Tensor]:
    """Master weights (where they are not the weights themselves) and both moments, of this process."""
    seen = {param.untyped_storage()._cdata for chunk in actor.chunks for param in chunk.parameters()}
    for optimizer in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer]):
        for param, state in optimizer.optimizer.state.items():
            yield from (value for value in state.values() if isinstance(value, Tensor))
            if param.untyped_storage()._cdata not in seen:
                yield param


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def process(folder: Path, out: Path) -> None:
    log_probs.CHUNK_LOGITS = CHUNK_ROWS * SHAPE["vocab_size"]
    parallel = ParallelConfig(tensor=2, sequence=True, recompute=True)
    actor = kit.make_actor(folder, dtype="bfloat16", parallel=parallel)
    measured = measure_activations(actor) | measure_states(actor)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, measured)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(parts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    process(Path(sys.argv[1]), Path(sys.argv[2]))
