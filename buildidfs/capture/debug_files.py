# SPDX-License-Identifier: Apache-2.0
"""The debug files that belong to a binary, searched where debuggers search, in the root of the
binary.

The search looks for the build ID below .build-id of each directory with debug files, such as
/usr/lib/debug, then for the name in .gnu_debuglink: beside the binary, in .debug beside it, and
below these directories (`debug_directories`). The section
.gnu_debugaltlink of a debug file leads to its dwz file (gdb manual, "Separate Debug Files";
dwz(1)). The .dwp file of split debug information lies beside the binary or its debug file. The
author of the binary chooses these names, so they are resolved inside the given root, and each file
must prove that it belongs to the binary. The proof is the build ID; for a file without one, the
checksum in the link; for a .dwp file, its units.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import zlib
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs import names
from buildidfs.capture import base
from buildidfs.capture.base import Known, Memo, Unreadable
from buildidfs.config import DEBUG_DIRECTORIES
from buildidfs.formats.elf import units
from buildidfs.formats.elf.identify import AltLink, DebugLink, ElfFile
from buildidfs.linux import inodes
from buildidfs.linux.file_ops import close_fds, closing_fd, closing_on_error
from buildidfs.model import Absence, BuildId, FileIdentity, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

DEBUG_ROOT: Final = b"/usr/lib/debug"
DEFAULT_DIRECTORIES: Final = tuple(map(os.fsencode, DEBUG_DIRECTORIES))
"""The directories with debug files that are searched by default."""

CRC_MAX_BYTES: Final = 2 << 30
"""Larger files are not read for a comparison of their checksum."""

_BY_ID: Final = b"/.build-id"
_GDBINIT: Final = (
    b"/etc/gdb/gdbinit",
    b"/etc/gdbinit",
    b"/usr/local/etc/gdb/gdbinit",
    b"/root/.gdbinit",
    b"/root/.config/gdb/gdbinit",
)
_GDBINIT_MAX: Final = 64 << 10
_SETTING: Final = re.compile(rb"^[ \t]*set[ \t]+debug-file-directory[ \t]+(\S+)", re.MULTILINE)
_MOST_NAMED: Final = 8
_DWZ: Final = b"/.dwz/"
_CHUNK: Final = 1 << 20
_SKELETONS: Final = 16  # one unit in a package is proof enough

# The file is missing or not regular: neither is reported.
_NOT_THERE: Final = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO)
)


class Companion(msgspec.Struct):
    """A file that belongs to a binary. ``path`` is its path in the container's root.

    ``path_fd`` (O_PATH) refers to it, ``fd`` reads it. If `capture.base.Memo` remembers the file
    from an earlier capture, ``known`` is set, and ``fd`` is -1. ``kind``, ``build_id`` and
    ``is_copy`` mean the same as in `capture.base.PinnedFile`; the first two are set only if the
    file has no build ID of its own. As a context manager it closes both descriptors, except ``fd``
    if `release` was called.
    """

    path: bytes
    identity: FileIdentity
    path_fd: int
    fd: int = -1
    known: Known | None = None
    kind: Kind | None = None
    build_id: BuildId | None = None
    is_copy: bool = False

    def release(self) -> int:
        """Return the descriptor; the caller closes it."""
        fd, self.fd = self.fd, -1
        return fd

    def __enter__(self) -> Companion:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; safe to call twice."""
        path_fd, self.path_fd = self.path_fd, -1
        close_fds(path_fd, self.release())


class Opener:
    """Opens candidate files, on filesystems that answer. Raises OSError."""

    def open(self, root_fd: int, path: bytes) -> tuple[int, FileIdentity]:
        """Pin the file at a path of a root (O_PATH), and return its identity."""
        with closing_on_error(inodes.open_in_root(root_fd, path, os.O_PATH)) as path_fd:
            return path_fd, inodes.identity(path_fd)

    def reopen(self, path_fd: int, identity: FileIdentity) -> tuple[int, bool]:
        """Return a descriptor that reads a pinned regular file, and True if it reads a copy."""
        return inodes.reopen_regular(path_fd), False


class Companions:
    """Looks for companions in one root directory.

    ``root_fd`` is the root (O_PATH suffices); the caller closes it. No file is opened on
    ``refused_devices`` (values of st_dev). ``opener`` opens files on filesystems that may not
    answer, ``directories`` have debug files. ``existing`` has the directories that exist in this
    root, or do not, as far as this scan has looked.
    """

    def __init__(
        self,
        root_fd: int,
        memo: Memo,
        refused_devices: Collection[int] = (),
        opener: Opener | None = None,
        directories: Sequence[bytes] = DEFAULT_DIRECTORIES,
        existing: dict[bytes, bool] | None = None,
    ) -> None:
        self._existing = {} if existing is None else existing
        self._directories = directories
        self._root_fd = root_fd
        self._memo = memo
        self._refused = refused_devices
        self._opener = opener or Opener()

    def of(self, path: bytes, binary: ElfFile) -> Iterator[Companion | Unreadable]:
        """Yield the debug files of ``binary``, which is at ``path`` in this root.

        The receiver closes each before it takes the next, or keeps its descriptor with `release`.
        """
        yield from self._of(path, binary.build_id, binary.debuglink, [(path, binary)])

    def of_known(
        self, path: bytes, build_id: BuildId, link: DebugLink | None
    ) -> Iterator[Companion | Unreadable]:
        """Do as `of` for a binary that is not read again, except for the files that it refers to
        itself: its dwz file and its .dwp file.
        """
        return self._of(path, build_id, link, [])

    def _of(
        self,
        path: bytes,
        build_id: BuildId,
        link: DebugLink | None,
        sources: list[tuple[bytes, ElfFile]],
    ) -> Iterator[Companion | Unreadable]:
        found = False
        for item in self._debug_files(path, build_id, link):
            if isinstance(item, Companion):
                found = True
                sources += self._described(item)
            yield item
            if found:
                break
        for where, file in sources:
            if file.altlink is not None:
                paths = self._dwz_paths(where, file.altlink)
                yield from self._first(paths, _has_id(file.altlink.build_id))
        for where, file in sources:
            if file.dwo_ids:
                paths = package_paths(where, path)
                yield from self._first(paths, _has_units(build_id, file.dwo_ids))

    def _described(self, companion: Companion) -> list[tuple[bytes, ElfFile]]:
        """Return the real path and the description of a debug file; an empty list if it
        is known.
        """
        if companion.fd < 0:
            return []
        try:
            described = base.describe(companion.fd, companion.build_id)
            if not isinstance(described, ElfFile):
                return []
            return [(self._real_path(companion), described)]
        except OSError:
            companion.close()
            raise

    def _debug_files(
        self, path: bytes, build_id: BuildId, link: DebugLink | None
    ) -> Iterator[Companion | Unreadable]:
        yield from self._first(self._paths_by_id(build_id), _has_id(build_id))
        if link is not None:
            yield from self._first(self._link_paths(path, link), _has_checksum(build_id, link))

    def _paths_by_id(self, build_id: BuildId) -> list[bytes]:
        return [path_by_id(build_id, directory) for directory in self._directories]

    def _link_paths(self, path: bytes, link: DebugLink) -> list[bytes]:
        """Return the paths at which gdb looks for a debug link, in its order."""
        if b"/" in link.name or link.name in (b".", b".."):
            return []
        beside = os.path.dirname(path)
        candidates = [b"%s/%s" % (beside, link.name), b"%s/.debug/%s" % (beside, link.name)]
        candidates += [b"%s%s/%s" % (each, beside, link.name) for each in self._directories]
        return [candidate for candidate in candidates if candidate != path]

    def _dwz_paths(self, path: bytes, link: AltLink) -> list[bytes]:
        """Return the paths of the dwz file of a file at ``path``: by name, under .dwz, by build
        ID.
        """
        paths = [os.path.normpath(os.path.join(os.path.dirname(path), link.name))]
        if _DWZ in link.name:
            name = link.name.rpartition(_DWZ)[2]
            paths += [each + _DWZ + name for each in self._directories]
        return paths + self._paths_by_id(link.build_id)

    def _first(self, paths: Iterable[bytes], proof: _Proof) -> Iterator[Companion | Unreadable]:
        """Yield the first of ``paths`` whose file passes the proof."""
        for path in paths:
            try:
                if not self._exists(os.path.dirname(path)):
                    continue
                companion = self._candidate(path, proof)
            except OSError as error:
                if error.errno not in _NOT_THERE:
                    yield Unreadable.of(path, error)
                continue
            if companion is not None:
                yield companion
                return

    def _exists(self, directory: bytes) -> bool:
        """Return False for a directory that does not exist, which most do not. Raises OSError."""
        exists = self._existing.get(directory)
        if exists is None:
            try:
                os.close(self._opener.open(self._root_fd, directory)[0])
                exists = True
            except FileNotFoundError:
                exists = False
            self._existing[directory] = exists
        return exists

    def _candidate(self, path: bytes, proof: _Proof) -> Companion | None:
        """Return the file at ``path`` if it passes the proof. Raises OSError."""
        path_fd, identity = self._opener.open(self._root_fd, path)
        companion = Companion(path, identity, path_fd)
        keep = False
        try:
            keep = self._is_sought(companion, proof)
        finally:
            if not keep:
                companion.close()
        return companion if keep else None

    def _is_sought(self, companion: Companion, proof: _Proof) -> bool:
        """Return True if a file passes the proof; open it unless it is known. Raises OSError."""
        identity = companion.identity
        if not stat.S_ISREG(identity.mode) or identity.dev in self._refused:
            return False
        known = self._memo.recall(identity)
        if known is not None and known.build_id is not None:
            companion.known = known
            return known.build_id == proof.build_id
        companion.fd, companion.is_copy = self._opener.reopen(companion.path_fd, identity)
        return proof.belongs(companion)

    def _real_path(self, companion: Companion) -> bytes:
        """Return the real path of a companion in this root, because dwz names are
        relative to it.
        """
        path = os.readlink(b"/proc/self/fd/%d" % companion.path_fd)
        root = os.readlink(b"/proc/self/fd/%d" % self._root_fd)
        if root == b"/":
            return path
        return path.removeprefix(root) if path.startswith(root + b"/") else companion.path


def path_by_id(build_id: BuildId, directory: bytes = DEBUG_ROOT) -> bytes:
    """Return the path at which distributions install the debug file with this build ID."""
    text = build_id.hex().encode()
    return b"%s%s/%s/%s.debug" % (directory, _BY_ID, text[:2], text[2:])


def debug_directories(
    root_fd: int, opener: Opener, usual: Sequence[bytes], refused_devices: Collection[int] = ()
) -> tuple[bytes, ...]:
    """Return the directories with debug files that a root has: the ``usual`` ones, and those that
    the configuration of gdb in the root names as ``debug-file-directory``, as `buildidfs setup
    gdb` does for a mount. Directories on ``refused_devices`` are left out, so nothing is looked up
    below them.

    Does not raise.
    """
    found = []
    for path in dict.fromkeys((*usual, *_named_by_gdb(root_fd, opener))):
        with (
            contextlib.suppress(OSError),
            closing_fd(inodes.open_in_root(root_fd, path, os.O_PATH | os.O_DIRECTORY)) as fd,
        ):
            if inodes.identity(fd, ask=False).dev not in refused_devices:
                found.append(path)
    return tuple(found)


def have_build_ids(root_fd: int, directories: Iterable[bytes]) -> bool:
    """Return True if one of the directories has debug files by build ID. Does not raise."""
    for path in directories:
        with contextlib.suppress(OSError):
            os.close(inodes.open_in_root(root_fd, path + _BY_ID, os.O_PATH | os.O_DIRECTORY))
            return True
    return False


def _named_by_gdb(root_fd: int, opener: Opener) -> list[bytes]:
    named: list[bytes] = []
    for path in _GDBINIT:
        try:
            path_fd, identity = opener.open(root_fd, path)
            with closing_fd(path_fd), closing_fd(opener.reopen(path_fd, identity)[0]) as fd:
                text = os.pread(fd, _GDBINIT_MAX, 0)
        except OSError:
            continue
        for value in _SETTING.findall(text):
            named += [os.path.normpath(each) for each in value.split(b":") if each[:1] == b"/"]
    return named[:_MOST_NAMED]


def package_paths(path: bytes, binary: bytes) -> list[bytes]:
    """Return the paths of the .dwp file of a binary whose skeleton units are in the file ``path``.

    gdb uses the name of the binary in the directory of that file (dwarf2/read.c,
    open_and_init_dwp_file); lldb and others use the name of either file.
    """
    beside = os.path.join(os.path.dirname(path), os.path.basename(binary))
    return list(dict.fromkeys(each + names.DWP_SUFFIX for each in (path, beside, binary)))


def package_owners(path: bytes) -> tuple[bytes, ...]:
    """Return the paths of the files whose .dwp file is at a path; none if it is not a .dwp file."""
    stem, suffix = path[: -len(names.DWP_SUFFIX)], path[-len(names.DWP_SUFFIX) :]
    return (stem, stem + names.DEBUG_SUFFIX) if suffix == names.DWP_SUFFIX else ()


def package_id(path: bytes, fd: int, open_at: Callable[[bytes], int]) -> BuildId | None:
    """Return the build ID under which to keep a file that is the .dwp file of a binary beside it.

    ``open_at`` opens the binary, or its debug file. Raises OSError if the package cannot be read.
    """
    for candidate in package_owners(path):
        try:
            owner_fd = open_at(candidate)
        except OSError:
            continue  # treated like any other file that does not belong to it
        with closing_fd(owner_fd):
            owner = base.describe(owner_fd)
        if isinstance(owner, ElfFile) and has_units(fd, owner.dwo_ids):
            return names.package_id(owner.build_id)
    return None


class _Proof(NamedTuple):
    """A test that a file is the one sought; ``build_id`` is the ID under which the file is kept."""

    build_id: BuildId
    belongs: Callable[[Companion], bool]


def _has_id(build_id: BuildId) -> _Proof:
    return _Proof(build_id, lambda file: base.identify(file.fd, file.identity.size) == build_id)


def _has_checksum(build_id: BuildId, link: DebugLink) -> _Proof:
    """Return the proof by the checksum; a file without a build ID is kept under that of
    the binary.
    """

    def belongs(companion: Companion) -> bool:
        own_id = base.own_id(companion.fd, companion.identity.size)
        if own_id not in (build_id, Absence.NO_BUILD_ID):
            return False
        if companion.identity.size > CRC_MAX_BYTES or _crc(companion.fd) != link.crc:
            return False
        if own_id is Absence.NO_BUILD_ID:
            companion.kind, companion.build_id = Kind.DEBUGINFO, build_id
        return True

    return _Proof(build_id, belongs)


def _has_units(build_id: BuildId, dwo_ids: tuple[int, ...]) -> _Proof:
    """Return the proof that a companion has a unit to which the binary refers."""
    kept_under = names.package_id(build_id)

    def belongs(companion: Companion) -> bool:
        companion.kind, companion.build_id = Kind.DEBUGINFO, kept_under
        return kept_under is not None and has_units(companion.fd, dwo_ids)

    return _Proof(kept_under or build_id, belongs)


def dwo_ids(fd: int) -> tuple[int, ...]:
    """Return the IDs that the first skeleton units of an open file refer to. Raises OSError."""
    found = units.skeletons(base.reader(fd), os.fstat(fd).st_size, _SKELETONS)
    return tuple(skeleton.dwo_id for skeleton in found)


def has_units(fd: int, dwo_ids: Iterable[int]) -> bool:
    """Return True if an open file is a .dwp file with one of these units. Raises OSError."""
    packaged = units.packaged(base.reader(fd), os.fstat(fd).st_size)
    return not packaged.isdisjoint(dwo_ids)


def _crc(fd: int) -> int:
    """Return the checksum that .gnu_debuglink uses; at most `CRC_MAX_BYTES` are read."""
    crc, offset = 0, 0
    while offset < CRC_MAX_BYTES and (chunk := os.pread(fd, _CHUNK, offset)):
        crc = zlib.crc32(chunk, crc)
        offset += len(chunk)
    return crc
