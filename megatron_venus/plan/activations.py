"""Bytes of activations on one actor process while a micro-batch goes forward and backward.

Counted as Korthikanti et al. do (arXiv 2205.05198, §4), tensor by tensor, but of what our layers keep: RMSNorm, grouped
queries with normalised heads, SwiGLU, no dropout. Symbols: h hidden, q and k the widths of all query and all key heads,
f feed-forward; matrices' outputs are cut by tensor parallelism, the rest by it only with sequence parallelism.

Two sets of kernels: `fused` (Transformer Engine, on GPUs) and the local ones on a CPU, which keep more: normalised
inputs, float32 copies in half precision, the gate's SiLU, tables of the rotary embedding. The local ones are measured
by the tests; the fused ones are the same list without these extras and have not been measured on a GPU. Not counted:
masks and gathered keys of the CPU's context parallelism. Experts are taken as evenly loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_venus.architecture import Architecture
from megatron_venus.config import CHUNK_LOGITS, ParallelConfig

INPUT_BYTES = 64
"""A token's ids, position, loss row, target, log-probs, advantage and sequence number: eight bytes each at most."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """What decides how many bytes the same activation takes."""

    fused: bool
    size: int
    """Bytes of an activation: 2 (bfloat16) or 4 (float32)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerBytes:
    """Of one layer and one micro-batch."""

    input: float
    """The layer's input: all that is kept under recompute."""
    kept: float
    """What autograd keeps of a forward pass without recompute."""
    kept_input: float
    """The part of `kept` that is the layer's input itself."""
    beside: float
    """Besides `kept`, at the worst moment of the layer's backward pass."""

    @property
    def again(self) -> float:
        """Besides the inputs of all layers, while this one is computed again and goes backward: its output, too."""
        return self.kept - self.kept_input + self.beside + self.input


def layer_bytes(arch: Architecture, parallel: ParallelConfig, kernels: Kernels, tokens: int) -> LayerBytes:
    """`tokens` are those of one context-parallel process."""
    size, local = kernels.size, not kernels.fused
    tensor = parallel.tensor
    sequence = tensor if parallel.sequence else 1
    # Widths per token.
    hidden = arch.hidden / sequence
    query, key = arch.heads * arch.head_dim / tensor, arch.kv_heads * arch.head_dim / tensor
    # torch's local norm keeps a float32 copy of its input unless that is float32, and the normalised input.
    norm_extra = (8 if size == 2 else 4) if local else 0
    kept_input = 0.0 if local and size == 2 else size * hidden

    norm = kept_input + (norm_extra + size) * hidden + 4 / sequence
    qkv = size * (query + 2 * key)
    head_norms = 0.0
    if arch.qk_norm:
        head_norms = norm_extra * (query + key) + 4 * (arch.heads + arch.kv_heads) / tensor
        # Float32 queries are copied out of the fused matrix's output; keys and values stay in it.
        head_norms += size * query if local and size == 4 else 0
    tables = 4 * size * arch.head_dim if local else 0
    attention = size * (query + key) + tables + (2 if local else 1) * size * query + 4 * arch.heads / tensor
    mlp, mlp_beside = (_experts if arch.experts else _mlp)(arch, parallel, kernels, tokens)
    kept = 2 * norm + qkv + head_norms + attention
    # Backward of attention: gradients of its output, of queries, keys and values, and of the fused matrix's output.
    attention_beside = size * query + 2 * qkv
    if parallel.context > 1:
        # Ring attention holds an output a round, two pairs of keys and values on the way, and sums in float32.
        attention_beside += size * (parallel.context * query + 4 * key) + 4 * (query + 2 * key)
    return LayerBytes(
        input=size * hidden * tokens,
        kept=kept * tokens + mlp,
        kept_input=kept_input * tokens,
        # With the gradient that came in.
        beside=max(mlp_beside, attention_beside * tokens - mlp) + size * hidden * tokens,
    )


def _experts(arch: Architecture, parallel: ParallelConfig, kernels: Kernels, tokens: int) -> tuple[float, float]:
    """As `_mlp`, where the feed-forward part is experts: each token's rows go to `experts_per_token` of them."""
    size, sequence = kernels.size, parallel.tensor if parallel.sequence else 1
    rows = arch.experts_per_token * tokens / sequence
    permuted, act = size * arch.hidden * rows, size * arch.expert_feed_forward * rows
    router = (20 * arch.experts_per_token + 5 * arch.experts) * tokens / sequence
    # The local kernels keep SwiGLU's output before and after the router's weight.
    kept = router + permuted + (3 if kernels.fused else 6) * act
    return kept, 2 * (permuted + act + size * arch.hidden * arch.expert_feed_forward)


def _mlp(arch: Architecture, parallel: ParallelConfig, kernels: Kernels, tokens: int) -> tuple[float, float]:
    """Bytes that the feed-forward part keeps, and those beside all that is kept while it goes backward."""
    size, widths = kernels.size, 3 if kernels.fused else 5
    whole = size * arch.hidden * tokens
    act = size * arch.feed_forward / parallel.tensor * tokens
    weight = size * arch.hidden * arch.feed_forward / parallel.tensor
    kept = widths * act
    gathered = whole if parallel.sequence else 0.0
    worst = max(
        # Backward of the second matrix: the gathered gradient, those of its input and of its weight.
        gathered + act + weight,
        # Of SwiGLU: its input's gradient; its output is gone.
        2 * act,
        # Of the first matrix: its gathered input, the gradients of that and of its weight; all the rest is gone.
        2 * act - kept + gathered + whole + 2 * weight,
    )
    return kept, worst


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBytes:
    """Of one process of a pipeline stage, at its worst; bytes. The last two are the last stage's only."""

    kept: int
    """Of all micro-batches in flight, until their backward passes."""
    layer: int
    """Besides, while one layer goes backward (and, with recompute, forward again)."""
    rows: int
    """Besides, in the loss: what the last norm keeps, the selected rows of its output and their gradient."""
    logits: int
    """Besides, in the loss: one chunk of logits. The output matrix's gradient is summed where it stays."""


def stage_bytes(
    arch: Architecture, parallel: ParallelConfig, kernels: Kernels, *, stage: int, tokens: int
) -> StageBytes:
    """`tokens`: of a micro-batch, before context parallelism cuts it."""
    size, here = kernels.size, -(-tokens // parallel.context)
    layer = layer_bytes(arch, parallel, kernels, here)
    layers, last = arch.layers // parallel.pipeline, stage == parallel.pipeline - 1
    kept = layers * (layer.input if parallel.recompute else layer.kept)
    # Between stages the output stays until its gradient comes back.
    kept += 0 if last else layer.input
    kept += (INPUT_BYTES + 4 * arch.head_dim) * here
    rows = logits = 0.0
    if last:
        hidden = arch.hidden / (parallel.tensor if parallel.sequence else 1) * here
        # Logits, shifted (in place in float32) and exponentiated ones.
        logits = min(CHUNK_LOGITS, here * arch.vocabulary // parallel.tensor) * (8 if size == 4 else 10)
        # Rows and gradient, each first gathered over sequence parallelism and then selected, or first spread and then
        # scattered: two at a time.
        rows = 2 * size * arch.hidden * here
        if kernels.fused:
            rows += size * hidden
        else:
            # The norm keeps its input in float32, and normalised; its backward pass, when the logits are gone, has six
            # float32 tensors of that size at once.
            rows = max(8 * hidden + rows, 24 * hidden - logits)
    return StageBytes(
        kept=int(in_flight(parallel, stage) * kept),
        layer=int(layer.again if parallel.recompute else layer.beside),
        rows=int(rows),
        logits=int(logits),
    )


def in_flight(parallel: ParallelConfig, stage: int) -> float:
    """Micro-batches whose activations a stage holds at most, in units of all its layers (Megatron's 1F1B schedules)."""
    behind = parallel.pipeline - stage - 1
    if parallel.virtual_stages == 1:
        return behind + 1
    pieces = 2 * behind + (parallel.virtual_stages - 1) * parallel.pipeline + 1
    return pieces / parallel.virtual_stages
