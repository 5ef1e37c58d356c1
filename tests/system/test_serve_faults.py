# SPDX-License-Identifier: Apache-2.0
"""buildidfs serve: clients that misbehave, and a store that changes while it is served."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import resource
import shutil
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.store import Store
from tests.support.clients.tools import run, tool
from tests.support.harness.captures import capture
from tests.support.harness.mounts import COMMAND, BuildIdFs
from tests.support.harness.waiting import until
from tests.support.servers.serving import Client, Server, free_port, serving

SMALL, LARGE, UNKNOWN = (bytes([n]) * 20 for n in range(0xB1, 0xB4))
CONTENT = random.Random(2).randbytes(24 << 20)
GOOD = f"/buildid/{SMALL.hex()}/executable"
BIG = f"/buildid/{LARGE.hex()}/executable"
MISSING = f"/buildid/{UNKNOWN.hex()}/executable"
ELFUTILS = "elfutils/0.188,Linux/x86_64,debian/12"
NO_RATE = "[serve]\nrate = 0\n"
TIMEOUT_S = 2
HOST = b" HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def store(directory: Path) -> Path:
    path = directory / "store"
    with Store.create(path) as store:
        store.commit([capture(store, b"small", SMALL), capture(store, CONTENT, LARGE)])
    return path


@pytest.fixture
def server(store: Path) -> Iterator[Server]:
    with serving(store, config=NO_RATE) as running:
        yield running
        assert running.ask(GOOD).body == b"small", "the server answers as before"


@contextlib.contextmanager
def connected(server: Server, buffer: int = 0) -> Iterator[Client]:
    with contextlib.closing(server.connect(buffer)) as client:
        yield client


def is_reset(client: Client) -> bool:
    """Read to the end, and return True if the server has reset the connection."""
    try:
        client.rest()
    except ConnectionResetError:
        return True
    return False


# --- requests that mean nothing -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /buildid/%zz/executable" + HOST + b"\r\n", 400),
        (b"GET /buildid/%0/executable" + HOST + b"\r\n", 400),
        (b"GET /buildid/a%00b/executable" + HOST + b"\r\n", 400),
        (b"GET buildid" + HOST + b"\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"nonsense\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400),
        (b"GET /" + HOST + b"no colon here\r\n\r\n", 400),
        (b"GET /" + HOST + b"Content-Length: -1\r\n\r\n", 400),
        (b"GET /" + HOST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET /" + HOST + b"Content-Length: 5\r\n\r\nhello", 413),
        (b"POST /" + HOST + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 413),
        (b"GET /" + b"a" * (1 << 20) + HOST + b"\r\n", 414),
        (b"GET /" + HOST + b"X: " + b"a" * (1 << 20) + b"\r\n\r\n", 431),
        (b"GET /" + HOST + b"".join(b"X%d: 1\r\n" % n for n in range(200)) + b"\r\n", 431),
    ],
    ids=lambda value: value if isinstance(value, int) else value[:24].decode("latin-1"),
)
def test_request_that_means_nothing_is_refused(
    server: Server, request_bytes: bytes, status: int
) -> None:
    with connected(server) as client:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            client.send(request_bytes)
        reply = client.reply()
        assert reply.status == status
        if reply.headers.get("connection") == "close":
            assert client.rest() == b""
        else:
            assert client.ask(GOOD).body == b"small", "only the path meant nothing"


def test_random_bytes_do_the_server_no_harm(server: Server) -> None:
    generator = random.Random(3)
    good = b"GET %s HTTP/1.1\r\nHost: localhost\r\nRange: bytes=1-2\r\n\r\n" % GOOD.encode()
    for _ in range(300):
        data = bytearray(good * generator.randrange(1, 4))
        for _ in range(generator.randrange(1, 6)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        with connected(server) as client:
            client.send(bytes(data))
            client.socket.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert client.rest()[:8] in (b"", b"HTTP/1.1")


def test_many_requests_at_once_are_all_answered(server: Server) -> None:
    with connected(server) as client:
        client.send(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % GOOD.encode() * 500)
        assert {client.reply().body for _ in range(500)} == {b"small"}


# --- clients that are slow, or many ---------------------------------------------------------------


@pytest.fixture
def impatient(store: Path) -> Iterator[Server]:
    """A server that waits for slow clients as briefly as it can be told to."""
    with serving(store, config=f"{NO_RATE}timeout = {TIMEOUT_S}\n") as running:
        yield running


def test_client_that_never_ends_its_request_is_told_so(impatient: Server) -> None:
    with connected(impatient) as client, connected(impatient) as other:
        started = time.monotonic()
        client.send(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        assert other.ask(GOOD).status == 200
        assert client.reply().status == 408
        assert time.monotonic() - started > TIMEOUT_S


def test_client_that_takes_nothing_loses_its_download(impatient: Server, store: Path) -> None:
    server = impatient
    with connected(server, buffer=4096) as client:
        client.send(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % BIG.encode())
        worker = server.workers()[0]
        name = next((store / "blobs").glob("*/*")).parent.parent

        def is_open() -> bool:
            links = Path(f"/proc/{worker}/fd").iterdir()
            found = (os.readlink(link) for link in links if link.exists())
            return any(target.startswith(str(name)) for target in found if target != str(name))

        until(is_open, "the blob in the hands of the worker")
        until(lambda: not is_open(), "the end of a download that nobody takes", seconds=60)
        assert is_reset(client)


def test_small_answers_wait_for_a_client_that_does_not_read(server: Server) -> None:
    with connected(server, buffer=4096) as client, connected(server) as other:
        for _ in range(20):
            client.send(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % GOOD.encode() * 10)
            assert other.ask(GOOD).body == b"small"
        assert client.reply().body == b"small"


def test_client_above_its_rate_is_answered_later_and_rightly(store: Path) -> None:
    with serving(store, config="[serve]\nrate = 50\n") as server, connected(server) as client:
        started = time.monotonic()
        answers = {(client.ask(GOOD).status, client.ask(MISSING).status) for _ in range(150)}
        taken = time.monotonic() - started
        assert answers == {(200, 404)}
        assert taken > 1.5, "four seconds' worth come at once, and the rest fifty a second"


@pytest.mark.slow
def test_ten_thousand_connections(store: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 12_000:
        pytest.skip(f"the machine allows {hard} descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    host = "127.0.0.1"
    clients = []
    try:
        with serving(store, config=NO_RATE) as server:
            for number in range(10_000):
                sock = socket.socket()
                sock.bind((f"127.0.{1 + number % 8}.1", 0))
                clients.append(sock)
                with contextlib.suppress(ConnectionResetError):
                    sock.connect((host, int(server.listen.rpartition(":")[2])))
                    sock.send(b"GET / HT")
            assert server.ask(GOOD).body == b"small"
            assert server.ask(BIG).body == CONTENT
            status = Path(f"/proc/{server.workers()[0]}/status").read_text()
            resident = int(status.split("VmRSS:")[1].split()[0])
            assert resident < 300_000, f"{resident} KiB"
    finally:
        for sock in clients:
            sock.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_two_hundred_downloads_at_once(server: Server, store: Path) -> None:
    """All of them begin before one goes on; together they are ten times what the worker may have.

    The file is a long one for the server, which stays with a client that takes much at once.
    """
    content = CONTENT[: 5 << 20]
    with Store.open(store) as writer:
        writer.commit([capture(writer, content, UNKNOWN)])
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connected(server, buffer=64 << 10)) for _ in range(200)]
        for client in clients:
            client.send(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % MISSING.encode())
        for client in clients:
            client.begin()
        are_whole = [client.reply().body == content for client in clients]
    assert are_whole == [True] * 200
    status = Path(f"/proc/{server.workers()[0]}/status").read_text()
    assert int(status.split("VmHWM:")[1].split()[0]) < 100_000


def test_clients_that_go_away_leave_nothing_behind(server: Server) -> None:
    worker = Path(f"/proc/{server.workers()[0]}/fd")
    assert server.ask(BIG).status == 200
    before = len(list(worker.iterdir()))
    for _ in range(50):
        with connected(server) as client:
            client.send(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % BIG.encode())
            client.socket.recv(1000)
            client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    until(lambda: len(list(worker.iterdir())) <= before + 1, "closed descriptors")


# --- a store that changes -------------------------------------------------------------------------


def test_later_capture_is_served_at_once(server: Server, store: Path) -> None:
    assert server.ask(MISSING).status == 404
    with Store.open(store) as writer:
        writer.commit([capture(writer, b"late", UNKNOWN)])
    assert server.ask(MISSING).body == b"late"
    with Store.open(store) as writer:
        ordinal = writer.index.ordinal(UNKNOWN)
        assert ordinal is not None
        artifact = writer.index.artifact(ordinal, 1)
        assert artifact is not None
        writer.remove([artifact.digest])
    assert server.ask(MISSING).status == 404


def test_removed_file_is_sent_to_its_end(server: Server, store: Path) -> None:
    with connected(server, buffer=256 << 10) as client:
        client.send(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % BIG.encode())
        client.begin()
        with Store.open(store) as writer:
            ordinal = writer.index.ordinal(LARGE)
            assert ordinal is not None
            artifact = writer.index.artifact(ordinal, 1)
            assert artifact is not None
            writer.remove([artifact.digest])
        assert client.reply().body == CONTENT
    assert server.ask(BIG).status == 404


def test_damaged_file_is_no_answer(server: Server, store: Path) -> None:
    blob = max((store / "blobs").glob("*/*"), key=lambda path: path.stat().st_size)
    blob.chmod(0o600)
    with blob.open("r+b") as file:
        file.seek(1 << 20)
        file.write(b"flipped")
    assert server.ask(BIG).status == 503
    with connected(server) as client:
        client.send(
            f"GET {BIG} HTTP/1.1\r\nHost: localhost\r\nUser-Agent: {ELFUTILS}\r\n\r\n".encode()
        )
        assert is_reset(client), "a debuginfod client takes each answer but a file for a no"


def test_file_that_is_written_to_while_it_is_sent_is_cut_off(server: Server, store: Path) -> None:
    blob = max((store / "blobs").glob("*/*"), key=lambda path: path.stat().st_size)
    blob.chmod(0o600)
    with connected(server, buffer=4096) as client:
        client.send(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % BIG.encode())
        client.socket.recv(10)
        with blob.open("r+b") as file:
            file.seek(23 << 20)
            file.write(b"flipped")
        assert is_reset(client)
    blob.unlink()
    shutil.rmtree(store / "blobs" / blob.parent.name, ignore_errors=True)


def test_store_that_was_deleted_is_no_answer(directory: Path, store: Path) -> None:
    with serving(store, config=NO_RATE) as server:
        assert server.ask(MISSING).status == 404
        worker = server.workers()[0]
        store.rename(directory / "deleted")
        shutil.rmtree(directory / "deleted", ignore_errors=True)  # workers still write there
        with connected(server) as client:
            client.send(
                f"GET {MISSING}".encode() + HOST + f"User-Agent: {ELFUTILS}\r\n\r\n".encode()
            )
            with contextlib.suppress(TimeoutError):
                assert is_reset(client)
        with Store.create(store) as writer:
            writer.commit([capture(writer, b"late", UNKNOWN)])
        until(lambda: server.workers() not in ([], [worker]), "a worker with the new store")
        assert server.ask(MISSING).body == b"late"
        assert server.ask(GOOD).status == 404


def test_killed_worker_is_replaced_and_no_file_called_missing(store: Path) -> None:
    statuses: set[int | str] = set()
    stop = threading.Event()
    with serving(store, "--workers", "2", config=NO_RATE) as server:

        def ask() -> None:
            while not stop.is_set():
                try:
                    statuses.add(server.ask(GOOD).status)
                except (OSError, EOFError):
                    statuses.add("ended")

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            workers = until(lambda: len(found := server.workers()) == 2 and found, "two workers")
            assert isinstance(workers, list)
            os.kill(workers[0], signal.SIGKILL)
            until(lambda gone=workers[0]: gone not in server.workers(), "its end")
        until(lambda: len(server.workers()) == 2, "two workers")
        stop.set()
        for thread in threads:
            thread.join()
        assert 200 in statuses
        assert statuses <= {200, "ended"}, statuses
    assert not Path(f"/proc/{server.process.pid}").exists()


def test_no_file_is_called_missing_while_others_work_on_the_store(
    store: Path, directory: Path
) -> None:
    buildidfs = BuildIdFs(directory, store)
    statuses: set[int | str] = set()
    stop = threading.Event()
    with serving(store, config=NO_RATE) as server:

        def ask() -> None:
            with connected(server) as client:
                while not stop.is_set():
                    statuses.add(client.ask(GOOD).status)
                    statuses.add(client.ask(BIG, "HEAD").status)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        for words in (
            ("check", "--repair"),
            ("gc",),
            ("prune", "--max-size", "10G"),
            ("compress", "--unused-for", "0"),
            ("check", "--verify-data"),
            ("pin", SMALL.hex()),
        ):
            buildidfs(*words)
        for number in range(20):
            with Store.open(store) as writer:
                writer.commit([capture(writer, b"more%d" % number, bytes([0xC1, number] * 10))])
        stop.set()
        for thread in threads:
            thread.join()
        assert server.ask(BIG).body == CONTENT
    assert statuses == {200}


def test_rebuild_of_the_index_waits_for_the_server_and_the_server_for_it(
    store: Path, directory: Path
) -> None:
    buildidfs = BuildIdFs(directory, store)
    with serving(store, config=NO_RATE) as server:
        assert server.ask(GOOD).status == 200
    shutil.rmtree(store / "index")
    with pytest.raises(AssertionError), serving(store, config=NO_RATE):
        pass  # it says what is missing, and ends
    assert buildidfs("check", "--repair", check=False).rc in (0, 10, 20)
    with serving(store, config=NO_RATE) as server:
        assert server.ask(GOOD).body == b"small"


def test_counts_of_all_workers_are_added_up(store: Path) -> None:
    with serving(store, "--workers", "2", config=NO_RATE) as server:
        for _ in range(60):
            assert server.ask(GOOD).status == 200
        line = 'http_requests_total{type="executable"} 60'
        until(
            lambda: line in server.ask("/metrics").body.decode().splitlines(),
            "the requests of both workers",
        )


def test_requests_in_vain_of_all_workers_are_on_the_page(store: Path) -> None:
    def asked() -> dict[str, int]:
        rows = json.loads(server.ask("/api/overview").body)["missing"]["asked"]
        return {row["build_id"]: row["asked"] for row in rows}

    expected = {f"{number:040x}": 3 for number in range(1, 11)}
    with serving(store, "--workers", "2", config=NO_RATE) as server:
        for build_id in list(expected) * 3:
            assert server.ask(f"/buildid/{build_id}/debuginfo").status == 404
        until(lambda: [asked() for _ in range(10)] == [expected] * 10, "one list of both workers")
        before = server.workers()
        for worker in before:
            os.kill(worker, signal.SIGTERM)
        until(lambda: not set(before) & set(server.workers()), "the end of both workers")
        until(lambda: [asked() for _ in range(10)] == [expected] * 10, "the list of those before")


# --- starting and ending --------------------------------------------------------------------------


def test_browser_is_sent_to_the_home_page(directory: Path, store: Path) -> None:
    where = "https://example.org/debuginfod?a=b"
    with serving(store, "--home-redirect", where, config=NO_RATE) as server:
        reply = server.ask("/")
        assert (reply.status, reply.headers["location"]) == (302, where)
        assert server.ask(GOOD).body == b"small"
    config = f'[serve]\nrate = 0\nhome-redirect = "{where}"\n'
    with serving(store, config=config) as server:
        assert server.ask("/", "HEAD").headers["location"] == where
    argv = [*COMMAND, "--store", store, "serve", "--home-redirect", "x\r\nSet-Cookie: a=b"]
    refused = run(argv, check=False)
    assert (refused.rc, "not an address for a browser" in refused.err) == (2, True)


def test_no_other_page_may_read_an_answer_unless_that_was_asked_for(server: Server) -> None:
    for method in ("GET", "OPTIONS"):
        headers = server.ask("/metrics", method, Origin="https://elsewhere.example").headers
        assert not [name for name in headers if name.startswith("access-control")]


def test_start_fails_with_one_line(directory: Path, store: Path) -> None:
    buildidfs = BuildIdFs(directory, store)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = buildidfs("serve", "--listen", f"127.0.0.1:{taken.getsockname()[1]}", check=False)
    assert (result.rc, len(result.err.splitlines())) == (40, 1), result
    assert os.strerror(errno.EADDRINUSE) in result.err
    missing = BuildIdFs(directory, directory / "none")("serve", "--listen", ":0", check=False)
    assert (missing.rc, "no store" in missing.err) == (11, True), missing
    assert len(missing.err.splitlines()) == 1, missing
    for host in ("a..b", "x" * 70):
        result = buildidfs("serve", "--listen", f"{host}:80", check=False)
        assert (result.rc, result.err.count("cannot listen")) == (40, 1), result
    for wrong in ("nonsense", ":99999", "::1:80", "unix:"):
        result = buildidfs("serve", "--listen", wrong, check=False)
        assert (result.rc, "not an address" in result.err) == (2, True), result


def test_server_says_where_it_serves(store: Path) -> None:
    with serving(store, config=NO_RATE) as server:
        until(lambda: f"serving at http://{server.listen}\n" in server.log(), "the address")


@pytest.mark.parametrize(
    ("listen", "name", "status"),
    [
        ("127.0.0.1", "evil.example", 421),
        ("127.0.0.1", "debug.example.com", 200),
        ("127.0.0.1", "localhost", 200),
        ("0.0.0.0", "evil.example", 200),
    ],
)
def test_server_at_a_loopback_address_answers_its_own_names_only(
    store: Path, listen: str, name: str, status: int
) -> None:
    """A page of the web may give its name an address of this machine."""
    config = NO_RATE + 'hosts = ["Debug.Example.COM"]\n'
    listen = f"{listen}:{free_port()}"
    with serving(store, listen=listen, config=config) as server, connected(server) as client:
        client.send(f"GET {GOOD} HTTP/1.1\r\nHost: {name}:8002\r\n\r\n".encode())
        assert client.reply().status == status


def test_unix_socket_is_for_all_and_goes_with_the_server(tmp_path: Path, store: Path) -> None:
    path = tmp_path / "http"  # the name of a socket has at most 107 bytes
    with serving(store, listen=f"unix:{path}", config=NO_RATE) as server:
        assert server.ask(GOOD, X_Forwarded_For="10.0.0.1, 10.0.0.2").body == b"small"
        assert path.stat().st_mode & 0o777 == 0o666
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with serving(store, listen=f"unix:{path}", config=NO_RATE) as server:
        assert server.ask(GOOD).status == 200, "what a killed server left is taken away"


def test_socket_of_systemd(store: Path) -> None:
    activate = tool("systemd-socket-activate")
    port = 0
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    under = [activate, "-l", f"127.0.0.1:{port}"]
    listen = f"127.0.0.1:{port}"
    with serving(store, listen=listen, config=NO_RATE, under=under) as server:
        assert server.ask(GOOD).body == b"small"
        assert len(server.workers()) == 1


def test_end_waits_for_a_download(store: Path) -> None:
    with serving(store, config=NO_RATE) as server, connected(server, buffer=65536) as client:
        client.send(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % BIG.encode())
        client.socket.recv(100)
        server.process.send_signal(signal.SIGTERM)
        assert client.rest().endswith(CONTENT[-1000:])


def test_server_tells_of_itself_while_it_runs(store: Path, directory: Path) -> None:
    buildidfs = BuildIdFs(directory, store)
    with serving(store, config=NO_RATE) as server:
        facts = run([*COMMAND, "--store", store, "status", "--json"]).out
        assert '"role":"serve"' in facts
        assert server.listen in facts
    assert '"role":"serve"' not in buildidfs("status", "--json", check=False).out
