"""Messages to tokens and tokens to tool calls: the only place that knows the model's chat template.

A trajectory is token in, token out: the prompt is rendered once, what the engine sampled is kept as it is, and an
observation is exactly what the template puts between an assistant's turn and the next generation prompt. The codec
derives those pieces from the template itself and refuses, when it is built, a template for which the pieces do not add
up to the template's own render of the whole conversation (one that rewrites or strips earlier turns).

Policy where "ids equal the template's render" meets "text from a tool is never a control token": the second wins.
Strings of added tokens (`<|im_end|>`, `<tool_call>`, ...) inside a `tool` or `user` message are encoded as ordinary
text; everywhere else the ids are those of the full render. `system` and `assistant` messages come from the agent's
author and keep their control tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from envclient.base.errors import ConfigError, VenusError
from rollout.types import Record

UNTRUSTED_ROLES = ("user", "tool")
# Private-use characters: no tokenizer has an added token with them, and no template trims them.
_MARK = "\ue0ff{}\ue0fe"
_MARK_PATTERN = re.compile("\ue0ff(\\d+)\ue0fe")
_TURN = "\ue0fdturn\ue0fd"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolCall(Record, frozen=True):
    """One call in the hermes format: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    name: str
    arguments: dict[str, Any]


class ParsedAction(Record, frozen=True):
    """What the generated tokens say."""

    text: str
    """Everything outside of tool calls, thinking included, without the stop token."""
    calls: list[ToolCall]
    """The well-formed calls, in order. Calls inside a thinking block are not calls."""
    error: str = ""
    """Why a call could not be read; empty when all could, also when there is none."""


class ChatCodec:
    """Encoder and decoder of one model's conversations.

    Args:
        tokenizer_path: Hugging Face folder with a fast tokenizer and a chat template.

    Raises:
        ConfigError: no fast tokenizer, no template, or a template that rewrites earlier messages; names the message.
    """

    def __init__(self, tokenizer_path: str) -> None:
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer

        self.tokenizer_path = tokenizer_path
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"tokenizer {tokenizer_path!r} cannot be loaded: {str(error).splitlines()[0]}", "see model.path"
            ) from None
        if not getattr(self._tokenizer, "is_fast", False):
            raise ConfigError(f"tokenizer {tokenizer_path!r} has no tokenizer.json", "a fast tokenizer is needed")
        if not self._tokenizer.chat_template:
            raise ConfigError(f"tokenizer {tokenizer_path!r} has no chat template", "add one to tokenizer_config.json")
        spec = json.loads(self._tokenizer.backend_tokenizer.to_str())
        # Post-processors add tokens and trim offsets; neither belongs into a rendered conversation.
        spec.update(post_processor=None, truncation=None, padding=None)
        self._full = Tokenizer.from_str(json.dumps(spec))
        added = {str(token["content"]): int(token["id"]) for token in spec["added_tokens"]}
        self._added_ids = frozenset(added.values())
        longest_first = sorted(added, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._plain = Tokenizer.from_str(json.dumps(spec | {"added_tokens": []}))
        self._frames: dict[int, str] = {}
        self._check_template()
        stop = self._encode(self._frame(1), [""])[0]
        if stop not in self._added_ids:
            raise ConfigError(
                f"chat template of {tokenizer_path!r}: an assistant turn ends with {self._tokenizer.decode([stop])!r}",
                "a turn must end with one control token, on which generation stops",
            )
        self.stop_token_id: int = stop

    # ------------------------------------------------------------------------------------------------ encoding

    def prompt_ids(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of `messages` (`{"role", "content"}`) with the generation prompt at the end."""
        hidden: list[str] = []

        def hide(match: re.Match[str]) -> str:
            hidden.append(match.group())
            return _MARK.format(len(hidden) - 1)

        safe = [
            message | {"content": self._control.sub(hide, message["content"])}
            if message["role"] in UNTRUSTED_ROLES
            else message
            for message in messages
        ]
        return self._encode(self._render(safe, generate=True), hidden)

    def observation_ids(self, outputs: Sequence[str], ended_with_stop: bool = True) -> list[int]:
        """Ids between a generated turn and the next one: the tool results `outputs`, then the generation prompt.

        `ended_with_stop` says whether the turn's last token was the stop token; if not, it is put here, so that the
        context stays what the template renders.

        Raises:
            VenusError: the template changes a tool's text in a way that depends on the other messages.
        """
        if not outputs:
            raise VenusError("observation_ids: no tool output", "an observation has at least one")
        ids = self._encode(self._frame(len(outputs)), self._as_rendered(outputs))
        return ids[1:] if ended_with_stop else ids

    def _as_rendered(self, outputs: Sequence[str]) -> list[str]:
        """`outputs` as the template writes them (some templates trim), each checked against the joint render."""
        if self._after_turn(list(outputs)) == _fill(self._frame(len(outputs)), outputs):
            return list(outputs)
        before, after = _MARK_PATTERN.split(self._frame(1))[::2]
        rendered = []
        for output in outputs:
            alone = self._after_turn([output])
            if not (alone.startswith(before) and alone.endswith(after)):
                raise VenusError(f"chat template rewrites tool message {output[:40]!r}", "mend the template")
            rendered.append(alone[len(before) : len(alone) - len(after)])
        if self._after_turn(list(outputs)) != _fill(self._frame(len(outputs)), rendered):
            raise VenusError(f"chat template rewrites tool message {outputs[0][:40]!r}", "mend the template")
        return rendered

    def _encode(self, frame: str, texts: Sequence[str]) -> list[int]:
        """Ids of `frame` with its marks filled by `texts`; control tokens come from the frame alone.

        A tokenizer splits at added tokens before it does anything else, so encoding the runs between them apart gives
        the ids of the whole.
        """
        encoding = self._full.encode(frame, add_special_tokens=False)
        ids: list[int] = []
        begin = 0
        for token, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._added_ids:
                ids += self._encode_plain(_fill(frame[begin:first], texts))
                ids.append(token)
                begin = last
        return ids + self._encode_plain(_fill(frame[begin:], texts))

    def _encode_plain(self, text: str) -> list[int]:
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids if text else []
        if self._added_ids.isdisjoint(ids):
            return ids
        # The vocabulary itself can hold a control string (models that look whole words up): go below words.
        return [token for char in text for token in self._plain.encode(char, add_special_tokens=False).ids]

    # ----------------------------------------------------------------------------------------------- rendering

    def _render(self, messages: Sequence[dict[str, str]], *, generate: bool) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=generate
            )
        except Exception as error:
            roles = [message.get("role") for message in messages]
            raise ConfigError(
                f"chat template of {self.tokenizer_path!r} cannot render roles {roles}: {error}", "mend the template"
            ) from None
        return text

    def _after_turn(self, outputs: list[str]) -> str:
        messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _TURN}]
        messages += [{"role": "tool", "content": output} for output in outputs]
        return self._render(messages, generate=True).partition(_TURN)[2]

    def _frame(self, outputs: int) -> str:
        """What follows a turn with `outputs` tool results, their texts replaced by marks."""
        if outputs not in self._frames:
            frame = self._after_turn([_MARK.format(index) for index in range(outputs)])
            if _MARK_PATTERN.findall(frame) != [str(index) for index in range(outputs)]:
                raise ConfigError(
                    f"chat template of {self.tokenizer_path!r} drops or reorders tool messages (message 2)",
                    "every tool result must be rendered once, in order",
                )
            self._frames[outputs] = frame
        return self._frames[outputs]

    def _check_template(self) -> None:
        """Refuse a template whose render of a longer conversation changes what an earlier one rendered."""
        call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
        for turn in ("plain words", call, f"<think>\nso\n</think>\n\n{call}"):
            messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
            context = self._render(messages, generate=True)
            for outputs in (["one"], ["two", "three"], ["four"]):
                messages.append({"role": "assistant", "content": turn})
                messages += [{"role": "tool", "content": output} for output in outputs]
                context += turn + _fill(self._frame(len(outputs)), self._as_rendered(outputs))
                self._compare(context, messages)

    def verify(self, token_ids: Sequence[int], messages: Sequence[dict[str, str]]) -> None:
        """Check that `token_ids` spell the template's render of `messages` with the generation prompt.

        Raises:
            ConfigError: they differ; names the first message that does.
        """
        self._compare(self._tokenizer.decode(list(token_ids), skip_special_tokens=False), messages)

    def _compare(self, context: str, messages: Sequence[dict[str, str]]) -> None:
        whole = self._render(messages, generate=True)
        if context == whole:
            return
        common = next((i for i, (a, b) in enumerate(zip(context, whole, strict=False)) if a != b), None)
        at = min(len(context), len(whole)) if common is None else common
        index, start = 0, 0
        for number, message in enumerate(messages):
            found = whole.find(message["content"], start) if message["content"] else start
            if found > at:
                break
            index, start = number, max(start, found)
        raise ConfigError(
            f"chat template of {self.tokenizer_path!r}: message {index} ({messages[index]['role']}) is rendered as "
            f"{whole[max(0, at - 20) : at + 30]!r} where the episode holds {context[max(0, at - 20) : at + 30]!r}",
            "use a template that never strips or rewrites earlier turns",
        )

    # ------------------------------------------------------------------------------------------------- parsing

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, control tokens included."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def parse(self, token_ids: Sequence[int]) -> ParsedAction:
        """The action that generated `token_ids` encode; malformed calls are told in `error`, never raised."""
        ids = list(token_ids)
        if ids and ids[-1] == self.stop_token_id:
            ids.pop()
        text = self.decode(ids)
        thinking, closed, answer = text.rpartition("</think>")
        calls: list[ToolCall] = []
        errors: list[str] = []
        for body in _CALL.findall(answer):
            call = _call(body)
            if isinstance(call, ToolCall):
                calls.append(call)
            else:
                errors.append(call)
        rest = _CALL.sub("", answer)
        if "<tool_call>" in rest:
            errors.append("a tool call is not closed by </tool_call>")
        return ParsedAction(text=thinking + closed + rest, calls=calls, error="; ".join(errors))


def _fill(frame: str, texts: Sequence[str]) -> str:
    return _MARK_PATTERN.sub(lambda match: texts[int(match.group(1))], frame)


def _call(body: str) -> ToolCall | str:
    """The call in `body`, or why it is none."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        return f"tool call is not JSON: {error}"
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return "tool call has no name"
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return "arguments of the tool call are not an object"
    return ToolCall(name=value["name"], arguments=arguments)
