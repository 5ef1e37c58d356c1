# SPDX-License-Identifier: Apache-2.0
"""buildidfs.ingest.upkeep: policy and pins of a store, and rereading of its blobs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from buildidfs import config
from buildidfs.catalog import remedies
from buildidfs.config import RetentionSettings
from buildidfs.errors import StoreFull, UsageError
from buildidfs.ingest import upkeep
from buildidfs.ingest.upkeep import Scrubbing
from buildidfs.model import BuildId, Digest, Kind
from buildidfs.profile import inputs
from buildidfs.store import Store, schema
from buildidfs.store.index import environment
from buildidfs.store.retention.eviction import Policy
from tests.support.clients.tools import run, tool
from tests.support.elf.elfwriter import TEXT, Section, elf_file
from tests.support.harness import damages
from tests.support.harness.captures import SECOND, capture, read_blob, sighting
from tests.support.harness.waiting import until

if TYPE_CHECKING:
    from buildidfs.store.retention.removal import RemovalResult


GIB = 1 << 30


# --- settings ------------------------------------------------------------------------------------


def test_without_settings_a_little_stays_free(tmp_path: Path) -> None:
    usage = os.statvfs(tmp_path)
    total = usage.f_blocks * usage.f_frsize
    policy = upkeep.policy(RetentionSettings(), tmp_path)
    assert policy == Policy(keep_free=min(total // 20, 4 * GIB), yields=False)


def test_shares_are_of_the_filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = os.statvfs_result((4096, 4096, 1000, 20, 10, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: usage)
    settings = RetentionSettings(keep_free="5%", max_size="80%")
    policy = upkeep.policy(settings, tmp_path)
    assert policy == Policy(max_size=800 * 4096, keep_free=50 * 4096)


def test_all_settings(tmp_path: Path) -> None:
    settings = RetentionSettings(max_size="50G", keep_free=0, max_age="30d", min_age="12h")
    assert upkeep.policy(settings, tmp_path) == Policy(
        max_size=50 * GIB, keep_free=0, max_age=30 * 86_400, min_age=12 * 3600
    )


# --- upkeep --------------------------------------------------------------------------------------


def test_upkeep_enforces_and_collects(store: Store) -> None:
    old = sighting(seen_ns=time.time_ns() - 40 * 86_400 * SECOND)
    store.commit([capture(store, b"old", at=old)])
    store.retain(Policy(max_age=30 * 86_400))
    collected: list[bool] = []
    store.collect = lambda: collected.append(True)  # type: ignore[method-assign, assignment, func-returns-value]
    with upkeep.Upkeep(store, every_s=0.01):
        until(lambda: store.stats().blobs == 0, "the old blob to go")
        until(lambda: collected, "what is left to be collected")
    assert len(collected) == 1, "once a day"


@pytest.mark.parametrize("error", [StoreFull("the disk is full"), KeyError("a fault")])
def test_upkeep_goes_on_after_a_failure(
    store: Store, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[bool] = []

    def enforce() -> RemovalResult:
        calls.append(True)
        raise error

    store.enforce = enforce  # type: ignore[method-assign]
    with upkeep.Upkeep(store, every_s=0.01):
        until(lambda: len(calls) > 2, "more attempts")
    assert "cannot look after the store" in caplog.text


# --- pins ----------------------------------------------------------------------------------------


def test_a_core_file_names_what_was_mapped(store: Store, tmp_path: Path) -> None:
    build_id = os.urandom(20)
    source, program, core = (tmp_path / name for name in ("a.c", "a", "core"))
    source.write_text('#include <unistd.h>\nint main(void) { write(1, "", 1); pause(); }\n')
    run([tool("gcc"), f"-Wl,--build-id=0x{build_id.hex()}", "-o", program, source], check=True)
    run(
        [tool("gdb"), "-nx", "-batch", "-ex", "break pause", "-ex", "run > /dev/null",
         "-ex", f"generate-core-file {core}", "-ex", "kill", program],
        check=True,
    )  # fmt: skip
    found = inputs.build_ids_named(store, os.fsencode(core))
    assert found.paths[BuildId(build_id)] == os.fsencode(program)
    assert len(found.paths) > 1
    assert (found.nameless, found.incomplete) == ([], "")


def test_what_names_no_build_id(store: Store, tmp_path: Path) -> None:
    head = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x04\0"  # a core file that was cut off
    core = tmp_path / "empty.core"
    core.write_bytes(head + bytes(100))
    found = inputs.build_ids_named(store, os.fsencode(core))
    assert (found.paths, found.nameless) == ({}, [])
    (tmp_path / "text").write_text("text")
    for path, message in (
        (tmp_path / "missing", "cannot read .*/missing: No such file"),
        (tmp_path / "text", "neither a profile of perf, nor a core file, nor a binary"),
        (tmp_path, str(tmp_path)),
    ):
        with pytest.raises(UsageError, match=message):
            inputs.build_ids_named(store, os.fsencode(path))


def test_the_dwz_file_that_debuginfo_needs(store: Store) -> None:
    from tests.support.elf.elfwriter import Section, elf_file

    needed = BuildId(b"\xdd" * 20)
    link = Section(b".gnu_debugaltlink", b"/usr/lib/debug/.dwz/common.debug\0" + needed)
    data = elf_file([link], build_id=b"\xaa" * 20)
    store.commit([capture(store, data, b"\xaa" * 20, kinds=[Kind.DEBUGINFO])])
    store.commit([capture(store, b"no ELF file", b"\xbb" * 20)])
    altlink = upkeep.altlinks(store)
    digests = [
        store.index.variants(1, Kind.DEBUGINFO)[0].digest,
        store.index.variants(2, 1)[0].digest,
    ]
    assert [altlink(digest) for digest in digests] == [needed, None]
    os.unlink(store.blobs.path(digests[0]))
    assert upkeep.altlinks(store)(digests[0]) is None


IDS = [BuildId(bytes([number]) * 8) for number in (1, 2, 3)]


def _elf(build_id: bytes) -> bytes:
    return elf_file([TEXT, Section(b".comment", build_id * 3000)], build_id=build_id)


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as made:
        made.commit([capture(made, _elf(each), each) for each in IDS])
        yield made


def _settings(rate: str = "1GiB") -> config.Settings:
    return config.parse(f"[check]\nscrub-rate = '{rate}'", "test")


def _row(filled: Store, digest: Digest) -> schema.DigestRow:
    env = environment.acquire(filled.path, read_only=False)
    try:
        value = env.get(env.tables["digests"], digest)
    finally:
        environment.release(env)
    assert value is not None
    return schema.DigestRow.unpack(value)


def _age(filled: Store, digest: Digest) -> None:
    """Let a blob have been read long ago; its file cannot be made older."""
    row = _row(filled, digest)
    row.verified = 1
    env = environment.acquire(filled.path, read_only=False)
    try:
        env.write(lambda txn: txn.put(digest, row.pack(), db=env.tables["digests"]))
    finally:
        environment.release(env)


def _blob(filled: Store, number: int) -> tuple[Digest, Path]:
    artifact = filled.index.artifact(number, Kind.EXECUTABLE)
    assert artifact is not None
    return artifact.digest, Path(os.fsdecode(filled.blobs.path(artifact.digest)))


@pytest.fixture
def everything_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep, "EVERY_S", -3600)


def test_what_is_right_is_written_down(filled: Store, everything_is_due: None) -> None:
    digests = [_blob(filled, number)[0] for number in (1, 2, 3)]
    with Scrubbing(filled, _settings(), 0):
        until(lambda: all(_row(filled, each).verified for each in digests), "all are read")
    assert all(abs(_row(filled, each).verified - time.time()) < 60 for each in digests)


def test_nothing_is_read_that_is_not_due(filled: Store, caplog: pytest.LogCaptureFixture) -> None:
    """It was written a moment ago; but what was touched is read in any case."""
    digest, path = _blob(filled, 1)
    path.chmod(0o600)
    with Scrubbing(filled, _settings(), 0):
        until(lambda: _row(filled, digest).verified, "the one that was touched is read")
    assert [_row(filled, _blob(filled, number)[0]).verified for number in (2, 3)] == [0, 0]
    assert filled.blobs.is_untouched(digest)
    assert caplog.records == []


def test_nothing_is_read_at_a_rate_of_nothing(filled: Store, everything_is_due: None) -> None:
    with Scrubbing(filled, _settings("0"), 0) as scrub:
        assert scrub._thread.ident is None
    assert _row(filled, _blob(filled, 1)[0]).verified == 0


def test_what_is_damaged_is_captured_again(
    filled: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From where it was seen on this host, with all that is known of it."""
    from buildidfs.ingest.scans import scan_tree

    original = tmp_path / "original"
    original.write_bytes(_elf(IDS[0]))
    scan_tree(filled, config.Settings(), [os.fsencode(original)])
    digest, path = _blob(filled, 1)
    origins = len(filled.index.origins(1))
    damages.flip(path, path)
    with Scrubbing(filled, _settings(), 0):
        until(lambda: "captured again" in caplog.text, "it is captured again")
    assert read_blob(filled, digest) == _elf(IDS[0])
    assert len(filled.index.origins(1)) == origins
    assert f"blob {digest} has other bytes" in caplog.text
    assert list(filled.check(digests=True)) == []


def test_what_nobody_has_goes_to_quarantine(
    filled: Store, caplog: pytest.LogCaptureFixture
) -> None:
    digest, path = _blob(filled, 2)
    damages.flip(path, path)
    with Scrubbing(filled, _settings(), 0):
        until(lambda: "is lost" in caplog.text, "it is given up", 120)
        until(lambda: filled.index.ordinal(IDS[1]) is None, "nothing speaks of it")
    assert (Path(os.fsdecode(filled.path)) / "quarantine" / digest.hex()).exists()
    (loss,) = filled.evictions().last
    assert (loss.build_id, loss.damaged, filled.evictions().losses) == (IDS[1], True, 1)
    assert remedies.removed(filled.journal.removals()[IDS[1]]).startswith(remedies.DAMAGED)
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.ERROR]
    assert list(filled.check(digests=True)) == []


def test_it_takes_its_time_and_ends_at_once(
    filled: Store, everything_is_due: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte a second: it ends in the middle of a file, and goes on with that one."""
    begun = time.monotonic()
    paced: list[int] = []
    real = Scrubbing._pace

    def pace(self: Scrubbing, size: int) -> None:
        paced.append(size)
        real(self, size)

    monkeypatch.setattr(Scrubbing, "_pace", pace)
    with Scrubbing(filled, _settings("1"), 0):
        until(lambda: paced, "it reads")
    assert time.monotonic() - begun < 15
    assert len(paced) == 1
    digests = sorted(_blob(filled, number)[0] for number in (1, 2, 3))
    assert [_row(filled, each).verified for each in digests] == [0, 0, 0]
    with Scrubbing(filled, _settings(), 0):
        until(lambda: all(_row(filled, each).verified for each in digests), "all are read")


def test_where_it_was_is_kept(filled: Store, everything_is_due: None) -> None:
    digests = sorted(_blob(filled, number)[0] for number in (1, 2, 3))
    checker = filled.checker()
    read: list[int] = []

    def pace(size: int) -> None:
        read.append(size)
        if len(read) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(checker.scrub(pace, lambda row: True))
    assert [bool(_row(filled, each).verified) for each in digests] == [True, False, False]
    read.extend([0, 0])
    list(checker.scrub(read.append, lambda row: True))
    assert len(read) == 6, "the second and the third"
    assert all(_row(filled, each).verified for each in digests)


def test_trouble_with_the_store_ends_nothing(
    filled: Store, caplog: pytest.LogCaptureFixture, everything_is_due: None
) -> None:
    class Broken(Scrubbing):
        def _pace(self, size: int) -> None:
            raise KeyError("a fault")

    with Broken(filled, _settings(), 0) as scrub:
        until(lambda: "cannot read the blobs" in caplog.text, "it is said")
        assert scrub._thread.is_alive()


def test_a_month_after_it_was_read(filled: Store) -> None:
    now = int(time.time())
    row = schema.DigestRow(1, ctime_ns=(now - 40 * 86_400) * 10**9)
    assert upkeep._is_due(row)
    assert not upkeep._is_due(msgspec.structs.replace(row, verified=now - 86_400))
    assert not upkeep._is_due(msgspec.structs.replace(row, ctime_ns=now * 10**9))
