# SPDX-License-Identifier: Apache-2.0
"""Options of the server, and the addresses that it listens at."""

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
"""The port of debuginfod, on this machine alone."""


_PORT: Final = re.compile(r"\d{1,5}")


class Pages(Protocol):
    """The pages for people, which a layer above makes."""

    def answer(self, request: Request) -> Answer | None:
        """The answer to a GET or HEAD, None if it is not for a page. Raises `BadRequest`.

        Also the answer to a POST to a path that takes a body.
        """

    def most_body(self, path: bytes) -> int:
        """Return the bytes that the body of a POST to a path may have; 0 for none."""


class Address(msgspec.Struct, frozen=True):
    """An address to listen at: ``path`` of a Unix socket, or ``host`` (empty: all) and ``port``."""

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
    """Options of a server. ``rate`` is requests a second of one client, 0 for no limit.

    A client has ``timeout`` seconds to send a request, and to take a part of the answer.

    ``metrics_of`` gives lines of metrics of the store, beside those of the server. ``pages_of``
    gives the pages over an open store, within a block; None is a server without. ``engine_of``
    makes what names addresses and disassembles. ``opened`` opens the store, if not in the usual
    way. ``agent_of`` makes what fetches missing files. A request for ``/`` is sent to ``home``.
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


def parse_address(text: str) -> Address:
    """An address from ``HOST:PORT``, ``[IPV6]:PORT``, ``:PORT`` or ``unix:PATH``.

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
