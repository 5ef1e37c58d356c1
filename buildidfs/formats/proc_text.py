# SPDX-License-Identifier: Apache-2.0
"""The texts of /proc/PID/mountinfo and /proc/PID/maps (proc_pid_mountinfo(5), proc_pid_maps(5))."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from buildidfs.model import Mapping

if TYPE_CHECKING:
    from collections.abc import Iterator


_OCTAL = re.compile(rb"\\([0-7]{3})")
_LEAST_FIELDS = 10


class MountInfo(msgspec.Struct, frozen=True):
    """One mount. ``dev`` is (major, minor) of the superblock, as stat(2) shows it in st_dev.

    ``root`` and ``mount_point`` are paths with the kernel's escapes undone. ``options`` are those
    of the mount, ``super_options`` those of the filesystem; both are raw, for `option`.
    """

    mount_id: int
    dev: tuple[int, int]
    root: bytes
    mount_point: bytes
    options: bytes
    fstype: bytes
    super_options: bytes


def unescape(field: bytes) -> bytes:
    """Undo the kernel's escapes (``\\040`` for a space, and so on)."""
    if b"\\" not in field:
        return field
    return _OCTAL.sub(lambda found: bytes([int(found[1], 8) & 0xFF]), field)


def option(options: bytes, name: bytes) -> bytes | None:
    """Return the value of one option, unescaped: empty if the option has no value, None if it is
    missing.
    """
    for item in options.split(b","):
        key, _, value = item.partition(b"=")
        if key == name:
            return unescape(value)
    return None


def mounts_in(text: bytes) -> Iterator[MountInfo]:
    """Yield the mounts in the order of the text; a line that is not a mount is skipped."""
    for line in text.split(b"\n"):
        fields = line.split(b" ")
        if len(fields) < _LEAST_FIELDS:
            continue
        try:
            # Any number of optional fields stands between the mount options and the hyphen.
            hyphen = fields.index(b"-", 6)
            fstype, _, super_options = fields[hyphen + 1 : hyphen + 4]
            major, _, minor = fields[2].partition(b":")
            yield MountInfo(
                int(fields[0]),
                (int(major), int(minor)),
                unescape(fields[3]),
                unescape(fields[4]),
                fields[5],
                unescape(fstype),
                super_options,
            )
        except (ValueError, IndexError):
            continue


_DELETED = b" (deleted)"


def mappings_in(text: bytes) -> Iterator[Mapping]:
    """Yield the mappings in the order of their addresses. Other lines are skipped.

    The kernel escapes a newline in a path as ``\\012`` and nothing else, not even the backslash
    (seq_path with "\\n"), and marks an unlinked file by appending " (deleted)". Both are undone
    here, and both are ambiguous for file names chosen to look like that: the path is a label, the
    file is to be opened through map_files.
    """
    for line in text.split(b"\n"):  # splitlines() would also split at a carriage return in a path
        fields = line.split(None, 5)
        if len(fields) < 5:
            continue
        addresses, perms, offset, dev, inode = fields[:5]
        path = fields[5] if len(fields) == 6 else b""
        deleted = path.endswith(_DELETED)
        if deleted:
            path = path[: -len(_DELETED)]
        if b"\\" in path:
            path = path.replace(b"\\012", b"\n")
        start, _, end = addresses.partition(b"-")
        major, _, minor = dev.partition(b":")
        try:
            yield Mapping(
                int(start, 16),
                int(end, 16),
                b"x" in perms,
                int(offset, 16),
                (int(major, 16), int(minor, 16)),
                int(inode),
                path,
                deleted,
            )
        except ValueError:
            continue
