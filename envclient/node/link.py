"""The node's end of a guest agent's socket: requests go in, replies come back by id. The same for every backend.

What the guest sends is not trusted: lengths are bounded, headers are checked, and a guest that breaks the rules is
cut off (its requests fail, its sandbox is destroyed by whoever leased it).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import struct
from typing import Any

from envclient.base.errors import VenusError

FRAME = struct.Struct(">II")
MAX_HEADER_BYTES = 1 << 16
log = logging.getLogger("venus.node")


class GuestLink(asyncio.Protocol):
    """One sandbox's connection. `await GuestLink.connect(...)`, then `request` as often as needed, also at once."""

    def __init__(self, sandbox: str, max_payload_bytes: int) -> None:
        self._sandbox = sandbox
        self._max_payload_bytes = max_payload_bytes
        self._buffer = bytearray()
        self._waiting: dict[int, asyncio.Future[tuple[dict[str, Any], bytes]]] = {}
        self._next_id = 1
        self._transport: asyncio.Transport | None = None
        self._ready: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[0] = self._ready
        self._closed_cause = ""

    @classmethod
    async def connect(cls, sandbox: str, sock: socket.socket, max_payload_bytes: int) -> GuestLink:
        """Take over `sock`, the node's end. The guest's first frame (id 0) says that it is ready: `wait_ready`."""
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, link = await loop.create_connection(lambda: cls(sandbox, max_payload_bytes), sock=sock)
        link._transport = transport
        return link

    async def wait_ready(self, timeout_s: float) -> None:
        """Returns when the agent serves.

        Raises:
            VenusError: it ended, said that it could not start, or said nothing in time.
        """
        try:
            header, _ = await asyncio.wait_for(self._ready, timeout_s)
        except TimeoutError:
            raise VenusError(
                f"sandbox {self._sandbox}: not ready after {timeout_s:g} s", "is the machine overloaded?"
            ) from None
        if not header.get("ready"):
            raise VenusError(f"sandbox {self._sandbox}: cannot start: {header.get('error', 'no reason given')}")

    async def request(self, header: dict[str, Any], payload: bytes, timeout_s: float) -> tuple[dict[str, Any], bytes]:
        """Send one request and await its reply.

        Raises:
            VenusError: the sandbox has ended, refuses, or does not answer in time.
        """
        if self._closed_cause or self._transport is None:
            raise VenusError(f"sandbox {self._sandbox}: {self._closed_cause or 'not connected'}")
        request_id = self._next_id
        self._next_id += 1
        future: asyncio.Future[tuple[dict[str, Any], bytes]] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        head = json.dumps({"id": request_id, **header}).encode()
        self._transport.write(FRAME.pack(len(head), len(payload)) + head + payload)
        try:
            reply, data = await asyncio.wait_for(future, timeout_s)
        except TimeoutError:
            raise VenusError(f"sandbox {self._sandbox}: its guest agent does not answer {header['op']!r}") from None
        finally:
            self._waiting.pop(request_id, None)
        if "error" in reply:
            raise VenusError(f"sandbox {self._sandbox}: {header['op']}: {reply['error']}")
        return reply, data

    def close(self, cause: str) -> None:
        """Cut the connection; requests on their way fail with `cause`. Idempotent."""
        if not self._closed_cause:
            self._closed_cause = cause
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(VenusError(f"sandbox {self._sandbox}: {cause}"))
                    with contextlib.suppress(VenusError):
                        future.exception()  # nobody may be waiting any more
        if self._transport is not None:
            self._transport.abort()

    # ---------------------------------------------------------------------------------------- asyncio calls these

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= FRAME.size:
            head_bytes, payload_bytes = FRAME.unpack_from(self._buffer)
            if head_bytes > MAX_HEADER_BYTES or payload_bytes > self._max_payload_bytes:
                self.close("its guest agent sent a frame that is too long")
                return
            end = FRAME.size + head_bytes + payload_bytes
            if len(self._buffer) < end:
                return
            try:
                header = json.loads(self._buffer[FRAME.size : FRAME.size + head_bytes])
                future = self._waiting.get(header["id"])
            except (ValueError, KeyError, TypeError):
                self.close("its guest agent sent a frame that is not one")
                return
            payload = bytes(self._buffer[FRAME.size + head_bytes : end])
            del self._buffer[:end]
            if future is not None and not future.done():
                future.set_result((header, payload))
            elif header["id"] == 0:
                log.error("sandbox %s: its guest agent failed: %s", self._sandbox, header.get("error"))

    def connection_lost(self, error: Exception | None) -> None:
        self.close("the sandbox has ended")
