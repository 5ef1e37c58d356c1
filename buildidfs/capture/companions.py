# SPDX-License-Identifier: Apache-2.0
"""The debug files that belong to a binary, looked for where debuggers look, in the root it is in.

By build ID under /usr/lib/debug/.build-id; by the name in .gnu_debuglink beside the binary, in
.debug beside it, and under /usr/lib/debug; and from there by .gnu_debugaltlink to what dwz moved
out (gdb manual, "Separate Debug Files"; dwz(1)). Names come from the binary, so from whoever made
it: they are resolved inside the root given, and what is found there has to prove that it belongs:
by build ID, or where it has none by the checksum in the link.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import zlib
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture import files
from buildidfs.capture.base import Known, Memo, Unreadable
from buildidfs.formats.elf import AltLink, DebugLink, ElfFile
from buildidfs.linux import openat2, statx
from buildidfs.model import Absence, BuildId, FileIdentity, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    Look = Callable[[], "Companion | None"]

DEBUG_ROOT: Final = b"/usr/lib/debug"
CRC_MAX_BYTES: Final = 2 << 30
"""No file larger than this is read only to compare its checksum."""

_BY_ID: Final = DEBUG_ROOT + b"/.build-id"
_DWZ: Final = b"/.dwz/"
_CHUNK: Final = 1 << 20

# Not there, or not a file: neither is worth a word.
_NOT_THERE: Final = frozenset(
    (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EINVAL, errno.ENXIO)
)


class Companion(msgspec.Struct):
    """A file that belongs to a binary. ``path`` is the one in the container's root.

    ``path_fd`` stands for it (O_PATH), ``fd`` reads it. ``known`` is what the memo says of it, and
    ``fd`` is then -1. ``kind`` and ``build_id`` are set where the file has no build ID of its own,
    see `capture.base.PinnedFile`. As a context manager it closes both descriptors, except ``fd``
    if that was taken by `release`.
    """

    path: bytes
    identity: FileIdentity
    path_fd: int
    fd: int = -1
    known: Known | None = None
    kind: Kind | None = None
    build_id: BuildId | None = None

    def release(self) -> int:
        """The descriptor, which is the caller's from now on."""
        fd, self.fd = self.fd, -1
        return fd

    def __enter__(self) -> Companion:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the file; safe to call twice."""
        path_fd, self.path_fd = self.path_fd, -1
        for fd in (path_fd, self.release()):
            if fd >= 0:
                os.close(fd)


class Companions:
    """Looks for companions in one root directory.

    ``root_fd`` is the root (O_PATH will do) and stays the caller's. Nothing is opened on
    ``refused_devices`` (values of st_dev). ``ask`` is given a path and what looks at it, which
    may have to wait for a filesystem; it raises TimeoutError when it has waited long enough.
    """

    def __init__(
        self,
        root_fd: int,
        memo: Memo,
        refused_devices: Collection[int] = (),
        ask: Callable[[bytes, Look], Companion | None] | None = None,
    ) -> None:
        self._root_fd = root_fd
        self._memo = memo
        self._refused = refused_devices
        self._ask = ask

    def has_debug_root(self) -> bool:
        """Whether anything at all can be found by build ID here."""
        try:
            os.close(openat2.open_in_root(self._root_fd, _BY_ID, os.O_PATH | os.O_DIRECTORY))
        except OSError:
            return False
        return True

    def by_build_id(self, build_id: BuildId) -> Iterator[Companion | Unreadable]:
        """The debug file with this build ID: all that can be done without reading the binary."""
        return self._first([path_by_id(build_id)], build_id, None)

    def of(self, path: bytes, binary: ElfFile) -> Iterator[Companion | Unreadable]:
        """All that belongs to ``binary``, which is at ``path`` of this root.

        The receiver closes each before it asks for the next, or takes it by `release`.
        """
        links: list[tuple[bytes, AltLink | None]] = [(path, binary.altlink)]
        found = False
        for item in self._debug_files(path, binary):
            if isinstance(item, Companion):
                found = True
                links += self._links_of(item)
            yield item
            if found:
                break
        for where, link in links:
            if link is not None:
                yield from self._first(_dwz_paths(where, link), link.build_id, None)

    def _links_of(self, companion: Companion) -> list[tuple[bytes, AltLink | None]]:
        """Where a debug file really is, and its link to a dwz file."""
        if companion.fd < 0:
            return []
        try:
            described = files.describe(companion.fd)
            if not isinstance(described, ElfFile):
                return []
            return [(self._real_path(companion), described.altlink)]
        except OSError:
            companion.close()
            raise

    def _debug_files(self, path: bytes, binary: ElfFile) -> Iterator[Companion | Unreadable]:
        yield from self.by_build_id(binary.build_id)
        if binary.debuglink is not None:
            yield from self._first(
                _link_paths(path, binary.debuglink), binary.build_id, binary.debuglink
            )

    def _first(
        self, paths: Iterable[bytes], build_id: BuildId, link: DebugLink | None
    ) -> Iterator[Companion | Unreadable]:
        """The first of ``paths`` that has ``build_id``, and the checksum if there is a link."""
        for path in paths:
            look = functools.partial(self._candidate, path, build_id, link)
            try:
                companion = look() if self._ask is None else self._ask(path, look)
            except OSError as error:
                if error.errno not in _NOT_THERE:
                    yield Unreadable(path, error.strerror or str(error), error.errno or 0)
                continue
            if companion is not None:
                yield companion
                return

    def _candidate(
        self, path: bytes, build_id: BuildId, link: DebugLink | None
    ) -> Companion | None:
        """The file at ``path`` if it is the one sought. Raises OSError."""
        path_fd = openat2.open_in_root(self._root_fd, path, os.O_PATH)
        try:
            companion = Companion(path, statx.identity(path_fd), path_fd)
        except BaseException:
            os.close(path_fd)
            raise
        keep = False
        try:
            keep = self._is_sought(companion, build_id, link)
        finally:
            if not keep:
                companion.close()
        return companion if keep else None

    def _is_sought(self, companion: Companion, build_id: BuildId, link: DebugLink | None) -> bool:
        """Look at a file, which is opened unless it is known. Raises OSError."""
        identity = companion.identity
        if not stat.S_ISREG(identity.mode) or identity.dev in self._refused:
            return False
        known = self._memo.recall(identity)
        if known is not None and known.build_id is not None:
            companion.known = known
            return known.build_id == build_id
        companion.fd = openat2.reopen_regular(companion.path_fd)
        return _belongs(companion, build_id, link)

    def _real_path(self, companion: Companion) -> bytes:
        """Where a companion really is in this root: dwz names are relative to that."""
        path = os.readlink(b"/proc/self/fd/%d" % companion.fd)
        root = os.readlink(b"/proc/self/fd/%d" % self._root_fd)
        if root == b"/":
            return path
        return path.removeprefix(root) if path.startswith(root + b"/") else companion.path


def path_by_id(build_id: BuildId) -> bytes:
    """Where distributions put the debug file with this build ID."""
    text = build_id.hex().encode()
    return b"%s/%s/%s.debug" % (_BY_ID, text[:2], text[2:])


def _link_paths(path: bytes, link: DebugLink) -> list[bytes]:
    """Where gdb looks for a debug link, in its order."""
    if b"/" in link.name or link.name in (b".", b".."):
        return []
    directory = os.path.dirname(path)
    return [
        candidate
        for candidate in (
            b"%s/%s" % (directory, link.name),
            b"%s/.debug/%s" % (directory, link.name),
            b"%s%s/%s" % (DEBUG_ROOT, directory, link.name),
        )
        if candidate != path
    ]


def _dwz_paths(path: bytes, link: AltLink) -> list[bytes]:
    """Where a file at ``path`` finds its dwz file: by name, under .dwz, by build ID."""
    paths = [os.path.normpath(os.path.join(os.path.dirname(path), link.name))]
    if _DWZ in link.name:
        paths.append(DEBUG_ROOT + _DWZ + link.name.rpartition(_DWZ)[2])
    paths.append(path_by_id(link.build_id))
    return paths


def _belongs(companion: Companion, build_id: BuildId, link: DebugLink | None) -> bool:
    """Whether an open file is the one sought; a file without a build ID is given it."""
    own_id = files.identify(companion.fd, companion.identity.size)
    if link is None:
        return own_id == build_id
    if own_id not in (build_id, Absence.NO_BUILD_ID):
        return False
    if companion.identity.size > CRC_MAX_BYTES or _crc(companion.fd) != link.crc:
        return False
    if own_id is Absence.NO_BUILD_ID:
        companion.kind, companion.build_id = Kind.DEBUGINFO, build_id
    return True


def _crc(fd: int) -> int:
    """The checksum that .gnu_debuglink holds; not more than `CRC_MAX_BYTES` are read."""
    crc, offset = 0, 0
    while offset < CRC_MAX_BYTES and (chunk := os.pread(fd, _CHUNK, offset)):
        crc = zlib.crc32(chunk, crc)
        offset += len(chunk)
    return crc
