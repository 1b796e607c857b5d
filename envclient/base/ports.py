"""Ports are reserved, not guessed: the launcher binds them and hands the open socket to its child."""

from __future__ import annotations

import socket

from envclient.base.errors import PreflightError


def listen(host: str, port: int = 0) -> socket.socket:
    """A listening TCP socket on `host`:`port` (0: any free one), inheritable by children.

    Raises:
        PreflightError: the port is in use or the host is not an address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio switches Nagle off: else every reply waits 40 ms.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as error:
        sock.close()
        raise PreflightError(
            f"cannot listen on {host}:{port}: {error.strerror}", "choose another port, 0 takes a free one"
        ) from None
    sock.listen(512)
    sock.set_inheritable(True)
    return sock


def port_of(sock: socket.socket) -> int:
    """The port number `sock` is bound to."""
    return int(sock.getsockname()[1])


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago, for programs that cannot take an open socket.

    The caller must retry with another one when the program reports that it is in use.
    """
    with socket.socket() as sock:
        sock.bind((host, 0))
        return port_of(sock)
