# SPDX-License-Identifier: Apache-2.0
"""Capture of the source files that debuginfo names, so that a server can give them to debuggers.

Debug information is a claim: a file of a stranger may name any file of the host as its source. So a
source file is captured only below directories that the operator gave, and only if all users can
read it; no path is resolved outside of these directories. If the line table has the MD5 of a file,
the file must have it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import tempfile
from typing import IO, TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from buildidfs import names
from buildidfs.capture.archive import packaged_files
from buildidfs.capture.base import Unreadable
from buildidfs.capture.origin.builder import Here
from buildidfs.errors import IntegrityError, InvalidBuildId, UsageError
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

_MOST_NAMED: Final = 2_000_000
_MOST_UNPACKED: Final = 4 << 30
_DEBUG_FILE: Final = re.compile(rb".*/\.build-id/([0-9a-f]{2})/([0-9a-f]+)(?:\.debug)?", re.DOTALL)
"""The names of debug files and programs in packages that tell their build ID."""


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
    with _Roots(here, [*roots, *(Root(path, path) for path in DEFAULT_ROOTS)]) as opened:
        for build_id in dict.fromkeys(build_ids):
            kept_under = names.sources_id(build_id)
            artifact = _described(store, build_id)
            if artifact is not None and kept_under is not None:
                _capture(store, here, opened, kept_under, artifact, counts)
    return counts


def capture_packaged_sources(
    store: Store, settings: Settings, paths: Sequence[bytes]
) -> SourceCounts:
    """Capture the sources in packages that debug files in these packages name.

    The packages are read twice, after they were scanned: for the build IDs of their debug files,
    and for the files that these name. Raises `StoreFull`.
    """
    counts = SourceCounts()
    here = Here("tree", container_namespaces=settings.container.namespaces)
    chosen = _packaged_debuginfo(store, paths)
    named: set[bytes] = set()
    for _, artifact in chosen:
        with store.blobs.open(artifact.digest) as blob:
            for each in line_files(blob.read_at, blob.size):
                if len(named) < _MOST_NAMED:
                    named.add(source_archive.normal(each.path))
    if not named:
        return counts
    with tempfile.TemporaryFile(dir=os.fsdecode(store.path), buffering=0) as content:
        packed = _Packed(content)
        packed.fill(paths, named)
        for kept_under, artifact in chosen:
            _capture(store, here, packed, kept_under, artifact, counts)
    return counts


def _packaged_debuginfo(store: Store, paths: Sequence[bytes]) -> list[tuple[BuildId, Artifact]]:
    """The debuginfo that packages have, with the IDs that their sources are kept under.

    Only if the debuginfo that is served is that of the packages: they say nothing of other files.
    """
    containers: set[str] = set()
    build_ids: dict[BuildId, None] = {}
    for file in packaged_files.files_in(paths):
        if isinstance(file, Unreadable):
            continue  # the scan has told of it
        containers.add(file.container)
        match = _DEBUG_FILE.fullmatch(file.path)
        if match is not None and len(match[2]) % 2 == 0:
            with contextlib.suppress(InvalidBuildId):
                build_ids[BuildId(bytes.fromhex((match[1] + match[2]).decode()))] = None
    chosen = []
    for build_id in build_ids:
        artifact, kept_under = _described(store, build_id), names.sources_id(build_id)
        if artifact is not None and kept_under is not None:
            places = store.index.origins(artifact.ordinal)
            if any(
                each.digest == artifact.digest and each.origin.container in containers
                for each in places
            ):
                chosen.append((kept_under, artifact))
    return chosen


def _described(store: Store, build_id: BuildId) -> Artifact | None:
    """The file with the debug information of a build ID; None if the store has none."""
    ordinal = store.index.ordinal(build_id) or 0
    for kind in (Kind.DEBUGINFO, Kind.EXECUTABLE):
        artifact = store.index.artifact(ordinal, kind)
        if artifact is not None and artifact.quality >= Quality.DEBUGINFO:
            return artifact
    return None


class _TooLarge(Exception):
    """A source file is larger than any that is captured."""


class _Files(Protocol):
    """Where source files come from."""

    def read(self, path: bytes) -> bytes | None:
        """The bytes of a file by its path in debug information; None for one that is elsewhere.

        Raises OSError if it is not there, or not for all users, and `_TooLarge`.
        """


class _Packed:
    """Files out of packages, one after the other in ``content``."""

    def __init__(self, content: IO[bytes]) -> None:
        self._content = content
        self._places: dict[bytes, tuple[int, int]] = {}
        self._large: set[bytes] = set()

    def fill(self, paths: Sequence[bytes], named: set[bytes]) -> None:
        """Take the files with these names out of packages."""
        end = 0

        def is_wanted(path: bytes, size: int) -> bool:
            if path in named and (size > _MOST_FILE or end + size > _MOST_UNPACKED):
                self._large.add(path)
            return path in named and path not in self._large and path not in self._places

        for file in packaged_files.files_in(paths, is_wanted):
            if isinstance(file, Unreadable) or file.data is None:
                continue
            file_ops.write_fully(self._content.fileno(), file.data)
            self._places[file.path] = end, len(file.data)
            end += len(file.data)

    def read(self, path: bytes) -> bytes | None:
        """The bytes of a file."""
        if path in self._large:
            raise _TooLarge
        place = self._places.get(path)
        return None if place is None else os.pread(self._content.fileno(), place[1], place[0])


class _Roots:
    """The directories that sources are taken from; a context manager."""

    def __init__(self, here: Here, roots: Sequence[Root]) -> None:
        self._here = here
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

    def read(self, path: bytes) -> bytes | None:
        """The bytes of a file that all users can read."""
        opened = self._open(path)
        if opened is None:
            return None
        fd, place = opened
        try:
            sighting = self._here.reached(self._here.sighting(place, fd), fd)
            if not sighting.origin.is_public:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            if os.fstat(fd).st_size > _MOST_FILE:
                raise _TooLarge
            return file_ops.read_fully(fd, _MOST_FILE, 0)
        finally:
            os.close(fd)

    def _open(self, path: bytes) -> tuple[int, bytes] | None:
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
    files: _Files,
    kept_under: BuildId,
    artifact: Artifact,
    counts: SourceCounts,
) -> None:
    with tempfile.TemporaryFile(dir=os.fsdecode(store.path), buffering=0) as content:
        found = _collect(store, files, artifact, counts, content)
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
    files: _Files,
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
            data = _source(files, path, named.md5, counts)
            if data is None:
                continue
            if total + len(data) > _MOST_ARCHIVE:
                counts.large += 1
                continue
            file_ops.write_fully(content.fileno(), data)
            found[path] = len(data)
            total += len(data)
    return found


def _source(files: _Files, path: bytes, md5: bytes, counts: SourceCounts) -> bytes | None:
    """The bytes of a source file; None if it is not captured, which is counted."""
    try:
        data = files.read(path)
    except _TooLarge:
        counts.large += 1
        return None
    except OSError:
        counts.absent += 1
        return None
    if data is None:
        counts.elsewhere += 1
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
