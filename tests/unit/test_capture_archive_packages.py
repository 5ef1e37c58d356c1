# SPDX-License-Identifier: Apache-2.0
"""Packages below directories, several at once, each read once a month."""

from __future__ import annotations

import errno
import gzip
import lzma
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.archive import elf_members, packages
from buildidfs.capture.archive.packages import NotAPackage, PackageScanner, open_package
from buildidfs.capture.archive.stream import ArchiveLimits
from buildidfs.capture.base import Known, PinnedFile, memory_file
from buildidfs.formats.archive.common import Damaged
from buildidfs.model import Absence, BuildId, FileIdentity
from tests.support.elf.elfwriter import elf_file
from tests.support.filesystems.sources import ar_member, deb, entry, tar
from tests.support.harness.scans import (
    Memory,
    nothing_left,
    open_descriptors,
    scan,
    without_privileges,
)

ID = BuildId(b"\xcd" * 20)
ELF = elf_file(build_id=ID)


@pytest.fixture(autouse=True)
def _nothing_left_open_or_running() -> Iterator[None]:
    with nothing_left():
        yield


def scanner(*paths: Path, memo: Memory | None = None, reread: bool = False) -> PackageScanner:
    memory = Memory() if memo is None else memo
    return PackageScanner(memory, [os.fsencode(path) for path in paths], reread=reread)


def app(number: int = 0) -> bytes:
    """A package with a file that has the number in its path."""
    return deb(tar([(f"./usr/bin/app{number}", ELF)]), f"Package: app{number}\n".encode())


def test_directory(tmp_path: Path) -> None:
    (tmp_path / "pool/a").mkdir(parents=True)
    for number in range(20):
        (tmp_path / f"pool/a/named-like-nothing-{number}").write_bytes(app(number))
    (tmp_path / "pool/README").write_text("no package")
    (tmp_path / "pool/app").write_bytes(ELF)
    (tmp_path / "pool/text.gz").write_bytes(gzip.compress(b"text"))
    (tmp_path / "link").symlink_to("pool/a")
    found = scanner(tmp_path)
    result = scan(found)
    assert sorted(result.paths()) == sorted(b"/usr/bin/app%d" % number for number in range(20))
    assert (result.unreadable, result.again) == ([], [])
    assert (found.packages, found.unchanged, len(found.whole)) == (20, 0, 20)
    seen = {item.path: item.pinned.sighting.origin for item in result.pinned}
    origin = seen[b"/usr/bin/app7"]
    assert (origin.container, origin.host) == ("package:app7", "named-like-nothing-7")


def test_package_without_a_name_is_called_by_that_of_its_file(tmp_path: Path) -> None:
    path = tmp_path / "app_1_amd64.deb"
    path.write_bytes(deb(tar([("app", ELF)]), b""))
    (seen,) = scan(scanner(path)).pinned
    assert seen.pinned.sighting.origin.container == "package:app_1_amd64.deb"


def test_largest_first(tmp_path: Path) -> None:
    for number, size in enumerate((1, 3, 2)):
        data = tar([(f"./usr/bin/app{number}", ELF), ("x", bytes(size * 100_000))])
        (tmp_path / str(number)).write_bytes(deb(data))
    found = PackageScanner(Memory(), [os.fsencode(tmp_path)], workers=1)
    assert scan(found).paths() == [b"/usr/bin/app1", b"/usr/bin/app2", b"/usr/bin/app0"]


def test_files_that_are_no_packages_or_cannot_be_read(directory: Path) -> None:
    (directory / "text").write_text("no package")
    (directory / "secret").write_bytes(app())
    (directory / "secret").chmod(0)
    with without_privileges():
        result = scan(scanner(*(directory / name for name in ("text", "missing", "secret"))))
    reasons = {os.path.basename(item.path): (item.reason, item.errno) for item in result.unreadable}
    assert reasons[b"text"] == ("not a package", 0)
    assert reasons[b"missing"][1] == errno.ENOENT
    assert reasons[b"secret"][1] == errno.EACCES


def test_damaged_package_keeps_the_files_before_the_damage(tmp_path: Path) -> None:
    data = tar([("a", ELF), ("b", ELF * 50)])
    (tmp_path / "short").write_bytes(deb(data)[:-25_000])
    (tmp_path / "whole").write_bytes(app())
    found = scanner(tmp_path)
    result = scan(found)
    assert sorted(result.paths()) == [b"/a", b"/usr/bin/app0"]
    ((item),) = result.unreadable
    assert item.path == os.fsencode(tmp_path / "short")
    assert "in the middle of a member" in item.reason
    assert (found.packages, len(found.whole)) == (2, 1)


# --- what was read before ------------------------------------------------------------------------


def remembered(found: PackageScanner) -> Memory:
    """A memo that keeps all that the scanner wants it to keep."""
    return Memory({mark: Known(absence=Absence.NOT_ELF) for mark in found.whole})


def test_unchanged_packages_are_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "app"
    path.write_bytes(app())
    first = scanner(path)
    assert len(scan(first).pinned) == 1
    memory = remembered(first)
    second = scanner(path, memo=memory)
    result = scan(second)
    assert (result.pinned, result.again, result.unreadable) == ([], [], [])
    assert (second.packages, second.unchanged) == (1, 1)
    forced = scanner(path, memo=memory, reread=True)
    assert len(scan(forced).pinned) == 1
    assert (forced.packages, forced.unchanged) == (1, 0)
    path.write_bytes(app(1))
    assert scan(scanner(path, memo=memory)).paths() == [b"/usr/bin/app1"]


def test_after_a_month_everything_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(30):
        (tmp_path / str(number)).write_bytes(app(number))
    first = scanner(tmp_path)
    scan(first)
    memory = remembered(first)
    real, read = time.time_ns, []
    for days in range(31):
        later = days * 86_400 * 10**9
        monkeypatch.setattr(packages.time, "time_ns", lambda later=later: real() + later)
        found = scanner(tmp_path, memo=memory)
        scan(found)
        memory |= remembered(found)
        read.append(len(found.whole))
    assert sum(read) == 30
    assert max(read) < 30, "not all on one day"


def test_package_of_which_something_was_passed_over_is_read_again(tmp_path: Path) -> None:
    (tmp_path / "app").write_bytes(deb(tar([("large", ELF + bytes(1000))])))
    paths = [os.fsencode(tmp_path)]
    found = PackageScanner(Memory(), paths, limits=ArchiveLimits(member_bytes=1000))
    assert len(scan(found).unreadable) == 1
    assert (found.packages, found.whole) == (1, [])


def test_package_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "app"
    path.write_bytes(deb(tar([("a", ELF), ("b", ELF)])))
    found = scanner(path)
    for item in found:
        assert isinstance(item, PinnedFile)
        item.close()
        os.utime(path)
    # The second may have been read before the first was taken.
    assert found.packages == 1
    items = PackageScanner(Memory(), [os.fsencode(path)], workers=1)
    monkey = iter(items)
    first = next(monkey)
    assert isinstance(first, PinnedFile)
    first.close()
    monkey.close()
    assert items.whole == []


def test_same_file_has_the_same_scope_and_another_has_not(tmp_path: Path) -> None:
    def identities() -> dict[str, FileIdentity]:
        found = scan(scanner(tmp_path)).pinned
        return {
            seen.pinned.sighting.origin.host: seen.pinned.sighting.origin.identity for seen in found
        }

    (tmp_path / "a").write_bytes(app())
    (tmp_path / "b").write_bytes(app())
    first = identities()
    assert first["a"].scope != first["b"].scope
    assert identities() == first
    os.utime(tmp_path / "a", (1, 1))
    assert identities()["a"].scope != first["a"].scope


def test_links_are_of_the_same_identity(tmp_path: Path) -> None:
    (tmp_path / "app").write_bytes(deb(tar([("a", ELF), (entry("b", b"1", "a"), b"")])))
    result = scan(scanner(tmp_path))
    (pinned,), (reread,) = result.pinned, result.again
    assert pinned.pinned.sighting.origin.identity == reread.sighting.origin.identity
    assert reread.sighting.origin.path == b"/b"


# --- threads -------------------------------------------------------------------------------------


def test_consumer_that_stops_early_leaves_nothing_behind(tmp_path: Path) -> None:
    for number in range(10):
        members = [(f"{number}-{member}", ELF) for member in range(50)]
        (tmp_path / str(number)).write_bytes(deb(tar(members)))
    items = iter(scanner(tmp_path))
    first = next(items)
    assert isinstance(first, PinnedFile)
    first.close()
    items.close()


def test_consumer_that_keeps_files_delays_others_until_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        packages, "MemberSpool", lambda directory: elf_members.MemberSpool(directory, open_bytes=1)
    )
    (tmp_path / "app").write_bytes(deb(tar([("a", ELF), ("b", ELF)])))
    items = iter(scanner(tmp_path))
    first = next(items)
    assert isinstance(first, PinnedFile)
    items.close()
    first.close()


def test_fault_of_a_thread_is_heard_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise ZeroDivisionError("a fault")

    (tmp_path / "app").write_bytes(app())
    monkeypatch.setattr(packages, "open_package", broken)
    with pytest.raises(ZeroDivisionError):
        scan(scanner(tmp_path))


# --- What is a package is told by its content: its name and where its members are


DATA = tar([("./usr/bin/app", b"content"), ("./usr/bin/other", b"more")])


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() <= before


def read(data: bytes) -> tuple[str, dict[bytes, bytes]]:
    """The name of a package, and the content of its members."""
    fd = memory_file(b"package", data)
    with open(fd, "rb"):
        package = open_package(fd, len(data), ArchiveLimits())
        return package.name, {
            member.name: package.stream.take(member.stored) for member in package.members
        }


CONTENT = {b"./usr/bin/app": b"content", b"./usr/bin/other": b"more"}


@pytest.mark.parametrize("pack", [bytes, gzip.compress, lzma.compress], ids=["none", "gz", "xz"])
def test_debian(pack: type[bytes]) -> None:
    assert read(deb(pack(DATA))) == ("app-1-2.all", CONTENT)


@pytest.mark.parametrize(
    "control", [b"", b"x" * 5_000_000, b"Package:\n"], ids=["empty", "long", "nameless"]
)
def test_debian_without_a_name(control: bytes) -> None:
    assert read(deb(DATA, control)) == ("", CONTENT)


def test_debian_package_with_damaged_control_archive() -> None:
    for damaged in (b"", b"x" * 1000, gzip.compress(b"x")[:-3], lzma.compress(bytes(20 << 20))):
        parts = [(b"debian-binary", b"2.0\n"), (b"control.tar.gz", damaged), (b"data.tar", DATA)]
        data = b"!<arch>\n" + b"".join(ar_member(*part) for part in parts)
        assert read(data) == ("", CONTENT)


def test_debian_without_data() -> None:
    with pytest.raises(Damaged, match="without data"):
        read(b"!<arch>\n" + ar_member(b"debian-binary", b"2.0\n"))


def test_static_library() -> None:
    with pytest.raises(NotAPackage):
        read(b"!<arch>\n" + ar_member(b"/", b"symbols") + ar_member(b"a.o/", b"\x7fELF"))
    with pytest.raises(NotAPackage):
        read(b"!<arch>\n")


def apk_parts() -> list[bytes]:
    info = b"pkgname = app\npkgver = 1-r2\narch = x86_64\n"
    return [
        tar([(".SIGN.RSA.key.rsa.pub", b"signature")], end=False),
        tar([(".PKGINFO", info), (".pre-install", b"#!/bin/sh\n")], end=False),
        DATA,
    ]


@pytest.mark.parametrize("ended", [False, True], ids=["cut", "whole"])
def test_alpine(ended: bool) -> None:
    signature, control, data = apk_parts()
    end = bytes(1024) if ended else b""
    packed = b"".join(gzip.compress(part) for part in (signature + end, control + end, data))
    assert read(packed) == ("app-1-r2.x86_64", CONTENT)


def test_alpine_without_a_signature() -> None:
    packed = b"".join(gzip.compress(part) for part in apk_parts()[1:])
    assert read(packed)[0] == "app-1-r2.x86_64"


def test_alpines_third_format_is_named() -> None:
    with pytest.raises(Damaged, match="third format"):
        read(b"ADBd" + bytes(100))


def test_arch() -> None:
    members = [(".BUILDINFO", b""), (".MTREE", b""), (".PKGINFO", b"pkgname = app\n")]
    data = tar([*members, ("usr/bin/app", b"content")])
    for pack in (bytes, gzip.compress, lzma.compress):
        assert read(pack(data)) == ("app", {b"usr/bin/app": b"content"})


def test_name_that_comes_too_late() -> None:
    data = tar([(".MTREE", b""), ("usr/bin/app", b"content"), (".PKGINFO", b"pkgname = app\n")])
    assert read(data)[0] == ""


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x7fELF" + bytes(1000),
        b"text",
        DATA,
        gzip.compress(DATA),
        gzip.compress(b"text"),
        gzip.compress(DATA)[:50],
        gzip.compress(b""),
        tar([(".profile", b"x")]),
        tar([]),
        b"BZh, as a text may begin",
    ],
    ids=range(11),
)
def test_file_that_is_no_package(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(NotAPackage):
        read(data)
