# SPDX-License-Identifier: Apache-2.0
"""The mount table as text."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from buildidfs.formats.proc_text import MountInfo, mappings_in, mounts_in, option, unescape
from buildidfs.model import Mapping

TEXT = rb"""36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
40 36 0:44 / /var/lib/a\040b\134c rw,relatime - overlay overlay rw,lowerdir=/l\0541:/l2,upperdir=/u
41 36 0:45 / /- rw shared:2 master:1 propagate_from:3 unbindable - fuse.sshfs user@host:/a\043b ro
"""


def test_mountinfo_is_parsed() -> None:
    first, second, third = mounts_in(TEXT)
    assert first == MountInfo(
        36,
        (98, 0),
        b"/mnt1",
        b"/mnt2",
        b"rw,noatime",
        b"ext3",
        b"rw,errors=continue",
    )
    assert second.mount_point == b"/var/lib/a b\\c"
    assert (third.mount_point, third.fstype) == (b"/-", b"fuse.sshfs")


def test_option() -> None:
    _, overlay, _ = mounts_in(TEXT)
    # The comma within the value is escaped: the options are split before anything is undone.
    assert option(overlay.super_options, b"lowerdir") == b"/l,1:/l2"
    assert option(overlay.super_options, b"upperdir") == b"/u"
    assert option(overlay.super_options, b"rw") == b""
    assert option(overlay.super_options, b"workdir") is None


def test_the_kernels_own_text() -> None:
    with open("/proc/self/mountinfo", "rb") as file:
        text = file.read()
    mounts = list(mounts_in(text))
    assert len(mounts) == text.count(b"\n")
    status = os.stat("/proc")
    [proc] = [mount for mount in mounts if mount.mount_point == b"/proc"][-1:]
    assert proc.fstype == b"proc"
    assert proc.dev == (os.major(status.st_dev), os.minor(status.st_dev))


def test_unescape_takes_any_bytes() -> None:
    assert unescape(rb"a\040\011\012\134z") == b"a \t\n\\z"
    assert unescape(rb"\04 \8 \777") == rb"\04 \8 " + b"\xff"


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=60), st.sampled_from(TEXT.split(b"\n")))))
def test_anything_may_be_parsed(lines: list[bytes]) -> None:
    for mount in mounts_in(b"\n".join(lines)):
        assert isinstance(mount, MountInfo)


MAPS = b"""\
55d4c0a00000-55d4c0a02000 r--p 00000000 fe:01 1054 /usr/bin/cat
55d4c0a02000-55d4c0a07000 r-xp 00002000 fe:01 1054                       /usr/bin/cat
7f0000000000-7f0000021000 rw-p 00000000 00:00 0\x20
7f0000100000-7f0000101000 r-xs 00001000 00:2a 18446744073709551615       /a b\\012c (deleted)
7ffd1e5f5000-7ffd1e5f7000 r-xp 00000000 00:00 0                          [vdso]
"""


def test_memory_map_is_parsed() -> None:
    assert list(mappings_in(MAPS)) == [
        Mapping(0x55D4C0A00000, 0x55D4C0A02000, False, 0, (0xFE, 1), 1054, b"/usr/bin/cat"),
        Mapping(0x55D4C0A02000, 0x55D4C0A07000, True, 0x2000, (0xFE, 1), 1054, b"/usr/bin/cat"),
        Mapping(0x7F0000000000, 0x7F0000021000, False, 0, (0, 0), 0, b""),
        Mapping(
            0x7F0000100000, 0x7F0000101000, True, 0x1000, (0, 0x2A), 2**64 - 1, b"/a b\nc", True
        ),
        Mapping(0x7FFD1E5F5000, 0x7FFD1E5F7000, True, 0, (0, 0), 0, b"[vdso]"),
    ]


def test_the_kernels_text_for_a_name_with_everything_in_it(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/new\nline, carriage\rreturn, \\ and \xff"
    with open(path, "w+b") as file:
        file.write(bytes(2 * mmap.PAGESIZE))
        file.flush()
        inode = os.fstat(file.fileno()).st_ino
        with mmap.mmap(file.fileno(), 2 * mmap.PAGESIZE, prot=mmap.PROT_READ):
            [mapping] = [each for each in mappings_in(_own_maps()) if each.inode == inode]
            assert mapping.path == path
            assert not mapping.deleted
            assert mapping.end - mapping.start == 2 * mmap.PAGESIZE
            assert not mapping.executable
            os.unlink(path)
            [mapping] = [each for each in mappings_in(_own_maps()) if each.inode == inode]
            assert mapping.path == path
            assert mapping.deleted


def test_every_line_of_the_kernel_is_a_mapping() -> None:
    text = _own_maps()
    mappings = list(mappings_in(text))
    assert len(mappings) == text.count(b"\n")
    assert any(mapping.executable and mapping.path.startswith(b"/") for mapping in mappings)
    assert all(mapping.start < mapping.end for mapping in mappings)


def test_a_text_cut_short_gives_what_was_whole() -> None:
    for length in range(len(MAPS)):
        mappings = list(mappings_in(MAPS[:length]))
        assert len(mappings) >= MAPS[:length].count(b"\n")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(st.binary(max_size=40), st.sampled_from(MAPS.split(b"\n")))))
def test_any_memory_map_may_be_parsed(lines: list[bytes]) -> None:
    for mapping in mappings_in(b"\n".join(lines)):
        assert isinstance(mapping, Mapping)


def _own_maps() -> bytes:
    with open("/proc/self/maps", "rb") as file:
        return file.read()
