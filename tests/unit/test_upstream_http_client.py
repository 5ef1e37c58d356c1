# SPDX-License-Identifier: Apache-2.0
"""buildidfs.upstream.http_client: uploads to servers that take them, or do not."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from buildidfs.upstream.http_client import HttpClient
from buildidfs.upstream.server import Unavailable
from tests.support.upstreams import Handler, self_signed, upstream

QUICK = 0.3
PIECE = b"p" * (1 << 20)


@contextlib.contextmanager
def client(timeout_s: float = 20.0, *headers: tuple[str, str]) -> Iterator[HttpClient]:
    made = HttpClient(timeout_s, headers)
    try:
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that has one connection, and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run() -> None:
            with contextlib.suppress(OSError):
                accepted, _ = listener.accept()
                with accepted:
                    serve(accepted)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)


def _answering(answer: bytes) -> Callable[[socket.socket], None]:
    """Read until a body of two pieces has come, and answer."""

    def serve(connection: socket.socket) -> None:
        left = 2 * len(PIECE)
        while left > 0 and (data := connection.recv(1 << 16)):
            left -= len(data)
        connection.sendall(answer)

    return serve


def test_pieces_arrive_and_the_answer_is_bounded() -> None:
    head = b"HTTP/1.1 418 Teapot\r\nContent-Length: 1000000\r\n\r\n"
    length = ("Content-Length", str(2 * len(PIECE)))
    with listening(_answering(head + b"x" * 1_000_000)) as url, client() as http:
        answer = http.send("PUT", url, iter([PIECE, PIECE]), [length])
    assert (answer.status, answer.said) == (418, "418 Teapot")
    assert answer.body == b"x" * (64 << 10)


def _silent(connection: socket.socket) -> None:
    """Read all that comes, and say nothing until the client goes."""
    while connection.recv(1 << 16):
        pass


def test_server_that_does_not_answer_has_its_time() -> None:
    with listening(_silent) as url, client(QUICK) as http:
        with pytest.raises(Unavailable, match=r"no answer within 0\.3 s") as raised:
            http.send("POST", url, b"{}")
        assert raised.value.hangs


def test_server_that_does_not_read_has_its_time() -> None:
    ended = threading.Event()

    def deaf(connection: socket.socket) -> None:
        ended.wait(30)

    with listening(deaf) as url, client(QUICK) as http:
        try:
            with pytest.raises(Unavailable, match="no answer") as raised:
                http.send("POST", url, itertools.repeat(PIECE))
        finally:
            ended.set()
        assert raised.value.hangs


def test_each_piece_has_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[float] = []

    class Counted(threading.Timer):
        def start(self) -> None:
            started.append(self.interval)
            super().start()

    monkeypatch.setattr(threading, "Timer", Counted)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
    quarters = [PIECE[: len(PIECE) // 4]] * 8
    length = ("Content-Length", str(2 * len(PIECE)))
    with listening(_answering(head)) as url, client() as http:
        assert http.send("POST", url, iter(quarters), [length]).status == 200
    assert started == [20.0] * (1 + len(quarters) + 1)


def test_server_that_drips_its_answer_has_its_time() -> None:
    ended = threading.Event()

    def drip(connection: socket.socket) -> None:
        for byte in itertools.cycle(b"HTTP/1.1 200 OK"):
            if ended.wait(QUICK / 10):
                return
            connection.sendall(bytes([byte]))

    with listening(drip) as url, client(QUICK) as http:
        try:
            with pytest.raises(Unavailable, match="no answer"):
                http.send("POST", url, b"{}")
        finally:
            ended.set()


def test_error_of_the_content_passes() -> None:
    def pieces() -> Iterator[bytes]:
        yield PIECE
        raise OSError(5, "the disk is broken")

    with (
        listening(_silent) as url,
        client() as http,
        pytest.raises(OSError, match="the disk is broken"),
    ):
        http.send("POST", url, pieces())


@pytest.mark.parametrize("url", ["http://host:x/", "http://\x7f/", "http://" + "a" * 70_000])
def test_url_that_is_none_is_no_crash(url: str) -> None:
    with client() as http, pytest.raises(Unavailable, match="URL") as raised:
        http.send("PUT", url, b"")
    assert raised.value.lasting


def test_certificate_of_the_server_is_verified(tmp_path: Path) -> None:
    def never(handler: Handler) -> None:
        raise AssertionError("a request came")

    with (
        upstream(never, self_signed(tmp_path)) as server,
        client() as http,
        pytest.raises(Unavailable, match="certificate"),
    ):
        http.send("POST", server.url, b"{}")


def test_no_request_after_the_connections_are_closed(tmp_path: Path) -> None:
    with upstream(Handler.hang) as server, (tmp_path / "there").open("wb") as file:
        client = HttpClient(30.0)
        used = client.connections()
        client.close()
        with pytest.raises(Unavailable, match="closed"):
            client.download(f"{server.url}/file", file.fileno(), 100)
        with pytest.raises(Unavailable, match="closed"):
            client.send("PUT", f"{server.url}/file", b"bytes")
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
