"""Recorded trajectories and the workload that draws them: the shipped coding sessions, and a run of one's own.

Of one's own run the time of scoring, the successes and the correlation inside groups are taken too (`measured`), below
what the user sets.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from itertools import combinations, pairwise
from pathlib import Path
from statistics import NormalDist, fmean

from envclient.base.errors import ConfigError
from envclient.base.files import read_jsonl
from rollout.sim.config import WorkloadConfig
from rollout.sim.workload import Dice, Script, bounded

_FEWEST_GROUPS = 8
"""That a correlation of lengths is estimated from."""


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


@dataclass(slots=True)
class _Played:
    """A trajectory as a run's events tell it."""

    turns: list[tuple[int, int]] = field(default_factory=list)
    """(context before the turn, output)."""
    ended_at: list[float] = field(default_factory=list)
    """Seconds at which each turn ended."""
    tools_s: list[float] = field(default_factory=list)
    """From a turn's end to the next one's wish: where the run's policy follows turns."""
    reward: float = 0.0


def from_run(run: str) -> list[Recorded]:
    """Training trajectories of run folder `run`: turns and tool times.

    Tool times follow the events' (where the run's policy follows turns), scaled to the mean that the workers measured:
    events are a coordinator's, which hears of turns up to a quarter of a second late.

    Raises:
        ConfigError: no such run, or it has no finished trajectory.
    """
    finished = _finished(run).values()
    mean_s = _ratio_of_sums(run, "tool_s", "tool_calls")
    heard = [seconds for played in finished for seconds in played.tools_s]
    scale = mean_s / fmean(heard) if mean_s is not None and heard and fmean(heard) else 1.0
    found = []
    for played in finished:
        tools_s: list[float] | None = None
        if played.tools_s and len(played.tools_s) == len(played.turns) - 1:
            # The last call is followed by the end, not by a turn.
            tools_s = [scale * seconds for seconds in (*played.tools_s, fmean(played.tools_s))]
        elif mean_s is not None:
            tools_s = [mean_s] * len(played.turns)
        found.append(_record(played.turns[0][0], played.turns, tools_s))
    return found


def measured(run: str) -> dict[str, dict[str, float]]:
    """Keys of SimConfig besides the trajectories themselves, as far as the run tells them.

    Seconds of scoring; the mean reward, where rewards lie between 0 and 1, for the share of successes; and the
    correlation of lengths inside a group, from eight groups on.

    Raises:
        ConfigError: no such run, or it has no finished trajectory.
    """
    played = _finished(run)
    rewards = [each.reward for each in played.values()]
    keys: dict[str, dict[str, float]] = {"environment": {}, "workload": {}}
    if (score_s := _ratio_of_sums(run, "score_s")) is not None:
        keys["environment"]["score_s"] = score_s
    if all(0.0 <= reward <= 1.0 for reward in rewards):
        keys["workload"]["pass_rate"] = fmean(rewards)
    lengths = {name: (len(each.turns), sum(output for _, output in each.turns)) for name, each in played.items()}
    if (correlation := _correlation(lengths)) is not None:
        keys["workload"]["correlation"] = correlation
    return keys


def _correlation(lengths: Mapping[str, tuple[int, int]]) -> float | None:
    """Of the normal scores of siblings' lengths, in [0, 1]; None below eight groups.

    How much more two siblings' scores agree than two others', relative to how much a score agrees with itself: ranks of
    a pool that holds the siblings too would else make them look less alike than they are.
    """
    places: dict[tuple[int, int], list[int]] = {}
    for place, length in enumerate(sorted(lengths.values())):
        places.setdefault(length, []).append(place)
    scores = {length: NormalDist().inv_cdf((fmean(same) + 0.5) / len(lengths)) for length, same in places.items()}
    groups: dict[str, list[float]] = {}
    for name, length in lengths.items():
        groups.setdefault(name.rsplit(".", 2)[0], []).append(scores[length])
    siblings = [a * b for members in groups.values() for a, b in combinations(members, 2)]
    if len(groups) < _FEWEST_GROUPS or not siblings:
        return None
    every = [score for members in groups.values() for score in members]
    squares = sum(score * score for score in every)
    pairs = len(every) * (len(every) - 1) / 2 - len(siblings)
    others = ((sum(every) ** 2 - squares) / 2 - sum(siblings)) / pairs
    itself = squares / len(every) - others
    return min(1.0, max(0.0, (fmean(siblings) - others) / itself)) if itself > 0 else None


@functools.lru_cache(maxsize=1)
def _finished(run: str) -> dict[str, _Played]:
    """Training trajectories that ended well, in the order of their ends. Read once: every simulation asks again."""
    events = Path(run) / "events.jsonl"
    if not run or not events.is_file():
        raise ConfigError(f"workload.run {run!r} has no events.jsonl", "name the folder of a run, runs/NAME")
    playing: dict[str, _Played] = {}
    found: dict[str, _Played] = {}
    with events.open("rb") as file:
        for line in file:
            if not any(kind in line for kind in (b'"turn_ready"', b'"turn_ended"', b'"trajectory_ended"')):
                continue
            if not line.endswith(b"\n"):
                break
            row = json.loads(line)
            event = row["event"]
            name = event.get("trajectory_id", "")
            if event["event"] == "turn_ended":
                played = playing.setdefault(name, _Played())
                played.turns.append((int(event["context_tokens"]), max(1, int(event["output_tokens"]))))
                played.ended_at.append(float(row["now"]))
            elif event["event"] == "turn_ready" and name in playing:
                played = playing[name]
                played.tools_s.append(max(0.0, float(row["now"]) - played.ended_at[-1]))
            elif event["event"] == "trajectory_ended":
                ended = playing.pop(name, None)
                if ended and name.startswith("p") and event["status"] in ("finished", "truncated"):
                    ended.reward = float(event["reward"])
                    found[name] = ended
    if not found:
        raise ConfigError(f"run {run!r} has no finished training trajectory", "let it make a step first")
    return found


def _ratio_of_sums(run: str, value: str, by: str = "") -> float | None:
    """Of two metrics, each summed over the run's steps (by "": their number); None when they were not measured."""
    path = Path(run) / "metrics.jsonl"
    rows = [row for row in (read_jsonl(path) if path.is_file() else []) if row.get(f"{value}/mean") is not None]
    total = sum(float(row[f"{value}/mean"]) for row in rows)
    count = sum(float(row.get(f"{by}/mean") or 0.0) if by else 1.0 for row in rows)
    return total / count if count else None
