"""The wire between roles: HTTP, msgpack bodies (msgspec), one bearer token on every endpoint.

A service is a FastAPI app from `make_app`; its endpoints take one msgspec struct and return another:

    app = make_app("coordinator", token)
    @endpoint(app, "/v1/poll", PollRequest)
    async def poll(request: PollRequest) -> PollReply: ...

A caller uses `Client(url, token)` and `await client.call("/v1/poll", PollRequest(...), PollReply)`.
Errors travel as `{"error": type, "message": ..., "remedy": ...}` with a 4xx or 5xx status and are raised as WireError.
"""

from __future__ import annotations

import hmac
import logging
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import httpx
import msgspec
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect

from envclient.base.errors import ConfigError, VenusError, WireError

TOKEN_VARIABLE = "VENUS_TOKEN"
CONTENT_TYPE = "application/msgpack"
R = TypeVar("R")
log = logging.getLogger("venus.wire")


class WireFault(msgspec.Struct, frozen=True, kw_only=True):
    """Body of an error reply."""

    error: str
    message: str
    remedy: str = ""


def token_from_environment() -> str:
    """The run's token; roles receive it in the environment, never on the command line or in a file.

    Raises:
        ConfigError: VENUS_TOKEN is not set.
    """
    token = os.environ.get(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(f"{TOKEN_VARIABLE} is not set", "roles are started by megatron_venus.launch, which sets it")
    return token


def _reply(value: Any, status: int = 200) -> Response:
    return Response(msgspec.msgpack.encode(value), status_code=status, media_type=CONTENT_TYPE)


def make_app(name: str, token: str) -> FastAPI:
    """A FastAPI app that refuses every request without `Authorization: Bearer <token>`, save GET /health."""
    app = FastAPI(title=name, docs_url=None, redoc_url=None, openapi_url=None)
    expected = f"Bearer {token}".encode()

    @app.middleware("http")
    async def authorise(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        given = request.headers.get("authorization", "").encode()
        if request.url.path != "/health" and not hmac.compare_digest(given, expected):
            return _reply(WireFault(error="Unauthorized", message=f"{name}: wrong or missing token"), 401)
        return await call_next(request)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"role": name, "status": "ok"}

    return app


def endpoint(
    app: FastAPI, path: str, request_type: type[Any]
) -> Callable[[Callable[[Any], Awaitable[Any]]], Callable[[Any], Awaitable[Any]]]:
    """Serve POST `path`: decode the body as `request_type`, await the function, encode what it returns."""

    def register(function: Callable[[Any], Awaitable[Any]]) -> Callable[[Any], Awaitable[Any]]:
        async def handler(request: Request) -> Response:
            try:
                body = msgspec.msgpack.decode(await request.body(), type=request_type)
            except ClientDisconnect:
                return Response(status_code=499)  # the caller gave up; nobody reads this
            except (msgspec.ValidationError, msgspec.DecodeError) as error:
                return _reply(WireFault(error="BadRequest", message=f"{path}: {error}"), 400)
            try:
                return _reply(await function(body))
            except VenusError as error:
                fault = WireFault(error=type(error).__name__, message=error.message, remedy=error.remedy)
                return _reply(fault, 409)
            except Exception as error:
                log.exception("%s failed", path)
                return _reply(WireFault(error=type(error).__name__, message=f"{path}: {error}"), 500)

        app.post(path)(handler)
        return function

    return register


class Client:
    """Caller of one service. Use as `async with Client(...)`, or close with `aclose`."""

    def __init__(self, url: str, token: str, *, timeout_s: float = 60.0, connections: int = 256) -> None:
        self.url = url
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {token}", "content-type": CONTENT_TYPE},
            timeout=timeout_s,
            limits=limits,
            trust_env=False,
        )

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._http.aclose()

    async def call(self, path: str, request: Any, reply_type: type[R] | Any, *, timeout_s: float | None = None) -> Any:
        """POST `request` to `path` and decode the reply as `reply_type` (a struct or a union of structs).

        Raises:
            WireError: no connection, no answer within the timeout, or an error reply.
        """
        timeout: Any = timeout_s if timeout_s is not None else httpx.USE_CLIENT_DEFAULT
        try:
            response = await self._http.post(path, content=msgspec.msgpack.encode(request), timeout=timeout)
        except httpx.TimeoutException:
            raise WireError(f"{self.url}{path}: no answer in time", "see the log of that role") from None
        except httpx.HTTPError as error:
            raise WireError(f"{self.url}{path}: {type(error).__name__} {error}", "is that role still alive?") from None
        return decode_reply(self.url + path, response.status_code, response.content, reply_type)


class SyncClient:
    """The same for code without an event loop (the actor's training loop)."""

    def __init__(self, url: str, token: str, *, timeout_s: float = 60.0) -> None:
        self.url = url
        headers = {"authorization": f"Bearer {token}", "content-type": CONTENT_TYPE}
        self._http = httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def call(self, path: str, request: Any, reply_type: type[R] | Any, *, timeout_s: float | None = None) -> Any:
        """As `Client.call`, blocking."""
        timeout: Any = timeout_s if timeout_s is not None else httpx.USE_CLIENT_DEFAULT
        try:
            response = self._http.post(path, content=msgspec.msgpack.encode(request), timeout=timeout)
        except httpx.TimeoutException:
            raise WireError(f"{self.url}{path}: no answer in time", "see the log of that role") from None
        except httpx.HTTPError as error:
            raise WireError(f"{self.url}{path}: {type(error).__name__} {error}", "is that role still alive?") from None
        return decode_reply(self.url + path, response.status_code, response.content, reply_type)


def decode_reply(where: str, status: int, body: bytes, reply_type: Any) -> Any:
    """Decode an answer, or raise the WireError that its fault describes."""
    if status == 200:
        return msgspec.msgpack.decode(body, type=reply_type)
    try:
        fault = msgspec.msgpack.decode(body, type=WireFault)
    except (msgspec.ValidationError, msgspec.DecodeError):
        raise WireError(f"{where}: HTTP {status}", "see the log of that role") from None
    raise WireError(f"{where}: {fault.error}: {fault.message}", fault.remedy)
