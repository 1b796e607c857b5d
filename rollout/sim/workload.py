"""What trajectories will do: a script of token counts, tool seconds and a reward for every (prompt, member, attempt).

Scripts depend on the seed and these three numbers alone, so every policy meets the same stream. Three sources: the
distributions of measured SWE agents, real coding sessions, and an own run's events.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rollout.sim.config import FailureConfig, SimConfig, WorkloadConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One trajectory's future. Lists have one entry a turn."""

    prompt_tokens: int
    outputs: list[int]
    """Tokens that the turn generates."""
    appended: list[int]
    """Tokens of the observation after the turn; the last one is not used."""
    tools_s: list[float]
    reward: float
    truncated: bool = False
    fails_after: int = -1
    """Turn after which sandbox or verifier fail; −1: never."""
    stuck_after: int = -1
    """Turn after which its tool never returns; −1: never."""

    @property
    def turns(self) -> int:
        return len(self.outputs)

    @property
    def generated(self) -> int:
        return sum(self.outputs)

    @property
    def context_tokens(self) -> int:
        """At its end; the last turn's observation is never sent."""
        return self.prompt_tokens + sum(self.outputs) + sum(self.appended[:-1])


class Workload(Protocol):
    """Where scripts come from."""

    def script(self, prompt: int, member: int, attempt: int) -> Script: ...


def bounded(prompt: int, outputs: list[int], appended: list[int], limit: int) -> tuple[list[int], bool]:
    """Outputs cut where the context would pass `limit`, and whether that cut the trajectory."""
    context = prompt
    for turn, output in enumerate(outputs):
        if context + output >= limit:
            left = max(1, limit - context)
            return [*outputs[:turn], left], True
        context += output + appended[turn]
        if context >= limit:
            return outputs[: turn + 1], True
    return outputs, False


class Dice:
    """The random parts that every source shares: tools, rewards, failures."""

    def __init__(self, config: WorkloadConfig, failures: FailureConfig, seed: int) -> None:
        self.config = config
        self.failures = failures
        self.seed = seed

    def of(self, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *key])

    def tools_s(self, rng: np.random.Generator, count: int) -> list[float]:
        c = self.config
        kind = rng.random(count)
        noise = np.exp(c.tool_sigma * rng.standard_normal(count))
        tail = c.tail_tool_s / np.maximum(1.0 - rng.random(count), 1e-12)
        slow = np.where(kind < c.fast_tool_share + c.slow_tool_share, c.slow_tool_s * noise, tail)
        seconds = np.where(kind < c.fast_tool_share, c.fast_tool_s * noise, slow)
        scaled: list[float] = (np.minimum(seconds, c.max_tool_s) * c.scale_tools).tolist()
        return scaled

    def reward(self, rng: np.random.Generator, prompt: int) -> float:
        """1 or 0, with a success rate of its group that is uniform in an interval around `pass_rate`."""
        p = self.config.pass_rate
        spread = min(p, 1.0 - p)
        rate = p + spread * (2.0 * self.of(2, prompt).random() - 1.0)
        return float(rng.random() < rate)

    def accident(self, rng: np.random.Generator, turns: int) -> tuple[int, int]:
        """Turns of `Script.fails_after` and `Script.stuck_after`."""
        draws = rng.random(2)
        turn = int(rng.integers(turns))
        fails = draws[0] < self.failures.trajectory_rate
        stuck = draws[1] < self.failures.stuck_rate
        return (turn if fails else -1), (turn if stuck and not fails else -1)


class SweWorkload:
    """Log-normal turns, correlated inside a group; log-normal outputs and observations."""

    def __init__(self, dice: Dice) -> None:
        self._dice = dice

    def script(self, prompt: int, member: int, attempt: int) -> Script:
        c = self._dice.config
        shared = self._dice.of(1, prompt).standard_normal()
        rng = self._dice.of(0, prompt, member, attempt)
        z = math.sqrt(c.correlation) * shared + math.sqrt(1.0 - c.correlation) * rng.standard_normal()
        turns = min(c.max_turns, max(1, round(math.exp(c.turns_mu + c.turns_sigma * z))))
        drawn = np.exp(c.output_mu + c.output_sigma * rng.standard_normal(turns))
        outputs = np.maximum(drawn.astype(np.int64), 1).tolist()
        drawn = np.exp(c.appended_mu + c.appended_sigma * rng.standard_normal(turns))
        appended = np.clip(drawn, 1, c.appended_max).astype(np.int64).tolist()
        outputs, truncated = bounded(c.first_context, outputs, appended, c.context_limit)
        fails, stuck = self._dice.accident(rng, len(outputs))
        return Script(
            prompt_tokens=c.first_context,
            outputs=outputs,
            appended=appended[: len(outputs)],
            tools_s=self._dice.tools_s(rng, len(outputs)),
            reward=self._dice.reward(rng, prompt),
            truncated=truncated,
            fails_after=fails,
            stuck_after=stuck,
        )


def make_workload(config: SimConfig) -> Workload:
    """The source that `workload.kind` names. Raises: ConfigError: no such kind, or nothing recorded."""
    from envclient.base.errors import ConfigError
    from rollout.sim.recordings import RecordedWorkload, from_run, sessions

    dice = Dice(config.workload, config.failures, config.seed)
    kind = config.workload.kind
    if kind == "swe":
        return SweWorkload(dice)
    if kind == "sessions":
        return RecordedWorkload(dice, sessions(config.workload))
    if kind == "from_run":
        return RecordedWorkload(dice, from_run(config.workload.run))
    raise ConfigError(f"workload.kind is {kind!r}", "use swe, sessions or from_run")
