# SPDX-License-Identifier: Apache-2.0
"""Of the members of an archive those that are ELF files, by all their names."""

from __future__ import annotations

import errno
import gzip
import os
import tarfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from buildidfs.capture.archive import elf_members
from buildidfs.capture.archive.elf_members import ArchiveOrigin, Ended, Members, MemberSpool
from buildidfs.capture.archive.stream import ArchiveLimits, CannotDecompress, LimitedStream
from buildidfs.formats.archive import tar as tar_format
from buildidfs.formats.archive.common import Damaged
from buildidfs.model import (
    EVERYBODY,
    OWNER,
    PUBLIC_ACCESS,
    Absence,
    Access,
    BuildId,
    FileIdentity,
    Origin,
    Sighting,
    Trust,
)
from tests.support.elf.elfwriter import ET_REL, elf_file
from tests.support.filesystems.sources import entry, tar
from tests.support.harness.scans import Memory, Scan, open_descriptors, remember, scan

ID = BuildId(b"\xab" * 20)
ELF = elf_file(build_id=ID)
WHOSE = ArchiveOrigin("package:app", "app.deb", Trust.PACKAGE, "package")
OTHER = ArchiveOrigin("image:other", "sha256:1", Trust.CONTAINER, "image")


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() <= before


class Archive:
    """One archive, to be read as often as a test wants."""

    def __init__(
        self,
        data: bytes,
        *,
        memo: Memory | None = None,
        limits: ArchiveLimits | None = None,
        access: Access = PUBLIC_ACCESS,
    ) -> None:
        self.data = data
        self.shown: dict[bytes, Sequence[ArchiveOrigin]] = {}
        self.members = Members(
            b"scope",
            b"/srv/app.deb",
            lambda path: self.shown.get(path, (WHOSE,)),
            memo=Memory() if memo is None else memo,
            spool=MemberSpool(),
            limits=limits or ArchiveLimits(),
            access=access,
        )

    def read(self, only: dict[int, list[bytes]] | None = None) -> Scan:
        stream = LimitedStream(iter([self.data]), 1 << 40, 1 << 20)
        return scan(self.members.scan(tar_format.members(stream), stream, only))


def paths(result: Scan) -> list[bytes]:
    return [item.sighting.origin.path for item in result.again]


def test_sighting() -> None:
    file = entry("./usr/bin/app", mode=0o4750, uid=5, gid=6, mtime=7)
    result = Archive(tar([("x", b"1"), (file, ELF)])).read()
    (seen,) = result.pinned
    assert seen.data == ELF
    origin = seen.pinned.sighting.origin
    assert origin.path == b"/usr/bin/app"
    assert origin.identity == FileIdentity(0, 2, len(ELF), 7 * 10**9, 0, 0o104750, 5, 6, b"scope")
    assert (origin.container, origin.host) == ("package:app", "app.deb")
    assert (origin.trust, origin.scanner) == (Trust.PACKAGE, "package")
    assert (origin.mnt_ns_id, origin.reach) == (0, EVERYBODY)
    assert (result.again, result.unreadable) == ([], [])


def test_only_elf_files_are_told_of() -> None:
    members = [
        ("script", b"#!/bin/sh\n"),
        ("empty", b""),
        ("short", b"\x7fE"),
        (entry("soft", tarfile.SYMTYPE, "app"), b""),
        (entry("null", tarfile.CHRTYPE), b""),
        ("nearly", b"\x7fELF"),
        ("without", elf_file(etype=ET_REL)),
    ]
    result = Archive(tar(members)).read()
    assert result.pinned == []
    assert [(item.sighting.origin.path, item.known.absence) for item in result.again] == [
        (b"/nearly", Absence.TRUNCATED), (b"/without", Absence.NO_BUILD_ID),
    ]  # fmt: skip


def test_names_are_claims() -> None:
    names = ["/absolute", "../../etc/passwd", "a/../../b", "n\udcff\udcfe", "\x1b[31m"]
    result = Archive(tar([(name, ELF) for name in names])).read()
    assert result.paths() == [b"/absolute", b"/etc/passwd", b"/b", b"/n\xff\xfe", b"/\x1b[31m"]


def test_known_members_are_not_read() -> None:
    memory = Memory()
    archive = Archive(tar([("a", ELF), ("b", elf_file(build_id=None))]), memo=memory)
    first = archive.read()
    remember(memory, first)
    second = archive.read()
    assert (second.pinned, paths(second)) == ([], [b"/a", b"/b"])
    assert second.again[0].known.build_id == ID
    again = Archive(tar([("other", b""), ("a", ELF)]), memo=memory).read()
    assert again.paths() == [b"/a"], "another number is another member"


# --- hard links ----------------------------------------------------------------------------------


def test_hard_links_have_the_identity_of_their_target() -> None:
    members = [
        ("a", ELF),
        ("text", b"x"),
        (entry("b", tarfile.LNKTYPE, "./a"), b""),
        (entry("c", tarfile.LNKTYPE, "b"), b""),
        (entry("to-text", tarfile.LNKTYPE, "text"), b""),
        (entry("to-nothing", tarfile.LNKTYPE, "gone"), b""),
    ]
    result = Archive(tar(members)).read()
    assert (result.paths(), paths(result)) == ([b"/a"], [b"/b", b"/c"])
    identity = result.pinned[0].pinned.sighting.origin.identity
    assert {item.sighting.origin.identity for item in result.again} == {identity}
    assert {item.known.build_id for item in result.again} == {ID}


def test_hard_link_to_a_name_that_is_hidden() -> None:
    members = [("a", ELF), (entry("b", tarfile.LNKTYPE, "a"), b""), ("c", ELF)]
    archive = Archive(tar(members))
    archive.shown[b"/a"] = ()
    first = archive.read()
    assert (first.paths(), first.again) == ([b"/c"], [])
    assert archive.members.missed == {1: [b"/b"]}
    second = archive.read(archive.members.missed)
    assert (second.paths(), second.again) == ([b"/b"], [])
    assert second.data(b"/b") == ELF


def test_all_viewers_see_a_file() -> None:
    archive = Archive(tar([("a", ELF), ("b", ELF), ("c", ELF)]))
    archive.shown |= {b"/a": (WHOSE, OTHER), b"/b": (OTHER,), b"/c": ()}
    result = archive.read()
    assert [(seen.path, seen.pinned.sighting.origin.container) for seen in result.pinned] == [
        (b"/a", "package:app"), (b"/b", "image:other"),
    ]  # fmt: skip
    (again,) = result.again
    assert (again.sighting.origin.path, again.sighting.origin.container) == (b"/a", "image:other")
    assert again.sighting.origin.trust is Trust.CONTAINER


# --- bounds --------------------------------------------------------------------------------------


def test_members_that_are_too_large_are_passed_over() -> None:
    members = [("a", ELF), ("large", ELF + bytes(1000)), ("b", ELF)]
    result = Archive(tar(members), limits=ArchiveLimits(member_bytes=len(ELF) + 999)).read()
    assert result.paths() == [b"/a", b"/b"]
    ((unreadable),) = result.unreadable
    assert unreadable.path == b"/srv/app.deb!/large"
    assert "too much" in unreadable.reason


def test_too_many_members() -> None:
    archive = Archive(
        tar([(f"{number}", b"") for number in range(4)]), limits=ArchiveLimits(members=3)
    )
    with pytest.raises(Damaged, match="more than 3 members"):
        archive.read()
    assert Archive(archive.data, limits=ArchiveLimits(members=4)).read().pinned == []


def test_a_member_that_ends_too_early() -> None:
    data = tar([("a", ELF), ("b", ELF * 100)])
    archive = Archive(data[: data.index(ELF, 1024) + 2000])
    found = archive.members.scan(
        tar_format.members(stream := LimitedStream(iter([archive.data]), 1 << 40, 1 << 20)), stream
    )
    first = next(found)
    scan([first])
    with pytest.raises(Damaged, match="in the middle of a member"):
        next(found)


def test_holes() -> None:
    sparse = entry("sparse")
    sparse.pax_headers = {"GNU.sparse.map": f"0,{len(ELF)}", "GNU.sparse.size": "100000"}
    late = entry("late")
    late.pax_headers = {"GNU.sparse.map": f"5,{len(ELF)}", "GNU.sparse.size": "100000"}
    data = tar([(sparse, ELF), (late, ELF)], format_=tarfile.PAX_FORMAT)
    result = Archive(data).read()
    assert result.paths() == [b"/sparse"], "what begins with a hole is no ELF file"
    assert result.data(b"/sparse") == ELF + bytes(100_000 - len(ELF))
    limited = Archive(data, limits=ArchiveLimits(member_bytes=99_999)).read()
    assert (limited.pinned, len(limited.unreadable)) == ([], 1)


# --- kernel modules ------------------------------------------------------------------------------


def test_kernel_modules_are_decompressed() -> None:
    module = elf_file(build_id=ID, etype=1)
    members = [
        ("lib/modules/6/a.ko.gz", gzip.compress(module)),
        ("lib/modules/6/b.ko.gz", gzip.compress(b"no module")),
        ("lib/modules/6/c.ko.gz", b"not gzip"),
        ("usr/share/man/a.1.gz", gzip.compress(module)),
    ]
    result = Archive(tar(members)).read()
    assert result.paths() == [b"/lib/modules/6/a.ko.gz"]
    assert result.pinned[0].data == module
    assert [item.known.absence for item in result.again] == [Absence.NOT_ELF]
    (damaged,) = result.unreadable
    assert damaged.path.endswith(b"!/lib/modules/6/c.ko.gz")


def test_damage_outside_of_a_module_is_that_of_the_archive() -> None:
    def pieces() -> Iterator[bytes]:
        data = tar([("a", ELF * 10)])
        yield data[:2000]
        raise CannotDecompress("damaged")

    stream = LimitedStream(pieces(), 1 << 40, 1 << 20)
    archive = Archive(b"")
    with pytest.raises(CannotDecompress):
        list(archive.members.scan(tar_format.members(stream), stream))


# --- who can get at it ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "directory_uid", "file_uid", "reach"),
    [
        (0o755, 0, 0, EVERYBODY),
        (0o700, 0, 0, OWNER),
        (0o700, 5, 5, OWNER),
        (0o700, 5, 6, 0),
        (0o700, 0, 6, 0),
        (0o644, 5, 5, 0),
        (0o750, 5, 0, OWNER),
    ],
)
def test_directories_that_are_closed(
    mode: int, directory_uid: int, file_uid: int, reach: int
) -> None:
    directory = entry("./var/private", tarfile.DIRTYPE, mode=mode, uid=directory_uid)
    inside = entry("var/private/below/app", uid=file_uid)
    outside = entry("var/app", uid=file_uid)
    result = Archive(tar([(directory, b""), (inside, ELF), (outside, ELF)])).read()
    shown = {seen.path: seen.pinned.sighting.origin.reach for seen in result.pinned}
    assert shown == {b"/var/private/below/app": reach, b"/var/app": EVERYBODY}


@pytest.mark.parametrize(
    ("archive", "member", "expected"),
    [
        pytest.param((0o444, 7, 8), (0o600, 0, 0), (0o600, 0, 0, EVERYBODY), id="public"),
        pytest.param((0o400, 7, 8), (0o755, 0, 0), (0o500, 7, 8, EVERYBODY), id="of one user"),
        pytest.param((0o440, 7, 8), (0o644, 0, 0), (0o440, 7, 8, EVERYBODY), id="of a group"),
        pytest.param((0o404, 7, 8), (0o755, 7, 0), (0o505, 7, 8, EVERYBODY), id="of no group"),
        pytest.param((0o000, 0, 0), (0o755, 7, 8), (0o000, 0, 0, EVERYBODY), id="of nobody"),
        pytest.param((0o400, 7, 8), (0o600, 7, 0), (0o600, 7, 0, OWNER), id="twice the user's"),
        pytest.param((0o400, 7, 8), (0o600, 0, 0), (0o600, 0, 0, 0), id="root's in a user's"),
        pytest.param((0o040, 7, 8), (0o640, 7, 8), (0o640, 7, 8, 0), id="not the user's"),
    ],
)
def test_readers_of_a_member_may_read_the_archive(
    archive: tuple[int, int, int], member: tuple[int, int, int], expected: tuple[int, ...]
) -> None:
    mode, uid, gid = member
    data = tar([(entry("./app", mode=mode, uid=uid, gid=gid), ELF)])
    (seen,) = Archive(data, access=Access(*archive)).read().pinned
    origin = seen.pinned.sighting.origin
    shown = (origin.identity.mode & 0o7777, origin.identity.uid, origin.identity.gid, origin.reach)
    assert shown == expected


# --- Members as files: in memory or not, sparse or not, and never too many at a time


SIGHTING = Sighting(Origin(b"/x", FileIdentity(0, 1, 0, 0, 0, 0, 0, 0, b"s")), 1)


@pytest.fixture(autouse=True)
def _no_spool_left_open() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() <= before


def is_in_memory(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").startswith("/memfd:")


def content(fd: int) -> bytes:
    return os.pread(fd, 1 << 26, 0)


def test_small_files_are_in_memory_and_large_ones_in_the_directory(tmp_path: Path) -> None:
    files = MemberSpool(os.fsencode(tmp_path))
    with files.pin(SIGHTING, 5, [b"ab", memoryview(b"cde")]) as small:
        assert is_in_memory(small.fd)
        assert content(small.fd) == b"abcde"
    size = elf_members.MEMORY_BYTES + 1
    with files.pin(SIGHTING, size, [b"x" * size]) as large:
        assert not is_in_memory(large.fd)
        assert os.fstat(large.fd).st_dev == tmp_path.stat().st_dev
        assert os.fstat(large.fd).st_nlink == 0
        assert content(large.fd) == b"x" * size
        assert list(tmp_path.iterdir()) == []
    assert large.fd == -1


def test_filesystem_without_unnamed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refusing(path: bytes, flags: int, mode: int = 0o777, **rest: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not on this one")
        return real(path, flags, mode, **rest)

    monkeypatch.setattr(os, "open", refusing)
    size = elf_members.MEMORY_BYTES + 1
    with MemberSpool(os.fsencode(tmp_path)).pin(SIGHTING, size, [b"x" * size]) as large:
        assert content(large.fd) == b"x" * size
        assert list(tmp_path.iterdir()) == []


def test_directory_that_is_none(tmp_path: Path) -> None:
    size = elf_members.MEMORY_BYTES + 1
    with pytest.raises(FileNotFoundError):
        MemberSpool(os.fsencode(tmp_path / "missing")).pin(SIGHTING, size, [b"x" * size])


@pytest.mark.parametrize("size", [5000, elf_members.MEMORY_BYTES + 5000])
def test_holes_are_kept_in_the_spool(tmp_path: Path, size: int) -> None:
    pieces = [b"abc", b"", b"defg", b"hij"]
    extents = ((0, 2), (100, 6), (200, 0), (size - 2, 2))
    with MemberSpool(os.fsencode(tmp_path)).pin(SIGHTING, size, pieces, extents) as file:
        expected = bytearray(size)
        expected[:2], expected[100:106], expected[-2:] = b"ab", b"cdefgh", b"ij"
        assert content(file.fd) == expected


def test_pieces_that_fail_leave_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[bytes]:
        yield b"x"
        raise OSError(errno.EIO, "broken")

    files = MemberSpool(os.fsencode(tmp_path), open_bytes=10)
    for _ in range(3):  # its room is given back, too
        with pytest.raises(OSError, match="broken"):
            files.pin(SIGHTING, 10, failing())


def test_room_is_waited_for() -> None:
    files = MemberSpool(open_bytes=10)
    first = files.pin(SIGHTING, 6, [b"123456"])
    second = files.pin(SIGHTING, 4, [b"1234"])
    events: list[str] = []

    def pieces() -> Iterator[bytes]:
        events.append("third is written")
        yield b"x" * 50

    def add() -> None:
        # What is larger than all the room is made when there is nothing else.
        files.pin(SIGHTING, 50, pieces()).close()

    thread = threading.Thread(target=add)
    thread.start()
    first.close()
    first.close()  # counts once
    with files.pin(SIGHTING, 6, [b"123456"]):
        pass
    events.append("second is closed")
    second.close()
    thread.join()
    assert events == ["second is closed", "third is written"]


def test_consumer_that_closes_nothing_is_given_more_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A consumer that is short of room holds a file until it has others to close."""
    monkeypatch.setattr(elf_members, "_PATIENCE_S", 0.01)
    files = MemberSpool(open_bytes=1)
    with files.pin(SIGHTING, 1, [b"x"]), files.pin(SIGHTING, 1, [b"y"]) as second:
        assert content(second.fd) == b"y"


def test_end_of_the_spool_ends_all_waiting() -> None:
    files = MemberSpool(open_bytes=1)
    first = files.pin(SIGHTING, 1, [b"x"])
    ended: list[bool] = []

    def wait() -> None:
        with pytest.raises(Ended):
            files.pin(SIGHTING, 1, [b"x"])
        ended.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    files.end()
    thread.join()
    assert ended == [True]
    first.close()
