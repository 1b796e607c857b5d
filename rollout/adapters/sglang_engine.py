"""SGLang behind `protocol.Engine`: the parent of one server process, spoken to over loopback HTTP.

The worker starts it, sends one request per turn (token ids in, token ids and log-probs out) and pauses it around weight
updates; the actor talks to the same server directly to broadcast weights. Log-probs are those of the tempered
distribution: settings under which SGLang would report anything else are refused when the engine is configured.
"""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from envclient.base.errors import ConfigError, InvariantError, VenusError, WireError
from envclient.base.ports import free_port
from envclient.base.processes import Child, last_lines, start_child
from rollout.adapters.sglang_args import server_arguments, server_environment
from rollout.config import ModelConfig, WorkerConfig
from rollout.engine_args import tensor_parallel
from rollout.protocol import GenerateRequest, Generation
from rollout.types import Capabilities

_START_ATTEMPTS = 3
_PROBE_S = 2.0
CONTROL_S = 60.0
"""Seconds that anything but a turn may take: a pause for new weights must notice an engine that is stuck."""
_STOP_GRACE_S = 3.0
# SGLang aborts every request whose id begins with the given one: a character that no trajectory id holds ends it.
_END_OF_ID = "#"


class SglangEngine:
    """One SGLang server.

    Args:
        model_path: Hugging Face folder to load.
        log: file that receives the server's output.
        token: bearer token that the server demands on every endpoint.
        seed: of the engine's sampling.

    Raises:
        ConfigError: `engine_args` holds an argument that this adapter sets, or one that spoils the log-probs.
    """

    def __init__(
        self, *, model_path: str, model: ModelConfig, worker: WorkerConfig, log: Path, token: str, seed: int
    ) -> None:
        self._arguments = server_arguments(model_path=model_path, model=model, worker=worker, seed=seed)
        self._environment = server_environment(
            token=token, extensions=log.parent / f"{log.stem}-extensions", ranks=tensor_parallel(worker)
        )
        self._start_timeout_s = worker.engine_start_timeout_s
        self._request_timeout_s = worker.request_timeout_s
        self._log = log
        self._headers = {"authorization": f"Bearer {token}", "content-type": "application/json"}
        self._child: Child | None = None
        self._http: aiohttp.ClientSession | None = None
        self._port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    # ------------------------------------------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            VenusError: it ended or did not answer within `engine_start_timeout_s`; carries its last log lines.
        """
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=300),
            headers=self._headers,
        )
        for attempt in range(_START_ATTEMPTS):
            self._port = free_port()
            argv = [sys.executable, "-m", "rollout.sglang_plugin.serve", *self._arguments, "--port", str(self._port)]
            self._child = await start_child("engine", argv, self._log, env=self._environment)
            try:
                await asyncio.wait_for(self._wait_ready(), self._start_timeout_s)
                return
            except TimeoutError:
                cause = (
                    f"engine gave no answer in {self._start_timeout_s:.0f} s (rollout.worker.engine_start_timeout_s)"
                )
            except WireError as error:
                cause = error.message
            lines = last_lines(self._log)
            await self._stop_child()
            if "address already in use" not in lines.lower() or attempt == _START_ATTEMPTS - 1:
                raise VenusError(f"{cause}; last lines of {self._log}:\n{lines}")

    async def _wait_ready(self) -> None:
        while True:
            if self._child is None or self._child.returncode is not None:
                raise WireError(f"engine ended while starting, exit code {self._child and self._child.returncode}")
            try:
                # Bounded: another process on this port may accept and never answer.
                await asyncio.wait_for(self._call("GET", "/model_info", None, {}), _PROBE_S)
                return
            except (WireError, TimeoutError):
                await asyncio.sleep(0.25)

    async def wait_dead(self) -> str:
        """Returns when the server process has ended: the reason with its last log lines."""
        if self._child is None:
            return "the engine was never started"
        code = await self._child.process.wait()
        return f"engine ended, exit code {code}; last lines of {self._log}:\n{last_lines(self._log)}"

    async def stop(self) -> None:
        """End the server and everything it started, within 10 s; idempotent."""
        await self._stop_child()
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _stop_child(self) -> None:
        if self._child is not None:
            # The whole group: the scheduler would otherwise outlive a server that is killed.
            await self._child.stop(grace_s=_STOP_GRACE_S)
            self._child = None

    # ---------------------------------------------------------------------------------------------- requests

    async def generate(self, request: GenerateRequest) -> Generation:
        """One turn.

        Raises:
            WireError: the engine is gone, too slow, or refused the request.
            InvariantError: the reply breaks the contract (counts, log-probs); the tokens are not used.
        """
        body = {
            "rid": request.request_id + _END_OF_ID,
            "input_ids": request.input_ids,
            "return_logprob": True,
            "sampling_params": {
                "temperature": request.temperature,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "max_new_tokens": request.max_new_tokens,
                "stop_token_ids": request.stop_token_ids,
                "skip_special_tokens": False,
                "spaces_between_special_tokens": False,
                "no_stop_trim": True,
            },
        }
        return _generation(await self._post("/generate", body, timeout_s=self._request_timeout_s), request)

    async def abort_all(self) -> None:
        await self._post("/abort_request", {"rid": "", "abort_all": True})

    async def abort(self, request_id: str) -> None:
        await self._post("/abort_request", {"rid": request_id + _END_OF_ID})

    async def flush(self) -> None:
        """Forget all cached KV.

        Raises:
            WireError: a request was still in the engine.
        """
        await self._post("/flush_cache", {}, params={"timeout": "5"})

    async def checksums(self) -> list[dict[str, str]]:
        """Checksum of every parameter as the engine holds it, one mapping per tensor-parallel rank."""
        body = {"action": "venus_checksum"}
        reply = await self._post("/weights_checker", body, timeout_s=self._request_timeout_s)
        return [rank["checksums"] for rank in reply["ranks"]]

    async def _post(
        self,
        path: str,
        body: dict[str, Any],
        params: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        return await self._call("POST", path, orjson.dumps(body), params or {}, timeout_s or CONTROL_S)

    async def _call(
        self, method: str, path: str, body: bytes | None, params: dict[str, str], timeout_s: float = _PROBE_S
    ) -> Any:
        if self._http is None:
            raise WireError("engine is not running", "call start first")
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._http.request(
                method, self.url + path, data=body, params=params, timeout=timeout
            ) as response:
                raw = await response.read()
                status = response.status
                is_json = response.content_type == "application/json"
        except TimeoutError:
            raise WireError(
                f"engine {self.url}{path}: no answer within {timeout_s:g} s",
                f"a turn's bound is rollout.worker.request_timeout_s; see {self._log}",
            ) from None
        except aiohttp.ClientError as error:
            raise WireError(f"engine {self.url}{path}: {type(error).__name__}: {error}", f"see {self._log}") from None
        if status != 200:
            raise WireError(f"engine {self.url}{path}: HTTP {status}: {raw[:300].decode(errors='replace')}")
        return orjson.loads(raw) if is_json and raw else None


def _generation(reply: dict[str, Any], request: GenerateRequest) -> Generation:
    """Check SGLang's answer against the contract of `Generation`."""
    meta = reply["meta_info"]
    reason = str((meta.get("finish_reason") or {}).get("type"))
    token_ids: list[int] = reply["output_ids"]
    rows = meta.get("output_token_logprobs") or []
    logprobs = [float(row[0]) for row in rows]
    where = f"engine's answer to {request.request_id}"
    if [row[1] for row in rows] != token_ids:
        raise InvariantError(f"{where}: {len(token_ids)} tokens but log-probs of {len(rows)} or of other tokens")
    if not all(math.isfinite(value) and value <= 1e-6 for value in logprobs):
        raise InvariantError(f"{where}: a log-prob is not finite or above 0: {logprobs}")
    if reason not in ("stop", "length", "abort"):
        raise InvariantError(f"{where}: finish reason {reason!r} is unknown")
    if reason == "length" and token_ids[-1] in request.stop_token_ids:
        reason = "stop"  # SGLang looks at the length first, but a turn whose last token stops it is whole
    if reason == "stop" and token_ids[-1] not in request.stop_token_ids:
        raise ConfigError(
            f"{where}: stopped at token {token_ids[-1]}, which is none of stop_token_ids {request.stop_token_ids}",
            "give the agent every eos_token_id of the model's generation_config.json, or remove it there",
        )
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reason,
        cached_tokens=int(meta.get("cached_tokens") or 0),
    )
