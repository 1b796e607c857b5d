"""The tokens of one trajectory while it runs: what was sent and what was sampled, recorded once and never re-tokenised.

The agent loop appends each piece as it comes, aborted pieces of a turn included, and in the end turns the record into
the `Trajectory` that is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

from envclient.base.errors import InvariantError
from rollout.types import VersionSpan


class TokenRecord:
    """prompt, response, loss mask, log-probs and version spans; their lengths agree after every call."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.prompt_ids = list(prompt_ids)
        self.response_ids: list[int] = []
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[VersionSpan] = []

    @property
    def context(self) -> list[int]:
        """Everything the next generation goes on from."""
        return self.prompt_ids + self.response_ids

    @property
    def context_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)

    def sampled(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append tokens that the engine sampled under weights `version`.

        Raises:
            InvariantError: log-probs of another number of tokens, or a version older than the last.
        """
        if len(token_ids) != len(logprobs):
            raise InvariantError(f"{len(token_ids)} sampled tokens came with {len(logprobs)} log-probs")
        if not token_ids:
            return
        start, end = len(self.response_ids), len(self.response_ids) + len(token_ids)
        last = self.spans[-1] if self.spans else None
        if last is not None and version < last.version:
            raise InvariantError(f"tokens sampled under version {version} after some under {last.version}")
        self.response_ids += token_ids
        self.logprobs += logprobs
        self.loss_mask += [1] * len(token_ids)
        if last is not None and last.end == start and last.version == version:
            self.spans[-1] = VersionSpan(start=last.start, end=end, version=version)
        else:
            self.spans.append(VersionSpan(start=start, end=end, version=version))

    def observed(self, token_ids: Sequence[int]) -> None:
        """Append tokens of the environment, which are never trained."""
        self.response_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.loss_mask += [0] * len(token_ids)
