# SPDX-License-Identifier: Apache-2.0
"""Options of the server, and its listening addresses."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from buildidfs.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from buildidfs.serve.backend import Backend
    from buildidfs.serve.messages import Answer, Request
    from buildidfs.serve.symbolication import Engine
    from buildidfs.store import Store
    from buildidfs.upstream.agent import Agent

DEFAULT_LISTEN: Final = "127.0.0.1:8002"
"""The port of debuginfod, reachable from this machine only."""


_PORT: Final = re.compile(r"\d{1,5}")


class Pages(Protocol):
    """The pages for people, made by a higher layer."""

    def answer(self, request: Request) -> Answer | None:
        """Return the answer to a GET or HEAD; None if the path is not that of a page. Raises
        `BadRequest`.

        Also answers a POST to a path that takes a body.
        """

    def most_body(self, path: bytes) -> int:
        """Return the maximum number of bytes in the body of a POST to a path; 0 if it takes
        none.
        """


class Address(msgspec.Struct, frozen=True):
    """A listening address: ``path`` of a Unix socket, or ``host`` (empty: all) and ``port``."""

    host: str = ""
    port: int = 0
    path: str = ""

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """Options of a server. ``rate`` is requests per second of one client, 0 for no limit.

    A client has ``timeout`` seconds to send a request, and to take a part of the answer.

    ``metrics_of`` returns lines of metrics of the store, in addition to those of the server.
    ``pages_of`` returns a context manager for the pages over an open store; None is a server
    without pages. ``engine_of`` makes the engine that names addresses and disassembles. ``opened``
    replaces the usual function that opens the store. ``agent_of`` makes the agent that fetches
    missing files. A request for ``/`` is redirected to ``home``. ``hosts`` are further names of a
    server at a loopback address, in lower case (`hosts.is_own`).
    """

    store: str | os.PathLike[str]
    listen: Address
    workers: int = 1
    cors: bool = False
    rate: float = 500.0
    timeout: float = 30.0
    most_downloads: int = 512
    metrics_of: Callable[[Store], bytes] = lambda store: b""
    pages_of: Callable[[Backend], AbstractContextManager[Pages]] | None = None
    engine_of: Callable[[Store], Engine] | None = None
    opened: Callable[[bytes], Store] | None = None
    agent_of: Callable[[], Agent] | None = None
    home: str = ""
    hosts: frozenset[str] = frozenset()


def parse_address(text: str) -> Address:
    """Parse ``HOST:PORT``, ``[IPV6]:PORT``, ``:PORT`` or ``unix:PATH``.

    Raises `UsageError`.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if path:
            return Address(path=os.path.abspath(path))
    else:
        host, colon, port = text.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            colon = ""
        if colon and _PORT.fullmatch(port) and int(port) < 65_536:
            return Address(host, int(port))
    raise UsageError(f"not an address: {text!r}; try {DEFAULT_LISTEN} or unix:/run/buildidfs.sock")
