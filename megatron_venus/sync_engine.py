"""The HTTP side of one engine in a weight sync, and the waiting for several of them at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import httpx

from envclient.base.errors import WireError
from rollout.protocol import EngineAddress

T = TypeVar("T")
MARGIN_S = 5.0
"""An engine that waits in vain for a peer answers after the sync's timeout: leave it this much longer."""


class EngineGone(WireError):
    """No answer in time, or no connection: the process is dead, stuck or unreachable."""


class EngineRefused(WireError):
    """It answered, with an error."""


class SyncEngine:
    """One engine. `timeout_s` bounds every request; `ranks` is its tensor-parallel size, once `layout` was asked."""

    def __init__(self, address: EngineAddress, token: str, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.ranks = 0
        self._http = httpx.Client(
            base_url=address.engine_url,
            headers={"authorization": f"Bearer {token}"},
            timeout=timeout_s + MARGIN_S,
            trust_env=False,
        )

    def __str__(self) -> str:
        return f"engine of worker {self.address.worker} ({self.address.engine_url})"

    def post(self, path: str, **fields: Any) -> Any:
        """POST `fields` as JSON; the engine's answer.

        Raises:
            EngineGone, EngineRefused: name the engine.
        """
        try:
            response = self._http.post(path, json=fields)
        except httpx.TimeoutException:
            raise self.silent(path) from None
        except (httpx.HTTPError, RuntimeError) as error:
            raise EngineGone(f"{self}: {path}: {type(error).__name__} {error}", "see the worker's log") from None
        if response.status_code != 200:
            raise EngineRefused(
                f"{self}: {path}: HTTP {response.status_code} {response.text[:500]}", "see the worker's log"
            )
        return response.json() if response.content else {}

    def silent(self, what: str) -> EngineGone:
        """The error of an engine that does not answer."""
        return EngineGone(
            f"{self}: {what} not answered within {self.timeout_s:g} s", "actor.sync.timeout_s bounds it; see its log"
        )

    def layout(self) -> dict[str, str]:
        """Parameter name → type and shape, of one rank; quick."""
        ranks = self.post("/weights_checker", action="venus_layout")["ranks"]
        self.ranks = len(ranks)
        layout: dict[str, str] = ranks[0]["checksums"]
        return layout

    def checksums(self) -> list[dict[str, str]]:
        """Parameter name → checksum, one mapping a rank, computed inside the engine from what it samples with."""
        return [rank["checksums"] for rank in self.post("/weights_checker", action="venus_checksum")["ranks"]]

    def close(self) -> None:
        self._http.close()


class EnginesFailed(Exception):
    """Some of the engines did not do as asked: those to blame, each with its error."""

    def __init__(self, errors: Mapping[SyncEngine, WireError]) -> None:
        super().__init__("; ".join(map(str, errors.values())))
        self.errors = dict(errors)


def start(function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
    """Call `function` in a thread that never keeps the process alive: it may be blocked on a dead engine."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def answers(futures: Mapping[SyncEngine, Future[T]]) -> dict[SyncEngine, T]:
    """Everyone's answer; each has its timeout.

    Raises:
        EnginesFailed: those that are gone, if any: what the others say is then most likely their fault. Else those
            that refused.
    """
    if futures:
        # The HTTP client has the same timeout and the better message: leave it a moment.
        wait(futures.values(), max(engine.timeout_s for engine in futures) + 2 * MARGIN_S)
    failed: dict[SyncEngine, WireError] = {}
    for engine, future in futures.items():
        if not future.done():
            failed[engine] = engine.silent("request")
        elif isinstance(error := future.exception(), WireError):
            failed[engine] = error
    if failed:
        raise EnginesFailed({engine: e for engine, e in failed.items() if isinstance(e, EngineGone)} or failed)
    return {engine: future.result() for engine, future in futures.items()}
