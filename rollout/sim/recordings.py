"""Recorded trajectories and the workload that draws them: the shipped coding sessions, and a run of one's own."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path

from envclient.base.errors import ConfigError
from envclient.base.files import read_jsonl
from rollout.sim.config import WorkloadConfig
from rollout.sim.workload import Dice, Script, bounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A recorded trajectory: token counts by turn."""

    prompt_tokens: int
    outputs: list[int]
    appended: list[int]
    tools_s: list[float] | None = None
    """None: drawn from the tool mix."""


class RecordedWorkload:
    """Draws recorded trajectories.

    Members of a group are neighbours by length: `correlation` 1 gives all of them the same one, 0 independent ones.
    They begin with one and the same prompt: that of the recording in their middle.
    """

    def __init__(self, dice: Dice, records: list[Recorded]) -> None:
        self._dice = dice
        self._records = sorted(records, key=lambda r: (len(r.outputs), sum(r.outputs)))

    def script(self, prompt: int, member: int, attempt: int) -> Script:
        c = self._dice.config
        rng = self._dice.of(0, prompt, member, attempt)
        shared = math.sqrt(c.correlation) * self._dice.of(1, prompt).standard_normal()
        prompt_tokens = self._at(shared).prompt_tokens
        record = self._at(shared + math.sqrt(1.0 - c.correlation) * rng.standard_normal())
        outputs = record.outputs[: c.max_turns]
        outputs, truncated = bounded(prompt_tokens, outputs, record.appended, c.context_limit)
        drawn = self._dice.tools_s(rng, len(outputs))
        fails, stuck = self._dice.accident(rng, len(outputs))
        return Script(
            prompt_tokens=prompt_tokens,
            outputs=outputs,
            appended=record.appended[: len(outputs)],
            tools_s=drawn if record.tools_s is None else [s * c.scale_tools for s in record.tools_s[: len(outputs)]],
            reward=self._dice.reward(rng, prompt),
            truncated=truncated,
            fails_after=fails,
            stuck_after=stuck,
        )

    def _at(self, z: float) -> Recorded:
        """The recording whose length has this place in a normal distribution."""
        rank = 0.5 * (1.0 + math.erf(z / math.sqrt(2.0)))
        return self._records[min(len(self._records) - 1, int(rank * len(self._records)))]


def sessions(config: WorkloadConfig) -> list[Recorded]:
    """The 460 sessions of `rollout/data/coding_sessions.jsonl`: counts only, their gaps are a person's.

    A session that begins with more than `first_context` tokens gets them as its prompt, and what is above it is left
    out of every turn: a rollout begins with an issue, not with a day's work.
    """
    text = (files("rollout.data") / "coding_sessions.jsonl").read_text()
    records = []
    for line in text.splitlines():
        turns = [(int(context), max(1, int(output))) for context, output, _, _ in json.loads(line)["turns"]]
        start = turns[0][0]
        prompt = min(start, config.first_context)
        records.append(_record(prompt, [(context - start + prompt, output) for context, output in turns]))
    return records


def _record(prompt: int, turns: list[tuple[int, int]], tools_s: list[float] | None = None) -> Recorded:
    """`turns`: (context before the turn, output). A context that shrank (compaction) counts as no growth."""
    appended = [max(1, after - (context + output)) for (context, output), (after, _) in pairwise(turns)]
    return Recorded(
        prompt_tokens=prompt, outputs=[output for _, output in turns], appended=[*appended, 1], tools_s=tools_s
    )


def from_run(run: str) -> list[Recorded]:
    """Training trajectories of run folder `run`: turns from its events, mean seconds of a tool call from its metrics.

    Raises:
        ConfigError: no such run, or it has no finished trajectory.
    """
    folder = Path(run)
    events = folder / "events.jsonl"
    if not run or not events.is_file():
        raise ConfigError(f"workload.run {run!r} has no events.jsonl", "name the folder of a run, runs/NAME")
    turns: dict[str, list[tuple[int, int]]] = {}
    ended: list[str] = []
    with events.open("rb") as file:
        for line in file:
            if b'"turn_ended"' not in line and b'"trajectory_ended"' not in line:
                continue
            if not line.endswith(b"\n"):
                break
            event = json.loads(line)["event"]
            if event["event"] == "turn_ended":
                row = (int(event["context_tokens"]), max(1, int(event["output_tokens"])))
                turns.setdefault(event["trajectory_id"], []).append(row)
            elif event["event"] == "trajectory_ended" and event["status"] in ("finished", "truncated"):
                ended.append(event["trajectory_id"])
    tool_s = _tool_seconds(folder)
    found = [turns[name] for name in ended if name in turns and name.startswith("p")]
    if not found:
        raise ConfigError(f"run {run!r} has no finished training trajectory", "let it make a step first")
    return [_record(rows[0][0], rows, [tool_s] * len(rows) if tool_s is not None else None) for rows in found]


def _tool_seconds(folder: Path) -> float | None:
    """Mean seconds of a tool call, over the run's steps; None when it was not measured."""
    path = folder / "metrics.jsonl"
    rows = read_jsonl(path) if path.is_file() else []
    seconds = sum(float(row.get("tool_s/mean") or 0.0) for row in rows)
    calls = sum(float(row.get("tool_calls/mean") or 0.0) for row in rows)
    return seconds / calls if calls else None
