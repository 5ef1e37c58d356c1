# SPDX-License-Identifier: Apache-2.0
"""Limits that prevent one client of a server from taking the share of others, and the names by
which browsers may call a server that listens at a loopback address.

A limit delays a client, or refuses its connection. It never causes a wrong answer, because a
debuginfod client remembers for ten minutes that a file is absent.

A page of the web can give its own name an address of this machine (DNS rebinding). A browser then
counts the server as part of that page, and shows it all answers. Such a request has the name of the
page in its header Host.
"""

from __future__ import annotations

import functools
import ipaddress
import re
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from buildidfs.shares import FairQueue, Quota, Share

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable
    from concurrent.futures import Executor

_MOST_CLIENTS: Final = 65_536
_BURST_S: Final = 4.0
_PORT: Final = re.compile(r":\d{0,5}\Z")
_ADDRESS: Final = re.compile(r"(?:\[([^\[\]]+)\]|([^:\[\]]*)):(\d{1,5})")
_LOCAL: Final = re.compile(r"(?:[a-z0-9_-]{1,63}\.)*localhost")


def client_of(address: str) -> str:
    """Return the client of an address: an IPv6 network of 64 bits is one client."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.IPv6Network((parsed, 64), strict=False))
    return address


class Rate:
    """At most ``rate`` requests per second from each client, after a burst for four seconds."""

    def __init__(self, rate: float) -> None:
        """With a ``rate`` of 0 there is no limit."""
        self._interval = 1 / rate if rate else 0.0
        # The time until which each client has used its share; clients in the order of their last
        # request.
        self._until: OrderedDict[Hashable, float] = OrderedDict()

    def delay(self, client: Hashable) -> float:
        """Count a request, and return the seconds for which it has to wait."""
        if not self._interval:
            return 0.0
        now = time.monotonic()
        until = max(self._until.get(client, 0.0), now) + self._interval
        self._until[client] = until
        self._until.move_to_end(client)
        while len(self._until) > _MOST_CLIENTS or next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        return max(until - now - _BURST_S, 0.0)


class Places:
    """Places for downloads in progress. A client that gets none is called later, when a place is
    free.
    """

    def __init__(self, quota: Quota) -> None:
        self._quota = quota
        self._waiting: OrderedDict[object, tuple[Hashable, Callable[[], None]]] = OrderedDict()

    def take(self, client: Hashable, key: object, go: Callable[[], None]) -> None:
        """Call ``go`` when ``client`` has a place, perhaps at once. ``key`` is for `forget`."""
        if self._quota.take(client):
            go()
        else:
            self._waiting[key] = client, go

    def forget(self, key: object) -> bool:
        """Stop waiting for a place; return False if ``key`` did not wait."""
        return self._waiting.pop(key, None) is not None

    def give_back(self, client: Hashable) -> None:
        """Give back a place; the first waiting client that may have it gets it."""
        self._quota.give_back(client)
        for key, (other, go) in self._waiting.items():
            if self._quota.take(other):
                del self._waiting[key]
                go()
                return


class Lane:
    """A queue for long work, with a limited number of pieces at a time. Clients take turns.

    So a client with many requests delays itself, and another client by one piece of work.
    """

    def __init__(self, executor: Executor, at_once: int, most: int) -> None:
        """At most ``most`` pieces of work wait or run; the clients share this number."""
        self.executor = executor
        self._free = at_once
        self._quota = Quota(most)
        # The quota keeps it from ever being full.
        self._waiting: FairQueue[tuple[str, Callable[[], bool]]] = FairQueue(most)

    def enter(self, client: str, begin: Callable[[], bool]) -> bool:
        """Call ``begin`` when it is the turn of ``client``, perhaps at once.

        ``begin`` returns False if the work is no longer wanted; otherwise the caller must call
        `leave` when it is done. Returns False if too much work waits already.
        """
        if not self._quota.take(client):
            return False
        self._waiting.put(Share(client), (client, begin))
        if self._free:
            self._free -= 1
            self._go_on()
        return True

    def leave(self, client: str) -> None:
        """Start the next piece of work, because one of ``client`` is done."""
        self._quota.give_back(client)
        self._go_on()

    def _go_on(self) -> None:
        while (turn := self._waiting.pop()) is not None:
            client, begin = turn
            if begin():
                return
            self._quota.give_back(client)
        self._free += 1


def host_and_port(text: str) -> tuple[str, int] | None:
    """Parse ``HOST:PORT``, ``[IPV6]:PORT`` or ``:PORT``; return None for any other text."""
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[3]) >= 1 << 16:
        return None
    return found[1] or found[2] or "", int(found[3])


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
