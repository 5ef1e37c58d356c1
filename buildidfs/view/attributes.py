# SPDX-License-Identifier: Apache-2.0
"""Values that the view returns: attributes of nodes, extended attributes, open files.

Extended attributes show `getfattr -d` and scripts the facts of the store about a file:

user.sha256               digest of the file as it was captured
user.buildid.id           its build ID
user.buildid.kind         executable, debuginfo, vdso or kallsyms
user.buildid.variant      number among the files with this build ID and kind
user.buildid.trust        host, package, container or unknown
user.buildid.quality      none, dynsym, symtab, gopclntab or debuginfo
user.buildid.first-seen   time in UTC
user.buildid.path         where these bytes were seen last, of the places that the viewer could
                          have read them at
user.buildid.container    and in which container
user.buildid.scripts      "zeroed" if sections that gdb would run read as zeros here
"""

from __future__ import annotations

import datetime
import errno
import os
import re
import stat
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.fleet.objects import VARIANT as REMOTE
from buildidfs.model import ByteRange
from buildidfs.store import Blob
from buildidfs.store.permissions import may_see

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.model import Artifact
    from buildidfs.store import OriginRecord, Store
    from buildidfs.store.permissions import Viewer


_LAST_MOMENT: Final = 253_402_300_799  # the end of the year 9999

CONTROL: Final = re.compile(rb"[\x00-\x1f\x7f]|\xc2[\x80-\x9f]")
"""Characters that a terminal interprets: below U+0020, DEL, and U+0080 to U+009F in UTF-8."""

READABLE: Final = 0o555
"""The permission bits that a read-only view can grant."""


class Attributes(msgspec.Struct, frozen=True):
    """The attributes of a node for stat(2), without its number.

    ``mode`` is st_mode with the type bits, ``mtime_ns`` in nanoseconds of Unix time. ``volatile``
    is True if size and content change while the node stays the same.
    """

    mode: int
    size: int
    mtime_ns: int
    uid: int
    gid: int
    volatile: bool = False


class NeedsReading(BlockingIOError):
    """Raised if the answer requires reading a file, which may wait for a disk.

    The caller must then use the method that may wait.
    """


class NeedsRequest(NeedsReading):
    """Raised if the answer requires a request to a bucket, which may wait for a network."""


class FileContent(msgspec.Struct):
    """An open file: its bytes are those of ``blob``, or of ``text`` if ``blob`` is None.

    ``zeros`` are extents that readers see as zeros (`blank`), whatever the bytes are. The caller
    closes it.
    """

    text: bytes = b""
    zeros: tuple[ByteRange, ...] = ()
    blob: Blob | None = None

    def close(self) -> None:
        """Close the file; safe to call twice."""
        if self.blob is not None:
            self.blob.close()


def moment(seconds: float) -> str:
    """Return a Unix time as text, in UTC: ``2026-11-23T02:42:17Z``."""
    when = datetime.datetime.fromtimestamp(min(int(seconds), _LAST_MOMENT), datetime.UTC)
    return when.isoformat().replace("+00:00", "Z")


def of_artifact(artifact: Artifact) -> Attributes:
    """Return the attributes of an artifact's served file: those of the original file."""
    return Attributes(
        stat.S_IFREG | artifact.mode & READABLE,
        artifact.size,
        artifact.mtime_ns,
        artifact.uid,
        artifact.gid,
    )


def stale() -> OSError:
    """Return the error for a node that is gone: the kernel then looks its name up again."""
    return OSError(errno.ESTALE, os.strerror(errno.ESTALE))


def blank(data: bytearray | memoryview, offset: int, zeros: tuple[ByteRange, ...]) -> None:
    """Zero the parts of ``zeros`` that lie in ``data``, which was read at ``offset``."""
    end = offset + len(data)
    for extent in zeros:
        first = max(extent.offset, offset)
        last = min(extent.offset + extent.size, end)
        if first < last:
            data[first - offset : last - offset] = bytes(last - first)


_PREFIX: Final = b"user.buildid."
_SHA256: Final = b"user.sha256"


class ExtendedAttributes:
    """Extended attributes of artifacts."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def names(self, artifact: Artifact, zeroed: bool, viewer: Viewer | None) -> list[bytes]:
        """Return the names of attributes with a value for a viewer; None is a viewer who may know
        all.
        """
        last = self._last_origin(artifact, viewer)
        of_origin = [
            part for part, value_of in _OF_ORIGIN.items() if last is not None and value_of(last)
        ]
        known = [b"id", *_OF_ARTIFACT, *of_origin, *([b"scripts"] if zeroed else [])]
        digest = [_SHA256] if artifact.variant != REMOTE else []
        return [*digest, *(_PREFIX + part for part in known)]

    def value(
        self, artifact: Artifact, zeroed: bool, name: bytes, viewer: Viewer | None
    ) -> bytes | None:
        """Return the value of one attribute for a viewer; None if it has no value for them."""
        if name == _SHA256:
            # The digest of a remote file is unknown until all of it was read.
            return None if artifact.variant == REMOTE else artifact.digest.hex().encode()
        if not name.startswith(_PREFIX):
            return None
        part = name[len(_PREFIX) :]
        if part == b"id":
            build_id = self._store.index.build_id(artifact.ordinal)
            return None if build_id is None else build_id.hex().encode()
        if part == b"scripts":
            return b"zeroed" if zeroed else None
        if part in (b"path", b"container"):
            last = self._last_origin(artifact, viewer)
            return None if last is None else _OF_ORIGIN[part](last) or None
        value_of = _OF_ARTIFACT.get(part)
        return None if value_of is None else value_of(artifact).encode()

    def _last_origin(self, artifact: Artifact, viewer: Viewer | None) -> OriginRecord | None:
        records = self._store.index.origins(artifact.ordinal)  # newest first
        fitting = (each for each in records if each.digest == artifact.digest)
        return next((each for each in fitting if may_see(viewer, each.origin)), None)


_OF_ARTIFACT: Final[dict[bytes, Callable[[Artifact], str]]] = {
    b"kind": lambda artifact: artifact.kind.name.lower(),
    b"variant": lambda artifact: str(artifact.variant),
    b"trust": lambda artifact: artifact.trust.name.lower(),
    b"quality": lambda artifact: artifact.quality.name.lower(),
    b"first-seen": lambda artifact: moment(artifact.first_seen_ns / 1e9),
}
_OF_ORIGIN: Final[dict[bytes, Callable[[OriginRecord], bytes]]] = {
    b"path": lambda record: record.origin.path,
    b"container": lambda record: record.origin.container.encode("utf-8", "surrogateescape"),
}
