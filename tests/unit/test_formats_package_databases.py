# SPDX-License-Identifier: Apache-2.0
"""The notes of dpkg and apk name the package of a file."""

from __future__ import annotations

import calendar

import pytest

from buildidfs.formats.package_databases import (
    UNKNOWN,
    Package,
    apk_owner,
    dpkg_lists,
    dpkg_owner,
    dpkg_version,
    dpkg_version_before,
    from_note,
    md5sums_as_list,
)

STATUS = (
    b"Package: bash\nArchitecture: amd64\nVersion: 5.2-1\n\n"
    b"Package: libc6\nArchitecture: i386\nVersion: 2.38-1\n\n"
    b"Package: libc6\nArchitecture: amd64\nVersion: 2.39-1\n"
)
APK = (
    b"C:Q1\nP:musl\nV:1.2.5-r1\nF:lib\nR:ld-musl.so.1\na:0:0:755\n\n"
    b"C:Q1\nP:busybox\nV:1.36-r2\nF:lib\nF:bin\nR:busybox\nF:etc\nR:passwd\n"
)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (b"/usr/bin/bash", b"bash"),
        (b"/lib/libc.so.6", b"libc6:amd64"),
        (b"/usr/bin/bas", b""),
        (b"/bin/bash", b""),
        (b"/usr\n/usr/bin/bash", b""),
    ],
)
def test_dpkg_owner(path: bytes, name: bytes) -> None:
    lists = [(b"bash", b"/usr\n/usr/bin/bash"), (b"libc6:amd64", b"/lib\n/lib/libc.so.6\n")]
    assert dpkg_owner(dpkg_lists(lists), [b"/none", path]) == name


@pytest.mark.parametrize(
    ("name", "version"),
    [(b"bash", "5.2-1"), (b"libc6:amd64", "2.39-1"), (b"libc6:i386", "2.38-1"), (b"none", "")],
)
def test_dpkg_version(name: bytes, version: str) -> None:
    assert dpkg_version(STATUS, name) == Package(name.decode().split(":")[0], version, "dpkg")


def test_checksums_of_distroless() -> None:
    assert md5sums_as_list(b"0a  usr/lib/x\n0b  ./usr/lib/y\nbad\n") == b"/usr/lib/x\n/usr/lib/y"


@pytest.mark.parametrize(
    ("path", "package"),
    [
        (b"/lib/ld-musl.so.1", Package("musl", "1.2.5-r1", "apk")),
        (b"/bin/busybox", Package("busybox", "1.36-r2", "apk")),
        (b"/etc/passwd", Package("busybox", "1.36-r2", "apk")),
        (b"/lib/busybox", UNKNOWN),
        (b"/bin/passwd", UNKNOWN),
        (b"/bin/busy", UNKNOWN),
    ],
)
@pytest.mark.parametrize("end", [b"", b"\nC:Q1\nP:tzdata\nV:1\nF:bin\nR:zic\n"])
def test_apk_owner(path: bytes, package: Package, end: bytes) -> None:
    assert apk_owner(APK + end, [path]) == package
    assert apk_owner(b"\n".join([b"", b"R:busybox"] * 9) + b"\n", [path]) == UNKNOWN


LOG = (
    b"2026-03-01 10:00:00 upgrade libx:amd64 1 2\n"
    b"2026-03-01 10:00:02 status unpacked libx:amd64 2\n"
    b"2026-03-01 10:00:02 upgrade libx-dev:amd64 8 9\n"
    b"2026-05-01 10:00:00 upgrade libx:amd64 2 3\n"
    b"2026-05-01 10:00:01 status unpacked libx:amd64 3\n"
    b"2026-05-01 10:30:00 status installed other:amd64 1\n"
)
END = calendar.timegm((2026, 5, 1, 10, 30, 0))
FIRST, SECOND = (calendar.timegm((2026, month, 1, 10, 0, 1)) for month in (3, 5))


@pytest.mark.parametrize("zone", [0, -5 * 3600, 20700])  # New York, Kathmandu
@pytest.mark.parametrize(
    ("replaced", "started", "version"),
    [
        (FIRST, 0, "1"),
        (FIRST + 3600, 0, "1"),  # before the change of the season
        (SECOND, 0, "2"),
        (0, FIRST + 60, "2"),  # a layer of an image has times of its own
        (0, FIRST - 60, ""),  # it may have mapped the library between the two
        (0, SECOND + 60, ""),
    ],
)
def test_version_that_an_upgrade_has_replaced(
    zone: int, replaced: int, started: int, version: str
) -> None:
    moments = (each - zone if each else 0 for each in (END, replaced, started))
    written, replaced, started = moments
    assert dpkg_version_before(LOG, written + 0.4, "libx", replaced, started) == version


def test_package_in_the_note_of_a_file() -> None:
    note = b'{"type":"rpm","name":"bash","version":"5.1-1.fc36","epoch":"1","os":"fedora"}'
    assert from_note(note) == Package("bash", "1:5.1-1.fc36", "rpm")
    assert from_note(b'{"name":["x"]}') == from_note(b"[" * 9000) == from_note(b"") == UNKNOWN
