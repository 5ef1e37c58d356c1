# SPDX-License-Identifier: Apache-2.0
"""The upstream servers, from the settings and from the variables of debuginfod clients."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import config
from buildidfs.errors import UsageError
from buildidfs.linux import openat2

if TYPE_CHECKING:
    from collections.abc import Mapping

    from buildidfs.config import UpstreamSettings

TIMEOUT_S: Final = 10.0
_MOST_HEADERS_BYTES: Final = 64 << 10

URLS: Final = "DEBUGINFOD_URLS"
TIMEOUT: Final = "DEBUGINFOD_TIMEOUT"
HEADERS_FILE: Final = "DEBUGINFOD_HEADERS_FILE"

_CREDENTIALS: Final = re.compile(r"(https?://)[^/\s]*@")


class FetchOptions(msgspec.Struct, frozen=True):
    """The servers in the order in which they are asked, and the limits for each.

    A server has ``timeout`` seconds to answer, and again for each 100 KiB of a file. A file has at
    most ``max_size`` bytes. If no server has a file, it is not requested again for ``absent_s``
    seconds. ``wait`` is the number of seconds for which an open of the mount, or a request, waits
    for a file. ``headers`` are sent to all HTTP servers.
    """

    urls: tuple[str, ...] = ()
    timeout: float = TIMEOUT_S
    wait: float = 10.0
    max_size: int = 2 << 30
    absent_s: int = 3600
    headers: tuple[tuple[str, str], ...] = ()
    offline: bool = False

    @property
    def scope(self) -> tuple[str, ...]:
        """The servers to which a remembered answer applies."""
        return (*map(without_password, self.urls), "offline" if self.offline else "")


def without_password(url: str) -> str:
    """Return a URL for people, without user and password."""
    return _CREDENTIALS.sub(r"\1***@", url)


def of_settings(settings: UpstreamSettings, environ: Mapping[str, str]) -> FetchOptions:
    """Return the options from settings and environment.

    The servers of the settings come first. Raises `UsageError`.
    """
    named = (*map(os.path.expanduser, settings.urls), *environ.get(URLS, "").split())
    return FetchOptions(
        tuple(dict.fromkeys(named)),
        settings.timeout or seconds(environ.get(TIMEOUT, "")) or TIMEOUT_S,
        settings.wait,
        config.size(settings.max_size),
        config.seconds(settings.remember_absent),
        headers_in(settings.headers_file or environ.get(HEADERS_FILE, "")),
        settings.offline,
    )


def seconds(text: str) -> float | None:
    """Return the value of DEBUGINFOD_TIMEOUT; None if it is invalid.

    Other programs ignore an invalid value, too.
    """
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < 86_400 else None


def headers_in(path: str) -> tuple[tuple[str, str], ...]:
    """Return the headers in a file, one per line; none without a path.

    Raises `UsageError`; its message contains no header.
    """
    if not path:
        return ()
    try:
        fd = openat2.open_regular(os.path.expanduser(path))
        with open(fd, encoding="latin-1") as file:
            text = file.read(_MOST_HEADERS_BYTES)
    except OSError as error:
        raise UsageError(
            f"cannot read the headers for servers: {path}: {error.strerror}"
        ) from error
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        name, colon, value = line.partition(":")
        if not colon or not name.strip().isascii() or " " in name.strip():
            raise UsageError(f"{path}: line {number} is not a header; try Name: value")
        found.append((name.strip(), value.strip()))
    return tuple(found)
