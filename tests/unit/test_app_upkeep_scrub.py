# SPDX-License-Identifier: Apache-2.0
"""buildidfs.app.upkeep.scrub: a store is read slowly, and what is damaged is made well again."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from buildidfs import config
from buildidfs.app.upkeep import scrub as upkeep_scrub
from buildidfs.app.upkeep.scrub import Scrubbing
from buildidfs.model import BuildId, Digest, Kind
from buildidfs.store import Store
from buildidfs.store.index import environment
from buildidfs.store.schema import schema
from tests.support import damages
from tests.support.captures import capture, read_blob
from tests.support.elfwriter import TEXT, Section, elf_file
from tests.support.waiting import until

IDS = [BuildId(bytes([number]) * 8) for number in (1, 2, 3)]


def _elf(build_id: bytes) -> bytes:
    return elf_file([TEXT, Section(b".comment", build_id * 3000)], build_id=build_id)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as made:
        made.commit([capture(made, _elf(each), each) for each in IDS])
        yield made


def _settings(rate: str = "1GiB") -> config.Settings:
    return config.parse(f"[check]\nscrub-rate = '{rate}'", "test")


def _row(store: Store, digest: Digest) -> schema.DigestRow:
    env = environment.acquire(store.path, read_only=False)
    try:
        value = env.get(env.tables["digests"], digest)
    finally:
        environment.release(env)
    assert value is not None
    return schema.DigestRow.unpack(value)


def _age(store: Store, digest: Digest) -> None:
    """Let a blob have been read long ago; its file cannot be made older."""
    row = _row(store, digest)
    row.verified = 1
    env = environment.acquire(store.path, read_only=False)
    try:
        env.write(lambda txn: txn.put(digest, row.pack(), db=env.tables["digests"]))
    finally:
        environment.release(env)


def _blob(store: Store, number: int) -> tuple[Digest, Path]:
    artifact = store.index.artifact(number, Kind.EXECUTABLE)
    assert artifact is not None
    return artifact.digest, Path(os.fsdecode(store.blobs.path(artifact.digest)))


@pytest.fixture
def everything_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upkeep_scrub, "EVERY_S", -3600)


def test_what_is_right_is_written_down(store: Store, everything_is_due: None) -> None:
    digests = [_blob(store, number)[0] for number in (1, 2, 3)]
    with Scrubbing(store, _settings(), 0):
        until(lambda: all(_row(store, each).verified for each in digests), "all are read")
    assert all(abs(_row(store, each).verified - time.time()) < 60 for each in digests)
    artifact = store.index.artifact(1, Kind.EXECUTABLE)
    assert artifact is not None
    assert artifact.segments, "which the capture did not say"


def test_nothing_is_read_that_is_not_due(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """It was written a moment ago; but what was touched is read in any case."""
    digest, path = _blob(store, 1)
    path.chmod(0o600)
    with Scrubbing(store, _settings(), 0):
        until(lambda: _row(store, digest).verified, "the one that was touched is read")
    assert [_row(store, _blob(store, number)[0]).verified for number in (2, 3)] == [0, 0]
    assert store.blobs.is_untouched(digest)
    assert caplog.records == []


def test_nothing_is_read_at_a_rate_of_nothing(store: Store, everything_is_due: None) -> None:
    with Scrubbing(store, _settings("0"), 0) as scrub:
        assert scrub._thread.ident is None
    assert _row(store, _blob(store, 1)[0]).verified == 0


def test_what_is_damaged_is_captured_again(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From where it was seen on this host, with all that is known of it."""
    from buildidfs.app import scan_tree

    original = tmp_path / "original"
    original.write_bytes(_elf(IDS[0]))
    scan_tree(store, config.Settings(), [os.fsencode(original)])
    digest, path = _blob(store, 1)
    origins = len(store.index.origins(1))
    damages.flip(path, path)
    with Scrubbing(store, _settings(), 0):
        until(lambda: "captured again" in caplog.text, "it is captured again")
    assert read_blob(store, digest) == _elf(IDS[0])
    assert len(store.index.origins(1)) == origins
    assert f"blob {digest} has other bytes" in caplog.text
    assert list(store.check(digests=True)) == []


def test_what_nobody_has_goes_to_quarantine(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    digest, path = _blob(store, 2)
    damages.flip(path, path)
    with Scrubbing(store, _settings(), 0):
        until(lambda: "is lost" in caplog.text, "it is given up")
        until(lambda: store.index.ordinal(IDS[1]) is None, "nothing speaks of it")
    assert (Path(os.fsdecode(store.path)) / "quarantine" / digest.hex()).exists()
    assert [record.levelno for record in caplog.records] == [logging.ERROR, logging.ERROR]
    assert list(store.check(digests=True)) == []


def test_it_takes_its_time_and_ends_at_once(
    store: Store, everything_is_due: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One byte a second: it ends in the middle of a file, and goes on with that one."""
    begun = time.monotonic()
    paced: list[int] = []
    real = Scrubbing._pace

    def pace(self: Scrubbing, size: int) -> None:
        paced.append(size)
        real(self, size)

    monkeypatch.setattr(Scrubbing, "_pace", pace)
    with Scrubbing(store, _settings("1"), 0):
        until(lambda: paced, "it reads")
    assert time.monotonic() - begun < 15
    assert len(paced) == 1
    digests = sorted(_blob(store, number)[0] for number in (1, 2, 3))
    assert [_row(store, each).verified for each in digests] == [0, 0, 0]
    with Scrubbing(store, _settings(), 0):
        until(lambda: all(_row(store, each).verified for each in digests), "all are read")


def test_where_it_was_is_kept(store: Store, everything_is_due: None) -> None:
    digests = sorted(_blob(store, number)[0] for number in (1, 2, 3))
    checker = store.checker()
    read: list[int] = []

    def pace(size: int) -> None:
        read.append(size)
        if len(read) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(checker.scrub(pace, lambda row: True))
    assert [bool(_row(store, each).verified) for each in digests] == [True, False, False]
    read.extend([0, 0])
    list(checker.scrub(read.append, lambda row: True))
    assert len(read) == 6, "the second and the third"
    assert all(_row(store, each).verified for each in digests)


def test_trouble_with_the_store_ends_nothing(
    store: Store, caplog: pytest.LogCaptureFixture, everything_is_due: None
) -> None:
    class Broken(Scrubbing):
        def _pace(self, size: int) -> None:
            raise KeyError("a fault")

    with Broken(store, _settings(), 0) as scrub:
        until(lambda: "cannot read the blobs" in caplog.text, "it is said")
        assert scrub._thread.is_alive()


def test_a_month_after_it_was_read(store: Store) -> None:
    now = int(time.time())
    row = schema.DigestRow(1, ctime_ns=(now - 40 * 86_400) * 10**9)
    assert upkeep_scrub._is_due(row)
    assert not upkeep_scrub._is_due(msgspec.structs.replace(row, verified=now - 86_400))
    assert not upkeep_scrub._is_due(msgspec.structs.replace(row, ctime_ns=now * 10**9))
