# SPDX-License-Identifier: Apache-2.0
"""Options of the server, and its listening addresses."""

from __future__ import annotations

import dataclasses
import os
import re
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.config import Settings
    from buildidfs.upstream.agent import Agent

DEFAULT_LISTEN: Final = "127.0.0.1:8002"
"""The port of debuginfod, reachable from this machine only."""


_PORT: Final = re.compile(r"\d{1,5}")


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
    """Options of a server: the ``store``, the listening address, and the ``settings``, of which
    ``[serve]`` has the limits. ``agent_of`` makes the agent that fetches missing files, if any.
    """

    store: str | os.PathLike[str]
    listen: Address
    settings: Settings
    agent_of: Callable[[], Agent] | None = None


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
