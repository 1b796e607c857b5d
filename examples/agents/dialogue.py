"""What the repair agent and its model say to each other, word for word.

Pure text, used by three parties that must agree: the warm-up demonstrations that teach the tiny model the format, the
tokenizer (the fixed strings become single tokens), and the agent that plays episodes. Rendering into tokens is the
chat template's and `rollout.worker.chat.ChatCodec`'s work; this file only knows messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from enum import Enum
from typing import Any

from examples.tasks.mutants import Site, nth_of, sites


class Tool(str, Enum):
    """How the agent repairs: the two variants of the edit tool."""

    EDIT = "edit"
    """edit(old, new, nth): the nth whole token `old` of the function becomes `new`."""
    PICK = "pick"
    """edit(k): the k-th of the candidate edits that view() lists. Easier."""


SIGNATURES = {Tool.EDIT: "edit(old, new, nth)", Tool.PICK: "edit(k)"}
OK, NOT_FOUND, BAD_CALL, PASS = "ok", "not found", "bad call", "PASS"
MESSAGE_CHARACTERS = 60
"""Characters of a failure's message that are shown."""

_ADDRESS = re.compile(r"0x[0-9a-f]+", re.I)
_ASSERTION = re.compile(r"^assert\w*Error: ", re.I)


def system_prompt(tool: Tool) -> str:
    """The system message."""
    return f"Fix the bug. Tools: view(), {SIGNATURES[tool]}, test(), submit()."


def user_prompt(qualname: str, test: str, message: str) -> str:
    """The user message: which function, and how one of its tests fails."""
    return f"Fix `{qualname}`. {test}: {shorten(message)}"


def shorten(message: str) -> str:
    """A failure's message as it is shown: no addresses, no `AssertionError:`, one line, bounded."""
    first_line = message.split("\n", 1)[0]
    return _ADDRESS.sub("0x", _ASSERTION.sub("", first_line))[:MESSAGE_CHARACTERS]


def call(name: str, arguments: dict[str, Any] | None = None) -> str:
    """A tool call as the assistant writes it (hermes format)."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments or {})}}}\n</tool_call>'


def edit_call(tool: Tool, original: Sequence[str], site: Site) -> str:
    """The call that makes the change at `site` of the buggy function `original`."""
    if tool is Tool.PICK:
        return call("edit", {"k": sites(original).index(site) + 1})
    return call("edit", {"old": site.old, "new": site.new, "nth": nth_of(original, site.line, site.old)})


def listing(lines: Sequence[str]) -> str:
    """Numbered source lines."""
    return "\n".join(f"{number} {line}" for number, line in enumerate(lines, 1))


def view(tool: Tool, current: Sequence[str], original: Sequence[str]) -> str:
    """What view() shows: the function as it stands; for `pick` also the candidate edits of the buggy original."""
    if tool is Tool.EDIT:
        return listing(current)
    candidates = (f"{k}: {site.line + 1} {site.old} -> {site.new}" for k, site in enumerate(sites(original), 1))
    return "\n".join([listing(current), "edits:", *candidates])


def verdict(ok: bool, message: str) -> str:
    """What test() shows."""
    return PASS if ok else f"FAIL {shorten(message)}"
