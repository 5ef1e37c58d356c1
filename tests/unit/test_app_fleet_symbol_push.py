# SPDX-License-Identifier: Apache-2.0
"""buildidfs.app.fleet.symbol_push: what Parca and Pyroscope get, and what faults cost."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import struct
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.app.fleet import symbol_push
from buildidfs.app.fleet.symbol_push import SymbolPusher, pusher_of
from buildidfs.app.fleet.uploader import Options, Summary
from buildidfs.capture.base import PinnedFile
from buildidfs.errors import RemoteDenied, RemoteUnavailable, UsageError
from buildidfs.ingest import Ingest
from buildidfs.linux import statx
from buildidfs.model import BuildId, Kind, Origin, Quality, Sighting, Trust
from tests.support import symbolservers as servers
from tests.support.captures import capture, commit, sighting
from tests.support.elfwriter import PT_LOAD, SHF_ALLOC, SHF_EXECINSTR, SYMTAB, Section, elf_file
from tests.support.symbolservers import ParcaServer, PyroscopeServer, SymbolServer, symbol_server
from tests.support.waiting import until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.store import Store

NO_PATIENCE = Options(patience_s=0)
AGAIN = Options(patience_s=0, verify=True)
A, B = bytes.fromhex("aa" * 20), bytes.fromhex("bb" * 20)
DEBUGINFO, EXECUTABLE = "DEBUGINFO_TYPE_DEBUGINFO_UNSPECIFIED", "DEBUGINFO_TYPE_EXECUTABLE"
DEBUG = [Kind.DEBUGINFO]

both = pytest.mark.parametrize("kind", ["parca", "pyroscope"])


@pytest.fixture
def server(kind: str) -> Iterator[SymbolServer]:
    with symbol_server(kind) as running:
        yield running


@pytest.fixture
def parca() -> Iterator[ParcaServer]:
    with symbol_server("parca") as running:
        assert isinstance(running, ParcaServer)
        yield running


@pytest.fixture
def pyroscope() -> Iterator[PyroscopeServer]:
    with symbol_server("pyroscope") as running:
        assert isinstance(running, PyroscopeServer)
        yield running


def _push(
    store: Store, server: SymbolServer, options: Options = NO_PATIENCE, headers_file: str = ""
) -> Summary:
    kind = "parca" if isinstance(server, ParcaServer) else "pyroscope"
    with pusher_of(store, kind, server.url, headers_file, options) as pusher:
        return pusher.run()


def _named(server: SymbolServer, build_id: bytes) -> bytes | None:
    """The file by which a server names the functions of a build ID."""
    slot = DEBUGINFO if isinstance(server, ParcaServer) else "exe"
    return server.uploaded().get((build_id.hex(), slot))


# --- what goes where -----------------------------------------------------------------------------


def test_parca_gets_debuginfo_and_executables(store: Store, parca: ParcaServer) -> None:
    commit(
        store,
        capture(store, b"program", A, quality=Quality.DYNSYM),
        capture(store, b"debug file", A, kinds=DEBUG, quality=Quality.DEBUGINFO),
        capture(store, b"not stripped", B, quality=Quality.SYMTAB),
    )
    summary = _push(store, parca)
    assert (summary.pushed, summary.failed, summary.unsuitable) == (4, [], 0)
    assert summary.bytes == sum(map(len, parca.uploaded().values()))
    assert parca.uploaded() == {
        (A.hex(), DEBUGINFO): b"debug file",
        (A.hex(), EXECUTABLE): b"program",
        (B.hex(), DEBUGINFO): b"not stripped",
        (B.hex(), EXECUTABLE): b"not stripped",
    }
    place = parca.places[A.hex(), DEBUGINFO]
    assert place.hash == hashlib.sha256(b"debug file").hexdigest()
    assert place.about["buildIdType"] == "BUILD_ID_TYPE_GNU"
    assert not place.about["force"]


def test_pyroscope_gets_one_file_for_a_build_id(store: Store, pyroscope: PyroscopeServer) -> None:
    commit(
        store,
        capture(store, b"program", A, quality=Quality.SYMTAB),
        capture(store, b"debug file", A, kinds=DEBUG, quality=Quality.DEBUGINFO),
        capture(store, b"not stripped", B, quality=Quality.SYMTAB),
    )
    assert _push(store, pyroscope).pushed == 2
    assert pyroscope.uploaded() == {
        (A.hex(), "exe"): b"debug file",
        (B.hex(), "exe"): b"not stripped",
    }
    about = [pyroscope.places[each.hex(), "exe"].about for each in (A, B)]
    assert [each["type"] for each in about] == ["TYPE_EXECUTABLE_NO_TEXT", "TYPE_EXECUTABLE_FULL"]
    assert {each["name"] for each in about} == {"app"}


def test_only_symbols_that_help_are_pushed(
    store: Store, parca: ParcaServer, pyroscope: PyroscopeServer
) -> None:
    commit(store, capture(store, b"stripped", A, quality=Quality.DYNSYM))
    summary = _push(store, pyroscope)
    assert (summary.pushed, summary.unsuitable) == (0, 1)
    assert pyroscope.requests == []
    assert _push(store, parca).pushed == 2


def test_program_of_go_goes_before_the_debug_file_made_of_it(
    store: Store, pyroscope: PyroscopeServer
) -> None:
    commit(
        store,
        capture(store, b"go", A, quality=Quality.NONE),
        capture(store, b"made", A, kinds=DEBUG, quality=Quality.GOPCLNTAB),
    )
    _push(store, pyroscope)
    assert _named(pyroscope, A) == b"go"


@both
def test_private_files_and_places_stay(store: Store, server: SymbolServer) -> None:
    secret = sighting(b"/home/user/secret", mode=0o100700, uid=1000)
    hidden = sighting(b"/home/user/hidden", reach=4)
    commit(
        store,
        capture(store, b"secret bytes", B, at=secret, quality=Quality.SYMTAB),
        capture(store, b"public", A, quality=Quality.SYMTAB),
        capture(store, b"public", A, at=hidden, quality=Quality.SYMTAB),
    )
    summary = _push(store, server)
    assert summary.private == 1
    assert {key[0] for key in server.places} == {A.hex()}
    assert "hidden" not in str([place.about for place in server.places.values()])


@both
def test_only_the_served_variant_is_pushed(store: Store, server: SymbolServer) -> None:
    commit(store, capture(store, b"good", A, quality=Quality.SYMTAB, trust=Trust.HOST))
    commit(store, capture(store, b"hostile", A, quality=Quality.SYMTAB, trust=Trust.CONTAINER))
    _push(store, server)
    assert set(server.uploaded().values()) == {b"good"}


def _scanned(store: Store, directory: Path, name: str, code: bytes, build_id: bytes) -> bytes:
    """A program with symbols in the store, as a scan takes it in."""
    flags = SHF_ALLOC | SHF_EXECINSTR
    text = Section(b".text", code.ljust(64, b"\x90"), flags=flags, segment=PT_LOAD)
    data = elf_file([text, SYMTAB], build_id=build_id or None)
    path = directory / name
    path.write_bytes(data)
    path.chmod(0o755)
    fd = os.open(path, os.O_RDONLY)
    origin = Origin(os.fsencode(path), statx.identity(fd))
    Ingest(store).run([PinnedFile(Sighting(origin, time.time_ns()), fd)])
    return data


def test_program_without_a_build_id_is_a_hash_to_parca(
    store: Store, parca: ParcaServer, pyroscope: PyroscopeServer, tmp_path: Path
) -> None:
    data = _scanned(store, tmp_path, "nameless", b"code", b"")
    htl = hashlib.sha256(data[:4096] + data[-4096:] + struct.pack(">Q", len(data))).digest()[:16]
    assert _push(store, parca).pushed == 2
    assert _named(parca, htl) == data
    assert parca.places[htl.hex(), DEBUGINFO].about["buildIdType"] == "BUILD_ID_TYPE_HASH"
    summary = _push(store, pyroscope)
    assert (summary.pushed, summary.unsuitable) == (0, 1)
    assert pyroscope.requests == []


@both
def test_build_id_of_unrelated_programs_is_left_out(
    store: Store, server: SymbolServer, tmp_path: Path
) -> None:
    for number in range(4):
        _scanned(store, tmp_path, f"program{number}", b"%d" % number, A)
    summary = _push(store, server)
    assert summary.ambiguous == 1
    assert A.hex() not in {key[0] for key in server.places}


def test_build_id_that_is_too_long_for_pyroscope(
    store: Store, parca: ParcaServer, pyroscope: PyroscopeServer
) -> None:
    commit(store, capture(store, b"long", b"\x77" * 32, quality=Quality.SYMTAB))
    summary = _push(store, pyroscope)
    assert (summary.unsuitable, summary.failed) == (1, [])
    assert _push(store, parca).pushed == 2


# --- what the server has -------------------------------------------------------------------------


@both
def test_second_push_asks_nothing_for_a_day(
    store: Store, server: SymbolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(store, capture(store, b"one", A, kinds=DEBUG, quality=Quality.DEBUGINFO))
    assert _push(store, server).pushed == 1
    server.requests.clear()
    assert _push(store, server).present == 1
    assert server.requests == []
    assert _push(store, server, AGAIN).present == 1
    assert server.count("Upload/") + server.count("/upload") == 0
    asked = len(server.requests)
    assert asked
    monkeypatch.setattr(symbol_push, "_ASK_AGAIN_S", 0)
    server.places.clear()  # it was purged
    assert _push(store, server).pushed == 1
    assert _named(server, A) == b"one"


@both
def test_file_that_others_uploaded_stays(store: Store, server: SymbolServer) -> None:
    slot = DEBUGINFO if isinstance(server, ParcaServer) else "exe"
    theirs = server.places[A.hex(), slot] = servers.Place("", "", {})
    theirs.state, theirs.data = "uploaded", b"theirs"
    commit(store, capture(store, b"ours", A, kinds=DEBUG, quality=Quality.DEBUGINFO))
    summary = _push(store, server)
    assert (summary.pushed, summary.present) == (0, 1)
    assert _named(server, A) == b"theirs"


@both
def test_upload_of_another_host_is_waited_for(store: Store, server: SymbolServer) -> None:
    slot = DEBUGINFO if isinstance(server, ParcaServer) else "exe"
    theirs = server.places[A.hex(), slot] = servers.Place("", "", {})
    commit(store, capture(store, b"ours", A, kinds=DEBUG, quality=Quality.DEBUGINFO))
    for _ in range(2):  # the first question does not make it an upload of ours
        assert _push(store, server).leased == 1
    assert theirs.data is None
    server.places.clear()
    assert _push(store, server).pushed == 1


def test_debuginfo_of_a_debuginfod_is_not_pushed_to_parca(
    store: Store, parca: ParcaServer, caplog: pytest.LogCaptureFixture
) -> None:
    parca.debuginfod.add(A.hex())
    commit(store, capture(store, b"ours", A, kinds=DEBUG, quality=Quality.DEBUGINFO))
    with caplog.at_level(logging.INFO):
        assert _push(store, parca).present == 1
    assert servers.IN_DEBUGINFOD in caplog.text


@both
def test_better_file_replaces_ours_where_that_is_possible(
    store: Store, server: SymbolServer
) -> None:
    commit(store, capture(store, b"program", A, quality=Quality.SYMTAB))
    _push(store, server)
    commit(store, capture(store, b"debug file", A, kinds=DEBUG, quality=Quality.DEBUGINFO))
    _push(store, server)
    can = isinstance(server, ParcaServer)
    assert _named(server, A) == (b"debug file" if can else b"program")


def test_worse_file_replaces_nothing(
    store: Store, parca: ParcaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(
        store,
        capture(store, b"debug file", A, kinds=DEBUG, quality=Quality.DEBUGINFO),
        capture(store, b"program", A, quality=Quality.SYMTAB),
    )
    _push(store, parca)
    ordinal = store.index.ordinal(BuildId(A))
    assert ordinal is not None
    program = store.index.artifact(ordinal, Kind.EXECUTABLE)
    # As if the debug file had been evicted.
    monkeypatch.setattr(SymbolPusher, "_fitting", lambda *_: [(Kind.DEBUGINFO, program)])
    assert _push(store, parca, AGAIN).present == 1
    assert _named(parca, A) == b"debug file"


# --- bytes ---------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("size", [1, 100, (1 << 20) - 1, 1 << 20, (3 << 20) + 7])
def test_files_of_all_sizes_arrive(store: Store, server: SymbolServer, size: int) -> None:
    data = os.urandom(size)
    commit(store, capture(store, data, A, kinds=DEBUG, quality=Quality.DEBUGINFO))
    assert _push(store, server).failed == []
    assert _named(server, A) == data


@both
def test_answers_may_have_the_names_of_the_definition(store: Store, server: SymbolServer) -> None:
    server.original_names = True
    commit(store, capture(store, b"debug file", A, kinds=DEBUG, quality=Quality.DEBUGINFO))
    assert _push(store, server).pushed == 1
    assert _named(server, A) == b"debug file"


def test_signed_url_gets_the_bytes_and_no_keys(
    store: Store, parca: ParcaServer, tmp_path: Path
) -> None:
    parca.signed = True
    parca.authorization = servers.AUTHORIZATION
    keys = tmp_path / "keys"
    keys.write_text(f"Authorization: {servers.AUTHORIZATION}\n")
    data = os.urandom((2 << 20) + 3)
    commit(store, capture(store, data, A, kinds=DEBUG, quality=Quality.DEBUGINFO))
    summary = _push(store, parca, headers_file=str(keys))
    assert (summary.pushed, summary.failed) == (1, [])
    assert _named(parca, A) == data
    assert parca.count("/api/upload") == 0


@both
def test_damaged_blob_is_named_and_not_sent(store: Store, server: SymbolServer) -> None:
    commit(
        store,
        capture(store, b"damaged", A, kinds=DEBUG, quality=Quality.DEBUGINFO),
        capture(store, b"whole", B, kinds=DEBUG, quality=Quality.DEBUGINFO),
    )
    digest = hashlib.sha256(b"damaged").hexdigest()
    path = Path(os.fsdecode(store.path)) / "blobs" / digest[:2] / digest
    path.chmod(0o600)
    path.write_bytes(b"DAMAGED")
    summary = _push(store, server)
    assert summary.pushed == 1
    assert len(summary.failed) == 1
    assert A.hex() in summary.failed[0]
    assert "check --repair" in summary.failed[0]
    assert [*server.uploaded().values()] == [b"whole"]
    path.write_bytes(b"damaged")


@both
def test_rate_is_kept_by_pauses_between_files(
    store: Store, server: SymbolServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for build_id in (A, B):
        new = capture(store, build_id * 100, build_id, kinds=DEBUG, quality=Quality.DEBUGINFO)
        commit(store, new)
    waited: list[int] = []
    monkeypatch.setattr("buildidfs.app.fleet.uploader.Pace.wait", lambda _, n: waited.append(n))
    _push(store, server)
    assert waited == [2000, 2000]


# --- faults --------------------------------------------------------------------------------------


def _three(store: Store) -> list[bytes]:
    ids = [bytes([number]) * 20 for number in (1, 2, 3)]
    for each in ids:
        new = capture(store, b"of " + each, each, kinds=DEBUG, quality=Quality.DEBUGINFO)
        commit(store, new)
    return ids


@both
@pytest.mark.parametrize("status", [503, -1])
def test_outage_ends_a_push_and_the_next_goes_on(
    store: Store, server: SymbolServer, status: int
) -> None:
    ids = _three(store)
    asked = 0

    def fail(path: str) -> int:
        nonlocal asked
        asked += 1
        return status if asked > 5 else 0

    server.fault = fail
    with pytest.raises(RemoteUnavailable, match=r"127\.0\.0\.1"):
        _push(store, server)
    server.fault = lambda path: 0
    assert _push(store, server).failed == []
    assert [_named(server, each) for each in ids] == [b"of " + each for each in ids]


@both
def test_push_waits_for_a_server_that_comes_back(store: Store, server: SymbolServer) -> None:
    _three(store)
    asked = 0

    def fail(path: str) -> int:
        nonlocal asked
        asked += 1
        return 503 if asked < 6 else 0

    server.fault = fail
    assert _push(store, server, Options(patience_s=60)).pushed == 3


@both
@pytest.mark.parametrize("number", range(1, 9))
@pytest.mark.parametrize("is_late", [False, True])
def test_push_that_ends_at_any_request_goes_on(
    store: Store, server: SymbolServer, number: int, is_late: bool
) -> None:
    ids = _three(store)
    asked = 0

    def fail(path: str) -> int:
        nonlocal asked
        asked += 1
        return -1 if asked == number else 0

    setattr(server, "late_fault" if is_late else "fault", fail)
    with contextlib.suppress(RemoteUnavailable):  # a lost upload is tried again at once
        _push(store, server)
    assert asked >= number
    server.fault = server.late_fault = lambda path: 0
    summary = _push(store, server)
    assert (summary.failed, summary.leased) == ([], 0)
    assert [_named(server, each) for each in ids] == [b"of " + each for each in ids]


@both
def test_one_file_that_the_server_cuts_off_does_not_stop_the_others(
    store: Store, server: SymbolServer
) -> None:
    large = os.urandom(300_000)
    commit(store, capture(store, large, A, kinds=DEBUG, quality=Quality.DEBUGINFO))
    ids = _three(store)
    server.cut_at = 200_000
    summary = _push(store, server)
    assert summary.pushed == len(ids)
    assert len(summary.failed) == 1
    assert A.hex() in summary.failed[0]
    assert "timeout" in summary.failed[0]
    assert _named(server, A) is None
    server.cut_at = 0
    assert _push(store, server).pushed == 1
    assert _named(server, A) == large


@both
def test_file_that_is_refused_is_named_with_the_reason(store: Store, server: SymbolServer) -> None:
    assert isinstance(server, ParcaServer | PyroscopeServer)
    server.max_size = 1000
    commit(store, capture(store, b"a" * 1001, A, kinds=DEBUG, quality=Quality.DEBUGINFO))
    ids = _three(store)
    summary = _push(store, server)
    assert summary.pushed == len(ids)
    assert len(summary.failed) == 1
    reason = "exceeds maximum" if isinstance(server, ParcaServer) else "upload failed"
    assert A.hex() in summary.failed[0]
    assert reason in summary.failed[0]


def test_upload_that_took_too_long_names_the_option_of_the_server(
    store: Store, parca: ParcaServer, pyroscope: PyroscopeServer
) -> None:
    commit(store, capture(store, b"large", A, kinds=DEBUG, quality=Quality.DEBUGINFO))
    parca.is_late = True
    assert "i/o timeout; is --http-read-timeout of" in _push(store, parca).failed[0]
    pyroscope.max_size = 1
    assert "upload failed; is -debug-info.upload-timeout" in _push(store, pyroscope).failed[0]


def test_upload_that_was_overtaken_is_no_failure(store: Store, parca: ParcaServer) -> None:
    commit(store, capture(store, b"ours", A, kinds=DEBUG, quality=Quality.DEBUGINFO))

    def overtake(path: str) -> int:
        if path.endswith("/initiateupload"):
            parca.places[A.hex(), DEBUGINFO] = servers.Place("theirs", "", {})
        return 0

    parca.fault = overtake
    summary = _push(store, parca)
    assert (summary.leased, summary.failed) == (1, [])


@both
@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, "refuses us: 401"),
        (403, "--headers-file"),
        (404, "check the URL"),
        (301, "redirects to https://elsewhere.invalid:"),
        (200, "check the URL"),
    ],
)
def test_server_that_takes_nothing_ends_a_push(
    store: Store, server: SymbolServer, status: int, message: str
) -> None:
    _three(store)
    server.fault = lambda path: status
    with pytest.raises(RemoteDenied, match=message) as raised:
        _push(store, server, Options(patience_s=None))
    assert "secret" not in str(raised.value)


def test_pyroscope_that_takes_no_uploads_says_how_to_allow_them(
    store: Store, pyroscope: PyroscopeServer
) -> None:
    _three(store)
    pyroscope.enabled = False
    with pytest.raises(RemoteDenied, match=r"-debug-info\.enabled"):
        _push(store, pyroscope)


@both
def test_keys_come_from_a_file_and_are_not_logged(
    store: Store, server: SymbolServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _three(store)
    server.authorization = servers.AUTHORIZATION
    with pytest.raises(RemoteDenied):
        _push(store, server)
    keys = tmp_path / "keys"
    keys.write_text(f"Authorization: {servers.AUTHORIZATION}\n")
    with caplog.at_level(logging.DEBUG):
        assert _push(store, server, headers_file=str(keys)).pushed == 3
    assert "secret" not in caplog.text


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://user:secret@host", "--headers-file"),
        ("parca:7070", "not the URL of a server"),
        ("ftp://host", "not the URL of a server"),
        ("https://", "not the URL of a server"),
        ("https://host:99999", "not the URL of a server"),
    ],
)
def test_url_that_is_none(store: Store, url: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        pusher_of(store, "parca", url, "", NO_PATIENCE)
    assert "secret" not in str(raised.value)


# --- the watch -----------------------------------------------------------------------------------


@both
def test_watch_pushes_what_is_captured(store: Store, server: SymbolServer, kind: str) -> None:
    ready = threading.Event()
    with pusher_of(store, kind, server.url, "", Options(patience_s=None)) as pusher:
        thread = threading.Thread(target=pusher.follow, args=(ready.set,))
        thread.start()
        try:
            assert ready.wait(30)
            commit(store, capture(store, b"new", A, kinds=DEBUG, quality=Quality.DEBUGINFO))
            until(lambda: _named(server, A) == b"new", "the new file")
        finally:
            pusher.stop()
            thread.join(30)
    assert not thread.is_alive()
