"""The repair agent: one episode is a sandbox with a buggy library function, four tools, and a reward from real tests.

The function under repair is a file of the sandbox. `edit` writes it (always starting from the buggy original), `test`
and the final score run the covering tests on what the file holds. The reward is 1 only if the agent submitted and all
covering tests pass. A sandbox or verifier that fails raises VenusError: that episode has no reward, never a 0.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envclient.base.errors import ConfigError, VenusError
from envclient.client import EnvClient
from envclient.types import Lease
from examples.agents.dialogue import BAD_CALL, NOT_FOUND, OK, Tool, system_prompt, user_prompt, verdict, view
from examples.agents.memo import Memo
from examples.tasks.libraries import library_named
from examples.tasks.mutants import apply, edit_nth, sites
from examples.tasks.records import DEFAULT_RECORDS, RepairRecord, load_records
from examples.tasks.repair_task import SOURCE_FILE, WALL_LIMIT_S, RepairTask, TaskReader
from examples.tasks.templates import TEST, templates_of
from examples.tasks.testing import Verdict, read_verdict
from rollout.protocol import Observation, Outcome
from rollout.types import Purpose, TrajectoryStatus
from rollout.worker.chat import ChatCodec, ToolCall

log = logging.getLogger("venus.agent")

SUBMITTED, OUT_OF_TURNS = "submitted", "max_turns"
LATE_S = 5.0
"""How long closing the agent waits for leases that nobody wants any more; what is left then expires."""


class Templates:
    """Registers the libraries' templates with the environment service, once, when the first episode opens."""

    def __init__(self, environment: EnvClient, records: Sequence[RepairRecord]) -> None:
        self._environment = environment
        self._templates = templates_of(records)
        self._lock = asyncio.Lock()
        self._done = False

    async def ready(self) -> None:
        """Returns when all are registered.

        Raises:
            ConfigError: one cannot be prepared: no episode could be played, so the worker must end.
        """
        async with self._lock:
            if not self._done:
                try:
                    await self._environment.register(self._templates)
                except VenusError as error:
                    message = f"sandbox templates cannot be prepared: {error.message}"
                    raise ConfigError(message, error.remedy) from error
                self._done = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What all episodes of an agent share."""

    environment: EnvClient
    templates: Templates
    codec: ChatCodec
    tool: Tool
    max_turns: int
    lifetime_s: float
    memo: Memo
    late: set[asyncio.Task[None]] = field(default_factory=set)
    """Releases of leases that came after their episode was cancelled."""


class RepairEpisode:
    """One trajectory on one task; a `rollout.protocol.Episode`."""

    def __init__(self, setup: Setup, task: RepairTask, trajectory_id: str) -> None:
        self._setup = setup
        self._task = task
        self._trajectory_id = trajectory_id
        self._lease_id = ""
        self._closed = False
        self.current: list[str] = list(task.buggy)
        """What the sandbox's file holds."""
        self.turns = 0
        self._submitted = False
        names = ("edits", "tests", "bad_calls", "tool_calls", "tool_errors", "repeated_edits", "memo_hits")
        self._stats = dict.fromkeys(names, 0.0)
        self._tool_s = 0.0
        self._tried: list[list[str]] = []

    async def open(self) -> list[int]:
        record = self._task.record
        await self._setup.templates.ready()
        lease = await self._lease(library_named(record.library).folder)
        self._lease_id = lease.lease_id
        if self._closed:  # by somebody else, while the lease was under way
            await self._setup.environment.release(self._lease_id)
            raise VenusError(f"episode {self._trajectory_id} was closed while it opened")
        await self._write(self.current)
        return self._setup.codec.prompt_ids(
            [
                {"role": "system", "content": system_prompt(self._setup.tool)},
                {"role": "user", "content": user_prompt(record.function, record.test, record.message)},
            ]
        )

    async def act(self, token_ids: Sequence[int]) -> Observation:
        codec = self._setup.codec
        action = codec.parse(token_ids)
        self.turns += 1
        self._stats["tool_calls"] += 1
        started = time.monotonic()
        # One call a turn: that is what the tools say, and what the warm-up showed.
        if action.error or len(action.calls) != 1:
            answer: str | None = self._bad_call()
        else:
            answer = await self._use(action.calls[0])
        self._tool_s += time.monotonic() - started
        if answer is None or self.turns >= self._setup.max_turns:
            return Observation(token_ids=[], done=True)
        stopped = bool(token_ids) and token_ids[-1] == codec.stop_token_id
        return Observation(token_ids=codec.observation_ids([answer], ended_with_stop=stopped), done=False)

    async def score(self, status: TrajectoryStatus, stop_reason: str) -> Outcome:
        reward = 0.0
        if self._submitted and status is TrajectoryStatus.FINISHED:
            reward = float((await self._verdict(self.current)).ok)
        first_edit_pass = await self._first_edit_passes()
        stats = self._stats | {"tool_s": self._tool_s, "first_edit_pass": first_edit_pass}
        reason = SUBMITTED if self._submitted else OUT_OF_TURNS if self.turns >= self._setup.max_turns else stop_reason
        return Outcome(reward=reward, status=status, stop_reason=reason, stats=stats)

    async def close(self) -> None:
        self._closed = True
        if self._lease_id:
            lease_id, self._lease_id = self._lease_id, ""
            await self._setup.environment.release(lease_id)

    # ---------------------------------------------------------------------------------------------------- tools

    async def _use(self, call: ToolCall) -> str | None:
        """What the tool answers; None after submit()."""
        arguments = call.arguments
        if call.name == "view" and not arguments:
            return view(self._setup.tool, self.current, self._task.buggy)
        if call.name == "test" and not arguments:
            self._stats["tests"] += 1
            result = await self._verdict(self.current)
            return verdict(result.ok, result.message)
        if call.name == "submit" and not arguments:
            self._submitted = True
            return None
        if call.name == "edit":
            try:
                edited = self._edited(arguments)
            except (KeyError, TypeError, ValueError):
                return self._bad_call()
            return await self._edit(edited)
        return self._bad_call()

    def _edited(self, arguments: dict[str, Any]) -> list[str] | None:
        """The buggy original after the edit; None when it is not there.

        Raises:
            KeyError, TypeError, ValueError: an argument is missing, of the wrong type, or one too many.
        """
        names = {"k"} if self._setup.tool is Tool.PICK else {"old", "new", "nth"}
        if set(arguments) != names:
            raise KeyError(str(arguments))
        if self._setup.tool is Tool.PICK:
            candidates = sites(self._task.buggy)
            k = _whole(arguments["k"])
            return apply(self._task.buggy, candidates[k - 1]) if 1 <= k <= len(candidates) else None
        old, new, nth = arguments["old"], arguments["new"], _whole(arguments["nth"])
        if not isinstance(old, str) or not isinstance(new, str) or "\n" in new:
            raise TypeError(str(arguments))
        return edit_nth(self._task.buggy, old, new, nth) if old and old != new and nth > 0 else None

    async def _edit(self, edited: list[str] | None) -> str:
        self._stats["edits"] += 1
        if edited is None:
            self._stats["tool_errors"] += 1
            return NOT_FOUND
        await self._write(edited)
        self.current = edited
        self._stats["repeated_edits"] += edited in self._tried
        self._tried.append(edited)
        return OK

    def _bad_call(self) -> str:
        self._stats["bad_calls"] += 1
        self._stats["tool_errors"] += 1
        return BAD_CALL

    # --------------------------------------------------------------------------------------------------- sandbox

    async def _lease(self, template: str) -> Lease:
        """A sandbox. When cancelled, the service goes on making it: it is released as soon as it is there."""
        key = self._trajectory_id
        leasing = asyncio.create_task(self._setup.environment.lease(template, key, self._setup.lifetime_s, key))
        try:
            return await asyncio.shield(leasing)
        except asyncio.CancelledError:
            releasing = asyncio.create_task(self._release_late(leasing))
            self._setup.late.add(releasing)
            releasing.add_done_callback(self._setup.late.discard)
            raise

    async def _release_late(self, leasing: asyncio.Task[Lease]) -> None:
        try:
            await self._setup.environment.release((await leasing).lease_id)
        except Exception as error:
            log.warning("trajectory %s: its late lease was not released: %s", self._trajectory_id, error)

    async def _write(self, lines: Sequence[str]) -> None:
        await self._setup.environment.write(self._lease_id, SOURCE_FILE, "\n".join(lines).encode())

    async def _verdict(self, lines: list[str]) -> Verdict:
        """Of the covering tests about the function when it reads `lines`."""
        remembered = True

        async def run() -> Verdict:
            nonlocal remembered
            remembered = False
            if lines != self.current:
                await self._write(lines)
                self.current = lines
            request = self._task.test_request()
            return read_verdict(await self._setup.environment.exec(self._lease_id, [TEST], WALL_LIMIT_S, request))

        found = await self._setup.memo.verdict(self._task.record, lines, run)
        self._stats["memo_hits"] += remembered
        return found

    async def _first_edit_passes(self) -> float:
        """1.0 if the first edit that applied already repaired the function, submitted or not."""
        return float((await self._verdict(self._tried[0])).ok) if self._tried else 0.0


def _whole(value: Any) -> int:
    """Raises: TypeError for anything but a whole number."""
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


class RepairAgent:
    """Makes episodes; a `rollout.protocol.Agent`."""

    def __init__(self, setup: Setup, records: Sequence[RepairRecord], max_new_tokens: int) -> None:
        self._setup = setup
        self._records = {record.instance_id: record for record in records}
        self._reader = TaskReader()
        self.max_new_tokens = max_new_tokens
        self.stop_token_ids = [setup.codec.stop_token_id]

    def episode(self, task_id: str, trajectory_id: str, purpose: Purpose) -> RepairEpisode:
        record = self._records.get(task_id)
        if record is None:
            raise ConfigError(f"task {task_id!r} is unknown", "rollout.tasks and rollout.agent must name the same file")
        return RepairEpisode(self._setup, self._reader.read(record), trajectory_id)

    def statistics(self) -> dict[str, float]:
        return self._setup.memo.statistics()

    async def aclose(self) -> None:
        """Closes the memo's log; the environment client is its maker's, and open until late leases are released."""
        if self._setup.late:
            await asyncio.wait(self._setup.late, timeout=LATE_S)
        self._setup.memo.close()


def make_agent(
    *,
    environment: EnvClient,
    model_path: str,
    context_length: int,
    records: str = "",
    tokenizer_path: str = "",
    tool: str = Tool.EDIT.value,
    max_turns: int = 12,
    max_new_tokens: int = 16,
    memo: bool = True,
    memo_log: str = "",
    lifetime_s: float = 900.0,
) -> RepairAgent:
    """Factory for `rollout.agent`.

    Args:
        environment: where sandboxes are leased.
        model_path: Hugging Face folder of the policy.
        context_length: tokens of prompt and response together.
        records: path of a tasks file; empty: the shipped one.
        tokenizer_path: another folder for the tokenizer; empty: `model_path`.
        tool: `edit`: edit(old, new, nth) by text; `pick`: edit(k) from a list of candidates.
        max_turns: after so many turns the episode ends unsubmitted.
        max_new_tokens: of one turn.
        memo: remember verdicts of deterministic tests.
        memo_log: file to which remembered verdicts are appended, for `python -m examples.agents.regrade`.
        lifetime_s: of a sandbox: longer than any episode with its grading.

    Raises:
        ConfigError: an argument is out of range, the tasks file is broken, or the tokenizer cannot be used.
    """
    if tool not in [kind.value for kind in Tool]:
        raise ConfigError(f"rollout.agent.args.tool={tool!r} is unknown", "use edit or pick")
    bounds = {"max_turns": max_turns, "max_new_tokens": max_new_tokens, "lifetime_s": lifetime_s}
    for name, value in bounds.items():
        if value <= 0:
            raise ConfigError(f"rollout.agent.args.{name}={value} is not positive", "see examples/agents/repair.py")
    if max_new_tokens >= context_length:
        raise ConfigError(
            f"rollout.agent.args.max_new_tokens={max_new_tokens} leaves no room in {context_length} tokens of context",
            "lower it or raise model.context_length",
        )
    loaded = load_records(Path(records) if records else DEFAULT_RECORDS)
    setup = Setup(
        environment=environment,
        templates=Templates(environment, loaded),
        codec=ChatCodec(tokenizer_path or model_path),
        tool=Tool(tool),
        max_turns=max_turns,
        lifetime_s=lifetime_s,
        memo=Memo(enabled=memo, log=Path(memo_log) if memo_log else None),
    )
    return RepairAgent(setup, loaded, max_new_tokens)
