"""PURE: what the active programs of one worker count for, as ThunderAgent's rule counts (`program_aware`).

A program counts its context while it is not marked, a prompt that members of a group share once, and a buffer. Prompts
of groups that have not generated yet are taken to be as long as the mean of the others, which moves: what depends on
that mean is kept apart, so that a change costs O(group size) and the sum O(1).
"""

from __future__ import annotations

from collections import Counter

from envclient.base.errors import InvariantError
from rollout.policy.jobs import Job, JobGroup, Phase


class ProgramLoad:
    """The active programs of a worker.

    Args:
        buffer_tokens: counted for each program beyond its context.
    """

    def __init__(self, buffer_tokens: int) -> None:
        self._buffer_tokens = buffer_tokens
        self.active: dict[str, Job] = {}
        """All of them, in the order of arrival."""
        self.counted = 0
        """Those that are not marked."""
        self.fresh = 0
        """Those that have not started."""
        self._groups: dict[int, _Group] = {}
        self._known_tokens = 0
        """Of groups whose prompt is known."""
        self._guessed_groups = 0
        self._guessed_contexts: Counter[int] = Counter()
        """Context → programs, of groups whose prompt is not known."""
        self._latest: tuple[float, float] | None = None
        """Mean prompt and sum of the latest `tokens`, while nothing has changed."""

    def add(self, job: Job) -> None:
        """The program is active here and counts."""
        self.active[job.trajectory_id] = job
        self.fresh += job.phase is Phase.NEW
        record = self._groups.setdefault(job.group.order, _Group())
        record.active += 1
        self._set(job, counts=True)

    def drop(self, job: Job) -> None:
        """It is not active any more; its phase is the one of its last `add`, `started` or later."""
        del self.active[job.trajectory_id]
        self.fresh -= job.phase is Phase.NEW
        self._set(job, counts=False)
        record = self._groups[job.group.order]
        record.active -= 1
        if not record.active:
            del self._groups[job.group.order]

    def mark(self, job: Job) -> None:
        """It stays active, and counts no more."""
        self._set(job, counts=False)

    def started(self) -> None:
        """A fresh one started."""
        self.fresh -= 1

    def changed(self, job: Job) -> None:
        """Its context is another one, or its group's prompt."""
        record = self._groups[job.group.order]
        self._set(job, counts=job.trajectory_id in record.contexts)

    def prompted(self, group: JobGroup) -> None:
        """The prompt's length became known, or another one."""
        record = self._groups.get(group.order)
        if record is not None:
            self._sum(record, -1)
            record.prompt_tokens = group.prompt_tokens
            self._sum(record, 1)

    def holds(self, group: JobGroup) -> bool:
        """Whether a member of the group is active here."""
        return group.order in self._groups

    def tokens(self, mean_prompt_tokens: float) -> float:
        """What all count for, where unknown prompts are `mean_prompt_tokens` long."""
        if self._latest is not None and self._latest[0] == mean_prompt_tokens:
            return self._latest[1]
        private = sum(n * max(0.0, context - mean_prompt_tokens) for context, n in self._guessed_contexts.items())
        prompts = self._guessed_groups * mean_prompt_tokens
        tokens = self._known_tokens + prompts + private + self.counted * self._buffer_tokens
        self._latest = (mean_prompt_tokens, tokens)
        return tokens

    def _set(self, job: Job, *, counts: bool) -> None:
        record = self._groups[job.group.order]
        self._sum(record, -1)
        record.prompt_tokens = job.group.prompt_tokens
        record.contexts.pop(job.trajectory_id, None)
        if counts:
            record.contexts[job.trajectory_id] = job.context_tokens
        self._sum(record, 1)

    def _sum(self, record: _Group, sign: int) -> None:
        if not record.contexts:
            return
        self._latest = None
        self.counted += sign * len(record.contexts)
        if prompt := record.prompt_tokens:
            private = sum(max(0, context - prompt) for context in record.contexts.values())
            self._known_tokens += sign * (prompt + private)
            return
        self._guessed_groups += sign
        for context in record.contexts.values():
            self._guessed_contexts[context] += sign
            if not self._guessed_contexts[context]:
                del self._guessed_contexts[context]

    def check_invariants(self, marked: set[str], mean_prompt_tokens: float) -> None:
        """Recount. Raises InvariantError."""
        prompts: dict[int, float] = {}
        private = 0.0
        counted = [job for job in self.active.values() if job.trajectory_id not in marked]
        for job in counted:
            prompt = float(job.group.prompt_tokens) or mean_prompt_tokens
            prompts[job.group.order] = prompt
            private += max(0.0, job.context_tokens - prompt) + self._buffer_tokens
        fresh = sum(job.phase is Phase.NEW for job in self.active.values())
        recounted = private + sum(prompts.values())
        kept = self.tokens(mean_prompt_tokens)
        if (len(counted), fresh) != (self.counted, self.fresh) or abs(recounted - kept) > 1e-6 * max(1.0, recounted):
            raise InvariantError(
                f"program load: {self.counted} programs, {self.fresh} fresh and {kept:g} tokens are counted; "
                f"recounted {len(counted)}, {fresh}, {recounted:g}"
            )


class _Group:
    """A group's active programs on the worker."""

    __slots__ = ("active", "contexts", "prompt_tokens")

    def __init__(self) -> None:
        self.active = 0
        self.contexts: dict[str, int] = {}
        """Of those that count."""
        self.prompt_tokens = 0
        """0: not known."""
