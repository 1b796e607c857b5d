"""Scripted, imperfect demonstrations over the standard library: what the tiny model is warmed up on.

A demonstration breaks a standard-library function (never a task's) with one mutation and then plays an episode of
random guesses: it views, edits, tests with simulated results, gives up early or goes on, and submits. It teaches the
format and the tools, not how to find the bug; that is left to reinforcement learning. Randomness is passed in.
"""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.agents.dialogue import (
    NOT_FOUND,
    OK,
    Tool,
    call,
    edit_call,
    system_prompt,
    user_prompt,
    verdict,
    view,
)
from examples.tasks.mutants import Site, apply, edit, fits, function_lines, functions, sites, undo

MAX_EDITS = 5
_P_VIEW, _P_TEST, _P_STOP_WHEN_PASSED, _P_GIVE_UP, _P_WRONG_LINE = 0.95, 0.6, 0.7, 0.3, 0.02
_SKIPPED_FOLDERS = ("site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFunction:
    """A function to learn from: its qualified name and stripped lines."""

    qualname: str
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One chat message; `role` as in the chat template."""

    role: str
    content: str


def standard_library() -> list[SourceFunction]:
    """Every function of the standard library of a size the tiny model handles, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[SourceFunction] = []
    for path in sorted([*root.glob("*.py"), *root.glob("[a-z]*/*.py")]):
        if set(path.relative_to(root).parts[:-1]) & set(_SKIPPED_FOLDERS):
            continue
        try:
            source = path.read_text()
            defined = functions(source)
        except (SyntaxError, UnicodeDecodeError):
            continue
        for function in defined:
            if function.last_line - function.first_line > 60:
                continue
            lines = function_lines(source, function)
            if lines and fits(lines):
                found.append(SourceFunction(qualname=function.qualname, lines=tuple(lines)))
    return found


def invented_failure(rng: random.Random, lines: Sequence[str]) -> str:
    """A message as a failing test might print it, made of the function's words and of constants."""
    words = re.findall(r"\w+", " ".join(lines))
    constants: list[object] = [0, 1, 2, 3, 10, True, None, [1, 2], [0], (1, 2), "ab", {}]

    def value() -> str:
        return rng.choice(words) if rng.random() < 0.4 else str(rng.choice(constants))

    return rng.choice(
        [
            f"assert {value()} == {value()}",
            f"Lists differ: {value()} != {value()}",
            f"{value()} != {value()}",
            f"TypeError: {value()} {value()} {value()}",
            f"IndexError: {value()} {value()}",
            "StopIteration",
            f"assert [{value()}, {value()}] == [{value()}]",
            f"AttributeError: {value()} object has no {value()}",
            f"ValueError: {value()}",
            "Timeout",
            f"Tuples differ: ({value()}) != ({value()})",
        ]
    )


def _break(rng: random.Random, lines: Sequence[str]) -> tuple[list[str], Site] | None:
    """A mutant of `lines` and the site that repairs it."""
    for _ in range(20):
        site = rng.choice(sites(lines))
        mutant = apply(lines, site)
        fix = undo(site)
        if edit(mutant[fix.line], fix.old, fix.new) == lines[fix.line]:
            return (mutant, fix) if sites(mutant) else None
    return None


def demonstration(rng: random.Random, function: SourceFunction, tool: Tool = Tool.EDIT) -> list[Message] | None:
    """One demonstration as chat messages, or None where the function has no mutant that can be undone."""
    broken = _break(rng, function.lines)
    if broken is None:
        return None
    mutant, fix = broken
    candidates = sites(mutant)
    failure = invented_failure(rng, mutant)
    test = "test_" + function.qualname.split(".")[-1].strip("_")
    messages = [
        Message(role="system", content=system_prompt(tool)),
        Message(role="user", content=user_prompt(function.qualname, test, failure)),
    ]

    def turn(action: str, observation: str) -> None:
        messages.append(Message(role="assistant", content=action))
        messages.append(Message(role="tool", content=observation))

    if rng.random() < _P_VIEW:
        turn(call("view"), view(tool, mutant, mutant))
    current: Site | None = None
    for _ in range(MAX_EDITS):
        guess = rng.choice(candidates)
        if tool is Tool.EDIT and rng.random() < _P_WRONG_LINE:
            guess = Site(line=(guess.line + 1) % len(mutant), old=guess.old, new=guess.new)
        found = edit(mutant[guess.line], guess.old, guess.new) is not None
        turn(edit_call(tool, mutant, guess), OK if found else NOT_FOUND)
        current = guess if found else current
        if rng.random() < _P_TEST:
            passed = current == fix
            shown = failure if rng.random() < 0.5 else invented_failure(rng, mutant)
            turn(call("test"), verdict(passed, shown))
            if passed and rng.random() < _P_STOP_WHEN_PASSED:
                break
        if rng.random() < _P_GIVE_UP:
            break
    messages.append(Message(role="assistant", content=call("submit")))
    return messages
