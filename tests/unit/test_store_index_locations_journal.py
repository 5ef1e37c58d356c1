# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.index.locations

What was seen where and when, in order, bounded, and cheap to repeat.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest

from buildidfs.errors import StoreError
from buildidfs.linux import inodes
from buildidfs.model import BuildId, Kind, NamespaceSet
from buildidfs.store import JournalRecord, NewSeen, Store, location_rows, schema
from buildidfs.store.index import environment
from buildidfs.store.location_rows import Removal
from tests.support.harness.captures import NOW, SECOND, capture, sighting

MINUTE = 60 * SECOND
ID, OTHER = BuildId(b"\xaa" * 20), BuildId(b"\xbb" * 20)
BOOT = bytes(range(16))

#: A container of which the control group says nothing, one of docker's, and the host.
BARE = {"mnt_ns_id": 7, "apart": 0x20, "container": "mnt:60", "namespaces": NamespaceSet(mnt=60)}
DOCKER = BARE | {"cgroup": b"/docker/" + b"01" * 32, "container": "docker:010101010101"}
HOST = {"mnt_ns_id": 1, "namespaces": NamespaceSet(mnt=6)}


@pytest.fixture
def store(store: Store) -> Iterator[Store]:
    yield store
    assert list(store.check()) == []


def seen(
    path: bytes = b"/bin/app",
    build_id: BuildId = ID,
    *,
    at: int = 0,
    boot: bytes | None = None,
    **changes: Any,
) -> NewSeen:
    """An entry, ``at`` nanoseconds after `NOW`."""
    return NewSeen(sighting(path, seen_ns=NOW + at, **(HOST | changes)), build_id, boot)


def times(store: Store) -> list[tuple[int, int]]:
    """First and last seen of all rows after `NOW`, in order of last seen."""
    return [(row.first_seen_ns - NOW, row.last_seen_ns - NOW) for row in store.journal.since()]


def last_transaction(store: Store) -> int:
    """A number that grows with each transaction that wrote something."""
    env = environment.acquire(store.path, read_only=False)
    try:
        return int(env._lmdb.info()["last_txnid"])
    finally:
        environment.release(env)


def test_all_that_was_seen_comes_back(store: Store) -> None:
    new = seen(b"/a\xff", scanner="watch", host="h\udcff", **DOCKER)
    store.note_seen([new])
    origin = new.sighting.origin
    expected = JournalRecord(
        build_id=ID,
        path=b"/a\xff",
        namespaces=NamespaceSet(mnt=60),
        apart=0x20,
        mnt_ns_id=7,
        cgroup=origin.cgroup,
        container="docker:010101010101",
        host="h\udcff",
        boot=inodes.boot_id(),
        scanner="watch",
        first_seen_ns=NOW,
        last_seen_ns=NOW,
    )
    assert list(store.journal.since()) == [expected]
    assert store.journal.at(7, b"/a\xff") == store.journal.at(7, b"/a\xff", inodes.boot_id())
    assert store.journal.at(7, b"/a\xff") == [expected]
    assert store.stats().journal == 1
    assert store.stats().ids == 0, "there are no bytes"


def test_seen_again_within_the_minute_writes_nothing(store: Store) -> None:
    store.note_seen([seen()])
    before = last_transaction(store)
    store.note_seen([seen(), seen(at=MINUTE - 1), seen(cgroup=b"/other.service", at=1)])
    assert times(store) == [(0, 0)]
    assert last_transaction(store) == before
    store.note_seen([seen(cgroup=b"/other.service", at=MINUTE)])
    assert last_transaction(store) == before + 1
    assert times(store) == [(0, MINUTE)]
    (row,) = store.journal.since()
    assert row.cgroup == b"/other.service", "what was true last"


def test_a_batch_may_say_the_same_twice(store: Store) -> None:
    store.note_seen([seen(), seen(at=5), seen(at=2 * MINUTE), seen(at=SECOND)])
    assert times(store) == [(0, 2 * MINUTE)]


@pytest.mark.parametrize("at_once", [True, False])
def test_first_of_sightings_within_a_minute_describes_the_row(store: Store, at_once: bool) -> None:
    """A scan that a catch led to may be committed before the catch."""
    sightings = [seen(at=SECOND, scanner="proc"), seen(at=0, scanner="watch")]
    for entries in [sightings] if at_once else [[each] for each in sightings]:
        store.note_seen(entries)
    (row,) = store.journal.since()
    assert (row.scanner, row.first_seen_ns, row.last_seen_ns) == ("watch", NOW, NOW + SECOND)
    # What is known of long ago does not replace what is known of now.
    store.note_seen([seen(at=-2 * MINUTE, scanner="tree")])
    (row,) = store.journal.since()
    assert (row.scanner, row.first_seen_ns) == ("watch", NOW - 2 * MINUTE)


def test_earlier_sighting_of_a_noted_file(store: Store) -> None:
    """The identity of a file without room stays in its row, and comes in with an earlier one."""
    store.note_seen([NewSeen(seen(at=SECOND).sighting, ID, omitted=True), seen(at=0)])
    (row,) = store.journal.since()
    assert (row.omitted is not None, row.first_seen_ns) == (True, NOW)
    store.note_seen(
        [seen(b"/other", at=SECOND), NewSeen(seen(b"/other").sighting, ID, omitted=True)]
    )
    (row,) = store.journal.at(1, b"/other")
    assert (row.omitted is not None, row.first_seen_ns) == (True, NOW)


def test_rows_come_in_order_of_last_seen(store: Store) -> None:
    minutes = [5, 1, 4, 2, 3]
    store.note_seen([seen(b"/%d" % n, at=n * MINUTE) for n in minutes])
    assert [row.path for row in store.journal.since()] == [b"/1", b"/2", b"/3", b"/4", b"/5"]
    assert [row.path for row in store.journal.since(NOW + 4 * MINUTE)] == [b"/4", b"/5"]
    assert [row.path for row in store.journal.since(NOW + 4 * MINUTE + 1)] == [b"/5"]
    store.note_seen([seen(b"/2", at=6 * MINUTE)])
    assert [row.path for row in store.journal.since()] == [b"/1", b"/3", b"/4", b"/5", b"/2"]
    assert list(store.journal.since(NOW + 7 * MINUTE)) == []
    assert len(list(store.journal.since(-5))) == 5


def test_many_rows_come_whole_and_once(store: Store) -> None:
    store.note_seen([seen(b"/%d" % n, at=n) for n in range(5000)])
    assert [row.path for row in store.journal.since()] == [b"/%d" % n for n in range(5000)]


def test_what_is_written_while_somebody_reads(store: Store) -> None:
    """A reader holds no transaction, and sees what is seen again once more."""
    store.note_seen([seen(b"/%d" % n, at=n) for n in range(3000)])
    rows = store.journal.since()
    assert next(rows).path == b"/0"
    store.note_seen([seen(b"/0", at=2 * MINUTE), seen(b"/new", at=3 * MINUTE)])
    paths = [row.path for row in rows]
    assert paths[-2:] == [b"/0", b"/new"]
    assert len(paths) == 3001


def test_one_path_in_one_namespace(store: Store) -> None:
    store.note_seen(
        [
            seen(),
            seen(build_id=OTHER, at=MINUTE),
            seen(b"/bin/app2"),
            seen(mnt_ns_id=2),
            seen(boot=BOOT, at=2 * MINUTE),
            seen(boot=b"", build_id=OTHER, at=3 * MINUTE),
        ]
    )
    here = store.journal.at(1, b"/bin/app", inodes.boot_id())
    assert [row.build_id for row in here] == [OTHER, ID], "last seen first"
    everywhen = store.journal.at(1, b"/bin/app")
    assert [row.boot for row in everywhen] == [b"", BOOT, inodes.boot_id(), inodes.boot_id()]
    assert [row.last_seen_ns - NOW for row in everywhen] == [3 * MINUTE, 2 * MINUTE, MINUTE, 0]
    assert [row.boot for row in store.journal.at(1, b"/bin/app", BOOT)] == [BOOT]
    assert [row.boot for row in store.journal.at(1, b"/bin/app", b"")] == [b""]
    assert store.journal.at(3, b"/bin/app") == store.journal.at(1, b"/bin/ap") == []


def test_any_namespace(store: Store) -> None:
    store.note_seen([seen(at=number, mnt_ns_id=number) for number in (1, 3, 2)])
    store.note_seen([seen(b"/bin/other", mnt_ns_id=1)])
    assert [row.mnt_ns_id for row in store.journal.at(None, b"/bin/app")] == [3, 2, 1]
    assert store.journal.at(None, b"/bin/ap") == []


def test_where_a_build_id_was_seen(store: Store) -> None:
    store.note_seen([seen(b"/%d" % number, OTHER, at=number) for number in range(3000)])
    # One whose bytes are in a row of another, which is not the same.
    store.note_seen([seen(b"/x" + ID, OTHER), seen(b"/b"), seen(b"/a", at=5, **DOCKER)])
    assert [(row.path, row.container) for row in store.journal.of(ID)] == [
        (b"/a", "docker:010101010101"), (b"/b", ""),
    ]  # fmt: skip
    others = store.journal.of(OTHER)
    assert [row.path for row in others[:2]] == [b"/2999", b"/2998"]
    assert len(others) == 3001
    assert store.journal.of(BuildId(b"\xcc" * 20)) == []


def test_what_tells_rows_apart(store: Store) -> None:
    different = [
        seen(),
        seen(b"/other"),
        seen(build_id=OTHER),
        seen(mnt_ns_id=9),
        seen(boot=BOOT),
        seen(host="elsewhere"),
        seen(**BARE),
        seen(**DOCKER),
        seen(**(BARE | {"namespaces": NamespaceSet(mnt=60, pid=50)})),
        # Not a container by the definition of then, but by another.
        seen(**(DOCKER | {"container": ""})),
        seen(**(DOCKER | {"container": "", "cgroup": b"/docker/" + b"23" * 32})),
    ]
    same = [
        seen(cgroup=b"/system.slice/a.service"),
        seen(cgroup=DOCKER["cgroup"]),  # all its namespaces are the host's
        seen(scanner="watch", dev=9, ino=9, uid=9),
        seen(**(BARE | {"cgroup": b"/user.slice"})),
    ]
    store.note_seen(different + same)
    rows = list(store.journal.since())
    assert len(rows) == len(different)
    found = {(row.path, row.build_id, row.mnt_ns_id, row.container, row.cgroup) for row in rows}
    assert all(
        (o.path, new.build_id, o.mnt_ns_id, o.container, o.cgroup) in found
        for new in different
        for o in [new.sighting.origin]
    )


def test_the_one_last_seen_longest_ago_goes_first(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema, "MAX_JOURNAL", 3)
    store.note_seen([seen(b"/a"), seen(b"/b", at=1), seen(b"/c", at=2)])
    store.note_seen([seen(b"/a", at=MINUTE)])
    assert len(list(store.journal.since())) == 3
    store.note_seen([seen(b"/d", at=MINUTE + 1)])
    assert [row.path for row in store.journal.since()] == [b"/c", b"/a", b"/d"]
    store.note_seen([seen(b"/%d" % n, at=2 * MINUTE + n) for n in range(10)])
    assert [row.path for row in store.journal.since()] == [b"/7", b"/8", b"/9"]
    store.note_seen([seen(b"/old", at=-MINUTE)])
    assert [row.path for row in store.journal.since()] == [b"/7", b"/8", b"/9"]


def test_container_with_many_entries_removes_only_its_own(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may take the place of another one that has as many, but not of smaller ones."""
    monkeypatch.setattr(schema, "MAX_JOURNAL", 64)
    others = [seen(b"/victim%d" % n, **DOCKER) for n in range(10)]
    others += [seen(b"/host%d" % n) for n in range(10)]
    store.note_seen(others)
    flood = BARE | {"cgroup": b"/docker/" + b"66" * 32, "container": "docker:010101010101"}
    for start in range(0, 300, 50):
        store.note_seen([seen(b"/%d" % n, at=1 + n, **flood) for n in range(start, start + 50)])
        assert len(list(store.journal.since())) <= 64
    paths = [row.path for row in store.journal.since()]
    assert {each.sighting.origin.path for each in others} <= set(paths)
    assert paths[-1] == b"/299"


def test_a_clock_that_is_set_back(store: Store) -> None:
    store.note_seen([seen(at=10 * MINUTE, cgroup=b"/last"), seen(b"/other")])
    store.note_seen([seen(at=-MINUTE, cgroup=b"/before")])
    assert times(store) == [(0, 0), (-MINUTE, 10 * MINUTE)]
    before = last_transaction(store)
    store.note_seen([seen(at=5 * MINUTE)])
    assert last_transaction(store) == before
    *_, row = store.journal.since()
    assert row.cgroup == b"/last"
    assert list(store.check()) == []


@pytest.mark.parametrize("at", [-(2**70), 2**70])
def test_a_clock_that_shows_anything(store: Store, at: int) -> None:
    before = time.time_ns()
    store.note_seen([seen(at=at)])
    store.note_seen([seen()])
    (row,) = store.journal.since()
    assert row.first_seen_ns <= row.last_seen_ns
    if at < 0:
        assert (row.first_seen_ns, row.last_seen_ns) == (0, NOW)
    else:
        assert row.first_seen_ns == NOW
        assert before <= row.last_seen_ns <= time.time_ns()


def test_captures_and_journal_are_one_commit(store: Store) -> None:
    store.note_seen([seen(b"/first")])
    before = last_transaction(store)
    new = capture(store, b"bytes", ID, at=seen().sighting)
    result = store.commit([new], (), [seen(), seen(b"/other", OTHER)])
    assert result.changed == (1,)
    assert last_transaction(store) == before + 1
    assert {row.path for row in store.journal.since()} == {b"/first", b"/bin/app", b"/other"}
    wrong = capture(store, b"other", kinds=())
    with pytest.raises(ValueError, match="at least one kind"):
        store.commit([wrong], (), [seen(b"/lost")])
    assert b"/lost" not in {row.path for row in store.journal.since()}


def test_nobody_is_told_of_the_journal(store: Store) -> None:
    with contextlib.closing(store.listen()) as listener:
        store.note_seen([seen()])
        store.commit((), (), [seen(b"/other")])
        os.set_blocking(listener.fileno(), False)
        with pytest.raises(BlockingIOError):
            os.read(listener.fileno(), 1)
        store.commit([capture(store, b"bytes")], (), [seen(b"/third")])
        assert os.read(listener.fileno(), 1)


def test_nothing_is_no_transaction(store: Store) -> None:
    store.note_seen([seen()])
    before = last_transaction(store)
    store.note_seen([])
    assert last_transaction(store) == before


def test_many_entries_are_written_fast_and_known_ones_faster(store: Store) -> None:
    """What one core does in a fraction of the time allowed here."""
    entries = [seen(b"/usr/lib/lib%d.so" % n, **DOCKER) for n in range(10_000)]
    taken = []
    for _ in range(2):
        start = time.process_time()
        store.note_seen(entries)
        taken.append(time.process_time() - start)
    assert taken[0] < 1.5
    assert taken[1] < 0.2
    assert store.stats().journal == 10_000


# --- an index that lacks something ---------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A store with a capture and a row in its journal."""
    path = tmp_path / "made"
    with Store.create(path) as store:
        store.commit([capture(store, b"bytes")], (), [seen()])
    return path


def test_an_index_whose_last_pages_were_never_written(made: Path) -> None:
    """It is read as a whole before it is believed."""
    data = made / "index" / "data.mdb"
    with data.open("r+b") as file:
        for meta in (0, 4096):
            file.seek(meta + 16 + 8 + 8 + 8 + 48 + 48)
            file.write((data.stat().st_size // 4096 + 5).to_bytes(8, "little"))
    with Store.open(made, read_only=True) as store:
        assert store.stats().ids == 1


@pytest.mark.parametrize("name", [b"seen", b"journal"])
def test_a_table_that_is_missing_is_damage(made: Path, name: bytes) -> None:
    raw = lmdb.open(str(made / "index"), max_dbs=64, map_size=1 << 30)
    with contextlib.closing(raw):
        table = raw.open_db(name, create=False)
        with raw.begin(write=True) as txn:
            txn.drop(table)
    for read_only in (True, False):
        with pytest.raises(StoreError, match="damaged"):
            Store.open(made, read_only=read_only)


# --- rows ----------------------------------------------------------------------------------------


def test_rows_are_the_documented_ones() -> None:
    spaces = NamespaceSet(1, 2, 3, 4, 5, 6, 7)
    origin = sighting(
        b"/a", namespaces=spaces, apart=0x21, mnt_ns_id=9, container="c", cgroup=b"g", host="h",
        scanner="s", cgroup_id=7,
    ).origin  # fmt: skip
    key = location_rows.journal_key(origin, ID, BOOT, "label")
    assert len(key) == 56
    assert key[16:40] == (9).to_bytes(8, "big") + BOOT
    assert key.startswith(location_rows.journal_prefix(b"/a", 9, BOOT))
    row = location_rows.pack_journal(origin, ID, 1, 2)
    assert row[:16].hex() == "00000000000000010000000000000002"
    array = [bytes(ID), b"/a", [1, 2, 3, 4, 5, 6, 7], 0x21, b"g", b"c", b"h", b"s", 7, None, 0]
    assert msgspec.msgpack.decode(row[16:]) == array
    assert location_rows.unpack_journal(key, row).cgroup_id == 7
    older = location_rows.unpack_journal(key, row[:16] + msgspec.msgpack.encode(array[:-1]))
    assert older == location_rows.unpack_journal(key, row)
    with pytest.raises(msgspec.ValidationError):
        location_rows.unpack_journal(key, row[:16] + msgspec.msgpack.encode(array[:-2]))
    longer = row[:16] + msgspec.msgpack.encode([*array, None, "later"])
    assert location_rows.unpack_journal(key, longer) == location_rows.unpack_journal(key, row)
    assert location_rows.unpack_journal(key, row).omitted is None
    omitted = location_rows.pack_journal(origin, ID, 1, 2, omitted=True)
    assert location_rows.unpack_journal(key, omitted).omitted == origin.identity
    assert location_rows.removal_in(omitted) is None
    assert location_rows.build_id_in(omitted) == ID


def test_row_of_removed_bytes_keeps_the_kinds_of_all_removals() -> None:
    origin = sighting(b"/a").origin
    row = location_rows.pack_journal(origin, ID, 1, 2)
    row = location_rows.mark_removed(row, Removal(5, 1 << Kind.DEBUGINFO), None)
    row = location_rows.mark_removed(row, Removal(7, 1 << Kind.EXECUTABLE), origin.identity)
    both = Removal(7, 1 << Kind.DEBUGINFO | 1 << Kind.EXECUTABLE)
    assert location_rows.removal_in(row) == both
    record = location_rows.unpack_journal(location_rows.journal_key(origin, ID, BOOT, ""), row)
    assert (record.removed, record.omitted) == (both, origin.identity)
    assert (record.first_seen_ns, record.last_seen_ns) == (1, 2)
