"""What computes a prediction: token ids in, log(1 + remaining tokens) out. In this process, or in an SGLang server."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollout.config import PredictorConfig

if TYPE_CHECKING:
    from rollout.predictor.model import LengthModel


class Scorer(Protocol):
    """A predictor that answers. Implementations: SGLang over HTTP, and torch in this process."""

    async def start(self) -> None:
        """Raises VenusError when it does not come up."""

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """log(1 + remaining tokens) at the end of each sequence. Raises WireError when it is gone."""

    async def load(self, folder: Path) -> None:
        """Answer with the model in `folder`, of the same shape, from the next request on."""

    async def wait_dead(self) -> str:
        """Returns only when it has died: the reason."""

    async def stop(self) -> None: ...


class TorchScorer:
    """In a thread of this process: for very small models."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model: LengthModel | None = None

    async def start(self) -> None:
        await self.load(self._folder)

    async def load(self, folder: Path) -> None:
        from rollout.predictor.model import load

        self._model = await asyncio.to_thread(load, folder)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        assert self._model is not None
        return await asyncio.to_thread(self._model.predict, sequences)

    async def wait_dead(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def stop(self) -> None: ...


def make_scorer(config: PredictorConfig, folder: Path, *, log: Path, token: str) -> Scorer:
    """The scorer that `rollout.predictor.engine` names, not started yet."""
    if config.engine == "torch":
        return TorchScorer(folder)
    from rollout.adapters.sglang_scorer import SglangScorer

    return SglangScorer(
        folder=folder,
        log=log,
        token=token,
        context_tokens=config.context_tokens,
        kv_tokens=config.kv_tokens,
        slots=config.slots,
        dtype=config.dtype,
        engine_args=config.engine_args,
        request_timeout_s=config.timeout_s,
    )
