# SPDX-License-Identifier: Apache-2.0
"""Upstream servers that do what a test wants: HTTP over real sockets, right or wrong."""

from __future__ import annotations

import contextlib
import gzip
import http.server
import socket
import socketserver
import ssl
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.clients.tools import run, tool
from tests.support.harness.waiting import until

Behaviour = Callable[["Handler"], None]
"""Answers one request, or does not."""


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection. The server says how it answers."""

    protocol_version = "HTTP/1.1"
    server: Upstream

    def do_GET(self) -> None:
        with self.server.changed:
            self.server.requests[self.path] += 1
            self.server.heads.append(dict(self.headers))
            self.server.changed.notify_all()
        self.server.behaviour(self)

    def send(self, body: bytes, status: int = 200, **headers: str) -> None:
        """Answer; underscores in names of headers stand for hyphens."""
        self.send_response(status)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in ({"Content-Length": str(len(body))} | given).items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(body)

    def hang(self) -> None:
        """Do nothing until the server ends, or the client goes."""
        self.close_connection = True
        self.connection.settimeout(0.1)
        while not self.server.ending.is_set():
            try:
                if not self.connection.recv(1):
                    return
            except TimeoutError:
                continue
            except OSError:
                return

    def drip(self, data: bytes, pause_s: float) -> None:
        """Send a byte now and then."""
        self.close_connection = True
        with contextlib.suppress(OSError):
            for number in range(len(data)):
                self.connection.sendall(data[number : number + 1])
                if self.server.ending.wait(pause_s):
                    return

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Upstream(socketserver.ThreadingTCPServer):
    """A server on this machine; ``requests`` counts those for each path."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour = behaviour
        self.requests: Counter[str] = Counter()
        self.heads: list[dict[str, str]] = []
        self.changed = threading.Condition()
        self.ending = threading.Event()
        self.scheme = "http"

    @property
    def url(self) -> str:
        """The URL to configure."""
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that cuts a connection is part of some tests."""


@contextlib.contextmanager
def upstream(behaviour: Behaviour, certificate: Path | None = None) -> Iterator[Upstream]:
    """A running server; with a ``certificate`` (and key, in one file) it speaks TLS."""
    with Upstream(behaviour) as server:
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
            server.scheme = "https"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.ending.set()
            server.shutdown()
            thread.join(10)


def self_signed(directory: Path) -> Path:
    """A certificate for 127.0.0.1 that no authority has signed, with its key."""
    key, certificate = directory / "key.pem", directory / "certificate.pem"
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=test"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key)]
    run([tool("openssl"), *words, "-out", certificate], check=True)
    certificate.write_text(certificate.read_text() + key.read_text())
    return certificate


def serving_files(files: dict[str, bytes], **headers: str) -> Behaviour:
    """Answer with files by ``ID/KIND``, 404 for all others."""

    def answer(handler: Handler) -> None:
        found = files.get(handler.path.removeprefix("/buildid/"))
        if found is None:
            handler.send(b"not found\n", 404)
        else:
            handler.send(found, 200, X_DEBUGINFOD_SIZE=str(len(found)), **headers)

    return answer


def plain_files(root: Path) -> Behaviour:
    """Answer with the files of a directory, as a plain web server does."""

    def answer(handler: Handler) -> None:
        path = root / handler.path.lstrip("/")
        if path.is_file():
            handler.send(path.read_bytes())
        else:
            handler.send(b"", 404)

    return answer


def bomb(size: int) -> bytes:
    """A gzip stream of ``size`` zeros."""
    return gzip.compress(bytes(size))


def silent_port() -> tuple[socket.socket, str]:
    """A socket that accepts nothing beyond its queue, which is full, and its URL."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=0)
    return listener, f"http://127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def debuginfod(
    directory: Path, *files: Path, urls: str = "", port: int, cache: Path
) -> Iterator[str]:
    """The debuginfod of elfutils, which serves what is in directories; yields its URL.

    ``urls`` are its own upstreams. It has scanned the directories when the block begins.
    """
    url = f"http://127.0.0.1:{port}"
    words = [tool("debuginfod"), "-v", "-p", str(port), "-d", ":memory:", "-F", "-t", "0"]
    log = directory / f"debuginfod-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*words, *files],
            stdout=output,
            stderr=output,
            env={"DEBUGINFOD_URLS": urls, "DEBUGINFOD_CACHE_PATH": str(cache), "PATH": "/usr/bin"},
        )
    try:
        until(lambda: _is_up(process, port, log), "an answer of debuginfod", seconds=30)
        yield url
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_up(process: subprocess.Popen[bytes], port: int, log: Path) -> bool:
    if process.poll() is not None:
        pytest.fail(f"debuginfod ended: {log.read_text(errors='replace')[-2000:]}")
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as sock:
        sock.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        text = b""
        while more := sock.recv(1 << 16):
            text += more
        return b"thread_work_pending" in text and _is_idle(text)
    return False


def _is_idle(metrics: bytes) -> bool:
    """Return True if all files that were found have been scanned."""
    values = dict(
        line.rsplit(b" ", 1) for line in metrics.splitlines() if line.startswith(b"thread_")
    )
    pending = [value for name, value in values.items() if name.startswith(b"thread_work_pending")]
    traversed = any(name.startswith(b"thread_work_total") for name in values)
    return traversed and all(float(value) == 0 for value in pending)
