# SPDX-License-Identifier: Apache-2.0
"""The mount table as text."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from buildidfs.formats.proc_text import MountInfo, mounts_in, option, unescape

TEXT = rb"""36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
40 36 0:44 / /var/lib/a\040b\134c rw,relatime - overlay overlay rw,lowerdir=/l\0541:/l2,upperdir=/u
41 36 0:45 / /- rw shared:2 master:1 propagate_from:3 unbindable - fuse.sshfs user@host:/a\043b ro
"""


def test_parse() -> None:
    first, second, third = mounts_in(TEXT)
    assert first == MountInfo(
        36,
        35,
        (98, 0),
        b"/mnt1",
        b"/mnt2",
        b"rw,noatime",
        b"ext3",
        b"/dev/root",
        b"rw,errors=continue",
    )
    assert second.mount_point == b"/var/lib/a b\\c"
    assert (third.mount_point, third.fstype) == (b"/-", b"fuse.sshfs")
    assert third.source == b"user@host:/a#b"


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
