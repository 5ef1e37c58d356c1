# SPDX-License-Identifier: Apache-2.0
"""The server of metrics: real sockets, most of which are idle."""

from __future__ import annotations

import os
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from buildidfs.watch import metrics
from buildidfs.watch.metrics import MetricsServer
from tests.support.harness.scans import open_descriptors

if TYPE_CHECKING:
    from collections.abc import Iterator

GET = b"GET /metrics HTTP/1.1\r\n\r\n"
BODY = b"metrics\n" * 100_000


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    """A running server that answers with `BODY`."""
    before = open_descriptors()
    wake, woken = os.pipe()
    with socket.create_server(("127.0.0.1", 0), backlog=metrics.BACKLOG) as listening:
        server = MetricsServer(listening, wake, lambda request: BODY)
        thread = threading.Thread(target=server.run)
        thread.start()
        yield listening.getsockname()
        os.close(woken)
        thread.join(10)
        assert not thread.is_alive()
    os.close(wake)
    assert open_descriptors() <= before


def answer(client: socket.socket) -> bytes:
    client.settimeout(10)
    parts = []
    while chunk := client.recv(1 << 16):
        parts.append(chunk)
    return b"".join(parts)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let connections last longer than any client waits, so that a delayed request fails."""
    monkeypatch.setattr(metrics, "CONNECTION_S", 3600.0)


def ask(address: tuple[str, int]) -> None:
    """Get an answer while the client waits for it."""
    with socket.create_connection(address, 10) as client:
        client.sendall(GET)
        assert answer(client) == BODY


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("count", [64, 300])
@pytest.mark.parametrize("sent", [b"", b"GET /metrics", GET], ids=["silent", "half", "unread"])
def test_connections_that_do_nothing_delay_no_request(
    address: tuple[str, int], count: int, sent: bytes
) -> None:
    idle = [socket.create_connection(address, 10) for _ in range(count)]
    try:
        for each in idle:
            each.sendall(sent)
        for _ in range(10):
            ask(address)
    finally:
        for each in idle:
            each.close()


def test_request_may_come_in_parts(address: tuple[str, int]) -> None:
    with socket.create_connection(address, 10) as client:
        for byte in GET:
            client.sendall(bytes((byte,)))
        assert answer(client) == BODY


def test_connection_ends_after_its_time(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "CONNECTION_S", 0.2)
    with socket.create_connection(address, 10) as client:
        client.sendall(b"GET ")
        assert answer(client) == b""


@pytest.mark.usefixtures("patient")
def test_client_that_leaves_harms_no_other(address: tuple[str, int]) -> None:
    for part in (b"", b"GET ", GET):
        with socket.create_connection(address, 10) as client:
            client.sendall(part)
    ask(address)
