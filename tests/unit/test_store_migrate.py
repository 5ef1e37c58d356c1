# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.migrate: older stores are converted whole or not at all, with nobody around."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from buildidfs.cli.main import main
from buildidfs.errors import StoreFull, StoreLocked, StoreMissing, StoreVersionError
from buildidfs.model import Absence, ByteRange, Digest, Kind, Quality, Trust
from buildidfs.store import NewSeen, Store, environment, layout, migrate, schema
from buildidfs.store.presence import Presence
from tests.golden.make import APP, BOOT, CONTENT, DWZ, NOW, SECOND, VDSO, fill, seen
from tests.support.captures import capture, read_blob
from tests.support.clients import run, tool
from tests.support.golden import unpack
from tests.support.killing import calls_of, is_killed, kill_at_call
from tests.support.waiting import until


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A store of format 1."""
    return unpack(1, tmp_path / "store")


def _rows(path: Path) -> dict[str, dict[bytes, bytes]]:
    """Every row of an index, whatever its format."""
    found = {}
    with lmdb.open(str(path / "index"), max_dbs=64, readonly=True, map_size=1 << 30) as env:
        with env.begin() as txn:
            tables = [key for key, _ in txn.cursor()]
        for name in tables:
            table = env.open_db(name, create=False)
            with env.begin(table) as txn:
                found[name.decode()] = dict(txn.cursor())
    return found


def _digest_row(store: Store, digest: Digest) -> schema.DigestRow:
    env = environment.acquire(store.path, read_only=False)
    try:
        value = env.get(env.tables["digests"], digest)
    finally:
        environment.release(env)
    assert value is not None
    return schema.DigestRow.unpack(value)


def _expect_everything(store: Store) -> None:
    """What `make.fill` put into it is there, in the order in which it is served."""
    assert list(store.check(digests=True)) == []
    ordinals = {build_id: ordinal for ordinal, build_id in store.build_ids_from()}
    assert ordinals == {APP: 1, DWZ: 2, VDSO: 3}
    for kind, expected in {
        Kind.EXECUTABLE: [
            ("unstripped", Quality.SYMTAB, Trust.HOST, 0o555, ()),
            ("stripped", Quality.DYNSYM, Trust.CONTAINER, 0o500, ()),
        ],
        Kind.DEBUGINFO: [
            ("debug", Quality.DEBUGINFO, Trust.HOST, 0o555, ()),
            ("unstripped", Quality.SYMTAB, Trust.HOST, 0o555, ()),
            (
                "scripted", Quality.DEBUGINFO, Trust.CONTAINER, 0o555,
                (ByteRange(CONTENT["scripted"].find(b"\x04gdb"), 26),),
            ),
        ],
        Kind.VDSO: [("bare", Quality.NONE, Trust.CONTAINER, 0o555, ())],
    }.items():  # fmt: skip
        found = store.variants(1, kind)
        assert [
            (read_blob(store, each.digest), each.quality, each.trust, each.mode, each.scripts)
            for each in found
        ] == [(CONTENT[name], *rest) for name, *rest in expected]
    for ordinal, name in ((2, "bare"), (3, "vdso")):
        (variant,) = store.variants(ordinal, Kind.VDSO)
        assert read_blob(store, variant.digest) == CONTENT[name]
    assert {record.origin.path for record in store.origins(1)} == {
        b"/app/bin/app", b"/app/bin/app.debug", b"/usr/bin/app", b"/d/app.debug", b"[vdso]",
        b"/opt/\xff/app",
    }  # fmt: skip
    assert store.supplementary(b"x86_64/app") == 2
    assert store.path_bytes(store.primary_path(1) or 0) == b"/app/bin/app"
    known = store.recall(seen(b"/bin/sh", Trust.HOST, 7, ino=7).origin.identity)
    assert known is not None
    assert known.absence is Absence.NOT_ELF
    known = store.recall(seen(b"/usr/bin/app", Trust.HOST, 2, ino=3).origin.identity)
    assert known is not None
    assert known.build_id == APP
    assert [record.path for record in store.journal_since()] == [b"/app/bin/app", b"/gone"]
    assert len(store.journal_at(70, b"/gone", BOOT)) == 1


def test_everything_is_there_afterwards(old: Path) -> None:
    assert migrate.run(old) == migrate.Migrated(1, 2, 3, 7)
    assert (old / "format").read_bytes() == b"buildidfs store 2\n"
    with Store.open(old, read_only=True) as store:
        _expect_everything(store)


def test_opening_for_writing_converts(old: Path) -> None:
    with Store.open(old) as store:
        _expect_everything(store)
        new = store.commit([capture(store, b"more", b"\x01\x02")])
        assert new.outcomes[0].ordinal == 4
        assert list(store.check(digests=True)) == []


def test_a_conversion_is_done_once(old: Path) -> None:
    assert migrate.run(old) is not None
    before = _rows(old)
    assert migrate.run(old) is None
    assert _rows(old) == before


def test_files_and_uses_of_blobs(old: Path) -> None:
    with Store.open(old) as store:
        for artifact, last, rank in [
            (store.variants(1, Kind.EXECUTABLE)[0], NOW // SECOND + 60, 0),
            (store.variants(1, Kind.EXECUTABLE)[1], NOW // SECOND, 1),
        ]:
            row = _digest_row(store, artifact.digest)
            status = os.stat(store.blob_path(artifact.digest))
            assert (row.stored, row.inode, row.ctime_ns) == (
                status.st_size, status.st_ino, status.st_ctime_ns,
            )  # fmt: skip
            assert row.size == row.stored == artifact.size
            assert (row.form, row.verified) == (schema.FORM_PLAIN, 0)
            assert last - schema.USE_SLACK_S <= row.used <= last
            assert row.rank == rank
    rows = _rows(old)
    assert len(rows["uses"]) == len(rows["digests"]) == 7
    counters = schema.Counters.unpack(rows["meta"][schema.COUNTERS_KEY])
    assert counters.stored_bytes == counters.blob_bytes == sum(map(len, CONTENT.values()))


def test_a_missing_blob_does_not_keep_it_from_converting(old: Path) -> None:
    victim = next(path for path in (old / "blobs").glob("*/*"))
    victim.unlink()
    with Store.open(old) as store:
        assert list(store.check()) == [f"blob {victim.name} is missing"]
        assert _digest_row(store, Digest(bytes.fromhex(victim.name))).stored == 0


def test_rows_that_do_not_decode_are_left_to_check(old: Path) -> None:
    with lmdb.open(str(old / "index"), max_dbs=64, map_size=1 << 30) as env:
        for name, key in [(b"artifacts", schema.ORDINAL_KIND.pack(1, 1)), (b"digests", b"x" * 32)]:
            table = env.open_db(name, create=False)
            with env.begin(table, write=True) as txn:
                txn.put(key, b"short")
    with Store.open(old) as store:
        assert any("cannot be read" in line for line in store.check())
        assert store.artifact(2, Kind.DEBUGINFO) is not None


def test_a_store_from_before_there_was_a_journal(old: Path) -> None:
    with lmdb.open(str(old / "index"), max_dbs=64, map_size=1 << 30) as env:
        for name in (b"journal", b"recent"):
            table = env.open_db(name, create=False)
            with env.begin(write=True) as txn:
                txn.drop(table)
    with Store.open(old) as store:
        assert list(store.journal_since()) == []
        store.journal([NewSeen(seen(b"/app/bin/app", Trust.HOST, 8, ino=1), APP, BOOT)])
        assert len(list(store.journal_since())) == 1
        assert list(store.check(digests=True)) == []


def test_reading_does_not_convert(old: Path) -> None:
    before = _rows(old)
    with pytest.raises(StoreVersionError, match="convert it with buildidfs migrate"):
        Store.open(old, read_only=True)
    assert _rows(old) == before
    assert (old / "format").read_bytes() == b"buildidfs store 1\n"


def test_newer_formats_are_refused(old: Path) -> None:
    migrate.run(old)
    (old / "format").write_bytes(b"buildidfs store 3\n")
    with pytest.raises(StoreVersionError, match="use a newer buildidfs"):
        migrate.run(old)
    with pytest.raises(StoreVersionError, match="use a newer buildidfs"):
        Store.open(old)


def test_nobody_else_may_have_it_open(old: Path) -> None:
    """Not even to read, as a mount does: LMDB knows of everybody."""
    ready, release = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            env = lmdb.open(str(old / "index"), max_dbs=64, readonly=True, map_size=1 << 30)
            with Presence(old, "mount"):
                os.write(ready[1], b".")
                os.read(release[0], 1)
            env.close()
        finally:
            os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"."
        before = _rows(old)
        with pytest.raises(StoreLocked, match=rf"end mount \(pid {child}\), then run buildidfs"):
            migrate.run(old)
        with pytest.raises(StoreLocked):
            Store.open(old)
        assert _rows(old) == before
        assert (old / "format").read_bytes() == b"buildidfs store 1\n"
    finally:
        os.write(release[1], b".")
        os.waitpid(child, 0)
        for fd in (*ready, *release):
            os.close(fd)
    assert migrate.run(old) is not None


_READ_FORMAT = """
import sys, lmdb
env = lmdb.open(sys.argv[1], max_dbs=64, readonly=True, map_size=1 << 30)
table = env.open_db(b"meta", create=False)
with env.begin(table) as txn:
    assert txn.get(b"format") == b"done"
"""


def test_others_wait_until_it_is_done(old: Path) -> None:
    """Whoever opens the index in the middle of it gets it when all rows are new."""
    with environment.alone(bytes(old), map_size=None) as env:
        child = subprocess.Popen([sys.executable, "-c", _READ_FORMAT, old / "index"])
        until(lambda: _waits_for_a_lock(child.pid), "the child waits")
        assert child.poll() is None
        env.write(lambda txn: txn.put(b"format", b"done", db=env.tables["meta"]))
    assert child.wait(30) == 0


def _waits_for_a_lock(pid: int) -> bool:
    """A line of proc_locks(5) for a process that waits, behind the one for which it does."""
    return any(
        b"->" in line and b" %d " % pid in line
        for line in Path("/proc/locks").read_bytes().splitlines()
    )


def test_an_open_store_of_this_process_is_in_use(tmp_path: Path) -> None:
    with (
        Store.create(tmp_path / "store") as store,
        pytest.raises(StoreLocked, match="in this process"),
        environment.alone(store.path, map_size=None),
    ):
        pass


def test_killed_before_any_call(old: Path, tmp_path: Path) -> None:
    """Wherever it is cut off, the next who opens it for writing has everything."""
    trial = tmp_path / "trial"

    def fresh() -> None:
        shutil.rmtree(trial, ignore_errors=True)
        shutil.copytree(old, trial)

    fresh()
    Store.open(trial).close()
    fresh()
    calls = calls_of(lambda: migrate.run(trial))
    assert calls > 100
    cut_off = 0
    for moment in random.Random(3).sample(range(1, calls), 25):
        fresh()

        def work(moment: int = moment) -> None:
            kill_at_call(moment)
            migrate.run(trial)
            os.kill(os.getpid(), 9)  # no two runs make quite the same calls

        assert is_killed(work)
        said = (trial / "format").read_bytes()
        if said == b"buildidfs store 1\n":
            assert schema.FORMAT_KEY not in _rows(trial)["meta"]
        elif schema.FORMAT_KEY not in _rows(trial)["meta"]:
            cut_off += 1
            with pytest.raises(StoreVersionError, match="buildidfs migrate"):
                Store.open(trial, read_only=True)
        with Store.open(trial) as store:
            _expect_everything(store)
    assert cut_off > 0


@pytest.mark.root
def test_a_full_disk_leaves_the_old_store(tmp_path: Path) -> None:
    point = tmp_path / "small"
    point.mkdir()
    run([tool("mount"), "-t", "tmpfs", "-o", "size=2m", "tmpfs", point], check=True)
    try:
        path = unpack(1, point / "store")
        before = _rows(path)
        ballast = point / "ballast"
        with ballast.open("wb") as file:
            usage = os.statvfs(point)
            os.posix_fallocate(file.fileno(), 0, usage.f_bavail * usage.f_frsize - (20 << 10))
        with pytest.raises(StoreFull):
            Store.open(path)
        assert (path / "format").read_bytes() == b"buildidfs store 1\n"
        assert {name: rows for name, rows in _rows(path).items() if name in before} == before
        ballast.unlink()
        with Store.open(path) as store:
            _expect_everything(store)
    finally:
        run([tool("umount"), point], check=True)


def test_a_small_map_grows(old: Path) -> None:
    assert migrate.run(old, map_size=80 << 10) is not None
    with Store.open(old) as store:
        _expect_everything(store)


def test_a_store_that_is_just_made_is_of_this_format(tmp_path: Path) -> None:
    Store.create(tmp_path / "store").close()
    assert layout.read_format(bytes(tmp_path / "store")) == schema.FORMAT_VERSION
    assert migrate.run(tmp_path / "store") is None


def test_no_store(tmp_path: Path) -> None:
    with pytest.raises(StoreMissing):
        migrate.run(tmp_path / "store")


def test_command(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--store", str(old), "migrate"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == "converted format 1 to 2: 3 build IDs, 7 blobs\n"
    assert main(arguments) == 0
    assert capsys.readouterr().out == "the store has the format of this version\n"
    (old / "format").write_bytes(b"buildidfs store 3\n")
    assert main(arguments) == 13


def test_a_store_of_this_format_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Its files are others, since it was unpacked: all of them are read, and then known."""
    path = unpack(2, tmp_path / "store")
    assert migrate.run(path) is None
    with Store.open(path, read_only=True) as store:
        assert store.ordinal(VDSO) is None
        assert list(store.check(digests=True)) == []
        for artifact in store.variants(1, Kind.DEBUGINFO):
            assert not store._verified.is_untouched(artifact.digest)
            assert read_blob(store, artifact.digest) in CONTENT.values()
        assert {(pin.build_id, pin.name) for pin in store.pins()} == {
            (APP, b"/profiles/perf.data"), (b"later", b"/profiles/perf.data"),
        }  # fmt: skip
    with Store.open(path) as store:
        assert list(store.check()) == []
        assert all(store._verified.is_untouched(name) for name in store.blob_names())
        assert store.artifact(1, Kind.EXECUTABLE) == store.variants(1, Kind.EXECUTABLE)[0]
        fill(store)
        assert list(store.check(digests=True)) == []
        assert store.ordinal(VDSO) is not None
