# SPDX-License-Identifier: Apache-2.0
"""Hosts that reach one server and not each other: network namespaces, joined by veth pairs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from buildidfs.linux import syscalls
from tests.support.clients.tools import run, tool

_CLONE_NEWNET = 0x40000000
_SERVER = "server"


class Networks:
    """The namespace of a server, and one for each host. ``addresses`` are those of the server, as
    each host sees it.
    """

    def __init__(self, *hosts: str) -> None:
        self._names = {name: f"buildidfs{os.getpid()}{name}" for name in (_SERVER, *hosts)}
        self.addresses: dict[str, str] = {}
        for name in self._names.values():
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        for number, host in enumerate(hosts):
            server, own = self._names[_SERVER], self._names[host]
            peer = ("peer", "name", "uplink", "netns", own)
            _ip("link", "add", f"to-{host}", "netns", server, "type", "veth", *peer)
            first = 4 * number + 1  # of the network for documents, RFC 5737
            for name, link, last in ((server, f"to-{host}", first), (own, "uplink", first + 1)):
                _ip("-n", name, "address", "add", f"192.0.2.{last}/30", "dev", link)
                _ip("-n", name, "link", "set", link, "up")
            self.addresses[host] = f"192.0.2.{first}"

    @contextlib.contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Let this thread, what it starts and the sockets that it opens be in a namespace."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            there = os.open(f"/run/netns/{self._names[name]}", os.O_RDONLY | os.O_CLOEXEC)
            try:
                syscalls.setns(there, _CLONE_NEWNET)
            finally:
                os.close(there)
            try:
                yield
            finally:
                syscalls.setns(before, _CLONE_NEWNET)
        finally:
            os.close(before)

    def cut(self, host: str) -> None:
        """Take the host from the network."""
        _ip("-n", self._names[host], "link", "delete", "uplink")

    def close(self) -> None:
        """Remove all namespaces, and the links with them."""
        for name in self._names.values():
            run([tool("ip"), "netns", "delete", name])


@contextlib.contextmanager
def networks(*hosts: str) -> Iterator[Networks]:
    """Make the networks, for the time of the block."""
    made = Networks.__new__(Networks)
    try:
        made.__init__(*hosts)  # type: ignore[misc]
        yield made
    finally:
        made.close()


def _ip(*words: str) -> None:
    run([tool("ip"), *words], check=True)
