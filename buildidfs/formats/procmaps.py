# SPDX-License-Identifier: Apache-2.0
"""The text of /proc/PID/maps (proc_pid_maps(5)), for kernels without PROCMAP_QUERY."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buildidfs.model import Mapping

if TYPE_CHECKING:
    from collections.abc import Iterator

_DELETED = b" (deleted)"


def parse(text: bytes) -> Iterator[Mapping]:
    """Yield the mappings in the order of their addresses; what is not a mapping is passed over.

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
