# SPDX-License-Identifier: Apache-2.0
"""``buildidfs serve`` as its clients see it, and a client that says exactly what a test wants."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.harness.mounts import COMMAND, start
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from tests.support.harness.mounts import Process

_PATIENCE_S = 30.0


@dataclasses.dataclass(frozen=True)
class Reply:
    """One response; names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Client:
    """One connection, for requests that need not be well-formed."""

    def __init__(self, family: int, address: tuple[str, int] | str, buffer: int = 0) -> None:
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        if buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(_PATIENCE_S)
        try:
            self.socket.connect(address)
        except OSError:
            self.socket.close()
            raise
        self._read = bytearray()

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.socket.sendall(data)

    def ask(self, target: str | bytes, method: str = "GET", **headers: str) -> Reply:
        """Send one request and read its response; underscores in names stand for hyphens."""
        path = target if isinstance(target, bytes) else target.encode()
        lines = [b"%s %s HTTP/1.1" % (method.encode(), path), b"Host: localhost"]
        lines += [f"{name.replace('_', '-')}: {value}".encode() for name, value in headers.items()]
        self.send(b"\r\n".join(lines) + b"\r\n\r\n")
        return self.reply(has_body=method != "HEAD")

    def post(self, target: str, body: object, **headers: str) -> Reply:
        """Post JSON, or bytes as they are, and read the response."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = [f"POST {target} HTTP/1.1", "Host: localhost", f"Content-Length: {len(data)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        return self.reply()

    def reply(self, *, has_body: bool = True) -> Reply:
        """Read one response. Raises `EOFError` if the server ends the connection before."""
        head = self._until(b"\r\n\r\n").decode("latin-1").split("\r\n")
        status = int(head[0].split(" ")[1])
        pairs = (line.partition(":") for line in head[1:] if line)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        length = int(headers.get("content-length", "0")) if has_body and status != 304 else 0
        return Reply(status, headers, self._body(length))

    def begin(self) -> None:
        """Read some of a response, which `reply` then has all of."""
        self._more()

    def started(self) -> bytes:
        """What was read of a response so far."""
        return bytes(self._read)

    def rest(self) -> bytes:
        """Read until the server ends the connection."""
        with contextlib.suppress(EOFError):
            while True:
                self._more()
        return bytes(self._read)

    def _until(self, end: bytes) -> bytes:
        while (at := self._read.find(end)) < 0:
            self._more()
        return self._taken(at + len(end))[:at]

    def _body(self, size: int) -> bytes:
        """Read so many bytes; large ones are not copied again and again."""
        body = bytearray(size)
        at = min(size, len(self._read))
        body[:at] = self._taken(at)
        with memoryview(body) as view:
            while at < size:
                count = self.socket.recv_into(view[at:])
                if not count:
                    raise EOFError(f"the server ended the connection after {at} of {size} bytes")
                at += count
        return bytes(body)

    def _taken(self, size: int) -> bytes:
        with memoryview(self._read) as view:
            found = bytes(view[:size])
        del self._read[:size]
        return found

    def _more(self) -> None:
        data = self.socket.recv(1 << 20)
        if not data:
            said = bytes(self._read[:200])
            raise EOFError(f"the server ended the connection after {said!r}")
        self._read += data

    def close(self) -> None:
        """End the connection."""
        self.socket.close()


class Server:
    """A running server. ``process`` is its owner, ``log`` what it writes."""

    def __init__(self, process: Process, log: Path, listen: str) -> None:
        self.process = process
        self.listen = listen
        self._log = log

    @property
    def url(self) -> str:
        """What debuginfod clients get as DEBUGINFOD_URLS."""
        return f"http://{self.listen}"

    def connect(self, buffer: int = 0) -> Client:
        """A new connection; with ``buffer`` the client takes little at a time."""
        if self.listen.startswith("unix:"):
            return Client(socket.AF_UNIX, self.listen.removeprefix("unix:"), buffer)
        host, _, port = self.listen.rpartition(":")
        return Client(socket.AF_INET, (host, int(port)), buffer)

    def ask(self, target: str | bytes, method: str = "GET", **headers: str) -> Reply:
        """Send one request on a connection of its own."""
        with contextlib.closing(self.connect()) as client:
            return client.ask(target, method, **headers)

    def post(self, target: str, body: object, **headers: str) -> Reply:
        """Post JSON on a connection of its own."""
        with contextlib.closing(self.connect()) as client:
            return client.post(target, body, **headers)

    def workers(self) -> list[int]:
        """The process IDs of the workers."""
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [int(pid) for pid in task.read_text().split()]

    def log(self) -> str:
        """The messages of the server."""
        return self._log.read_text(errors="replace")


def free_port() -> int:
    """A port of this machine that nothing listens at."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def serving(
    store: Path, *options: str, config: str = "", listen: str = "", under: Sequence[str] = ()
) -> Iterator[Server]:
    """Serve a store until the end of the block, and expect that the server ends well.

    ``config`` is text of a configuration file, ``under`` a command that runs the server.
    """
    listen = listen or f"127.0.0.1:{free_port()}"
    log = store.parent / f"serve-{listen.rpartition('/')[2].replace(':', '-')}.log"
    settings = log.with_suffix(".toml")
    settings.write_text(config)
    words = [*under, *COMMAND, "--config", str(settings), "--store", str(store)]
    words += ["serve", "--listen", listen, *options]
    with log.open("wb") as output:
        process = start(words, output.fileno())
    server = Server(process, log, listen)
    try:
        until(lambda: _is_up(server), "an answer of the server", seconds=_PATIENCE_S)
        yield server
        process.terminate()
        assert process.wait(_PATIENCE_S) == 0, server.log()
        assert "Traceback" not in server.log(), server.log()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(_PATIENCE_S)


def _is_up(server: Server) -> bool:
    assert server.process.poll() is None, server.log()
    try:
        return server.ask("/healthz").status == 200
    except (OSError, EOFError):
        return False
