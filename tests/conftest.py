"""Fixtures that several suites share: one real SGLang server for the whole test session, started on first use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from rollout.protocol import Engine

MODEL = Path(__file__).parents[1] / "examples" / "models" / "tiny-qwen3-repair"
TOKEN = "test-token"

# The same examples every time, and no limit on an example's time: the machine may be busy. A long run searches anew.
settings.register_profile("venus", deadline=None, derandomize=not os.environ.get("VENUS_LONG"))
settings.load_profile("venus")


class EngineHost:
    """An engine and the event loop it lives on; tests are plain functions that call into it."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self._loop = loop

    def call(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = 120.0) -> Any:
        """The result of `coroutine`, run on the engine's loop."""

        async def bounded() -> Any:
            async with asyncio.timeout(timeout_s):
                return await coroutine

        return self._loop.run_until_complete(bounded())


@pytest.fixture(scope="session")
def engine_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="session")
def sglang_host(
    engine_loop: asyncio.AbstractEventLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHost]:
    """A real SGLang on the shipped model: 32 slots, token TOKEN."""
    from rollout.adapters.sglang_engine import SglangEngine
    from rollout.config import ModelConfig, WorkerConfig

    log = tmp_path_factory.mktemp("sglang") / "engine.log"
    model = ModelConfig(path=str(MODEL), context_length=640)
    engine = SglangEngine(
        model_path=str(MODEL), model=model, worker=WorkerConfig(slots=32), log=log, token=TOKEN, seed=0
    )
    host = EngineHost(engine, engine_loop)
    host.call(engine.start(), timeout_s=250)
    yield host
    host.call(engine.stop())
