"""The stream of prompts: which task stands at which place, as a function of seed and place alone.

Every epoch is a permutation of the training tasks, so a resume goes on at any place without having been there.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from functools import lru_cache

from envclient.base.errors import ConfigError
from rollout.types import PromptSubmitted


class TaskOrder:
    """`at(position)`: the prompt at a place of the stream.

    Args:
        task_ids: training tasks; duplicates are refused, since a task's epoch would then be ambiguous.
        seed: of the permutations.
        epochs: times the list is gone through; 0: endless.
    """

    def __init__(self, task_ids: Sequence[str], seed: int, epochs: int = 0) -> None:
        if not task_ids:
            raise ConfigError("rollout.tasks names no training task", "check rollout.tasks.args")
        if len(set(task_ids)) != len(task_ids):
            twice = sorted({t for t in task_ids if task_ids.count(t) > 1})
            raise ConfigError(f"rollout.tasks names {twice[0]!r} twice", "repeat tasks with run.epochs instead")
        self._tasks = tuple(task_ids)
        self._seed = seed
        self._length = epochs * len(task_ids) if epochs else None
        self._permutation = lru_cache(maxsize=4)(self._permute)

    @property
    def digest(self) -> str:
        """Names the task list, order included."""
        return hashlib.blake2b("\n".join(self._tasks).encode(), digest_size=16).hexdigest()

    def at(self, position: int) -> PromptSubmitted | None:
        """The prompt at `position`; None past the end of a finite stream."""
        if self._length is not None and position >= self._length:
            return None
        epoch, place = divmod(position, len(self._tasks))
        return PromptSubmitted(
            prompt_id=f"p{position:06d}", task_id=self._tasks[self._permutation(epoch)[place]], epoch=epoch
        )

    def _permute(self, epoch: int) -> tuple[int, ...]:
        order = list(range(len(self._tasks)))
        # A string seed is hashed with SHA-512 by `random`: the same on every machine and Python.
        random.Random(f"venus {self._seed} {epoch}").shuffle(order)
        return tuple(order)
