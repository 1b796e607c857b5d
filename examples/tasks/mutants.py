"""Single-token mutants: where a function can be broken, and the edit that breaks or repairs it.

Pure functions over a function's source lines without docstrings, comments and blank lines (`strip_doc`). `build` breaks
library functions with them, the repair agent's `edit` tool repairs with them, and the warm-up demonstrations do both.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALTERNATIVES: dict[str, tuple[str, ...]] = {
    "<": ("<=", ">"),
    "<=": ("<", ">="),
    ">": (">=", "<"),
    ">=": (">", "<="),
    "==": ("!=",),
    "!=": ("==",),
    "+": ("-",),
    "-": ("+",),
    "*": ("+",),
    "//": ("%",),
    "%": ("//",),
    "+=": ("-=",),
    "-=": ("+=",),
    "and": ("or",),
    "or": ("and",),
    "is not": ("is",),
    "is": ("is not",),
    "not in": ("in",),
    "in": ("not in",),
    "True": ("False",),
    "False": ("True",),
    "0": ("1",),
    "1": ("0", "2"),
    "2": ("1", "3"),
    "3": ("2",),
    "break": ("continue",),
    "continue": ("break",),
    "any": ("all",),
    "all": ("any",),
    "min": ("max",),
    "max": ("min",),
    "None": ("True",),
    "if not": ("if",),
    "if": ("if not",),
    "pop": ("popleft",),
    "popleft": ("pop",),
    "append": ("appendleft",),
    "appendleft": ("append",),
}
"""The operator table: whole token → what may stand in its place."""

_TOKEN = re.compile(
    r"""(?:[rbfu]*'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")"""
    r"""|\bis not\b|\bnot in\b|\bif not\b|\w+|//=|\*\*|//|<=|>=|==|!=|->|[-+*/%]=|[^\w\s]"""
)
_CONSTANTS = ("True", "False", "0", "1", "None")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One possible change: the first whole token `old` of line `line` (from 0) becomes `new`."""

    line: int
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    """A function or method of a source file; lines count from 1, decorators included."""

    qualname: str
    first_line: int
    last_line: int


def tokens(line: str) -> Iterator[tuple[str, int, int]]:
    """The whole tokens of `line` with their start and end column; a string literal is one token."""
    for match in _TOKEN.finditer(line):
        yield match.group(), match.start(), match.end()


def edit(line: str, old: str, new: str) -> str | None:
    """`line` with its first whole token `old` replaced by `new`; None if it has none."""
    for token, start, end in tokens(line):
        if token == old:
            return line[:start] + new + line[end:]
    return None


def edit_nth(lines: Sequence[str], old: str, new: str, nth: int) -> list[str] | None:
    """`lines` with their `nth` (from 1) whole token `old` replaced by `new`; None if there are fewer."""
    for index, line in enumerate(lines):
        for token, start, end in tokens(line):
            if token == old:
                nth -= 1
                if nth == 0:
                    return [*lines[:index], line[:start] + new + line[end:], *lines[index + 1 :]]
    return None


def nth_of(lines: Sequence[str], line: int, old: str) -> int:
    """Which occurrence in the function the first `old` of line `line` is, from 1."""
    return 1 + sum(token == old for before in lines[:line] for token, _, _ in tokens(before))


def apply(lines: Sequence[str], site: Site) -> list[str]:
    """`lines` after the change at `site`.

    Raises:
        ValueError: the site's line has no such token.
    """
    changed = edit(lines[site.line], site.old, site.new) if 0 <= site.line < len(lines) else None
    if changed is None:
        raise ValueError(f"line {site.line} has no token {site.old!r}")
    return [*lines[: site.line], changed, *lines[site.line + 1 :]]


def undo(site: Site) -> Site:
    """The change that takes `site`'s change back (if `reversible`)."""
    return Site(line=site.line, old=site.new, new=site.old)


def _allowed(line: str, token: str, start: int) -> bool:
    """Whether changing `token` at column `start` is likely to stay a program that means something."""
    stripped, before = line.lstrip(), line[:start]
    if token == "in" and re.search(r"\bfor\b", line):
        return False
    if token == "if" and not stripped.startswith(("if ", "elif ")):
        return False
    if token in "-+*" and stripped.startswith(("def", "@")):
        return False
    if token in ("*", "-") and re.search(r"[(,=]\s*\*?$", before):
        return False
    if stripped.startswith(("def ", "@", "from ", "import ")) and token not in _CONSTANTS:
        return False
    return not (token == "*" and before.rstrip().endswith("*"))


def sites(lines: Sequence[str]) -> list[Site]:
    """Every single-token change that the operator table allows in a function, in reading order."""
    found: list[Site] = []
    for index, line in enumerate(lines):
        seen: set[str] = set()
        for token, start, _ in tokens(line):
            if token not in ALTERNATIVES or token in seen:
                continue
            seen.add(token)
            if _allowed(line, token, start):
                found += [Site(line=index, old=token, new=new) for new in ALTERNATIVES[token]]
    return found


def reversible(lines: Sequence[str], site: Site) -> bool:
    """Whether the mutant at `site` can be repaired by one edit that `sites` of the mutant lists."""
    mutant = apply(lines, site)
    back = undo(site)
    return edit(mutant[site.line], back.old, back.new) == lines[site.line] and back in sites(mutant)


def strip_doc(source_lines: Sequence[str]) -> list[str] | None:
    """A function's lines, dedented, without decorators, docstrings, comments and blank lines.

    `source_lines` is the function as it stands in its file. None if it does not parse on its own.
    """
    text = "".join(source_lines)
    indent = len(text) - len(text.lstrip(" "))
    dedented = "".join(
        "\n" if not line.strip() else line[indent:] if not line[:indent].strip() else line for line in source_lines
    )
    try:
        tree = ast.parse(dedented)
    except SyntaxError:
        return None
    dropped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                dropped |= set(range(first.lineno - 1, first.end_lineno or first.lineno))
    lines = [
        line.rstrip("\n")[indent:]
        for index, line in enumerate(source_lines)
        if index not in dropped and line.strip() and not line.lstrip().startswith("#")
    ]
    while lines and lines[0].startswith("@"):
        lines = lines[1:]
    return lines


def functions(source: str) -> list[Function]:
    """The top-level functions and the methods of a source file, in order.

    Raises:
        SyntaxError: the file is not Python.
    """
    found: list[Function] = []

    def walk(body: Sequence[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                found.append(
                    Function(qualname=prefix + node.name, first_line=first, last_line=node.end_lineno or node.lineno)
                )
            elif isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")

    walk(ast.parse(source).body, "")
    return found


def function_lines(source: str, function: Function) -> list[str] | None:
    """The stripped lines (`strip_doc`) of `function` in the text of its file."""
    lines = source.split("\n")[function.first_line - 1 : function.last_line]
    return strip_doc([f"{line}\n" for line in lines])


def fits(lines: Sequence[str], max_lines: int = 12, max_columns: int = 76, min_sites: int = 3) -> bool:
    """Whether a function is of the size that the tiny model is asked to repair."""
    return 3 <= len(lines) <= max_lines and max(map(len, lines)) <= max_columns and len(sites(lines)) >= min_sites
