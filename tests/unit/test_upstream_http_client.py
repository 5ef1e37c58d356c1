# SPDX-License-Identifier: Apache-2.0
"""buildidfs.upstream.http_client: certificates, URLs that are none, and the end."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from buildidfs.upstream.http_client import HttpClient
from buildidfs.upstream.options import Unavailable
from tests.support.servers.upstreams import Handler, self_signed, upstream


@contextlib.contextmanager
def client() -> Iterator[HttpClient]:
    made = HttpClient(20.0)
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("url", ["http://host:x/", "http://\x7f/", "http://" + "a" * 70_000])
def test_url_that_is_none_is_no_crash(url: str, tmp_path: Path) -> None:
    with (
        client() as http,
        (tmp_path / "file").open("wb") as file,
        pytest.raises(Unavailable, match="URL") as raised,
    ):
        http.download(url, file.fileno(), 100)
    assert raised.value.lasting


def test_certificate_of_the_server_is_verified(tmp_path: Path) -> None:
    def never(handler: Handler) -> None:
        raise AssertionError("a request came")

    with (
        upstream(never, self_signed(tmp_path)) as server,
        client() as http,
        (tmp_path / "file").open("wb") as file,
        pytest.raises(Unavailable, match="certificate"),
    ):
        http.download(server.url, file.fileno(), 100)


def test_no_request_after_the_connections_are_closed(tmp_path: Path) -> None:
    with upstream(Handler.hang) as server, (tmp_path / "there").open("wb") as file:
        client = HttpClient(30.0)
        used = client.connections()
        client.close()
        with pytest.raises(Unavailable, match="closed"):
            client.download(f"{server.url}/file", file.fileno(), 100)
        failures: list[BaseException] = []

        def another_thread() -> None:
            with pytest.raises(Unavailable, match="closed") as caught:
                client.download(f"{server.url}/file", file.fileno(), 100)
            failures.append(caught.value)

        thread = threading.Thread(target=another_thread)
        thread.start()
        thread.join(20)
        assert len(failures) == 1
        assert used.is_ended


def test_connection_that_is_made_while_all_are_closed_is_cut() -> None:
    client = HttpClient(30.0)
    connections = client.connections()
    client.close()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        made = SimpleNamespace(get_extra_info=lambda name: ours)
        connections.trace("connection.connect_tcp.complete", {"return_value": made})
        theirs.settimeout(20)
        assert theirs.recv(1) == b""
