# SPDX-License-Identifier: Apache-2.0
"""The names by which browsers may call a server that listens at a loopback address.

A page of the web can give its own name an address of this machine (DNS rebinding). A browser then
counts the server as part of that page, and shows it all answers. Such a request has the name of the
page in its header Host.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from typing import Final

_PORT: Final = re.compile(r":\d{0,5}\Z")
_LOCAL: Final = re.compile(r"(?:[a-z0-9_-]{1,63}\.)*localhost")


def is_loopback(address: str) -> bool:
    """Return True for the IP address of a socket that only this machine can reach."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(parsed, "ipv4_mapped", None)
    return parsed.is_loopback if mapped is None else bool(mapped.is_loopback)


@functools.lru_cache(maxsize=64)
def is_own(header: bytes, names: frozenset[str]) -> bool:
    """Return True if a header Host has a local name, a literal IP address, or one of ``names``.

    A request without the header, which no browser sends, has an empty one. ``names`` are in lower
    case. A page of the web has no name below ``localhost`` (RFC 6761).
    """
    if not header:
        return True
    host = _PORT.sub("", header.decode("latin-1")).lower().removesuffix(".")
    if _LOCAL.fullmatch(host) or host in names:
        return True
    try:
        if host.startswith("[") and host.endswith("]"):
            return ipaddress.IPv6Address(host[1:-1]).scope_id is None  # a scope may be any text
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True
