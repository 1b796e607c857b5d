"""Mutants: every edit can be found again, told in words, and taken back."""

from __future__ import annotations

import ast
import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.agents.dialogue import Tool, edit_call
from examples.model.demonstrations import SourceFunction, demonstration, standard_library
from examples.tasks import mutants
from examples.tasks.mutants import Site


@functools.cache
def corpus() -> list[SourceFunction]:
    return standard_library()


@st.composite
def sited_functions(draw: st.DrawFn) -> tuple[list[str], Site]:
    function = draw(st.sampled_from(corpus()))
    return list(function.lines), draw(st.sampled_from(mutants.sites(function.lines)))


@given(sited_functions())
def test_a_reversible_mutant_differs_in_one_line_and_its_undo_restores_the_function(
    case: tuple[list[str], Site],
) -> None:
    lines, site = case
    mutant = mutants.apply(lines, site)
    assert [index for index, line in enumerate(mutant) if line != lines[index]] == [site.line]
    if mutants.reversible(lines, site):
        assert mutants.undo(site) in mutants.sites(mutant)
        assert mutants.apply(mutant, mutants.undo(site)) == lines


@given(sited_functions())
def test_telling_an_edit_by_old_new_nth_makes_the_same_edit(case: tuple[list[str], Site]) -> None:
    lines, site = case
    nth = mutants.nth_of(lines, site.line, site.old)
    assert mutants.edit_nth(lines, site.old, site.new, nth) == mutants.apply(lines, site)
    assert mutants.edit_nth(lines, site.old, site.new, 10_000) is None


@given(st.text(max_size=60))
def test_tokens_are_disjoint_pieces_of_the_line(line: str) -> None:
    end = 0
    for token, start, stop in mutants.tokens(line):
        assert end <= start < stop and line[start:stop] == token
        end = stop


@given(
    st.sampled_from(["x", "'a < b'", "-1", "a+b", "not in", "if not y", "<="]),
    st.sampled_from(sorted(mutants.ALTERNATIVES)),
)
def test_edit_touches_whole_tokens_only(line: str, old: str) -> None:
    assert (mutants.edit(line, old, "@") is not None) == (old in [token for token, _, _ in mutants.tokens(line)])


def test_operators_inside_strings_are_no_sites() -> None:
    assert mutants.sites(["def f(a):", "    return a == 'x < y and 1'"]) == [Site(line=1, old="==", new="!=")]


def test_stripping_keeps_the_program_and_drops_the_prose() -> None:
    source = '@wrap\ndef f(a):\n    """Doc\n    string."""\n\n    # why\n    if a:\n        return 1\n    return 2\n'
    (function,) = mutants.functions(source)
    assert (function.first_line, function.last_line) == (1, 9)
    lines = mutants.function_lines(source, function)
    assert lines == ["def f(a):", "    if a:", "        return 1", "    return 2"]
    ast.parse("\n".join(lines))


def test_a_site_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="line 5"):
        mutants.apply(["def f():", "    return 1"], Site(line=5, old="1", new="2"))


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from(list(Tool)))
def test_demonstrations_follow_the_dialogue_and_end_submitted(seed: int, tool: Tool) -> None:
    rng = random.Random(seed)
    messages = demonstration(rng, rng.choice(corpus()), tool)
    if messages is None:
        return
    assert [message.role for message in messages[:2]] == ["system", "user"]
    assert messages[-1].content == '<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call>'
    assert {message.role for message in messages[2::2]} == {"assistant"} and len(messages) % 2 == 1


def test_both_forms_of_the_edit_call() -> None:
    lines = ["def f(a, b):", "    if a < b:", "        return a + 1"]
    site = Site(line=2, old="+", new="-")
    assert '{"old": "+", "new": "-", "nth": 1}' in edit_call(Tool.EDIT, lines, site)
    assert mutants.sites(lines)[int(edit_call(Tool.PICK, lines, site).split('"k": ')[1].split("}")[0]) - 1] == site
