"""The answer as one HTML file that needs nothing else: text, tables, and the plots inside it as base64."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from pathlib import Path

from envclient.base.configs import to_yaml
from envclient.base.files import write_atomic
from rollout.sim.plan.answer import Answer
from rollout.sim.plan.plots import plot
from rollout.sim.plan.report import bottleneck, headline, money, notes, table

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0 }
td, th { padding: .2rem .7rem; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left }
pre { background: #f6f6f6; padding: .7rem; overflow-x: auto }
img { max-width: 100% }
"""


def write(found: Answer, folder: Path) -> list[Path]:
    """Write the plots as PNG files and `plan.html` with all of them inside; returns the paths."""
    plots = plot(found, folder)
    page = folder / "plan.html"
    write_atomic(page, html(found, plots))
    return [*plots, page]


def html(found: Answer, plots: Sequence[Path]) -> str:
    pictures = {path.stem: _picture(path) for path in plots}
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>VenusRL plan</title>',
        f"<style>{_STYLE}</style></head><body>",
        "<h1>Plan</h1>",
        _lines(headline(found)),
        "<h2>What binds it</h2>",
        _lines(bottleneck(found)),
        pictures["bottleneck"],
        "<h2>Runners-up</h2>",
        _table(table(found)),
        "<h2>The split of the GPUs</h2>",
        pictures["split"],
        "<h2>Settings</h2>",
        pictures["settings"],
        "<h2>What the next euro buys</h2>",
        _table(money(found)),
        pictures["money"],
        "<h2>How this was found</h2>",
        *(f"<p>{escape(line)}</p>" for line in notes(found)),
        f"<details><summary>the whole question</summary><pre>{escape(to_yaml(found.config))}</pre></details>",
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode("ascii")
    return f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{data}">'


def _lines(lines: Sequence[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    cells = ["<tr>" + "".join(f"<th>{escape(cell)}</th>" for cell in head) + "</tr>"]
    cells += ["<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body]
    return "<table>" + "\n".join(cells) + "</table>"
