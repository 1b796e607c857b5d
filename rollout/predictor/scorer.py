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
    """In a thread of this process: for very small models. What waits meanwhile is computed together."""

    def __init__(self, folder: Path, *, slots: int) -> None:
        self._folder = folder
        self._slots = slots
        self._model: LengthModel | None = None
        self._waiting: list[tuple[Sequence[int], asyncio.Future[float]]] = []
        self._working: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.load(self._folder)

    async def load(self, folder: Path) -> None:
        from rollout.predictor.model import load

        self._model = await asyncio.to_thread(load, folder)

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[float]] = [loop.create_future() for _ in sequences]
        self._waiting += zip(sequences, futures, strict=True)
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work())
        return list(await asyncio.gather(*futures))

    async def _work(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._slots], self._waiting[self._slots :]
            model = self._model
            assert model is not None
            try:
                scores = await asyncio.to_thread(model.predict, [sequence for sequence, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():
                    future.set_result(score)

    async def wait_dead(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def stop(self) -> None:
        if self._working is not None:
            self._working.cancel()


def make_scorer(config: PredictorConfig, folder: Path, *, log: Path, token: str) -> Scorer:
    """The scorer that `rollout.predictor.engine` names, not started yet."""
    if config.engine == "torch":
        return TorchScorer(folder, slots=config.slots)
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
