# SPDX-License-Identifier: Apache-2.0
"""The text of /proc/PID/mountinfo (proc_pid_mountinfo(5))."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator

_OCTAL = re.compile(rb"\\([0-7]{3})")
_LEAST_FIELDS = 10


class MountInfo(msgspec.Struct, frozen=True):
    """One mount. ``dev`` is (major, minor) of the superblock, as stat(2) shows it in st_dev.

    ``root`` and ``mount_point`` are paths with the kernel's escapes undone. ``options`` are those
    of the mount, ``super_options`` those of the filesystem: raw, for `option`.
    """

    mount_id: int
    parent_id: int
    dev: tuple[int, int]
    root: bytes
    mount_point: bytes
    options: bytes
    fstype: bytes
    source: bytes
    super_options: bytes


def unescape(field: bytes) -> bytes:
    """Undo the kernel's escapes (``\\040`` for a space, and so on)."""
    if b"\\" not in field:
        return field
    return _OCTAL.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), field)


def option(options: bytes, name: bytes) -> bytes | None:
    """The value of one option, unescaped; empty for one without a value, None if not there."""
    for item in options.split(b","):
        key, _, value = item.partition(b"=")
        if key == name:
            return unescape(value)
    return None


def parse(text: bytes) -> Iterator[MountInfo]:
    """Yield the mounts in the order of the text; a line that is not a mount is passed over."""
    for line in text.split(b"\n"):
        fields = line.split(b" ")
        if len(fields) < _LEAST_FIELDS:
            continue
        try:
            # Any number of optional fields stands between the mount options and the hyphen.
            hyphen = fields.index(b"-", 6)
            fstype, source, super_options = fields[hyphen + 1 : hyphen + 4]
            major, _, minor = fields[2].partition(b":")
            yield MountInfo(
                int(fields[0]),
                int(fields[1]),
                (int(major), int(minor)),
                unescape(fields[3]),
                unescape(fields[4]),
                fields[5],
                unescape(fstype),
                unescape(source),
                super_options,
            )
        except (ValueError, IndexError):
            continue
