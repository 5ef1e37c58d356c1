# SPDX-License-Identifier: Apache-2.0
"""buildidfs.profile.match: build IDs of mappings, and the times of a profile."""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from buildidfs.capture.base import PinnedFile
from buildidfs.catalog.remedies import NO_BUILD_ID
from buildidfs.formats.perf import headers
from buildidfs.formats.perf.address_spaces import File
from buildidfs.ingest import Ingest
from buildidfs.linux import machine
from buildidfs.linux import perf_event as linux_clock
from buildidfs.model import BuildId, NamespaceSet, Trust
from buildidfs.profile import match
from buildidfs.profile.match import (
    AMBIGUOUS,
    OTHER_FILE,
    OTHER_HOST,
    SHARP_NS,
    ClockOffset,
    Matcher,
    aligned,
    by_file_time,
    namesakes,
    of_this_boot,
)
from buildidfs.profile.perf_data import Profile
from buildidfs.store import NewSeen, Store
from tests.support.elf.perfwriter import PerfWriter
from tests.support.harness.captures import NOW, SECOND, capture, sighting
from tests.unit.test_ingest_aliases import htl, program

RED, BLUE, GREEN = (BuildId(bytes([number]) * 20) for number in (1, 2, 3))
PATH = b"/app/server"
TMPFS = (0, 39)

#: A profile whose times begin 1000 s before NOW, so that 1000 s is NOW.
SHARP = ClockOffset(NOW - 1000 * SECOND, SECOND // 20, "")
ROUGH = ClockOffset(NOW - 1000 * SECOND, 32 * SECOND, "")
START = 900 * SECOND
AT = 1000 * SECOND

_counter = itertools.count()


def file(path: bytes = PATH, **changes: Any) -> File:
    values = {"dev": TMPFS, "inode": 2, "generation": 0, "build_id": b"", "cpumode": 2, **changes}
    return File(path, **values)


def seen(
    store: Store,
    build_id: BuildId,
    after: float = 0.0,
    *,
    path: bytes = PATH,
    dev: tuple[int, int] = TMPFS,
    ino: int = 2,
    mnt_ns_id: int = 100,
    mnt: int = 0,
    container: str = "c",
    host: str = "",
    captured: bool = True,
) -> None:
    """A file was there ``after`` seconds behind NOW; its bytes were ``captured`` or not."""
    at = sighting(
        path,
        seen_ns=NOW + int(after * SECOND),
        dev=os.makedev(*dev),
        ino=ino,
        mnt_ns_id=mnt_ns_id,
        container=container,
        host=host,
        namespaces=NamespaceSet(mnt=mnt),
    )
    if captured:
        store.commit([capture(store, b"%d" % next(_counter), build_id, at=at)])
    store.note_seen([NewSeen(at, build_id)])


def matcher(store: Store, *files: File, clock: ClockOffset | None = SHARP, **more: Any) -> Matcher:
    known = dict.fromkeys(files, AT) or {file(): AT}
    return Matcher(store, known, clock=clock, start=START, **more)


def test_nothing_is_known(store: Store) -> None:
    answer = matcher(store).answer(file(), AT)
    assert (answer.build_id, answer.why) == (None, NO_BUILD_ID)


def test_the_only_file_that_was_there(store: Store) -> None:
    seen(store, RED)
    answer = matcher(store).answer(file(), AT)
    assert (answer.build_id, answer.container, answer.is_sure) == (RED, "c", True)
    deleted = matcher(store).answer(file(PATH + b" (deleted)"), AT)
    assert deleted.build_id == RED


def test_another_file_at_the_same_path(store: Store) -> None:
    seen(store, RED, ino=99)
    answer = matcher(store).answer(file(), AT)
    assert (answer.build_id, answer.why, answer.is_other) == (None, OTHER_FILE, True)


def test_two_at_the_same_time_by_their_device(store: Store) -> None:
    seen(store, RED, dev=(0, 39), mnt_ns_id=1, container="red")
    seen(store, BLUE, dev=(0, 40), mnt_ns_id=2, container="blue")
    for dev, expected, label in (((0, 39), RED, "red"), ((0, 40), BLUE, "blue")):
        answer = matcher(store).answer(file(dev=dev), AT)
        assert (answer.build_id, answer.container) == (expected, label)


def test_one_file_in_several_mount_namespaces_says_nothing_of_which(store: Store) -> None:
    """A service that shares the host's libc was the last to be seen with it."""
    seen(store, RED, -200, mnt_ns_id=1, container="")
    seen(store, RED, -150, mnt_ns_id=2, container="service")
    for when in (0, AT):
        answer = matcher(store).answer(file(), when)
        assert (answer.build_id, answer.container, answer.is_sure) == (RED, None, True)
        for mounts, label in (({1}, ""), ({2}, "service"), ({3}, None)):
            assert matcher(store).answer(file(), when, mounts=mounts).container == label


def test_who_was_in_another_mount_namespace_had_another_file(store: Store) -> None:
    """Of two with the same numbers, also if it is the one that was seen last."""
    seen(store, RED, -200, mnt_ns_id=1, container="red")
    seen(store, BLUE, -150, mnt_ns_id=2, container="blue")
    assert matcher(store).answer(file(), AT).build_id == BLUE
    assert matcher(store).answer(file(), AT, mounts={1}).build_id == RED


def test_overlay_whose_device_is_another_in_mappings(store: Store) -> None:
    seen(store, RED, dev=(0, 44), ino=7)
    assert matcher(store).answer(file(dev=(0, 42), inode=7), AT).build_id == RED
    # On block devices both are the same.
    assert matcher(store).answer(file(dev=(8, 1), inode=7), AT).build_id == RED
    seen(store, BLUE, dev=(8, 2), ino=8)
    assert matcher(store).answer(file(dev=(8, 1), inode=8), AT).build_id is None


def test_one_after_the_other_in_the_same_place(store: Store) -> None:
    """A device number that is used again at once: time tells."""
    for number, build_id in enumerate((RED, BLUE, RED, GREEN)):
        seen(store, build_id, number * 0.7 + 0.001, mnt_ns_id=number + 1)
    found = matcher(store)
    for number, build_id in enumerate((RED, BLUE, RED, GREEN)):
        mapped = AT + int(number * 0.7 * SECOND)
        assert found.answer(file(), mapped).build_id == build_id, number
    # Mapped once more, when it had been seen before: if something else was seen soon after that,
    # it may have been of this mapping.
    assert found.answer(file(), AT + SECOND * 3 // 10).why == AMBIGUOUS
    assert found.answer(file(), AT + 60 * SECOND).build_id == GREEN


def test_times_that_are_not_sharp_do_not_tell(store: Store) -> None:
    seen(store, RED, 0.001, mnt_ns_id=1)
    seen(store, BLUE, 0.7, mnt_ns_id=2)
    answer = matcher(store, clock=ROUGH).answer(file(), AT)
    assert (answer.build_id, answer.why) == (None, AMBIGUOUS)
    assert matcher(store, clock=None).answer(file(), AT).why == AMBIGUOUS
    seen(store, RED, -3600, mnt_ns_id=3, dev=(0, 50))
    seen(store, BLUE, 0, mnt_ns_id=4, dev=(0, 50))
    assert matcher(store, clock=ROUGH).answer(file(dev=(0, 50)), AT).why == AMBIGUOUS


def test_what_was_mapped_before_the_recording(store: Store) -> None:
    seen(store, RED, -500, mnt_ns_id=1)  # at 500 s, the recording began at 900
    seen(store, BLUE, -99, mnt_ns_id=2)
    assert matcher(store).answer(file(), 0).build_id == RED


def test_sightings_before_a_file_was_mapped_are_of_others(store: Store) -> None:
    """Generations tell files of one number apart, and each is mapped before it is seen."""
    first, second = file(generation=11), file(generation=12)
    seen(store, RED, 0.001, mnt_ns_id=1)
    seen(store, BLUE, 1.2, mnt_ns_id=2)  # long after it was mapped
    found = Matcher(store, {first: AT, second: AT + SECOND * 7 // 10}, clock=SHARP, start=START)
    assert found.answer(first, AT).build_id == RED
    assert found.answer(second, AT + SECOND * 7 // 10).build_id == BLUE


def test_mount_namespace_tells(store: Store) -> None:
    seen(store, RED, mnt_ns_id=1, mnt=4001)
    seen(store, BLUE, mnt_ns_id=2, mnt=4002)
    found = matcher(store, clock=ROUGH)
    assert found.answer(file(), AT).build_id is None
    assert found.answer(file(), AT, 4002).build_id == BLUE
    assert found.answer(file(), AT, mounts={1}).build_id == RED
    assert found.answer(file(), AT, mounts={77}).build_id is None
    other = found.answer(file(), AT, 4003)
    assert other.build_id is None


def test_several_containers_with_one_build_id(store: Store) -> None:
    seen(store, RED, mnt_ns_id=1, container="one")
    seen(store, RED, mnt_ns_id=2, container="two")
    answer = matcher(store).answer(file(), AT)
    assert (answer.build_id, answer.container) == (RED, None)
    assert matcher(store).answer(file(), AT, mounts={2}).container == "two"


def test_never_captured_but_in_the_journal(store: Store) -> None:
    seen(store, RED, captured=False)
    answer = matcher(store).answer(file(), AT)
    assert (answer.build_id, answer.is_sure) == (RED, False)
    # What was captured at the same path is another file; the journal alone does not say.
    seen(store, BLUE, ino=50, mnt_ns_id=5)
    assert matcher(store).answer(file(), AT).build_id == RED
    assert matcher(store).answer(file(inode=50), AT).build_id == BLUE


@pytest.mark.parametrize(("after", "build_id"), [(-90_000, None), (60, None), (-3600, RED)])
def test_never_captured_and_of_another_time(
    store: Store, after: float, build_id: BuildId | None
) -> None:
    seen(store, RED, after, captured=False)
    assert matcher(store).answer(file(), AT).build_id == build_id


def test_seen_after_it_was_mapped(store: Store) -> None:
    """A scan may come later than what it finds."""
    seen(store, RED, 3600)
    assert matcher(store).answer(file(), AT).build_id == RED


def test_host(store: Store) -> None:
    seen(store, RED, host="here", mnt_ns_id=1)
    seen(store, BLUE, host="there", mnt_ns_id=2)
    assert matcher(store, host="here").answer(file(), AT).build_id == RED
    assert matcher(store, host="there").answer(file(), AT).build_id == BLUE
    assert matcher(store, host="nowhere").answer(file(), AT).build_id is None


def test_same_numbers_on_another_machine(store: Store) -> None:
    """The first file on every tmpfs has the same device and inode."""
    seen(store, RED, host="there")
    answer = matcher(store, host="nowhere").answer(file(), AT)
    assert (answer.build_id, answer.why, answer.is_other) == (None, OTHER_HOST, False)
    assert matcher(store, host="there").answer(file(), AT).build_id == RED
    assert matcher(store).answer(file(), AT).build_id == RED


def test_machine_under_another_name(store: Store) -> None:
    """In a container perf writes the name of that into the profile: then the clock counts."""
    seen(store, RED, path=b"/a", host="there")
    seen(store, BLUE, path=b"/b", host=machine.host_name())

    def answers(clock: ClockOffset) -> list[BuildId | None]:
        found = matcher(store, host="pod", clock=clock)
        return [found.answer(file(path=path), AT).build_id for path in (b"/a", b"/b")]

    assert answers(SHARP) == [None, None]
    assert answers(msgspec.structs.replace(SHARP, is_local=True)) == [None, BLUE]
    assert answers(msgspec.structs.replace(SHARP, is_seen=True)) == [RED, BLUE]


def test_build_id_in_the_record(store: Store) -> None:
    seen(store, RED, mnt_ns_id=1, container="red")
    seen(store, BLUE, mnt_ns_id=2, container="blue")
    named = file(dev=(0, 0), inode=0, build_id=bytes(BLUE))
    answer = matcher(store).answer(named, AT)
    assert (answer.build_id, answer.container, answer.is_sure) == (BLUE, "blue", True)
    unknown = matcher(store).answer(file(build_id=bytes(GREEN)), AT)
    assert (unknown.build_id, unknown.container) == (GREEN, None)


def test_names_in_brackets(store: Store) -> None:
    seen(store, RED, -3600, path=b"[vdso]", ino=0)
    vdso = file(b"[vdso]", dev=(0, 0), inode=0)
    assert matcher(store, vdso).answer(vdso, AT).build_id == RED
    kernel = file(b"[kernel.kallsyms]_text", dev=(0, 0), inode=0)
    seen(store, GREEN, -3600, path=b"[kernel.kallsyms]")
    assert matcher(store, kernel).answer(kernel, AT).build_id == GREEN


def test_asking_again_after_the_store_has_learned(store: Store) -> None:
    found = matcher(store)
    assert found.answer(file(), AT).build_id is None
    seen(store, RED)
    assert found.answer(file(), AT).build_id is None
    found.forget()
    assert found.answer(file(), AT).build_id == RED


SECOND = 1_000_000_000
MILLISECOND = SECOND // 1000
OFFSET = 1_700_000_000 * SECOND
BY_FILE_TIME = ClockOffset(OFFSET, 32 * SECOND, "rough")


def test_a_profile_that_says_it(tmp_path: Path) -> None:
    write = PerfWriter()
    path = tmp_path / "perf.data"
    for content, offset in (
        (write.pack("IIQQ", 1, 1, OFFSET + 5, 5), OFFSET),
        (write.pack("IIQQ", 9, 1, OFFSET + 5, 5), None),
        (b"short", None),
    ):
        path.write_bytes(write.file(write.comm(1, b"x"), {headers.CLOCK_DATA: content}))
        with Profile(bytes(path)) as profile:
            clock = match.recorded(profile)
        assert (None if clock is None else clock.offset_ns) == offset
        assert clock is None or clock.error_ns <= SHARP_NS


def test_a_profile_of_this_machine_that_says_it(tmp_path: Path) -> None:
    write = PerfWriter()
    path = tmp_path / "perf.data"
    for clockid, wrong, is_local in (
        (time.CLOCK_MONOTONIC, 0, True),
        (time.CLOCK_BOOTTIME, 0, True),
        (time.CLOCK_MONOTONIC, 3600 * SECOND, False),
        (time.CLOCK_REALTIME, 0, False),  # is the same everywhere
    ):
        event = time.clock_gettime_ns(clockid)
        content = write.pack("IIQQ", 1, clockid, time.time_ns() + wrong, event)
        path.write_bytes(write.file(write.comm(1, b"x"), {headers.CLOCK_DATA: content}))
        with Profile(bytes(path)) as profile:
            clock = match.recorded(profile)
        assert clock is not None
        assert clock.is_local == is_local


def test_by_the_time_of_the_file() -> None:
    """What was last in it happened up to a minute before it was written."""
    last = 5000 * SECOND
    clock = by_file_time(OFFSET + last, last)
    for late in (0, 30, 60):
        true_offset = OFFSET - late * SECOND
        assert abs(true_offset - clock.offset_ns) <= clock.error_ns
    assert clock.error_ns > SHARP_NS


def test_differences_that_are_alike() -> None:
    true = OFFSET + 3 * SECOND
    alike = [(number, true + number * MILLISECOND // 2) for number in range(8)]
    others = [(number, true - (5 + number) * SECOND) for number in range(8)]
    clock = aligned(BY_FILE_TIME, [*others, *alike])
    assert clock is not None
    assert abs(clock.offset_ns - true) <= 5 * MILLISECOND
    assert clock.error_ns < SECOND
    assert "8 files" in clock.how
    assert clock.is_seen


def test_too_few_are_alike() -> None:
    assert aligned(BY_FILE_TIME, []) is None
    assert aligned(BY_FILE_TIME, [(1, OFFSET), (2, OFFSET)]) is None
    assert aligned(BY_FILE_TIME, [(1, OFFSET)] * 5) is None  # one file, five times


def test_several_occasions_that_look_the_same() -> None:
    """The same container, started again and again: the nearest may be the one before."""
    runs = [(number, OFFSET + run * SECOND) for number in range(6) for run in range(2)]
    assert aligned(BY_FILE_TIME, runs) is None
    assert aligned(BY_FILE_TIME, [*runs, (6, OFFSET), (7, OFFSET)]) is None
    more = [(number, OFFSET) for number in range(6, 10)]
    clock = aligned(BY_FILE_TIME, [*runs, *more])
    assert clock is not None
    assert clock.offset_ns == OFFSET


def test_clock_of_this_machine() -> None:
    try:
        offset, error = linux_clock.perf_offset()
    except OSError as refused:
        pytest.skip(f"events of one's own are not allowed here: {refused.strerror}")
    now = time.time_ns()
    last = now - offset
    clock = of_this_boot(now + SECOND, last, now + SECOND)
    assert clock is not None
    assert abs(clock.offset_ns - offset) < SECOND // 10
    assert error < clock.error_ns < SECOND // 10
    assert clock.is_local
    later = of_this_boot(now + SECOND, last, now + 3600 * SECOND)
    assert later is not None
    assert later.error_ns > SECOND // 10
    # written a day before, or by a machine that began at another time
    assert of_this_boot(now - 86_400 * SECOND, last, now) is None
    assert of_this_boot(now, last - 86_400 * SECOND, now) is None


def test_far_away_from_when_the_file_was_written() -> None:
    far = [(number, OFFSET + 40 * SECOND) for number in range(9)]
    assert aligned(BY_FILE_TIME, far) is None


# --- mappings without an inode -------------------------------------------------------------------


def _pathless(path: bytes = PATH) -> File:
    return file(path, dev=(0, 0), inode=0)


def test_path_and_time_suffice_if_one_file_fits(store: Store) -> None:
    seen(store, RED, -300)
    assert matcher(store).answer(_pathless(), AT).build_id == RED
    seen(store, BLUE, 300, ino=3, mnt_ns_id=200)
    assert matcher(store).answer(_pathless(), AT).build_id == RED
    seen(store, GREEN, -200, ino=4, mnt_ns_id=300)
    assert matcher(store).answer(_pathless(), AT).why == AMBIGUOUS


def test_file_that_was_replaced_before_the_mapping_does_not_fit(store: Store) -> None:
    seen(store, RED, -300)
    seen(store, BLUE, -200, ino=3)
    assert matcher(store).answer(_pathless(), AT).build_id == BLUE
    assert matcher(store).answer(_pathless(), AT - 250 * SECOND).build_id == RED


def test_path_alone_does_not_identify_a_file_of_another_day(store: Store) -> None:
    seen(store, RED, -3 * 86400)
    answer = matcher(store).answer(_pathless(), AT)
    assert (answer.build_id, answer.why, answer.is_other) == (None, OTHER_FILE, False)


def test_file_seen_later_fits_if_it_has_not_changed_since(store: Store) -> None:
    for build_id, path, ctime in ((RED, b"/old", 1), (BLUE, b"/new", NOW + 30 * SECOND)):
        at = sighting(path, seen_ns=NOW + 60 * SECOND, ctime_ns=ctime)
        store.commit([capture(store, path, build_id, at=at)])
    assert matcher(store).answer(_pathless(b"/old"), AT).build_id == RED
    assert matcher(store).answer(_pathless(b"/new"), AT).build_id is None


# --- build IDs that are not to be believed -------------------------------------------------------

_KERNEL_MODE = 1


def _module(name: bytes, build_id: bytes) -> File:
    return file(name, dev=(0, 0), inode=0, build_id=build_id, cpumode=_KERNEL_MODE)


def test_modules_that_share_a_build_id_are_told_by_name(tmp_path: Path) -> None:
    """As perf wrote them, which gave each module the build ID of the first one."""
    with Store.create(tmp_path / "store") as store:
        for name, build_id in ((b"ext4", RED), (b"nf_nat", BLUE)):
            at = sighting(b"/lib/modules/6.1/" + name.replace(b"_", b"-") + b".ko")
            store.commit([capture(store, name, build_id, at=at, trust=Trust.HOST)])
        wrong = [_module(name, RED) for name in (b"[ext4]", b"[nf_nat]", b"[other]")]
        matcher = Matcher(store, dict.fromkeys(wrong, 0), clock=SHARP)
        assert [matcher.believes(each) for each in wrong] == [False] * 3
        assert [matcher.answer(each, AT).build_id for each in wrong] == [RED, BLUE, None]
        right = [_module(b"[ext4]", RED), _module(b"[nf_nat]", BLUE)]
        matcher = Matcher(store, dict.fromkeys(right, 0), clock=SHARP)
        assert [matcher.believes(each) for each in right] == [True] * 2


def test_file_of_a_container_is_no_module_of_the_kernel(tmp_path: Path) -> None:
    """A crowd of them comes first, and hides neither the module nor the hint of a namesake."""
    path = b"/lib/modules/6.1/ext4.ko"
    with Store.create(tmp_path / "store") as store:
        crowd = [
            capture(
                store, b"forged %d" % number, bytes([7]) * 19 + bytes([number]),
                at=sighting(b"/srv/%d/ext4.ko" % number), trust=Trust.CONTAINER,
            )
            for number in range(70)
        ]  # fmt: skip
        store.commit(crowd)
        mapped = _module(b"[ext4]", b"")
        assert Matcher(store, {mapped: 0}, clock=SHARP).answer(mapped, AT).build_id is None
        store.commit([capture(store, b"own", RED, at=sighting(path), trust=Trust.HOST)])
        assert Matcher(store, {mapped: 0}, clock=SHARP).answer(mapped, AT).build_id == RED
        assert namesakes(store, b"/elsewhere/ext4.ko")[0] == (RED, path)


@pytest.mark.parametrize("inode", [2, 0])
def test_build_id_that_programs_share_gives_way_to_the_adopted_one(
    tmp_path: Path, inode: int
) -> None:
    """A record with a build ID has no device and inode."""
    shared = BuildId.from_hex("498919aff001d8366249403a2544fba2d833084f")
    with Store.create(tmp_path / "store") as store:
        adopted = []
        for number, path in enumerate((PATH, b"/app/other")):
            data = program(b"%d" % number, build_id=shared)
            where = tmp_path / f"file{number}"
            where.write_bytes(data)
            with where.open("rb") as opened:
                at = sighting(path, seen_ns=NOW, ino=2, dev=os.makedev(*TMPFS))
                pinned = PinnedFile(at, os.dup(opened.fileno()), is_copy=True)
                assert Ingest(store).run([pinned]).captured == 1
            adopted.append(htl(data))
        mapped = file(inode=inode, build_id=bytes(shared), dev=TMPFS if inode else (0, 0))
        matcher = Matcher(store, {mapped: AT}, clock=SHARP)
        assert not matcher.believes(mapped)
        assert matcher.answer(mapped, AT).build_id == adopted[0]
