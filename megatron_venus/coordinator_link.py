"""One replica's calls to the coordinator, blocking: the training loop has nothing else to do meanwhile.

All calls are idempotent on the coordinator's side (a group is handed out again until it is acknowledged), so a lost
connection is retried a few times before the actor gives up. Used by `train` only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from envclient.base.errors import WireError
from envclient.base.wire import SyncClient
from megatron_venus.config import ActorConfig
from megatron_venus.sync_result import SyncResult
from rollout.protocol import (
    AckRequest,
    Empty,
    EngineAddress,
    EvaluateReply,
    EvaluateRequest,
    NextGroupRequest,
    StepRequest,
    SyncBeginReply,
    SyncBeginRequest,
    SyncEndRequest,
)
from rollout.types import BatchClosed, BatchCounts, NextGroup, NoGroupYet, TrainGroup

ATTEMPTS = 4
RETRY_PAUSE_S = 0.5
ANSWER_MARGIN_S = 30.0
"""How much longer than the asked wait an answer may take."""
EVALUATION_TIMEOUT_S = 3600.0


class CoordinatorLink:
    """Client of `/v1/actor/*` for one replica; rank 0 alone uses `report_step`, the syncs and `evaluate`."""

    def __init__(
        self,
        url: str,
        token: str,
        replica: int,
        config: ActorConfig,
        *,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = SyncClient(url, token)
        self._replica = replica
        self._poll_s = config.poll_s
        self._sync_timeout_s = config.sync.timeout_s
        self._sleep = sleep

    def close(self) -> None:
        self._client.close()

    def next_group(self, step: int, check: Callable[[], None] = lambda: None) -> TrainGroup | BatchClosed:
        """Wait for the next group of `step`, or for the news that its batch is complete; `check` ends the wait early by
        an error, at the latest after `poll_s`."""
        request = NextGroupRequest(step=step, replica=self._replica, wait_s=self._poll_s)
        while True:
            answer = self._call("next_group", request, NextGroup, self._poll_s + ANSWER_MARGIN_S)
            if not isinstance(answer, NoGroupYet):
                assert isinstance(answer, (TrainGroup, BatchClosed))
                return answer
            check()

    def acknowledge(self, group: TrainGroup, tokens: int) -> None:
        """The group's gradient is added."""
        request = AckRequest(step=group.step, replica=self._replica, group_id=group.group_id, tokens=tokens)
        self._call("ack", request, Empty)

    def report_step(self, step: int, *, skipped: bool, counts: BatchCounts, metrics: dict[str, float]) -> None:
        """The optimizer step is made; the batch's prompts count as accepted from here on."""
        self._call("step", StepRequest(step=step, skipped=skipped, counts=counts, metrics=metrics), Empty)

    def begin_sync(self, version: int) -> list[EngineAddress]:
        """Wait until every worker is paused; returns the engines to send `version` to."""
        timeout_s = self._sync_timeout_s + ANSWER_MARGIN_S
        reply: SyncBeginReply = self._call("sync_begin", SyncBeginRequest(version=version), SyncBeginReply, timeout_s)
        return reply.engines

    def end_sync(self, version: int, result: SyncResult) -> None:
        """Wait until every worker samples under `version`, but for those whose engines were lost."""
        timeout_s = self._sync_timeout_s + ANSWER_MARGIN_S
        self._call(
            "sync_end", SyncEndRequest(version=version, seconds=result.seconds, lost=result.lost), Empty, timeout_s
        )

    def evaluate(self, eval_id: str, version: int) -> EvaluateReply:
        """Evaluate the engines' current weights on the held-out tasks; takes minutes."""
        request = EvaluateRequest(eval_id=eval_id, version=version)
        reply: EvaluateReply = self._call("evaluate", request, EvaluateReply, EVALUATION_TIMEOUT_S)
        return reply

    def _call(self, name: str, request: Any, reply_type: Any, timeout_s: float = 60.0) -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._client.call(f"/v1/actor/{name}", request, reply_type, timeout_s=timeout_s)
            except WireError:
                if attempt == ATTEMPTS:
                    raise
                self._sleep(RETRY_PAUSE_S)
