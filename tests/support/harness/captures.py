# SPDX-License-Identifier: Apache-2.0
"""Captures made to order: bytes, a build ID and a place, without an ELF file around them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import msgspec

from buildidfs.formats.elf import identify
from buildidfs.model import (
    Absence,
    BuildId,
    Digest,
    FileIdentity,
    Kind,
    Origin,
    Quality,
    Sighting,
    Trust,
)
from buildidfs.store import CommitResult, NewCapture, Staged, Store

SECOND = 1_000_000_000

#: When everything here is seen, unless a test says otherwise (Unix time, ns).
NOW = 1_700_000_000 * SECOND

_IDENTITY = FileIdentity(
    dev=0xFE00,
    ino=1234,
    size=10,
    mtime_ns=NOW - 500 * SECOND,
    ctime_ns=NOW - 400 * SECOND,
    mode=0o100755,
    uid=0,
    gid=0,
    scope=b"",
)


def identity(**changes: Any) -> FileIdentity:
    """What statx says of some executable of root's."""
    return msgspec.structs.replace(_IDENTITY, **changes)


def sighting(path: bytes = b"/usr/bin/app", *, seen_ns: int = NOW, **changes: Any) -> Sighting:
    """A sighting; ``changes`` are fields of the origin, or else of its identity."""
    of_origin = {key: changes.pop(key) for key in [*changes] if key in Origin.__struct_fields__}
    origin = Origin(**{"path": path, "identity": identity(**changes), **of_origin})
    return Sighting(origin, seen_ns)


def stage(store: Store, content: bytes) -> Staged:
    """Stage bytes."""
    fd = os.memfd_create("captured")
    try:
        os.write(fd, content)
        return store.stage(fd)
    finally:
        os.close(fd)


def capture(
    store: Store,
    content: bytes | Digest,
    build_id: bytes = b"\xab\xcd\xef\x01",
    *,
    at: Sighting | None = None,
    kinds: Iterable[Kind] = (Kind.EXECUTABLE,),
    quality: Quality = Quality.NONE,
    trust: Trust | None = None,
) -> NewCapture:
    """A capture ready for commit; bytes are staged, a digest is taken as it is."""
    seen = at or sighting()
    if trust is not None:
        origin = msgspec.structs.replace(seen.origin, trust=trust)
        seen = msgspec.structs.replace(seen, origin=origin)
    held = content if isinstance(content, Digest) else stage(store, content)
    new = NewCapture(seen, held, BuildId(build_id), tuple(kinds), quality)
    found = Absence.NOT_ELF if isinstance(content, Digest) else _described(content)
    if isinstance(found, Absence):
        return new
    truncated = bool(found.truncated)
    return msgspec.structs.replace(new, segments=found.segments, truncated=truncated)


def _described(content: bytes) -> identify.ElfFile | Absence:
    """What a scanner says of a file."""

    def read_at(offset: int, size: int) -> bytes:
        return content[offset : offset + size]

    found = identify.describe(read_at, len(content))
    if found is Absence.NO_BUILD_ID:
        found = identify.classify(BuildId(bytes(20)), content[:4096], read_at, len(content))
    return found


def commit(store: Store, *captures: NewCapture) -> CommitResult:
    """Commit, and expect a sound store."""
    result = store.commit(captures)
    assert list(store.check()) == []
    return result


def read_blob(store: Store, digest: Digest) -> bytes:
    """All bytes of a blob."""
    with store.open_blob(digest) as blob:
        return blob.pread(blob.size, 0)
