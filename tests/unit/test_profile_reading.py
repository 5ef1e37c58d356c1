# SPDX-License-Identifier: Apache-2.0
"""Profiles made to order: what they name, how much of it is held, and what repair makes of them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import zstandard

from buildidfs.catalog.coverage import BinaryCoverage, Coverage
from buildidfs.catalog.remedies import (
    GUEST,
    MAY_BE_HERE,
    NO_BUILD_ID,
    NO_EXECUTABLE,
    NO_KALLSYMS,
    NO_SYMBOLS,
    NOT_CAPTURED,
    NOTHING_RECORDED,
    OTHER_CONTEXT,
    OTHER_HOST,
    STRIPPED,
)
from buildidfs.config import Settings
from buildidfs.errors import UsageError
from buildidfs.formats.perf import headers
from buildidfs.formats.perf.records import KERNEL_PID, Events, Mapped
from buildidfs.model import BuildId, Kind, Quality, Trust
from buildidfs.profile import reading as profile_reading
from buildidfs.profile import scan as profile_scan
from buildidfs.profile.perf_data import Profile
from buildidfs.profile.reading import NamedFile
from buildidfs.profile.repair import Repaired, repair
from buildidfs.profile.selection import Selection
from buildidfs.store import NewSeen, Store
from tests.support.elf.perfwriter import CALLCHAIN, KERNEL, USUAL, PerfWriter
from tests.support.harness.captures import NOW, SECOND, capture, sighting

RED, BLUE = BuildId(b"\x01" * 20), BuildId(b"\x02" * 20)
LONG = BuildId(b"\x03" * 32)
START = 10 * SECOND
KERNEL_TEXT = 0xFFFFFFFF81000000


@pytest.fixture(params=["<", ">"])
def write(request: pytest.FixtureRequest) -> PerfWriter:
    return PerfWriter(request.param)


def seen(
    store: Store,
    path: bytes,
    build_id: BuildId,
    *,
    quality: Quality = Quality.SYMTAB,
    kinds: tuple[Kind, ...] = (Kind.EXECUTABLE,),
    at: float = 0.0,
    dev: tuple[int, int] = (8, 1),
    **changes: Any,
) -> None:
    """Captured ``at`` seconds behind the start of the profile."""
    when = NOW + int(at * SECOND)
    place = sighting(path, seen_ns=when, dev=os.makedev(*dev), **{"ino": 5, **changes})
    content = path + bytes(build_id) + bytes(kinds)
    store.commit([capture(store, content, build_id, at=place, kinds=kinds, quality=quality)])
    store.note_seen([NewSeen(place, build_id)])


def clock(write: PerfWriter) -> dict[int, bytes]:
    """The feature that makes the time ``START`` of a profile the time NOW of the day."""
    return {headers.CLOCK_DATA: write.pack("IIQQ", 1, 1, NOW, START)}


def saved(path: Path, data: bytes) -> bytes:
    path.write_bytes(data)
    return bytes(path)


def profile_of(path: Path, write: PerfWriter, records: bytes, **features: bytes) -> bytes:
    more = {getattr(headers, name): value for name, value in features.items()}
    return saved(path, write.file(records, {**clock(write), **more}))


def mappings(path: bytes) -> list[Mapped]:
    """All mappings that a profile tells of."""
    with Profile(path) as profile:
        events = Events(profile.layouts, profile.header.order)
        found = [events.read(raw) for raw in profile.records()]
        assert profile.truncated == ""
    return [event for event in found if isinstance(event, Mapped)]


def named_in(path: bytes) -> dict[BuildId, bytes]:
    """The build IDs that a profile names itself."""
    with Profile(path) as profile:
        return profile_reading.build_ids_of(profile)


def by_path(coverage: Coverage) -> dict[bytes, BinaryCoverage]:
    rows = {row.path: row for row in coverage.rows}
    assert len(rows) == len(coverage.rows)
    return rows


# --- coverage ------------------------------------------------------------------------------


def test_coverage(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    seen(store, b"/app", RED, container="docker:1")
    seen(store, b"/dyn", BuildId(b"\x0a" * 20), ino=6, quality=Quality.DYNSYM)
    seen(store, b"/none", BuildId(b"\x0b" * 20), ino=7, quality=Quality.NONE)
    seen(store, b"/dbg", BuildId(b"\x0c" * 20), kinds=(Kind.DEBUGINFO,), quality=Quality.DEBUGINFO)
    seen(store, b"/full", BuildId(b"\x0d" * 20), ino=8, quality=Quality.DEBUGINFO)
    names = [b"/app", b"/dyn", b"/none", b"/dbg", b"/full", b"/gone", b"/id", b"//anon"]
    ids = {b"/dbg": b"\x0c" * 20, b"/id": bytes(BLUE)}
    inodes = {b"/dyn": 6, b"/none": 7, b"/full": 8}
    records = b"".join(
        write.mmap2(
            1, 0x10000 * number, 0x1000, name, time=START, build_id=ids.get(name, b""),
            inode=inodes.get(name, 5),
        )
        for number, name in enumerate(names, 1)
    )  # fmt: skip
    for number, _ in enumerate(names, 1):
        records += write.sample(1, 0x10000 * number + 8, START + 5) * number
    records += write.sample(1, 0x999999, START + 5)
    records += write.sample(1, KERNEL_TEXT, START + 5, misc=KERNEL) * 3
    records += write.sample(1, KERNEL_TEXT, START + 5, misc=4)
    records += write.sample(1, 0x10008, START - 1)  # not mapped yet
    records += write.record(2, write.pack("QQ", 1, 30))
    found = profile_reading.coverage(store, profile_of(tmp_path / "p", write, records))
    rows = by_path(found)
    assert {path: row.weight for path, row in rows.items()} == {
        b"/app": 1, b"/dyn": 2, b"/none": 3, b"/dbg": 4, b"/full": 5, b"/gone": 6, b"/id": 7,
        b"//anon": 8, b"[unknown]": 2, b"[kernel.kallsyms]": 3, b"[guest]": 1,
    }  # fmt: skip
    why = {path: row.why for path, row in rows.items()}
    assert why[b"/app"] == why[b"/full"] == ""
    assert why[b"/dyn"] == STRIPPED
    assert why[b"/none"] == NO_SYMBOLS
    assert why[b"/dbg"] == NO_EXECUTABLE
    assert why[b"/gone"] == NO_BUILD_ID
    assert why[b"/id"] == NOT_CAPTURED
    assert "JIT" in why[b"//anon"]
    assert "no mapping" in why[b"[unknown]"]
    assert "kernel" in why[b"[kernel.kallsyms]"]
    assert "virtual machine" in why[b"[guest]"]
    assert rows[b"/app"].container == "docker:1"
    assert found.weight == 42
    assert found.executable() == pytest.approx((1 + 2 + 3 + 5) / 42)
    assert found.dynamic_symbols() == pytest.approx((1 + 2 + 4 + 5) / 42)
    assert found.symbols() == pytest.approx((1 + 4 + 5) / 42)
    assert found.debuginfo() == pytest.approx((4 + 5) / 42)
    assert [row.path for row in found.worst_first()][:3] == [b"//anon", b"/id", b"/gone"]
    assert found.worst_first()[-1].path == b"/app"
    assert found.notes == [
        "the times of the samples are exact: the profile says how its clock relates to the date",
        "30 records were lost when the profile was made",
        NOTHING_RECORDED,
        MAY_BE_HERE,
    ]
    assert found.incomplete == ""


def test_coverage_of_nothing_is_whole() -> None:
    assert Coverage([], "samples").symbols() == 1


def test_build_ids_behind_the_records(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    """The table names files by their paths only: what the journal knows better counts."""
    seen(store, b"/app", RED, dev=(0, 39), ino=2)
    seen(store, b"/host", BLUE)
    records = (
        write.mmap2(1, 0x10000, 0x1000, b"/app", time=START, dev=(0, 39), inode=2)
        + write.mmap2(1, 0x20000, 0x1000, b"/host", time=START)
        + write.mmap2(1, 0x30000, 0x1000, b"/other", time=START)
        + write.mmap2(2, 0x40000, 0x1000, b"/host", time=START, dev=(0, 40), inode=77)
        + write.mmap(KERNEL_PID, KERNEL_TEXT, 1 << 24, b"[kernel.kallsyms]_text", misc=1)
    )
    for pid, address in ((1, 0x10008), (1, 0x20008), (1, 0x30008), (2, 0x40008)):
        records += write.sample(pid, address, START + 5)
    records += write.sample(1, KERNEL_TEXT + 8, START + 5, misc=KERNEL)
    kernel, other = BuildId(b"\x0e" * 20), BuildId(b"\x0f" * 20)
    table = b"".join(
        write.build_id(name, build_id, misc)
        for name, build_id, misc in (
            (b"/app", BLUE, 2), (b"/host", BLUE, 2), (b"/other", other, 2),
            (b"[kernel.kallsyms]", kernel, 1),
        )
    )  # fmt: skip
    path = profile_of(tmp_path / "p", write, records, BUILD_ID=table)
    found = {(row.path, row.build_id) for row in profile_reading.coverage(store, path).rows}
    why = {row.path: row.why for row in profile_reading.coverage(store, path).rows}
    assert why[b"[kernel.kallsyms]"] == NO_KALLSYMS
    assert found == {
        (b"/app", RED), (b"/host", BLUE), (b"/other", other), (b"/host", None),
        (b"[kernel.kallsyms]", kernel),
    }  # fmt: skip


@pytest.mark.parametrize("contradicted", [False, True])
def test_other_files_of_a_process_tell_where_it_was(
    tmp_path: Path, store: Store, write: PerfWriter, contradicted: bool
) -> None:
    """Two containers have the same numbers for one file, and each a file of its own."""
    for number, build_id in ((1, RED), (2, BLUE)):
        place = {"mnt_ns_id": number, "container": f"c{number}", "at": -100}
        seen(store, b"/app", build_id, dev=(0, 44), ino=2, **place)
        own = BuildId(bytes([0x10 + number]) * 20)
        seen(store, b"/own", own, dev=(0, 50 + number), ino=9, **place)
    elsewhere = BuildId(b"\x20" * 20)
    seen(store, b"/elsewhere", elsewhere, dev=(0, 60), ino=9, mnt_ns_id=7, at=-100)
    records = b""
    for pid in (1, 2):
        records += write.mmap2(pid, 0x10000, 0x1000, b"/app", dev=(0, 42), inode=2)
        records += write.mmap2(pid, 0x20000, 0x1000, b"/own", dev=(0, 50 + pid), inode=9)
        if contradicted:
            records += write.mmap2(pid, 0x30000, 0x1000, b"/elsewhere", dev=(0, 60), inode=9)
        records += write.sample(pid, 0x10008, START + 5)
    rows = profile_reading.coverage(store, profile_of(tmp_path / "p", write, records)).rows
    found = {(row.container, row.build_id) for row in rows}
    assert found == ({("", None)} if contradicted else {("c1", RED), ("c2", BLUE)})


def test_call_chains(tmp_path: Path, store: Store) -> None:
    write = PerfWriter("<", USUAL | CALLCHAIN)
    records = write.mmap2(1, 0x10000, 0x1000, b"/app", time=START)
    records += write.mmap2(1, 0x20000, 0x1000, b"/lib", time=START, inode=6)
    user, kernel = (1 << 64) - 512, (1 << 64) - 128
    chain = [kernel, KERNEL_TEXT, user, 0x10008, 0x10010, 0x20008]
    records += write.sample(1, KERNEL_TEXT, START + 5, misc=KERNEL, chain=chain)
    path = profile_of(tmp_path / "p", write, records)
    with Profile(path) as profile:
        reading = profile_reading.Reading(profile, store)
        whole = {reading.describe(hit)[0]: n for hit, n in reading.hits(chains=True).items()}
        leaves = {reading.describe(hit)[0]: n for hit, n in reading.hits().items()}
    assert whole == {b"[kernel.kallsyms]": 1, b"/app": 1, b"/lib": 1}
    assert leaves == {b"[kernel.kallsyms]": 1}


def test_deferred_chains_count_where_usual_ones_do(
    tmp_path: Path, store: Store, write: PerfWriter
) -> None:
    """The user part comes behind the samples or before them; one of the parts was lost."""
    write = PerfWriter(write.order, USUAL | CALLCHAIN)
    mapped = write.mmap2(1, 0x10000, 0x1000, b"/app", time=START)
    mapped += write.mmap2(1, 0x20000, 0x1000, b"/lib", time=START, inode=6)
    user, kernel, deferred = (1 << 64) - 512, (1 << 64) - 128, (1 << 64) - 640
    own, whole = [kernel, KERNEL_TEXT], [user, 0x10008, 0x10010, 0x20008]

    def sample(chain: list[int]) -> bytes:
        return write.sample(1, KERNEL_TEXT, START + 5, misc=KERNEL, chain=chain)

    usual = mapped + sample(own + whole) * 3 + sample(own)
    parts = mapped + sample([*own, deferred, 7]) * 2 + write.deferred(1, 7, whole, START + 6)
    parts += sample([*own, deferred, 7]) + sample([*own, deferred, 8])
    for number, records in enumerate((usual, parts)):
        path = profile_of(tmp_path / f"{number}", write, records)
        with Profile(path) as profile:
            reading = profile_reading.Reading(profile, store)
            chains = {reading.describe(hit)[0]: n for hit, n in reading.hits(chains=True).items()}
            at = profile_reading.Reading(profile, store, selection=Selection.of("0x20008"))
            called = {at.describe(hit)[0]: n for hit, n in at.hits().items()}
        assert chains == {b"[kernel.kallsyms]": 4, b"/app": 3, b"/lib": 3}, number
        assert called == {b"/lib": 3}, number


def test_unknown_context_is_no_guest(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    write = PerfWriter(write.order, USUAL | CALLCHAIN)
    unknown, guest = (1 << 64) - 700, (1 << 64) - 2048
    records = write.sample(1, KERNEL_TEXT, START, misc=KERNEL, chain=[unknown, 0x30008])
    records += write.sample(1, KERNEL_TEXT, START, misc=KERNEL, chain=[guest, 0x30008]) * 2
    records += write.sample(1, 0x30008, START, misc=3) * 4
    with Profile(profile_of(tmp_path / "p", write, records)) as profile:
        reading = profile_reading.Reading(profile, store)
        found = {reading.describe(hit)[1].why: n for hit, n in reading.hits(chains=True).items()}
    assert (found[OTHER_CONTEXT], found[GUEST]) == (5, 2)


def test_repair_names_modules_of_the_kernel(
    tmp_path: Path, store: Store, write: PerfWriter
) -> None:
    """perf finds their build IDs in the table of the profile, by path."""
    module = b"/lib/modules/6.1.0-9/kernel/fs/ext4.ko.xz"
    for build_id, path, content in (
        (RED, b"/usr" + module, b"own"),
        (BLUE, module.replace(b"-9", b"-8"), b"other"),
    ):
        at = sighting(path, seen_ns=NOW - 90 * 86400 * SECOND, ino=9)
        store.commit([capture(store, content, build_id, at=at, trust=Trust.HOST)])
    records = b"".join(
        write.mmap(KERNEL_PID, start, 0x1000, name, misc=KERNEL)
        for start, name in ((0xFFFFFFFFA0000000, module), (0xFFFFFFFFA0002000, b"[ext4]"))
    )
    records += write.sample(1, 0xFFFFFFFFA0000010, START + 5, misc=KERNEL)
    records += write.sample(1, 0xFFFFFFFFA0002010, START + 5, misc=KERNEL)
    path = profile_of(tmp_path / "p", write, records, OSRELEASE=write.text(b"6.1.0-9"))
    result, out = repaired(store, path)
    assert result.unresolved == []
    assert table_of(out) == {module: bytes(RED), b"[ext4]": bytes(RED)}


def test_profile_without_times(tmp_path: Path, store: Store) -> None:
    write = PerfWriter("<", 1 | 2)  # IP and TID
    seen(store, b"/a", RED)
    records = write.mmap2(1, 0x10000, 0x1000, b"/a") + write.sample(1, 0x10008, 0)
    records += write.comm(1, b"b", exec_=True) + write.sample(1, 0x10008, 0)
    path = saved(tmp_path / "p", write.file(records))
    rows = by_path(profile_reading.coverage(store, path))
    assert {path: row.weight for path, row in rows.items()} == {b"/a": 1, b"[unknown]": 1}
    assert rows[b"/a"].build_id == RED


def test_truncated_profile(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    records = write.mmap2(1, 0x10000, 0x1000, b"/a", time=START)
    data = write.file(records + write.sample(1, 0x10008, START) * 10)
    found = profile_reading.coverage(store, saved(tmp_path / "p", data[:-20]))
    assert found.weight == 9
    assert "is not whole: its end is missing" in found.incomplete


def test_no_profile(tmp_path: Path, store: Store) -> None:
    for content in (b"", b"\x7fELF" + bytes(100), b"PERFILE2" * 40):
        with pytest.raises(UsageError, match=r"perf\.data"):
            profile_reading.coverage(store, saved(tmp_path / "p", content))
    for path in (tmp_path / "none", tmp_path, Path("/dev/null")):
        with pytest.raises(UsageError) as caught:
            profile_reading.coverage(store, bytes(path))
        assert str(path) in str(caught.value)


def test_profile_of_another_machine(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    """What it names itself counts, not the numbers of files that are on every machine."""
    seen(store, b"/app", RED, host="here")
    seen(store, b"/other", RED, host="here")
    records = (
        write.mmap2(1, 0x10000, 0x1000, b"/app", time=START)
        + write.mmap2(1, 0x20000, 0x1000, b"/other", time=START)
        + write.sample(1, 0x10008, START + 1)
        + write.sample(1, 0x20008, START + 1)
    )
    path = profile_of(
        tmp_path / "p", write, records,
        HOSTNAME=write.text(b"there"), BUILD_ID=write.build_id(b"/app", BLUE),
    )  # fmt: skip
    found = profile_reading.coverage(store, path)
    rows = by_path(found)
    assert (rows[b"/app"].build_id, rows[b"/app"].why) == (BLUE, "never captured")
    assert (rows[b"/other"].build_id, rows[b"/other"].why) == (None, OTHER_HOST)
    assert "made on there" in found.notes[-2]
    assert "scan perf-data" in found.notes[-1]
    done, _ = repaired(store, path)
    assert [each.path for each in done.unresolved] == [b"/other"]
    assert "use the store of there" in done.notes[-1]


def test_build_ids_that_are_named(tmp_path: Path, write: PerfWriter) -> None:
    records = write.mmap2(1, 0x10000, 0x1000, b"/a", build_id=bytes(RED))
    records += write.mmap2(1, 0x20000, 0x1000, b"/b", build_id=b"\7")
    table = write.build_id(b"/c", BLUE)
    path = profile_of(tmp_path / "p", write, records, BUILD_ID=table)
    assert named_in(path) == {RED: b"/a", BLUE: b"/c"}
    piped = saved(tmp_path / "q", write.pipe(write.build_id(b"/c", BLUE) + records))
    assert named_in(piped) == {RED: b"/a", BLUE: b"/c"}


# --- repair --------------------------------------------------------------------------------


def repaired(store: Store, path: bytes) -> tuple[Repaired, bytes]:
    out = path + b".out"
    return repair(store, path, out), out


def table_of(path: bytes) -> dict[bytes, bytes]:
    with Profile(path) as profile:
        return {named.name: named.build_id for named in profile.build_ids()}


def test_mappings_get_their_build_ids(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    seen(store, b"/app", RED)
    records = (
        write.comm(1, b"x")
        + write.mmap2(1, 0x10000, 0x1000, b"/app", time=START, offset=0x2000)
        + write.sample(1, 0x10008, START + 1)
        + write.mmap2(1, 0x20000, 0x1000, b"/gone", time=START)
        + write.record(68, b"", 0)
    )
    path = profile_of(tmp_path / "p", write, records, HOSTNAME=write.text(b"box"))
    done, out = repaired(store, path)
    assert (done.known, done.resolved, done.renamed, done.unresolved) == (0, 1, [], [])
    first, second = mappings(out)
    assert first == Mapped(
        START, 1, 0x10000, 0x11000, 0x2000, b"/app", build_id=bytes(RED), cpumode=2
    )
    assert (second.path, second.build_id, second.inode) == (b"/gone", b"", 5)
    assert table_of(out) == {b"/app": bytes(RED)}
    with Profile(out) as profile:
        assert profile.text(headers.HOSTNAME) == b"box"
        assert profile.feature(headers.CLOCK_DATA) == clock(write)[headers.CLOCK_DATA]
        assert [raw.kind for raw in profile.records()] == [3, 10, 9, 10, 68]
    assert set(named_in(out)) == {RED}
    again, third = repaired(store, out)
    assert (again.known, again.resolved) == (1, 0)
    assert Path(os.fsdecode(third)).read_bytes() == Path(os.fsdecode(out)).read_bytes()


def test_unresolved_are_listed(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    seen(store, b"/long", LONG, ino=9)
    records = write.mmap2(1, 0x10000, 0x1000, b"/gone", time=START)
    records += write.mmap2(1, 0x20000, 0x1000, b"/long", time=START, inode=9)
    records += write.mmap2(1, 0x30000, 0x1000, b"//anon", time=START)
    for address in (0x10008, 0x10008, 0x20008, 0x30008, 0x999999):
        records += write.sample(1, address, START + 1)
    done, out = repaired(store, profile_of(tmp_path / "p", write, records))
    assert [(each.path, each.samples) for each in done.unresolved] == [(b"/gone", 2), (b"/long", 1)]
    assert done.unresolved[0].why == NO_BUILD_ID
    assert "20 bytes" in done.unresolved[1].why
    assert all(not event.build_id for event in mappings(out))


def test_remedy_and_files_of_the_same_name(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    seen(store, b"/elsewhere/gone", BLUE)
    records = write.mmap2(1, 0x10000, 0x1000, b"/gone", time=START)
    records += write.sample(1, 0x10008, START + 1)
    path = profile_of(tmp_path / "p", write, records)
    done, _ = repaired(store, path)
    (left,) = done.unresolved
    assert left.namesakes == (NamedFile(BLUE, b"/elsewhere/gone"),)
    assert NOTHING_RECORDED in done.notes
    assert NOTHING_RECORDED in profile_reading.coverage(store, path).notes
    assigned = repair(store, path, path + b".out", assigned={b"/gone": BLUE})
    assert (assigned.resolved, assigned.unresolved) == (1, [])
    assert NOTHING_RECORDED not in assigned.notes
    assert [event.build_id for event in mappings(path + b".out")] == [bytes(BLUE)]
    assert table_of(path + b".out") == {b"/gone": bytes(BLUE)}


def test_assignment_decides_what_nothing_else_does(
    tmp_path: Path, store: Store, write: PerfWriter
) -> None:
    seen(store, b"/app", RED, ino=9)
    records = write.mmap2(1, 0x10000, 0x1000, b"/app (deleted)", time=START)
    records += write.sample(1, 0x10008, START + 1)
    path = profile_of(tmp_path / "p", write, records)
    assert len(repaired(store, path)[0].unresolved) == 1, "another inode"
    done = repair(store, path, path + b".out", assigned={b"/app": RED})
    assert (done.resolved, done.unresolved) == (1, [])


def test_assignment_that_does_not_fit(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    seen(store, b"/app", RED)
    records = write.mmap2(1, 0x10000, 0x1000, b"/app", time=START)
    path = profile_of(tmp_path / "p", write, records)
    out = tmp_path / "out"
    with pytest.raises(UsageError, match=r"/other is no file of this profile"):
        repair(store, path, os.fsencode(out), assigned={b"/other": RED})
    assert not out.exists()
    repair(store, path, os.fsencode(out))
    with pytest.raises(UsageError, match=r"/app has a build ID in this profile"):
        repair(store, os.fsencode(out), path + b".again", assigned={b"/app": BLUE})


def test_one_name_for_two_files(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    seen(store, b"/app", RED, dev=(0, 39), ino=2, container="red", mnt_ns_id=1)
    seen(store, b"/app", BLUE, dev=(0, 40), ino=2, container="blue", mnt_ns_id=2)
    records = b"".join(
        write.mmap2(pid, 0x10000, 0x1000, b"/app", time=START, dev=(0, 38 + pid), inode=2)
        for pid in (1, 2, 3)
    )
    table = write.build_id(b"/app", b"\x0f" * 20)
    done, out = repaired(store, profile_of(tmp_path / "p", write, records, BUILD_ID=table))
    red, blue = b"/app@010101010101", b"/app@020202020202"
    assert {each.path: each.build_id for each in done.renamed} == {red: RED, blue: BLUE}
    assert [(event.path, event.build_id) for event in mappings(out)] == [
        (red, bytes(RED)), (blue, bytes(BLUE)), (b"/app@0:41:2", b""),
    ]  # fmt: skip
    assert table_of(out) == {red: bytes(RED), blue: bytes(BLUE)}


def test_the_host_keeps_the_name(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    seen(store, b"/lib/libc.so.6", RED)
    seen(store, b"/lib/libc.so.6", BLUE, dev=(0, 40), ino=2, container="blue")
    records = write.mmap2(1, 0x10000, 0x1000, b"/lib/libc.so.6", time=START)
    records += write.mmap2(2, 0x10000, 0x1000, b"/lib/libc.so.6", dev=(0, 40), inode=2, time=START)
    done, out = repaired(store, profile_of(tmp_path / "p", write, records))
    renamed = b"/lib/libc.so.6@020202020202"
    assert done.renamed == [NamedFile(BLUE, renamed)]
    assert [event.path for event in mappings(out)] == [b"/lib/libc.so.6", renamed]
    assert table_of(out) == {b"/lib/libc.so.6": bytes(RED), renamed: bytes(BLUE)}


def test_pipe(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    seen(store, b"/app", RED)
    described = write.record(66, write.pack("I", 13)) + b"x" * 16
    compressed = write.pack("IHHQ", 80, 0, 36, headers.COMPRESSED) + bytes(20)
    old = write.build_id(b"/app", BLUE) + write.build_id(b"/kept", BLUE)
    records = described + compressed + old
    records += write.mmap2(1, 0x10000, 0x1000, b"/app", time=START)
    records += write.sample(1, 0x10008, START + 1)
    path = saved(tmp_path / "p", write.pipe(records, clock(write)))
    done, out = repaired(store, path)
    assert done.resolved == 1
    with Profile(out) as profile:
        kinds = [raw.kind for raw in profile.records()]
        named = [profile.named(raw) for raw in profile.records()]
        assert profile.feature(headers.CLOCK_DATA)
    assert kinds == [64, 80, 66, 67, 67, 10, 9]
    assert {each.name: each.build_id for each in named if each} == {
        b"/app": bytes(RED), b"/kept": bytes(BLUE),
    }  # fmt: skip
    assert [event.build_id for event in mappings(out)] == [bytes(RED)]
    assert described in Path(os.fsdecode(out)).read_bytes()


def test_compressed(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    seen(store, b"/app", RED)
    plain = write.mmap2(1, 0x10000, 0x1000, b"/app", time=START)
    plain += write.sample(1, 0x10008, START + 1) * 100
    packed = zstandard.compress(plain)
    records = write.pack("IHH", 81, 0, 8 + len(packed)) + packed
    done, out = repaired(store, profile_of(tmp_path / "p", write, records, COMPRESSED=bytes(20)))
    assert done.resolved == 1
    with Profile(out) as profile:
        assert [raw.kind for raw in profile.records()] == [10] + [9] * 100
        assert headers.COMPRESSED not in profile.header.features


def test_traces_of_hardware_move(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    """What is renamed becomes longer, and the index has places in the file."""
    seen(store, b"/app", RED, dev=(0, 39), ino=2, mnt_ns_id=1)
    seen(store, b"/app", BLUE, dev=(0, 40), ino=2, mnt_ns_id=2)
    maps = [
        write.mmap2(pid, 0x10000, 0x1000, b"/app", time=START, dev=(0, 38 + pid), inode=2)
        for pid in (1, 2)
    ]
    traces = [
        write.record(71, write.pack("QQQIIII", 24, 0, 0, number, 0, 0, 0)) + bytes([number]) * 24
        for number in (1, 2)
    ]
    records = maps[0] + traces[0] + maps[1] + traces[1]
    features = clock(write) | {headers.AUXTRACE: b""}
    begin = write.file(records, features).index(records)
    places = [begin + records.index(trace) for trace in traces]
    size = len(traces[0])
    index = write.pack("Q4Q", 3, places[0], size, places[1], size) + write.pack("QQ", 12345, size)
    features[headers.AUXTRACE] = index
    before = write.file(records, features)
    # The index is behind the records, and does not move them.
    assert all(before[at : at + size] == trace for at, trace in zip(places, traces, strict=True))
    _, out = repaired(store, saved(tmp_path / "p", before))
    after = Path(os.fsdecode(out)).read_bytes()
    with Profile(out) as profile:
        count, *moved = [
            int.from_bytes(profile.feature(headers.AUXTRACE)[at : at + 8], _byteorder(write))
            for at in range(0, 40, 8)
        ]
    assert count == 2
    assert moved[0] != places[0]
    for at, trace in zip(moved[::2], traces, strict=True):
        assert after[at : at + size] == trace


def _byteorder(write: PerfWriter) -> Any:
    return "little" if write.order == "<" else "big"


def test_directory(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    seen(store, b"/app", RED)
    directory = tmp_path / "perf.data"
    directory.mkdir()
    first = write.mmap2(1, 0x10000, 0x1000, b"/app", time=START) + write.record(68, b"", 0)
    features = clock(write) | {headers.DIR_FORMAT: write.pack("Q", 1)}
    (directory / "data").write_bytes(write.file(first, features))
    (directory / "data.0").write_bytes(write.sample(1, 0x10008, START + 1))
    (directory / "data.10").write_bytes(write.sample(1, 0x10010, START + 3))
    (directory / "data.2").write_bytes(
        write.sample(1, 0x10008, START + 2) + write.record(68, b"", 0)
    )
    (directory / "data.x").write_bytes(b"not a part")
    found = profile_reading.coverage(store, bytes(directory))
    assert (found.weight, by_path(found)[b"/app"].weight) == (3, 3)
    done, out = repaired(store, bytes(directory))
    assert (done.resolved, done.unresolved) == (1, [])
    with Profile(out) as profile:
        assert [raw.kind for raw in profile.records()] == [10, 9, 9, 9]
        assert headers.DIR_FORMAT not in profile.header.features
    (directory / "data").unlink()
    with pytest.raises(UsageError, match="without a file 'data'"):
        repair(store, bytes(directory), out)


def test_written_whole_or_not_at_all(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = PerfWriter()
    path = profile_of(tmp_path / "p", write, write.mmap2(1, 0x10000, 0x1000, b"/app"))
    out = tmp_path / "out"
    out.write_bytes(b"before")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", _disk_is_full)
        with pytest.raises(UsageError, match=r"cannot write .*No space left"):
            repair(store, path, bytes(out))
    assert out.read_bytes() == b"before"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "p", "store"]
    repair(store, path, bytes(out))
    assert named_in(bytes(out)) == {}
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    for place in (tmp_path, tmp_path / "none" / "out"):
        with pytest.raises(UsageError, match="cannot write"):
            repair(store, path, bytes(place))


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path, store: Store) -> None:
    write = PerfWriter()
    path = profile_of(tmp_path / "p", write, write.mmap2(1, 0x10000, 0x1000, b"/app"))
    _, out = repaired(store, path)
    whole = Path(os.fsdecode(out)).read_bytes()
    link, fifo = tmp_path / "link", tmp_path / "fifo"
    link.symlink_to("target")
    repair(store, path, bytes(link))
    assert os.readlink(link) == "target"
    assert (tmp_path / "target").read_bytes() == whole
    os.mkfifo(fifo)
    with open(os.open(fifo, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0) as reader:
        repair(store, path, bytes(fifo))
        assert reader.read(len(whole) + 1) == whole
    assert fifo.is_fifo()


def _disk_is_full(fd: int) -> None:
    raise OSError(28, "No space left on device")


def test_repair_of_a_truncated_profile(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    seen(store, b"/app", RED)
    records = write.mmap2(1, 0x10000, 0x1000, b"/app", time=START)
    data = write.file(records + write.sample(1, 0x10008, START) * 10)
    done, out = repaired(store, saved(tmp_path / "p", data[:-20]))
    assert "is not whole" in done.incomplete
    with Profile(out) as profile:
        assert [raw.kind for raw in profile.records()] == [10] + [9] * 9
        assert profile.truncated == ""


# --- scan ----------------------------------------------------------------------------------


def test_scan_tells_what_is_missing(tmp_path: Path, store: Store, write: PerfWriter) -> None:
    seen(store, b"/held", RED)
    records = write.mmap2(1, 0x10000, 0x1000, b"/held", time=START)
    records += write.mmap2(1, 0x20000, 0x1000, b"/nowhere/gone", build_id=bytes(BLUE))
    records += write.mmap2(1, 0x30000, 0x1000, b"/nowhere/unknown")
    records += write.mmap2(1, 0x40000, 0x1000, b"/nowhere/never-sampled")
    for address in (0x10008, 0x20008, 0x20008, 0x30008):
        records += write.sample(1, address, START + 1)
    path = profile_of(tmp_path / "p", write, records)
    broken = saved(tmp_path / "q", b"nothing")
    scan = profile_scan.scan_perf_data(store, Settings(), [path, broken])
    assert [(each.path, each.state, each.samples) for each in scan.binaries] == [
        (b"/nowhere/gone", profile_scan.MISSING, 2),
        (b"/nowhere/unknown", profile_scan.MISSING, 1),
        (b"/held", profile_scan.HELD, 1),
    ]
    assert (scan.summary.held, scan.summary.captured) == (1, 0)
    assert "no process maps it" in scan.binaries[0].why
    assert scan.binaries[1].why == NO_BUILD_ID
    (unreadable,) = scan.summary.unreadable
    assert (unreadable.path, unreadable.reason) == (broken, "is not a perf.data file")
    everything = profile_scan.scan_perf_data(store, Settings(), [path], everything=True)
    assert b"/nowhere/never-sampled" in {each.path for each in everything.binaries}
