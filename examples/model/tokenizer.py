"""The tiny model's tokenizer: byte-level BPE of 2,048 tokens, and the chat template it is used with.

Trained on the standard library's functions as view() lists them. The protocol's fixed strings (a whole tool call
without arguments, the frame around an observation) are added tokens, so that a turn is a handful of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from examples.agents.dialogue import Tool, call, listing, system_prompt
from examples.model.demonstrations import SourceFunction

VOCABULARY = 2048
END_OF_TURN = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
CONTROL = [END_OF_TEXT, "<|im_start|>", END_OF_TURN, "<tool_call>", "</tool_call>"]
_OPEN_OBSERVATION = "<|im_start|>user\n<tool_response>\n"
_CLOSE_OBSERVATION = "\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
_PRE_TOKEN = r""" ?(?:\*\*|//=|//|<=|>=|==|!=|->|[-+*/%]=)|\p{N}{1,2}| ?[\p{L}_]+|[\r\n]+[ \t]*| ?[^\s\p{L}\p{N}]|\s+"""

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}
{{- '<|im_start|>user' -}}
{%- endif -%}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' + (message.content or '') -}}
{%- for tool_call in message.tool_calls or [] -%}
{%- set function = tool_call.function or tool_call -%}
{%- if message.content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
{{- function.arguments if function.arguments is string else function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- else -%}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""ChatML with hermes tool calls; consecutive tool results share one user turn, as in Qwen's template."""


def protocol_strings() -> list[str]:
    """The fixed strings of the dialogue that become single tokens, longest context first."""
    frames = [_OPEN_OBSERVATION, _CLOSE_OBSERVATION, "<|im_start|>user\nFix `"]
    frames += [f"<|im_start|>system\n{system_prompt(tool)}<|im_end|>\n" for tool in Tool]
    whole_calls = [call("view"), call("test"), call("submit")]
    edit_parts = [
        '<tool_call>\n{"name": "edit", "arguments": {"old": "',
        '", "new": "',
        '", "nth": ',
        "}}\n</tool_call>",
    ]
    pick_parts = ['<tool_call>\n{"name": "edit", "arguments": {"k": ']
    return whole_calls + frames + edit_parts + pick_parts


def train(corpus: Sequence[SourceFunction]) -> Tokenizer:
    """The BPE of `corpus`. Deterministic: the same corpus gives the same file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PRE_TOKEN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = protocol_strings()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(added),
        special_tokens=CONTROL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((listing(function.lines) for function in corpus), trainer)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in added])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into `folder`."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(str(folder), save_jinja_files=False)
