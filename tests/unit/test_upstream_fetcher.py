# SPDX-License-Identifier: Apache-2.0
"""Fetching from servers that answer well, badly, or not at all: real sockets, one store."""

from __future__ import annotations

import contextlib
import gzip
import os
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.backoff import Backoff
from buildidfs.errors import UsageError
from buildidfs.model import BuildId, Kind, Quality, Standing, Trust
from buildidfs.store.absent_files import AbsentFiles
from buildidfs.upstream import http_client
from buildidfs.upstream.fetcher import Upstreams
from buildidfs.upstream.options import FetchOptions, FetchState
from tests.support.elf.elfwriter import DWARF, TEXT, TEXT_SPLIT, altlink, elf_file
from tests.support.harness.captures import capture, sighting
from tests.support.harness.waiting import until
from tests.support.servers.upstreams import (
    Behaviour,
    Handler,
    bomb,
    self_signed,
    serving_files,
    silent_port,
    upstream,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.store import Store
    from buildidfs.upstream.fetcher import Fetched

ID = BuildId(b"\xab" + bytes(range(19)))
OTHER = BuildId(b"\xac" + bytes(range(19)))
DEBUG = elf_file([TEXT_SPLIT, DWARF], build_id=ID)
PROGRAM = elf_file([TEXT], build_id=ID)
PATH = f"/buildid/{ID}/debuginfo"
QUICK = 0.5
"""Seconds that a server has, where a test waits for the end of them."""


@contextlib.contextmanager
def asking(store: Store, *urls: str, **changes: object) -> Iterator[Upstreams]:
    options = FetchOptions(urls, **{"timeout": 5.0, **changes})  # type: ignore[arg-type]  # any field
    with Upstreams(store, options) as upstreams:
        yield upstreams


def fetched(store: Store, *urls: str, kind: Kind = Kind.DEBUGINFO, **changes: object) -> Fetched:
    with asking(store, *urls, **changes) as upstreams:
        return upstreams.fetch(ID, kind)


def nothing_came(store: Store) -> bool:
    return store.index.ordinal(ID) is None and store.stats().blobs == 0


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once."""
    monkeypatch.setattr(http_client, "_PAUSES", Backoff(0.001, 5))


# --- what comes ----------------------------------------------------------------------------------


def test_file_is_committed_with_its_server_as_origin(store: Store) -> None:
    modified = "Tue, 14 Nov 2023 22:13:20 GMT"
    files = serving_files({f"{ID}/debuginfo": DEBUG}, Last_Modified=modified)
    with upstream(files) as server:
        done = fetched(store, server.url)
    assert (done.state, done.size) == (FetchState.FETCHED, len(DEBUG))
    ordinal = store.index.ordinal(ID)
    assert ordinal is not None
    artifact = store.index.artifact(ordinal, Kind.DEBUGINFO)
    assert artifact is not None
    assert (artifact.trust, artifact.standing) == (Trust.PACKAGE, Standing.UPSTREAM)
    assert (artifact.mode, artifact.mtime_ns) == (0o444, 1_700_000_000 * 10**9)
    (record,) = store.index.origins(ordinal)
    host = server.url.removeprefix("http://")
    assert (record.origin.host, record.origin.container) == (host, f"upstream:{host}")
    assert record.origin.scanner == "upstream"
    with store.open_blob(artifact.digest) as blob:
        assert blob.pread(1 << 20, 0) == DEBUG
    assert list(store.check()) == []


def test_file_that_is_held_is_not_asked_for(store: Store) -> None:
    store.commit([capture(store, DEBUG, ID, kinds=(Kind.DEBUGINFO,), quality=Quality.DEBUGINFO)])
    with upstream(serving_files({})) as server:
        assert fetched(store, server.url).state is FetchState.HELD
    assert not server.requests


def test_servers_are_asked_in_their_order(store: Store) -> None:
    with (
        upstream(serving_files({})) as first,
        upstream(serving_files({f"{ID}/debuginfo": DEBUG})) as second,
        upstream(serving_files({f"{ID}/debuginfo": DEBUG})) as third,
    ):
        done = fetched(store, first.url, second.url, third.url)
    assert (done.state, done.server) == (FetchState.FETCHED, second.url.removeprefix("http://"))
    assert first.requests[PATH] == second.requests[PATH] == 1
    assert not third.requests


def test_dwz_file_comes_with_the_debuginfo_that_needs_it(store: Store) -> None:
    debug = elf_file([TEXT_SPLIT, DWARF, altlink(b"../.dwz/x.debug", OTHER)], build_id=ID)
    common = elf_file([DWARF], build_id=OTHER)
    files = {f"{ID}/debuginfo": debug, f"{OTHER}/debuginfo": common}
    with upstream(serving_files(files)) as server, asking(store, server.url) as upstreams:
        assert upstreams.fetch(ID, Kind.DEBUGINFO).state is FetchState.FETCHED
        assert upstreams.is_held(OTHER, Kind.DEBUGINFO)


def test_debuginfo_of_a_server_names_a_program_of_the_host(store: Store) -> None:
    at = sighting(b"/usr/bin/x", trust=Trust.HOST, standing=Standing.SYSTEM)
    store.commit([capture(store, PROGRAM, ID, at=at, trust=Trust.HOST)])
    with upstream(serving_files({f"{ID}/debuginfo": DEBUG})) as server:
        assert fetched(store, server.url).state is FetchState.FETCHED


def test_program_of_a_server_does_not_displace_that_of_the_host(store: Store) -> None:
    store.commit([capture(store, DEBUG, ID, kinds=(Kind.DEBUGINFO,), quality=Quality.DEBUGINFO)])
    with upstream(serving_files({f"{ID}/executable": PROGRAM})) as server:
        assert fetched(store, server.url, kind=Kind.EXECUTABLE).state is FetchState.FETCHED
    at = sighting(b"/usr/bin/x", trust=Trust.HOST, standing=Standing.ELSEWHERE)
    store.commit([capture(store, b"the host's", ID, at=at, trust=Trust.HOST)])
    best = store.index.artifact(1, Kind.EXECUTABLE)
    assert best is not None
    assert best.trust is Trust.HOST


def test_file_that_took_credentials_is_for_the_owner(store: Store) -> None:
    headers = (("Authorization", "Bearer secret"),)
    with upstream(serving_files({f"{ID}/debuginfo": DEBUG})) as server:
        assert fetched(store, server.url, headers=headers).state is FetchState.FETCHED
    assert server.heads[0]["Authorization"] == "Bearer secret"
    artifact = store.index.artifact(1, Kind.DEBUGINFO)
    assert artifact is not None
    assert artifact.mode == 0o400


# --- what does not come ---


def test_absence_is_remembered_for_a_while(store: Store) -> None:
    with upstream(serving_files({})) as server:
        for _ in range(3):
            assert fetched(store, server.url).state is FetchState.ABSENT
        assert server.requests[PATH] == 1
        assert fetched(store, server.url, absent_s=0).state is FetchState.ABSENT
        with asking(store, server.url) as upstreams:
            assert upstreams.fetch(ID, Kind.DEBUGINFO, retry_absent=True).state is FetchState.ABSENT
        assert server.requests[PATH] == 2


def test_absence_ends(store: Store) -> None:
    with upstream(serving_files({})) as server:
        assert fetched(store, server.url, absent_s=1).state is FetchState.ABSENT
        server.behaviour = serving_files({f"{ID}/debuginfo": DEBUG})
        until(lambda: fetched(store, server.url, absent_s=1).state is FetchState.FETCHED, "its end")


def test_absence_of_a_clock_that_was_wrong_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 4_000_000_000
    monkeypatch.setattr(time, "time", lambda: now)
    absences = AbsentFiles(os.fsencode(tmp_path), ["server"])
    absences.add(ID, Kind.DEBUGINFO, 60)
    assert absences.has(ID, Kind.DEBUGINFO)
    now = 2_000_000_000
    assert not absences.has(ID, Kind.DEBUGINFO)
    absences.add(ID, Kind.DEBUGINFO, 60)
    assert absences.has(ID, Kind.DEBUGINFO)


def test_capture_ends_an_absence_at_once(store: Store) -> None:
    with upstream(serving_files({})) as server, asking(store, server.url) as upstreams:
        assert upstreams.fetch(ID, Kind.DEBUGINFO).state is FetchState.ABSENT
        store.commit(
            [capture(store, DEBUG, ID, kinds=(Kind.DEBUGINFO,), quality=Quality.DEBUGINFO)]
        )
        assert upstreams.fetch(ID, Kind.DEBUGINFO).state is FetchState.HELD


def test_other_servers_do_not_inherit_absences(store: Store) -> None:
    with (
        upstream(serving_files({})) as first,
        upstream(serving_files({f"{ID}/debuginfo": DEBUG})) as second,
    ):
        assert fetched(store, first.url).state is FetchState.ABSENT
        assert fetched(store, first.url, second.url).state is FetchState.FETCHED


def with_status(status: int, **headers: str) -> Behaviour:
    return lambda handler: handler.send(b"no", status, **headers)


def loop(handler: Handler) -> None:
    handler.send(b"", 302, Location=handler.path + "x")


def truncated(handler: Handler) -> None:
    handler.send(DEBUG[:100], Content_Length=str(len(DEBUG)))
    handler.close_connection = True


def wrong_length(handler: Handler) -> None:
    handler.send(DEBUG, X_DEBUGINFOD_SIZE=str(len(DEBUG) + 1))


def cut(handler: Handler) -> None:
    handler.send(DEBUG[: len(DEBUG) // 2])


def no_http(handler: Handler) -> None:
    handler.close_connection = True
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n" * 4)


UNAVAILABLE: list[tuple[Behaviour, str, int]] = [
    (with_status(401), "refuses us: 401 Unauthorized", 1),
    (with_status(403), "refuses us: 403 Forbidden", 1),
    (with_status(500), "answers 500 Internal Server Error", 3),
    (with_status(503, Retry_After="3600"), "answers 503 Service Unavailable", 1),
    (with_status(400), "answers 400 Bad Request", 1),
    (truncated, "fails: ", 3),
    (wrong_length, f"sent only {len(DEBUG)} of {len(DEBUG) + 1} bytes", 3),
    (no_http, "fails: ", 3),
]


@pytest.mark.parametrize(("behaviour", "why", "attempts"), UNAVAILABLE)
def test_fault_that_may_pass_is_no_absence(
    store: Store, behaviour: Behaviour, why: str, attempts: int
) -> None:
    with upstream(behaviour) as server:
        done = fetched(store, server.url)
        assert done.state is FetchState.UNAVAILABLE
        assert why in done.why
        assert server.requests[PATH] == attempts
        assert nothing_came(store)
        server.behaviour = serving_files({f"{ID}/debuginfo": DEBUG})
        assert fetched(store, server.url).state is FetchState.FETCHED


def test_redirects_are_followed_and_counted(store: Store) -> None:
    with upstream(loop) as server:
        done = fetched(store, server.url)
    assert (done.state, sum(server.requests.values())) == (FetchState.UNAVAILABLE, 6)
    assert "more than 5 redirects" in done.why

    def moved(handler: Handler) -> None:
        if handler.path == PATH:
            handler.send(b"", 302, Location="/elsewhere")
        else:
            handler.send(DEBUG)

    with upstream(moved) as server:
        assert fetched(store, server.url).state is FetchState.FETCHED


def test_credentials_do_not_follow_a_redirect_to_another_host(store: Store) -> None:
    with upstream(lambda handler: handler.send(DEBUG)) as target:
        to = target.url.replace("127.0.0.1", "localhost")
        with upstream(lambda handler: handler.send(b"", 307, Location=f"{to}/x")) as server:
            done = fetched(store, server.url, headers=(("X-Secret", "s"),))
    assert done.state is FetchState.FETCHED
    assert "X-Secret" in server.heads[0]
    assert "X-Secret" not in target.heads[0]


def test_redirect_to_a_file_is_refused(store: Store) -> None:
    with upstream(lambda handler: handler.send(b"", 302, Location="file:///etc/shadow")) as server:
        done = fetched(store, server.url)
    assert (done.state, "redirects from http" in done.why) == (FetchState.UNAVAILABLE, True)


def test_redirect_to_what_is_no_url_is_no_crash(store: Store) -> None:
    moved = "http://127.0.0.1:port/"
    with upstream(lambda handler: handler.send(b"", 302, Location=moved)) as server:
        done = fetched(store, server.url)
    assert (done.state, "leads to an invalid URL" in done.why) == (FetchState.UNAVAILABLE, True)


REFUSED: list[tuple[Behaviour, str]] = [
    (lambda handler: handler.send(elf_file([DWARF], build_id=OTHER)), f"build ID, {OTHER}"),
    (lambda handler: handler.send(b"<html>log in</html>"), "not an ELF file"),
    (lambda handler: handler.send(b""), "empty file"),
    (cut, "sent "),
    (lambda handler: handler.send(PROGRAM), "not debuginfo"),
    (lambda handler: handler.send(DEBUG, Content_Encoding="br"), "was not requested: 'br'"),
    (lambda handler: handler.send(DEBUG, Content_Encoding="gzip"), "damaged gzip stream"),
    (with_status(406), "larger than max-size"),
]


@pytest.mark.parametrize(("behaviour", "why"), REFUSED)
def test_wrong_file_is_dropped_and_the_next_server_asked(
    store: Store, behaviour: Behaviour, why: str
) -> None:
    with upstream(behaviour) as server:
        done = fetched(store, server.url)
        assert (done.state, server.requests[PATH]) == (FetchState.ABSENT, 1)
        assert why in done.why
        assert nothing_came(store)
        with upstream(serving_files({f"{ID}/debuginfo": DEBUG})) as good:
            assert fetched(store, server.url, good.url).state is FetchState.FETCHED


def test_file_beyond_the_limit_is_cut_off(store: Store) -> None:
    large = 64 << 20

    def endless(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        with contextlib.suppress(OSError):
            for _ in range(large >> 16):
                handler.wfile.write(bytes(1 << 16))
                handler.server.requests["sent"] += 1 << 16

    with upstream(endless) as server:
        done = fetched(store, server.url, max_size=1 << 20)
        assert "sends more bytes than the 1048576" in done.why
        assert server.requests["sent"] < large
        server.behaviour = lambda handler: handler.send(b"", Content_Length=str(large))
        done = fetched(store, server.url, max_size=1 << 20, absent_s=0)
        assert done.state is FetchState.ABSENT


def test_gzip_bomb_is_unpacked_up_to_the_limit(store: Store) -> None:
    packed = bomb(192 << 20)
    assert len(packed) < 1 << 20
    before = peak_kib()
    with upstream(lambda handler: handler.send(packed, Content_Encoding="gzip")) as server:
        done = fetched(store, server.url, max_size=8 << 20)
    assert (done.state, "sends more bytes than" in done.why) == (FetchState.ABSENT, True)
    assert peak_kib() - before < 64 << 10


def _endless(head: bytes, piece: bytes, most: int) -> Behaviour:
    """Answer with a gzip stream that goes on and on, or with something else behind it."""

    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Connection", "close")
        handler.end_headers()
        handler.close_connection = True
        with contextlib.suppress(OSError):
            handler.wfile.write(head)
            for _ in range(most // len(piece)):
                handler.wfile.write(piece)
                handler.server.requests["sent"] += len(piece)

    return answer


def test_gzip_stream_that_contains_nothing_ends(store: Store) -> None:
    header = bytes.fromhex("1f8b08000000000000ff")
    nothing = bytes.fromhex("000000ffff") * 13_000  # empty blocks
    with upstream(_endless(header, nothing, 64 << 20)) as server:
        done = fetched(store, server.url, max_size=1 << 20)
        assert (done.state, "sends more bytes than" in done.why) == (FetchState.ABSENT, True)
        assert server.requests["sent"] < 32 << 20


def test_what_follows_a_gzip_stream_is_not_waited_for(store: Store) -> None:
    packed = gzip.compress(DEBUG)
    with upstream(_endless(packed, bytes(1 << 16), 64 << 20)) as server:
        assert fetched(store, server.url, max_size=1 << 20).state is FetchState.FETCHED
        assert server.requests["sent"] < 32 << 20


def peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)


def test_gzip_is_unpacked(store: Store) -> None:
    packed = gzip.compress(DEBUG)
    with upstream(lambda handler: handler.send(packed, Content_Encoding="gzip")) as server:
        assert fetched(store, server.url).state is FetchState.FETCHED
        server.behaviour = lambda handler: handler.send(packed[:-9], Content_Encoding="gzip")
        with asking(store, server.url) as upstreams:
            done = upstreams.fetch(OTHER, Kind.DEBUGINFO)
    assert "part of a gzip stream" in done.why


# --- servers that hang ---


def dripping_head(handler: Handler) -> None:
    handler.drip(b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 10_000, QUICK / 5)


def dripping_body(handler: Handler) -> None:
    handler.send(b"", Content_Length="1000000")
    handler.drip(DEBUG * 100, QUICK / 5)


def dripping_trailer(handler: Handler) -> None:
    handler.send(b"%x\r\n%s\r\n0\r\n" % (len(DEBUG), DEBUG), Transfer_Encoding="chunked")
    handler.drip(b"X-Long: " + b"x" * 10_000, QUICK / 5)


def dripping_body_of_unknown_length(handler: Handler) -> None:
    handler.connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    handler.drip(DEBUG * 100, QUICK / 5)


def dripping_chunk(handler: Handler) -> None:
    handler.send(b"4;x=", Transfer_Encoding="chunked")
    handler.drip(b"x" * 10_000, QUICK / 5)


def slow_head_then_part_of_a_body(handler: Handler) -> None:
    handler.drip(b"HTTP/1.1 200 OK\r\n", QUICK / 25)
    handler.connection.sendall(b"Content-Length: 1000000\r\n\r\n")
    handler.drip(DEBUG[:18], QUICK / 25)


def flooding_head(handler: Handler) -> None:
    handler.close_connection = True
    with contextlib.suppress(OSError):
        handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
        while not handler.server.ending.is_set():
            handler.wfile.write(b"X-Flood: %s\r\n" % (b"x" * 1000) * 100)


def flooding_with_interim_answers(handler: Handler) -> None:
    handler.close_connection = True
    with contextlib.suppress(OSError):
        while not handler.server.ending.is_set():
            handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


@pytest.mark.parametrize("behaviour", [flooding_head, flooding_with_interim_answers])
def test_flood_of_heads_ends(store: Store, behaviour: Behaviour) -> None:
    before = peak_kib()
    with upstream(behaviour) as server:
        done = fetched(store, server.url, timeout=QUICK)
    assert done.state is FetchState.UNAVAILABLE
    assert peak_kib() - before < 64 << 10


@pytest.mark.parametrize(
    ("behaviour", "why"),
    [
        (Handler.hang, "no answer within 0.5 s"),
        (dripping_trailer, "less than 100 KiB in 0.5 s"),
        (dripping_body_of_unknown_length, "less than 100 KiB in 0.5 s"),
        (dripping_chunk, "less than 100 KiB in 0.5 s"),
        (slow_head_then_part_of_a_body, "fails: |no answer within 0.5 s"),
        (dripping_head, "no answer within 0.5 s"),
        (dripping_body, "less than 100 KiB in 0.5 s"),
    ],
)
def test_server_that_hangs_is_given_up_and_left_alone(
    store: Store, behaviour: Behaviour, why: str
) -> None:
    with upstream(behaviour) as server, asking(store, server.url, timeout=QUICK) as upstreams:
        done = upstreams.fetch(ID, Kind.DEBUGINFO)
        assert done.state is FetchState.UNAVAILABLE
        assert re.search(why, done.why), done.why
        done = upstreams.fetch(OTHER, Kind.DEBUGINFO)
        assert (done.state, "not asked for a while" in done.why) == (FetchState.UNAVAILABLE, True)
        assert sum(server.requests.values()) == 1
    assert nothing_came(store)


def test_body_has_a_deadline_in_total(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def trickling(handler: Handler) -> None:
        handler.send(b"", Content_Length="1000000000")
        with contextlib.suppress(OSError):
            while not handler.server.ending.wait(QUICK / 5):
                handler.wfile.write(bytes(100 << 10))

    monkeypatch.setattr(http_client, "_MOST_BODY_S", 2 * QUICK)
    with upstream(trickling) as server:
        done = fetched(store, server.url, timeout=QUICK)
    assert (done.state, "sends for more than 1 s" in done.why) == (FetchState.UNAVAILABLE, True)


def test_connection_that_is_late_counts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time was over before there was a socket to close."""
    connect = socket.create_connection

    def late(*arguments: object, **options: object) -> socket.socket:
        time.sleep(1.5 * QUICK)
        return connect(*arguments, **options)  # type: ignore[arg-type]

    def trickling(handler: Handler) -> None:
        handler.send(b"", Content_Length="1000000000")
        with contextlib.suppress(OSError):
            while not handler.server.ending.wait(QUICK / 5):
                handler.wfile.write(b"x")

    monkeypatch.setattr(socket, "create_connection", late)
    with upstream(trickling) as server:
        done = fetched(store, server.url, timeout=QUICK)
    assert (done.state, "no answer within" in done.why) == (FetchState.UNAVAILABLE, True)


def test_server_that_does_not_accept_is_given_up(store: Store) -> None:
    listener, url = silent_port()
    with listener, contextlib.ExitStack() as fillers:
        for _ in range(2):  # fill its queue
            filler = fillers.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        done = fetched(store, url, timeout=QUICK)
    assert (done.state, "no answer" in done.why) == (FetchState.UNAVAILABLE, True)


def test_unknown_host(store: Store) -> None:
    done = fetched(store, "http://no-such-host.invalid")
    assert (done.state, "no known address" in done.why) == (FetchState.UNAVAILABLE, True)


def test_closed_port(store: Store) -> None:
    listener, url = silent_port()
    listener.close()
    done = fetched(store, url)
    assert (done.state, "Connection refused" in done.why) == (FetchState.UNAVAILABLE, True)


def test_certificate_that_nobody_signed(store: Store, tmp_path: Path) -> None:
    with upstream(serving_files({f"{ID}/debuginfo": DEBUG}), self_signed(tmp_path)) as server:
        done = fetched(store, server.url)
    assert (done.state, "certificate" in done.why) == (FetchState.UNAVAILABLE, True), done.why
    assert nothing_came(store)


def test_certificate_of_a_given_authority(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate = self_signed(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with upstream(serving_files({f"{ID}/debuginfo": DEBUG}), certificate) as server:
        assert fetched(store, server.url).state is FetchState.FETCHED


# --- one at a time ---


def test_threads_that_want_one_file_cause_one_request(store: Store) -> None:
    begun = threading.Event()
    go_on = threading.Event()

    def slow(handler: Handler) -> None:
        begun.set()
        go_on.wait(20)
        handler.send(DEBUG)

    with upstream(slow) as server, asking(store, server.url) as upstreams:
        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(upstreams.fetch, ID, Kind.DEBUGINFO) for _ in range(8)]
            assert begun.wait(20)
            go_on.set()
            states = {future.result().state for future in futures}
        assert states <= {FetchState.FETCHED, FetchState.HELD}
        assert server.requests[PATH] == 1


def open_locks(store: Store) -> int:
    """The descriptors of the file with the locks in this process."""
    lock = os.path.join(os.fsdecode(store.path), "upstream/lock")
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            count += os.readlink(link) == lock
    return count


@pytest.mark.parametrize(
    ("status", "state"), [(404, FetchState.ABSENT), (400, FetchState.UNAVAILABLE)]
)
def test_threads_that_want_one_file_in_vain_cause_one_request(
    store: Store, status: int, state: FetchState
) -> None:
    begun = threading.Event()
    go_on = threading.Event()

    def slow(handler: Handler) -> None:
        begun.set()
        go_on.wait(20)
        handler.send(b"", status)

    with upstream(slow) as server, asking(store, server.url) as upstreams:
        with ThreadPoolExecutor(4) as pool:
            futures = [
                pool.submit(upstreams.fetch, ID, Kind.DEBUGINFO, retry_absent=True)
                for _ in range(4)
            ]
            assert begun.wait(20)
            until(lambda: open_locks(store) == 4, "the other threads at the lock")
            go_on.set()
            assert {future.result().state for future in futures} == {state}
        assert server.requests[PATH] == 1


def test_processes_that_want_one_file_cause_one_request(store: Store) -> None:
    begun = threading.Event()
    go_on = threading.Event()

    def slow(handler: Handler) -> None:
        begun.set()
        go_on.wait(20)
        handler.send(DEBUG)

    # Two objects share nothing but the lock file, as two processes do.
    with (
        upstream(slow) as server,
        asking(store, server.url) as one,
        asking(store, server.url) as other,
        ThreadPoolExecutor(2) as pool,
    ):
        first = pool.submit(one.fetch, ID, Kind.DEBUGINFO)
        assert begun.wait(20)
        second = pool.submit(other.fetch, ID, Kind.DEBUGINFO)
        go_on.set()
        states = {first.result().state, second.result().state}
        assert states == {FetchState.FETCHED, FetchState.HELD}
        assert server.requests[PATH] == 1


# --- directories ---

LAYOUTS = {
    "debug root": f".build-id/{ID.hex()[:2]}/{ID.hex()[2:]}.debug",
    "below .build-id": f"{ID.hex()[:2]}/{ID.hex()[2:]}.debug",
    "perf": f".build-id/{ID.hex()[:2]}/{ID.hex()[2:]}/debug",
    "bucket": f"buildid/{ID}/debuginfo",
    "client cache": f"{ID}/debuginfo",
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", ["", "file://"])
def test_directory_in_each_layout(store: Store, tmp_path: Path, layout: str, scheme: str) -> None:
    file = tmp_path / "files" / LAYOUTS[layout]
    file.parent.mkdir(parents=True)
    file.write_bytes(DEBUG)
    done = fetched(store, f"{scheme}{tmp_path}/files")
    assert (done.state, done.server) == (FetchState.FETCHED, f"{tmp_path}/files")


def test_link_of_perf_leads_within_the_directory_only(store: Store, tmp_path: Path) -> None:
    first, rest = ID.hex()[:2], ID.hex()[2:]
    home = tmp_path / "files/usr/bin/x" / ID.hex()
    home.mkdir(parents=True)
    (home / "elf").write_bytes(PROGRAM)
    links = tmp_path / "files/.build-id" / first
    links.mkdir(parents=True)
    (links / rest).symlink_to(f"../../usr/bin/x/{ID}")
    outside = tmp_path / "outside"
    outside.write_bytes(DEBUG)
    (links / f"{rest}.debug").symlink_to(outside)
    assert fetched(store, f"{tmp_path}/files").state is FetchState.ABSENT
    done = fetched(store, f"{tmp_path}/files", kind=Kind.EXECUTABLE)
    assert done.state is FetchState.FETCHED


def test_file_of_a_directory_keeps_its_mode(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "files" / LAYOUTS["bucket"]
    file.parent.mkdir(parents=True)
    file.write_bytes(DEBUG)
    file.chmod(0o600)
    assert fetched(store, f"{tmp_path}/files").state is FetchState.FETCHED
    artifact = store.index.artifact(1, Kind.DEBUGINFO)
    assert artifact is not None
    assert (artifact.mode, artifact.uid) == (0o400, os.geteuid())


def test_fifo_in_a_directory_is_not_opened(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "files" / LAYOUTS["bucket"]
    file.parent.mkdir(parents=True)
    os.mkfifo(file)
    assert fetched(store, f"{tmp_path}/files").state is FetchState.ABSENT


def test_offline_leaves_only_directories(store: Store, tmp_path: Path) -> None:
    file = tmp_path / "files" / LAYOUTS["bucket"]
    file.parent.mkdir(parents=True)
    with upstream(serving_files({f"{ID}/debuginfo": DEBUG})) as server:
        urls = (server.url, f"{tmp_path}/files")
        assert fetched(store, *urls, offline=True).state is FetchState.ABSENT
        file.write_bytes(DEBUG)
        assert fetched(store, *urls, offline=True, absent_s=0).state is FetchState.ABSENT
        with asking(store, *urls, offline=True) as upstreams:
            assert (
                upstreams.fetch(ID, Kind.DEBUGINFO, retry_absent=True).state is FetchState.FETCHED
            )
        assert not server.requests


@pytest.mark.parametrize("url", ["ftp://host/x", "http://", "https://h:x", "file://host/x", "x"])
def test_url_that_is_none(store: Store, url: str) -> None:
    with pytest.raises(UsageError, match="not an upstream"):
        fetched(store, url)
