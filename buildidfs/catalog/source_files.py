# SPDX-License-Identifier: Apache-2.0
"""Capture of the source files that debuginfo names, so that a server can give them to debuggers.

Debug information is a claim: a file of a stranger may name any file of the host as its source. So a
source file is captured only below directories that the operator gave, and only if all users can
read it; no path is resolved outside of these directories. If the line table has an MD5 for a file,
the file must match it.

A package brings sources only for debuginfo in the packages of the same command. An image brings
sources only for debuginfo that it contains, if this was captured at no better place and has no
sources yet. Packages and images that not all users can read bring no sources.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import tempfile
from functools import partial
from itertools import islice
from typing import IO, TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from buildidfs import names
from buildidfs.capture import base
from buildidfs.capture.archive import plain_files, stream
from buildidfs.capture.base import PinnedFile, Resighting, Unreadable
from buildidfs.capture.origin.builder import Here
from buildidfs.capture.scan.tree import identify_tree
from buildidfs.errors import IntegrityError, InvalidBuildId, UsageError
from buildidfs.formats import source_archive
from buildidfs.formats.elf import identify
from buildidfs.formats.elf.line_files import SourceNames
from buildidfs.formats.elf.sections import packed_sections
from buildidfs.formats.elf.units import SECTION_MAX
from buildidfs.linux import file_ops, inodes
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import Absence, BuildId, ByteRange, Kind, Quality, Sighting, Standing
from buildidfs.store import NewCapture
from buildidfs.store.permissions import PUBLIC, may_see

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from buildidfs.capture.archive.elf_members import ArchiveOrigin
    from buildidfs.capture.archive.plain_files import PlainFile
    from buildidfs.capture.image.scanner import ImageScanner
    from buildidfs.config import Settings
    from buildidfs.formats.elf.header import ReadAt
    from buildidfs.formats.elf.line_files import LineFile
    from buildidfs.model import Artifact, Digest
    from buildidfs.store import Store

DEFAULT_ROOTS: Final = (b"/usr/src", b"/usr/include", b"/usr/lib/gcc")

_MOST_FILE: Final = 16 << 20
_MOST_ARCHIVE: Final = 512 << 20
_SOURCES: Final = b"/[sources]"

_MOST_NAMED: Final = 2_000_000
_MOST_UNPACKED: Final = 4 << 30
_DEBUG_FILE: Final = re.compile(rb".*/\.build-id/([0-9a-f]{2})/([0-9a-f]+)(?:\.debug)?", re.DOTALL)
"""The paths in packages that contain the build ID of their file: debug files and programs."""


class SourceRoot(NamedTuple):
    """A directory with sources, and the path that debug information has for it."""

    path: bytes
    named: bytes


class SourceCounts(msgspec.Struct):
    """The number of captured source files, of their build IDs, and of other source files by reason.

    ``elsewhere`` are not below a given directory, ``absent`` do not exist or cannot be read by all
    users, ``different`` have another MD5, ``large`` exceed a limit, ``relative`` have a name in an
    unknown directory. ``kept`` counts build IDs that have sources already, ``no_debuginfo`` those
    for which the store has no debuginfo with the names of sources.
    """

    files: int = 0
    build_ids: int = 0
    elsewhere: int = 0
    absent: int = 0
    different: int = 0
    large: int = 0
    relative: int = 0
    kept: int = 0
    no_debuginfo: int = 0


def parse_root(text: bytes) -> SourceRoot:
    """Parse a root from ``DIR`` or ``PATH=DIR``; debug information names DIR as PATH."""
    named, equals, path = text.partition(b"=")
    path = os.path.abspath(path if equals else named)
    if equals and not named.startswith(b"/"):
        raise UsageError(f"not an absolute path: {os.fsdecode(named)!r}")
    return SourceRoot(path, source_archive.normal(named) if equals else path)


def capture_sources(
    store: Store, settings: Settings, build_ids: Iterable[BuildId], roots: Sequence[SourceRoot]
) -> SourceCounts:
    """Capture the sources of build IDs whose debuginfo the store has; raises `StoreFull`."""
    counts = SourceCounts()
    here = Here("tree", container_namespaces=settings.container.namespaces)
    with _Roots(here, [*roots, *(SourceRoot(path, path) for path in DEFAULT_ROOTS)]) as opened:
        for build_id in dict.fromkeys(build_ids):
            kept_under = names.sources_id(build_id)
            artifact = _described(store, build_id)
            if artifact is None:
                counts.no_debuginfo += 1
            elif kept_under is not None:
                _capture(store, here, opened, kept_under, artifact, counts)
    return counts


def capture_tree_sources(
    store: Store, settings: Settings, paths: Sequence[bytes], source_dirs: Iterable[bytes]
) -> SourceCounts:
    """Capture the sources of the files below ``paths``, from there and from ``source_dirs``.

    Raises `UsageError` for a directory that `parse_root` refuses, `StoreFull`.
    """
    roots = [parse_root(each) for each in source_dirs]
    roots += [SourceRoot(real, real) for real in map(os.path.realpath, paths)]
    found = (answer for _, answer in identify_tree(paths))
    build_ids = (answer for answer in found if isinstance(answer, BuildId))
    return capture_sources(store, settings, build_ids, roots)


def capture_packaged_sources(
    store: Store, settings: Settings, paths: Sequence[bytes]
) -> SourceCounts:
    """Capture source files in packages: those that debug files in these packages name.

    After the scan, the packages are read twice more: for the build IDs of their debug files, and
    for the source files that these name. Raises `StoreFull`.
    """
    counts = SourceCounts()
    chosen = _packaged_debuginfo(store, paths)
    with tempfile.TemporaryFile(dir=os.fsdecode(store.path), buffering=0) as content:
        files = _Archived(_named(store, chosen), content)
        for file in plain_files.in_packages(paths, partial(files.is_wanted, _PACKAGES)):
            if not isinstance(file, Unreadable):
                files.add([_PACKAGES], file.file)
        _capture_archived(store, settings, files, chosen, counts)
    return counts


def capture_image_sources(
    store: Store, settings: Settings, scanner: Callable[[], ImageScanner]
) -> SourceCounts:
    """Capture source files in images: those that debuginfo in the same image names.

    ``scanner`` makes a scanner of the images, which were scanned before. The images are read twice:
    for the build IDs, and for the source files that their debuginfo names. An image may come from
    anywhere, so it adds no sources to a build ID that has some. Raises `StoreFull`.
    """
    counts = SourceCounts()
    chosen = []
    for each in _image_debuginfo(store, scanner()):
        if store.index.artifact(store.index.ordinal(each.kept_under) or 0, Kind.DEBUGINFO) is None:
            chosen.append(each)
        else:
            counts.kept += 1
    if not chosen:
        return counts
    with tempfile.TemporaryFile(dir=os.fsdecode(store.path), buffering=0) as content:
        files = _Archived(_named(store, chosen), content)

        def is_wanted(whose: ArchiveOrigin, path: bytes, size: int) -> bool:
            return files.is_wanted(_place(whose.container, whose.host), path, size)

        for item in scanner().plain_files(is_wanted):
            if not isinstance(item, Unreadable):
                whose, file = item
                files.add([_place(each.container, each.host) for each in whose], file)
        _capture_archived(store, settings, files, chosen, counts)
    return counts


_Place = tuple[str, str]
"""The origin of sources: an image, by its label and digest, or all given packages."""

_PACKAGES: Final = ("", "")


def _place(container: str, host: str) -> _Place:
    """Return the image of a file, by the container and the host of its origin."""
    return container, host.rpartition("/")[0]


class _Chosen(NamedTuple):
    """Debuginfo, the ID under which its sources are kept, and the places that may have them."""

    kept_under: BuildId
    artifact: Artifact
    places: Sequence[_Place] = (_PACKAGES,)


def _named(store: Store, chosen: Iterable[_Chosen]) -> dict[_Place, set[bytes]]:
    """Return the paths of the source files that debuginfo names, for each place, up to a limit."""
    found: dict[_Place, set[bytes]] = {}
    room = _MOST_NAMED
    for each in chosen:
        with named_by(store, each.artifact.digest) as names_in_it:
            files = islice(names_in_it.files(), max(room, 0))
            paths = {source_archive.normal(each.path) for each in files if _is_absolute(each)}
        for place in each.places:
            known = found.setdefault(place, set())
            room += len(known)
            known |= paths
            room -= len(known)
    return found


def _capture_archived(
    store: Store,
    settings: Settings,
    files: _Archived,
    chosen: Iterable[_Chosen],
    counts: SourceCounts,
) -> None:
    here = Here("tree", container_namespaces=settings.container.namespaces)
    for each in chosen:
        _capture(store, here, _At(files, each.places), each.kept_under, each.artifact, counts)


def _packaged_debuginfo(store: Store, paths: Sequence[bytes]) -> list[_Chosen]:
    """Return the debuginfo in packages.

    The debuginfo of a build ID is included only if the served file comes from the packages: the
    sources in a package belong to its own debuginfo only.
    """
    containers: set[str] = set()
    build_ids: dict[BuildId, None] = {}
    for found in plain_files.in_packages(paths):
        if isinstance(found, Unreadable):
            continue  # the scan has reported it
        containers.add(found.container)
        match = _DEBUG_FILE.fullmatch(found.file.path)
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
                chosen.append(_Chosen(kept_under, artifact))
    return chosen


def _image_debuginfo(store: Store, scanner: ImageScanner) -> list[_Chosen]:
    """Return the debuginfo in images, each with the images that contain it.

    Debuginfo is included only if the served one comes from the image and was at no better place:
    the sources in an image belong to its own debuginfo only.
    """
    seen: dict[BuildId, set[_Place]] = {}
    for item in scanner:
        if isinstance(item, Unreadable):
            continue  # the scan has reported it
        build_id = _build_id(item)
        if build_id is not None:
            origin = item.sighting.origin
            seen.setdefault(build_id, set()).add(_place(origin.container, origin.host))
    chosen = []
    for build_id, images in seen.items():
        artifact, kept_under = _described(store, build_id), names.sources_id(build_id)
        if artifact is None or kept_under is None or artifact.standing is not Standing.IMAGE:
            continue
        places = dict.fromkeys(
            _place(each.origin.container, each.origin.host)
            for each in store.index.origins(artifact.ordinal)
            if each.digest == artifact.digest and each.origin.trust is artifact.trust
        )
        if shown := [place for place in places if place in images]:
            chosen.append(_Chosen(kept_under, artifact, shown))
    return chosen


def _build_id(item: PinnedFile | Resighting) -> BuildId | None:
    """Return the build ID of a file that a scanner found; close the file."""
    if isinstance(item, Resighting):
        return item.known.build_id
    try:
        answer = item.build_id or base.identify(item.fd)
    except OSError:
        return None
    finally:
        item.close()
    return answer if isinstance(answer, BuildId) else None


def _described(store: Store, build_id: BuildId) -> Artifact | None:
    """Return the file with the debug information of a build ID; None if the store has none."""
    ordinal = store.index.ordinal(build_id) or 0
    for kind in (Kind.DEBUGINFO, Kind.EXECUTABLE):
        artifact = store.index.artifact(ordinal, kind)
        if artifact is not None and artifact.quality >= Quality.DEBUGINFO:
            return artifact
    return None


class _TooLarge(Exception):
    """A source file is larger than the limit."""


class _Files(Protocol):
    """A source of source files."""

    def read(self, path: bytes) -> bytes | None:
        """Return the bytes of a file by its path in debug information; None if the path is not
        below a directory of this source.

        Raises `_TooLarge`. Raises OSError if the file does not exist, or not all users may read it.
        """


class _Archived:
    """Files from packages and images, one after another in ``content``.

    ``named`` has the paths of the files to take from each.
    """

    def __init__(self, named: Mapping[_Place, set[bytes]], content: IO[bytes]) -> None:
        self._named = named
        self._content = content
        self._end = 0
        self._extents: dict[tuple[_Place, bytes], ByteRange] = {}
        self._is_private: dict[tuple[_Place, bytes], bool] = {}

    def is_wanted(self, place: _Place, path: bytes, size: int) -> bool:
        """Return True if a file is named, not too large, and not stored yet."""
        is_named = path in self._named.get(place, ()) and (place, path) not in self._extents
        return is_named and size <= _MOST_FILE and self._end + size <= _MOST_UNPACKED

    def add(self, places: Iterable[_Place], file: PlainFile) -> None:
        """Add a file that has the same path in several places."""
        keys = [
            (place, file.path)
            for place in places
            if file.path in self._named.get(place, ()) and (place, file.path) not in self._extents
        ]
        if not keys:
            return
        if file.data is None:
            if file.is_private or file.size:
                self._is_private.update(dict.fromkeys(keys, file.is_private))
            return
        file_ops.write_fully(self._content.fileno(), file.data)
        self._extents.update(dict.fromkeys(keys, ByteRange(self._end, file.size)))
        self._end += file.size

    def read(self, place: _Place, path: bytes) -> bytes | None:
        """Return the bytes of a file at a place. Raises the errors of `_Files.read`."""
        extent = self._extents.get((place, path))
        if extent is not None:
            return os.pread(self._content.fileno(), extent.size, extent.offset)
        is_private = self._is_private.get((place, path))
        if is_private is None:
            return None
        raise _private() if is_private else _TooLarge


class _At(NamedTuple):
    """The archived files of some places; the first place that has a file decides."""

    files: _Archived
    places: Sequence[_Place]

    def read(self, path: bytes) -> bytes | None:
        """See `_Files`."""
        failure: Exception | None = None
        for place in self.places:
            try:
                data = self.files.read(place, path)
            except (OSError, _TooLarge) as error:
                failure = error
            else:
                if data is not None:
                    return data
        if failure is not None:
            raise failure
        return None


def _private() -> PermissionError:
    """Return the error for a file that not all users may read."""
    return PermissionError(errno.EACCES, os.strerror(errno.EACCES))


class _Roots:
    """The directories from which sources are taken; a context manager."""

    def __init__(self, here: Here, roots: Sequence[SourceRoot]) -> None:
        self._here = here
        self._roots: list[tuple[SourceRoot, int]] = []
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
        """Return the bytes of a file that all users can read."""
        opened = self._open(path)
        if opened is None:
            return None
        fd, place = opened
        with closing_fd(fd):
            sighting = self._here.reached(self._here.sighting(place, fd), fd)
            if not sighting.origin.is_public:
                raise _private()
            if os.fstat(fd).st_size > _MOST_FILE:
                raise _TooLarge
            return file_ops.read_fully(fd, _MOST_FILE, 0)

    def _open(self, path: bytes) -> tuple[int, bytes] | None:
        """Open a source file by its path in debug information, and return its real path, too.

        Returns None if the path is below no root. Raises OSError.
        """
        failure: OSError | None = None
        for root, fd in self._roots:
            rest = path.removeprefix(root.named.rstrip(b"/") + b"/")
            if rest == path:
                continue
            try:
                return inodes.open_regular_in_root(fd, rest), os.path.join(root.path, rest)
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
    store: Store, files: _Files, artifact: Artifact, counts: SourceCounts, content: IO[bytes]
) -> dict[bytes, int]:
    """Write the sources of a file one after another; return their paths and sizes."""
    found: dict[bytes, int] = {}
    total = 0
    with named_by(store, artifact.digest) as names_in_it:
        for named in names_in_it.files():
            if not _is_absolute(named):
                counts.relative += 1
                continue
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


@contextlib.contextmanager
def named_by(store: Store, digest: Digest) -> Iterator[SourceNames]:
    """Yield the names of source files in a file with debug information.

    Raises `IntegrityError` if the blob is gone, or has other bytes.
    """
    with contextlib.ExitStack() as stack:
        file = _readable(store, digest, stack)

        def alternate() -> tuple[ReadAt, int] | None:
            described = identify.describe(*file)
            if isinstance(described, Absence) or described.altlink is None:
                return None
            ordinal = store.index.ordinal(described.altlink.build_id) or 0
            found = store.index.artifact(ordinal, Kind.DEBUGINFO)
            if found is None:
                return None
            return _readable(store, found.digest, stack)

        yield SourceNames(*file, alternate)


def _readable(store: Store, digest: Digest, stack: contextlib.ExitStack) -> tuple[ReadAt, int]:
    """Return a blob, or a copy of it with plain sections if some are compressed by zstd or are
    large. Sections that cannot be decompressed stay compressed.
    """
    blob = stack.enter_context(store.blobs.open(digest))
    if packed_sections(blob.read_at, blob.size, SECTION_MAX):
        with contextlib.suppress(OSError):
            copy = base.scratch_file()
            stack.callback(os.close, copy)
            file_ops.copy(blob.fileno(), copy)
            with contextlib.suppress(stream.CannotDecompress):
                stream.unpack_sections(copy, stream.SECTIONS_MAX, SECTION_MAX)
            return lambda offset, size: os.pread(copy, size, offset), os.fstat(copy).st_size
    return blob.read_at, blob.size


def _is_absolute(file: LineFile) -> bool:
    return file.path.startswith(b"/")


def _source(files: _Files, path: bytes, md5: bytes, counts: SourceCounts) -> bytes | None:
    """Return the bytes of a source file; None if it is not captured, which is counted."""
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
    """Commit an archive in place of the earlier one. Raises `StoreFull`, `StoreError`."""
    kept = store.index.variants(store.index.ordinal(kept_under) or 0, Kind.DEBUGINFO)
    before = {each.digest for each in kept}
    staged = store.stage(archive.fileno())
    if staged.digest in before:
        staged.close()
        return
    new = here.sighting(_SOURCES, archive.fileno())
    records = store.index.origins(artifact.ordinal)
    places = [each.origin for each in records if each.digest == artifact.digest]
    if not places:
        staged.close()
        raise IntegrityError("the index has no place of a file that it has")
    place = next((each for each in places if may_see(PUBLIC, each)), places[0])
    # The archive gets the trust and the readers of its debuginfo, because it shows the paths in it.
    theirs = place.identity
    identity = msgspec.structs.replace(
        new.origin.identity, scope=None, mode=theirs.mode, uid=theirs.uid, gid=theirs.gid
    )
    origin = msgspec.structs.replace(
        place,
        path=_SOURCES + place.path,
        identity=identity,
        trust=artifact.trust,
        standing=artifact.standing,
        archive=b"",
        scanner="tree",
    )
    capture = NewCapture(
        Sighting(origin, new.seen_ns), staged, kept_under, (Kind.DEBUGINFO,), remember=False
    )
    store.commit([capture])
    store.remove(before)
