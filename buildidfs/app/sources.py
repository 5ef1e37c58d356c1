# SPDX-License-Identifier: Apache-2.0
"""Capture of the source files that debuginfo names, so that a server can give them to debuggers.

Debug information is a claim: a file of a stranger may name any file of the host as its source. So a
source file is captured only below directories that the operator gave, and only if all users can
read it; no path is resolved outside of these directories. If the line table has the MD5 of a file,
the file must have it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from typing import IO, TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs import names
from buildidfs.capture.origin.builder import Here
from buildidfs.errors import IntegrityError, UsageError
from buildidfs.formats import source_archive
from buildidfs.formats.elf.line_files import line_files
from buildidfs.linux import file_ops, openat2
from buildidfs.model import EVERYBODY, BuildId, Kind, Quality, Sighting
from buildidfs.store import NewCapture

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from buildidfs.config import Settings
    from buildidfs.model import Artifact
    from buildidfs.store import Store

DEFAULT_ROOTS: Final = (b"/usr/src", b"/usr/include", b"/usr/lib/gcc")

_MOST_FILE: Final = 16 << 20
_MOST_ARCHIVE: Final = 512 << 20
_SOURCES: Final = b"/[sources]"


class Root(NamedTuple):
    """A directory with sources, and the path that debug information has for it."""

    path: bytes
    named: bytes


class SourceCounts(msgspec.Struct):
    """The result: source files captured, of how many build IDs, and why others were not.

    ``elsewhere`` are below no directory that was given, ``absent`` is not there or cannot be read
    by all users, ``different`` has another MD5, ``large`` exceeds a limit.
    """

    files: int = 0
    build_ids: int = 0
    elsewhere: int = 0
    absent: int = 0
    different: int = 0
    large: int = 0


def parse_root(text: bytes) -> Root:
    """Parse a root from ``DIR`` or ``PATH=DIR``; debug information names DIR as PATH."""
    named, equals, path = text.partition(b"=")
    path = os.path.abspath(path if equals else named)
    if equals and not named.startswith(b"/"):
        raise UsageError(f"not an absolute path: {os.fsdecode(named)!r}")
    return Root(path, source_archive.normal(named) if equals else path)


def capture_sources(
    store: Store, settings: Settings, build_ids: Iterable[BuildId], roots: Sequence[Root]
) -> SourceCounts:
    """Capture the sources of build IDs whose debuginfo the store has; raises `StoreFull`."""
    counts = SourceCounts()
    here = Here("tree", container_namespaces=settings.container.namespaces)
    with _Roots([*roots, *(Root(path, path) for path in DEFAULT_ROOTS)]) as opened:
        for build_id in dict.fromkeys(build_ids):
            kept_under = names.sources_id(build_id)
            artifact = _described(store, build_id)
            if artifact is not None and kept_under is not None:
                _capture(store, here, opened, kept_under, artifact, counts)
    return counts


def _described(store: Store, build_id: BuildId) -> Artifact | None:
    """The file with the debug information of a build ID; None if the store has none."""
    ordinal = store.index.ordinal(build_id) or 0
    for kind in (Kind.DEBUGINFO, Kind.EXECUTABLE):
        artifact = store.index.artifact(ordinal, kind)
        if artifact is not None and artifact.quality >= Quality.DEBUGINFO:
            return artifact
    return None


class _Roots:
    """The directories that sources are taken from; a context manager."""

    def __init__(self, roots: Sequence[Root]) -> None:
        self._roots: list[tuple[Root, int]] = []
        for root in roots:
            try:
                fd = os.open(root.path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            except OSError:
                continue
            self._roots.append((root, fd))

    def __enter__(self) -> _Roots:
        return self

    def __exit__(self, *_: object) -> None:
        for _root, fd in self._roots:
            os.close(fd)

    def open(self, path: bytes) -> tuple[int, bytes] | None:
        """Open a source file by its path in debug information, and tell where it is.

        None if the path is below no root. Raises OSError.
        """
        failure: OSError | None = None
        for root, fd in self._roots:
            rest = path.removeprefix(root.named.rstrip(b"/") + b"/")
            if rest == path:
                continue
            try:
                return openat2.open_regular_in_root(fd, rest), os.path.join(root.path, rest)
            except OSError as error:
                failure = error
        if failure is not None:
            raise failure
        return None


def _capture(
    store: Store,
    here: Here,
    roots: _Roots,
    kept_under: BuildId,
    artifact: Artifact,
    counts: SourceCounts,
) -> None:
    with tempfile.TemporaryFile(dir=os.fsdecode(store.path), buffering=0) as content:
        found = _collect(store, here, roots, artifact, counts, content)
        if not found:
            return
        head = source_archive.pack((path, size) for path, size in found.items())
        with tempfile.TemporaryFile(dir=os.fsdecode(store.path), buffering=0) as archive:
            os.fchmod(archive.fileno(), 0o644)
            file_ops.write_fully(archive.fileno(), head)
            at, end = 0, os.fstat(content.fileno()).st_size
            while at < end:
                at += os.sendfile(archive.fileno(), content.fileno(), at, end - at)
            _commit(store, here, kept_under, artifact, archive)
    counts.files += len(found)
    counts.build_ids += 1


def _collect(
    store: Store,
    here: Here,
    roots: _Roots,
    artifact: Artifact,
    counts: SourceCounts,
    content: IO[bytes],
) -> dict[bytes, int]:
    """Write the sources of a file one after the other; returns their paths and sizes."""
    found: dict[bytes, int] = {}
    total = 0
    with store.blobs.open(artifact.digest) as blob:
        for named in line_files(blob.read_at, blob.size):
            path = source_archive.normal(named.path)
            if path in found:
                continue
            data = _source(here, roots, path, named.md5, counts)
            if data is None:
                continue
            if total + len(data) > _MOST_ARCHIVE:
                counts.large += 1
                continue
            file_ops.write_fully(content.fileno(), data)
            found[path] = len(data)
            total += len(data)
    return found


def _source(
    here: Here, roots: _Roots, path: bytes, md5: bytes, counts: SourceCounts
) -> bytes | None:
    """The bytes of a source file; None if it is not captured, which is counted."""
    try:
        opened = roots.open(path)
        if opened is None:
            counts.elsewhere += 1
            return None
        fd, place = opened
        try:
            sighting = here.reached(here.sighting(place, fd), fd)
            if not sighting.origin.is_public:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            if os.fstat(fd).st_size > _MOST_FILE:
                counts.large += 1
                return None
            data = file_ops.read_fully(fd, _MOST_FILE, 0)
        finally:
            os.close(fd)
    except OSError:
        counts.absent += 1
        return None
    if md5 and hashlib.md5(data, usedforsecurity=False).digest() != md5:
        counts.different += 1
        return None
    return data


def _commit(
    store: Store, here: Here, kept_under: BuildId, artifact: Artifact, archive: IO[bytes]
) -> None:
    """Keep an archive in place of the one before it. Raises `StoreFull`, `StoreError`."""
    ordinal = store.index.ordinal(kept_under)
    before = set() if ordinal is None else {
        each.digest for each in store.index.variants(ordinal, Kind.DEBUGINFO)
    }  # fmt: skip
    staged = store.stage(archive.fileno())
    if staged.digest in before:
        staged.close()
        return
    new = here.sighting(_SOURCES, archive.fileno())
    records = store.index.origins(artifact.ordinal)
    last = next((each for each in records if each.digest == artifact.digest), None)
    if last is None:
        staged.close()
        raise IntegrityError("the index has no place of a file that it has")
    # It is believed as its debuginfo is, and readable by all: so was each of the files.
    identity = msgspec.structs.replace(new.origin.identity, scope=None)
    origin = msgspec.structs.replace(
        last.origin,
        path=_SOURCES + last.origin.path,
        identity=identity,
        reach=EVERYBODY,
        trust=artifact.trust,
        standing=artifact.standing,
        archive=b"",
        scanner="tree",
    )
    capture = NewCapture(
        Sighting(origin, new.seen_ns),
        staged,
        kept_under,
        (Kind.DEBUGINFO,),
        remember=False,
    )
    store.commit([capture])
    store.remove(before)
