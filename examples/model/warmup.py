"""Warm-up: a tiny Qwen3 learns the dialogue's format from scripted demonstrations, before reinforcement learning.

The budget is counted in steps, and every choice is seeded, so that the same command makes the same model again (up to
the order of floating-point sums of another machine). The recipe is frozen: it was fixed before any RL result.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from examples.agents.dialogue import Tool
from examples.model.demonstrations import SourceFunction, demonstration

_ASSISTANT_TURN = re.compile(r"<\|im_start\|>assistant\n(.*?<\|im_end\|>)", re.S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides what the warmed-up model is."""

    seed: int = 1
    tool: Tool = Tool.EDIT
    steps: int = 1800
    learning_rate: float = 5e-3
    rising_steps: int = 30
    """Linear rise of the learning rate."""
    falling_share: float = 0.5
    """Share of the steps over which it falls linearly to `final_share` of its height."""
    final_share: float = 0.02
    demonstrations: int = 16
    """Per step, in two halves by length."""
    max_tokens: int = 512
    observation_weight: float = 0.2
    """Loss weight of tokens that the assistant does not write; they teach the model to read code."""
    observation_share: float = 0.3
    """Share of those tokens that is scored, at random, to save time."""
    shape: dict[str, int] = field(
        default_factory=lambda: {
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "max_position_embeddings": 2048,
        }
    )

    def learning_rate_at(self, step: int) -> float:
        """Of step `step` (from 0)."""
        left = (1 - step / self.steps) / self.falling_share
        return self.learning_rate * min(1.0, (step + 1) / self.rising_steps) * min(1.0, max(self.final_share, left))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How the warm-up is going: mean losses (nats a token) since the last report."""

    step: int
    tokens: int
    assistant_loss: float
    observation_loss: float


def fresh_model(recipe: Recipe, vocabulary: int, end_of_turn: int, padding: int) -> Qwen3ForCausalLM:
    """A randomly initialised model of the recipe's shape, fp32, tied embeddings.

    Matrices are drawn with std 0.7 / sqrt(hidden), those that write into the residual stream with half of it.
    """
    config = Qwen3Config(
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        attention_bias=False,
        eos_token_id=end_of_turn,
        pad_token_id=padding,
        bos_token_id=None,
        dtype="float32",
        **recipe.shape,
    )
    torch.manual_seed(recipe.seed)
    model = Qwen3ForCausalLM(config).float()
    scale = 0.7 * config.hidden_size**-0.5
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            residual = "o_proj" in name or "down_proj" in name
            std = 0.02 if "embed" in name else scale * (0.5 if residual else 1.0)
            torch.nn.init.normal_(parameter, std=std)
    return model


def weighted_tokens(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], observation_weight: float
) -> tuple[list[int], list[float]]:
    """Token ids of the rendered conversation, and each one's loss weight: 1 where the assistant writes."""
    text = tokenizer.apply_chat_template(list(messages), tokenize=False)
    encoded = tokenizer(text, return_offsets_mapping=True, add_special_tokens=False)
    turns = [match.span(1) for match in _ASSISTANT_TURN.finditer(text)]
    weights = [
        1.0 if any(start <= begin < end for start, end in turns) else observation_weight
        for begin, _ in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], weights


def _batches(
    recipe: Recipe, rng: random.Random, corpus: Sequence[SourceFunction], tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """One step's two micro-batches of similar length: ids and weights, both [demonstrations / 2, longest]."""
    rows: list[tuple[list[int], list[float]]] = []
    while len(rows) < recipe.demonstrations:
        messages = demonstration(rng, rng.choice(corpus), recipe.tool)
        if messages is None:
            continue
        chat = [{"role": message.role, "content": message.content} for message in messages]
        ids, weights = weighted_tokens(tokenizer, chat, recipe.observation_weight)
        rows.append((ids[: recipe.max_tokens], weights[: recipe.max_tokens]))
    rows.sort(key=lambda row: len(row[0]))
    half = recipe.demonstrations // 2
    for part in (rows[:half], rows[half:]):
        longest = max(len(ids) for ids, _ in part)
        yield (
            torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in part]),
            torch.tensor([weights + [0.0] * (longest - len(weights)) for _, weights in part]),
        )


def warm_up(
    recipe: Recipe,
    corpus: Sequence[SourceFunction],
    tokenizer: PreTrainedTokenizerBase,
    report: Callable[[Progress], None],
    report_every: int = 50,
) -> Qwen3ForCausalLM:
    """Train a fresh model by the recipe; `report` hears every `report_every` steps."""
    model = fresh_model(recipe, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01)
    torch.manual_seed(recipe.seed)
    rng = random.Random(recipe.seed)
    tokens = 0
    sums = torch.zeros(4, dtype=torch.float64)
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        optimizer.zero_grad()
        for ids, weights in _batches(recipe, rng, corpus, tokenizer):
            targets, weights = ids[:, 1:], weights[:, 1:]
            assistant = weights == 1
            scored = assistant | ((weights > 0) & (torch.rand(weights.shape) < recipe.observation_share))
            hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            loss_of = F.cross_entropy(model.lm_head(hidden[scored]), targets[scored], reduction="none")
            weight_of, spoken = weights[scored], assistant[scored]
            ((loss_of * weight_of).sum() / weight_of.sum() / 2).backward()
            tokens += int((weights > 0).sum())
            losses = loss_of.detach().double()
            sums += torch.stack([losses[spoken].sum(), spoken.sum(), losses[~spoken].sum(), (~spoken).sum()])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % report_every == 0 or step + 1 == recipe.steps:
            said, said_n, seen, seen_n = sums.tolist()
            report(
                Progress(
                    step=step + 1,
                    tokens=tokens,
                    assistant_loss=said / max(1, said_n),
                    observation_loss=seen / max(1, seen_n),
                )
            )
            sums.zero_()
    return model.eval()
