"""SGLang's classify path behind `predictor.scorer.Scorer`: one server whose pooled output is a predicted length.

A `Qwen3ForSequenceClassification` folder with one label makes SGLang 0.5.17 pool the last token and apply the head;
`/classify` answers it raw (`/v1/classify` would put it through a softmax). Prefixes of a trajectory stay in its radix
cache, so that a turn costs its new tokens only. New weights of the same shape are loaded in place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envclient.base.errors import InvariantError, WireError
from rollout.adapters.sglang_engine import SglangEngine
from rollout.config import ModelConfig, WorkerConfig


class SglangScorer(SglangEngine):
    """One server. Life and errors as those of `SglangEngine`.

    Args:
        folder: the predictor's folder.
        context_tokens: longest input.
        kv_tokens: capacity of its cache.
        slots: inputs computed together.
        engine_args: further arguments of the server.
    """

    def __init__(
        self,
        *,
        folder: Path,
        log: Path,
        token: str,
        context_tokens: int,
        kv_tokens: int,
        slots: int,
        dtype: str = "float32",
        engine_args: Mapping[str, Any] = {},
        start_timeout_s: float = 240.0,
        request_timeout_s: float = 60.0,
    ) -> None:
        worker = WorkerConfig(
            slots=slots,
            kv_tokens=kv_tokens,
            engine_start_timeout_s=start_timeout_s,
            request_timeout_s=request_timeout_s,
            engine_args={**engine_args, "is-embedding": True},
        )
        model = ModelConfig(path=str(folder), dtype=dtype, context_length=context_tokens)
        super().__init__(model_path=str(folder), model=model, worker=worker, log=log, token=token, seed=0)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """log(1 + remaining tokens) at the end of each sequence.

        Raises:
            WireError: the server is gone or too slow.
            InvariantError: its answer has another shape.
        """
        replies = await self._post("/classify", {"input_ids": [list(sequence) for sequence in sequences]})
        scores = [float(reply["embedding"][0]) for reply in replies]
        if len(scores) != len(sequences) or not all(map(math.isfinite, scores)):
            raise InvariantError(f"SGLang's scores of {len(sequences)} inputs: {scores}")
        return scores

    async def load(self, folder: Path) -> None:
        """Serve the weights in `folder` from the next request on.

        Raises:
            WireError: the server refused them; it goes on with those it has.
        """
        reply = await self._post("/update_weights_from_disk", {"model_path": str(folder)})
        if not reply.get("success"):
            raise WireError(f"SGLang did not load {folder}: {reply.get('message')}")
