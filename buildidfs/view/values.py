# SPDX-License-Identifier: Apache-2.0
"""What the view tells its front doors: attributes of a node, and what is in a file."""

from __future__ import annotations

import datetime
import os
import stat
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.model import ByteRange
from buildidfs.store import Content as Readable

if TYPE_CHECKING:
    from buildidfs.model import Artifact

_LAST_MOMENT: Final = 253_402_300_799  # the end of the year 9999

READABLE: Final = 0o555
"""The permission bits that a read-only view can grant."""


class Attributes(msgspec.Struct, frozen=True):
    """What stat(2) shows of a node, without its number.

    ``mode`` is st_mode with the type bits, ``mtime_ns`` in nanoseconds of Unix time.
    ``volatile`` says that size and content change while the node stays the same.
    """

    mode: int
    size: int
    mtime_ns: int
    uid: int
    gid: int
    volatile: bool = False


class NeedsReading(BlockingIOError):
    """A file has to be read first, which may have to wait for a disk: another method does it."""


class Content(msgspec.Struct):
    """An open file. ``fd`` holds its bytes, or, where that is -1, ``blob`` or ``text`` does.

    ``zeros`` are extents to be shown as zeros (`blank`), whatever the bytes are. The receiver
    closes it.
    """

    fd: int = -1
    text: bytes = b""
    zeros: tuple[ByteRange, ...] = ()
    blob: Readable | None = None

    def close(self) -> None:
        """Let go of the file; safe to call twice."""
        if self.blob is not None:
            self.blob.close()
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


def moment(seconds: float) -> str:
    """A Unix time as people write it, in UTC: ``2026-11-23T02:42:17Z``."""
    when = datetime.datetime.fromtimestamp(min(int(seconds), _LAST_MOMENT), datetime.UTC)
    return when.isoformat().replace("+00:00", "Z")


def of_artifact(artifact: Artifact) -> Attributes:
    """The attributes of the file that an artifact is served as: those of the original."""
    return Attributes(
        stat.S_IFREG | artifact.mode & READABLE,
        artifact.size,
        artifact.mtime_ns,
        artifact.uid,
        artifact.gid,
    )


def blank(data: bytearray | memoryview, offset: int, zeros: tuple[ByteRange, ...]) -> None:
    """Zero in place what of ``zeros`` lies in ``data``, which was read at ``offset``."""
    end = offset + len(data)
    for extent in zeros:
        first = max(extent.offset, offset)
        last = min(extent.offset + extent.size, end)
        if first < last:
            data[first - offset : last - offset] = bytes(last - first)
