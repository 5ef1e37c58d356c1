# SPDX-License-Identifier: Apache-2.0
"""The ELF files among the members of an archive, each read once, in the order of the archive.

Name, mode and size of a member are claims of the archive. Each ELF file is yielded as a file of its
own; no other bytes are written.
"""

from __future__ import annotations

import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import names as spellings
from buildidfs.capture import base, debug_files
from buildidfs.capture.archive.stream import CannotDecompress, decompressed
from buildidfs.capture.base import Known, PinnedFile, Resighting, Unreadable, memory_file
from buildidfs.capture.origin.builder import Surroundings
from buildidfs.formats.archive.common import Damaged, Member, Type, installed
from buildidfs.formats.budget import STEP_BYTES
from buildidfs.formats.elf.header import MAGIC
from buildidfs.linux import file_ops
from buildidfs.linux.file_ops import closing_on_error, on_error
from buildidfs.model import (
    EVERYBODY,
    OWNER,
    Absence,
    BuildId,
    FileIdentity,
    Kind,
    Origin,
    Sighting,
    Standing,
    Trust,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.capture.archive.stream import ArchiveLimits, LimitedStream
    from buildidfs.capture.base import Found, Memo
    from buildidfs.formats.budget import Budget
    from buildidfs.model import Access

# Memory for the names of one archive, which are needed for hard links and private directories; and
# the memory of each name besides its length.
_NAMES_BYTES: Final = 128 << 20
_NAME_BYTES: Final = 500
# A member that decompresses to more is not a kernel module; modules are kept in memory.
_MODULE_BYTES: Final = 128 << 20
_MODULES: Final = (b".ko.xz", b".ko.gz", b".ko.zst")
_SEARCH: Final = 0o111


class ArchiveOrigin(msgspec.Struct, frozen=True):
    """The fields that all sightings in one archive have in common, see `model.Origin`."""

    container: str
    host: str
    trust: Trust
    scanner: str
    archive: bytes = b""
    standing: Standing = Standing.GIVEN

    def origin(
        self, path: bytes, identity: FileIdentity, reach: int, signature: bytes = b""
    ) -> Origin:
        """Return the origin of one file."""
        return Surroundings(container=self.container).origin(
            path,
            identity,
            host=self.host,
            trust=self.trust,
            scanner=self.scanner,
            reach=reach,
            archive=self.archive,
            signature=signature,
            standing=self.standing,
        )


IsThere = Callable[[bytes, bool], bool]
"""Called with a path, and True for a directory; returns False if the member is to be skipped."""

Viewers = Callable[[bytes], Sequence[ArchiveOrigin]]
"""Returns the viewers who see the file at a path; none if the file is hidden from all."""


class Closed:
    """The directories of one archive or layer that not all users may search, as far as it records
    them.
    """

    def __init__(self) -> None:
        self._modes: dict[bytes, tuple[int, int]] = {}

    @staticmethod
    def is_open(mode: int) -> bool:
        """Return True if all users may search a directory with these permission bits."""
        return mode & _SEARCH == _SEARCH

    def note(self, path: bytes, mode: int, uid: int) -> None:
        """Add a directory, with permission bits and owner."""
        if not self.is_open(mode):
            self._modes[path] = mode, uid

    def reach(self, path: bytes, uid: int) -> int:
        """Return `Origin.reach` of a file of user ``uid``: all users, the owner at
        most, or none.
        """
        reach = EVERYBODY
        while self._modes and len(path) > 1:
            path = path[: path.rfind(b"/")] or b"/"
            found = self._modes.get(path)
            if found is not None:
                mode, owner = found
                reach &= OWNER if uid == 0 or (mode & 0o100 and owner == uid) else 0
        return reach


class NamedMembers:
    """The members of one archive by their paths after installation, in bounded memory.

    ``is_there`` is called with every path, and True for a directory; a path for which it returns
    False is skipped. A remembered name takes ``name_bytes`` besides its length.
    """

    def __init__(self, limits: ArchiveLimits, is_there: IsThere | None, name_bytes: int) -> None:
        self._limits = limits
        self._is_there = is_there
        self._name_bytes = name_bytes
        self._closed = Closed()
        self._waiting: dict[tuple[int, int], list[bytes]] = {}
        self._room = _NAMES_BYTES

    def _present(self, members: Iterable[Member]) -> Iterator[tuple[int, Member, bytes]]:
        """Yield number, member and path, without directories. Raises `Damaged`."""
        for number, member in enumerate(members, 1):
            if number > self._limits.members:
                raise Damaged(f"more than {self._limits.members} members")
            path = installed(member.name)
            is_directory = member.type is Type.DIRECTORY
            if self._is_there is not None and not self._is_there(path, is_directory):
                continue
            if not is_directory:
                yield number, member, path
            elif not Closed.is_open(member.mode):
                self._count(path)
                self._closed.note(path, member.mode, member.uid)

    def _names(self, member: Member, path: bytes) -> list[bytes]:
        """Return all names of a file whose bytes follow now; none if its bytes come with a later
        member.
        """
        if member.link is None:
            return [path]
        if member.stored:
            return [path, *self._waiting.pop(member.link, ())]
        self._count(path)
        self._waiting.setdefault(member.link, []).append(path)
        return []

    def _count(self, path: bytes) -> None:
        """Count one more remembered name; raise `Damaged` if there are too many."""
        self._room -= len(path) + self._name_bytes
        if self._room < 0:
            raise Damaged("too many names of files and private directories")


class _Elf(msgspec.Struct, frozen=True):
    """An ELF file of the archive, to which later members may add names. ``known`` is None if the
    first name was hidden, so that the file was not read.

    ``number`` is the number of its member in the archive.
    """

    number: int
    member: Member
    known: Known | None


class Members(NamedMembers):
    """Reads the ELF files of one archive.

    ``access`` tells who may read the archive: users who may not read the archive may not read its
    members. ``scope`` makes the numbers of the members unambiguous, see `model.FileIdentity`: the
    same scope always means the same bytes. ``where`` names the archive in reports of unreadable
    members. ``signatures`` has `Origin.signature` by path.
    """

    def __init__(
        self,
        scope: bytes,
        where: bytes,
        viewers: Viewers,
        is_there: IsThere | None = None,
        *,
        memo: Memo,
        spool: MemberSpool,
        limits: ArchiveLimits,
        access: Access,
        signatures: Mapping[bytes, bytes] = MappingProxyType({}),
    ) -> None:
        super().__init__(limits, is_there, _NAME_BYTES)
        self._signatures = signatures
        self._access = access
        self._scope = scope
        self._where = where
        self._viewers = viewers
        self._memo = memo
        self._spool = spool
        self._elves: dict[bytes, _Elf] = {}
        self._units: dict[bytes, tuple[BuildId, tuple[int, ...]]] = {}
        self.missed: dict[int, list[bytes]] = {}
        """Visible names, by member number, of files that were skipped because their first name is
        hidden. A second call of `scan` reads them.
        """

    def scan(
        self,
        members: Iterable[Member],
        stream: LimitedStream,
        only: dict[int, list[bytes]] | None = None,
    ) -> Iterator[Found]:
        """Yield the ELF files; ``members`` take their headers from ``stream``.

        ``only`` restricts the scan to some members, by number, under the given names. Raises the
        errors of ``members`` and ``stream``, `Damaged` and `Ended`.
        """
        for number, member, path in self._present(members):
            if member.type is Type.FILE:
                if only is not None and number not in only:
                    continue
                names = self._names(member, path) if only is None else only[number]
                yield from self._file(number, member, names, stream)
            elif member.type is Type.HARD_LINK and only is None:
                yield from self._link(installed(member.target), path)

    def _file(
        self, number: int, member: Member, names: list[bytes], stream: LimitedStream
    ) -> Iterator[Found]:
        if not names or not member.stored or (member.extents and member.extents[0][0]):
            return
        head = stream.take(min(len(MAGIC), member.stored))
        packed = names[0].endswith(_MODULES)
        if head != MAGIC and not packed:
            return
        sightings = self._sightings(number, member, names)
        if not sightings:
            self._note(names[0], _Elf(number, member, None))
            return
        known = self._memo.recall(sightings[0].origin.identity)
        if known is None:
            if member.size > self._limits.member_bytes:
                yield self._unreadable(names[0], f"has {member.size} bytes, which is too much")
                return
            pieces: Iterator[bytes | memoryview] = itertools.chain(
                (memoryview(head),), stream.rest(member.stored - len(head))
            )
            try:
                stream.budget.charge((member.size - member.stored) // STEP_BYTES)  # holes
                pinned = self._pinned(
                    sightings[0], member, pieces, stream.budget if packed else None
                )
            except CannotDecompress as error:
                if not packed:
                    raise
                yield self._unreadable(names[0], str(error))
                return
            known = self._known(pinned, names)
            if known.build_id is not None:
                yield pinned
                del sightings[0]
        self._note(names[0], _Elf(number, member, known))
        for sighting in sightings:
            yield Resighting(sighting, known)

    def _pinned(
        self,
        sighting: Sighting,
        member: Member,
        pieces: Iterator[bytes | memoryview],
        budget: Budget | None,
    ) -> Spooled:
        """Return the member as a pinned file, decompressed if there is a budget for that.

        Raises OSError, `Damaged`, `Ended`.
        """
        pinned = self._spool.pin(sighting, member.size, pieces, member.extents)
        if budget is None:
            return pinned
        try:
            fd = decompressed(pinned.fd, member.name, _MODULE_BYTES, budget)
            assert fd is not None
        finally:
            pinned.close()
        return Spooled(sighting, fd)

    def _known(self, pinned: Spooled, names: list[bytes]) -> Known:
        """Identify a file; close it if it has no build ID. Raises OSError."""
        with on_error(pinned.close):
            answer = base.own_id(pinned.fd)
            if answer is Absence.NO_BUILD_ID and (owner := self._owner(pinned.fd, names)):
                answer = pinned.build_id = owner
                pinned.kind = Kind.DEBUGINFO
            else:
                answer = base.adopted(answer, pinned.fd)
                if isinstance(answer, BuildId):
                    self._remember_units(pinned.fd, answer, names)
        if isinstance(answer, Absence):
            pinned.close()
            return Known(absence=answer)
        return Known(answer)

    def _remember_units(self, fd: int, build_id: BuildId, names: list[bytes]) -> None:
        """Remember the units for the .dwp file, which in sorted archives follows its binary."""
        package_id = spellings.package_id(build_id)
        dwo_ids = debug_files.dwo_ids(fd)
        if package_id is not None and dwo_ids:
            for path in names:
                self._count(path)
                self._units[path] = package_id, dwo_ids

    def _owner(self, fd: int, names: list[bytes]) -> BuildId | None:
        """Return the build ID under which to keep a .dwp file; None unless its binary came before
        it.
        """
        for path in names:
            for candidate in debug_files.package_owners(path):
                package_id, dwo_ids = self._units.get(candidate, (None, ()))
                if package_id is not None and debug_files.has_units(fd, dwo_ids):
                    return package_id
        return None

    def _note(self, path: bytes, elf: _Elf) -> None:
        self._count(path)
        self._elves[path] = elf

    def _link(self, target: bytes, path: bytes) -> Iterator[Found]:
        """Yield the sighting of an earlier file under one more name, if it is an ELF file."""
        elf = self._elves.get(target)
        if elf is None:
            return
        self._note(path, elf)  # a link may lead to a link
        sightings = self._sightings(elf.number, elf.member, [path])
        if elf.known is not None:
            for sighting in sightings:
                yield Resighting(sighting, elf.known)
        elif sightings:
            self.missed.setdefault(elf.number, []).append(path)

    def _sightings(self, number: int, member: Member, names: list[bytes]) -> list[Sighting]:
        """Return the sightings of all viewers, under each name."""
        identity = FileIdentity(
            0,
            number,
            member.size,
            member.mtime_ns,
            0,  # no change time, because a member of an archive cannot change
            stat.S_IFREG | member.mode,
            member.uid,
            member.gid,
            self._scope,
        )
        now = time.time_ns()
        signature = next(filter(None, map(self._signatures.get, names)), b"")
        return [
            Sighting(whose.origin(path, *within, signature), now)
            for path in names
            for within in (self._access.within(identity, self._closed.reach(path, member.uid)),)
            for whose in self._viewers(path)
        ]

    def _unreadable(self, path: bytes, reason: str) -> Unreadable:
        return Unreadable(self._where + b"!" + path, reason)


MEMORY_BYTES: Final = 16 << 20
"""Larger files are not kept in memory."""
OPEN_BYTES: Final = 256 << 20
"""The most bytes that all open files may have together; one larger file alone is allowed."""

_PATIENCE_S: Final = 5.0


class Spooled(PinnedFile):
    """A pinned file that reports when it is closed."""

    done: Callable[[], None] | None = None

    def close(self) -> None:
        """Close the file; safe to call twice."""
        super().close()
        done, self.done = self.done, None
        if done is not None:
            done()


class Ended(Exception):
    """Raised by `MemberSpool.pin` after `MemberSpool.end`: the consumer wants no more members."""


class MemberSpool:
    """Keeps members of archives as separate files until their consumer closes them.

    Small files are in memory, others are files without a name in ``directory``, by default that for
    temporary files. The bytes of all open files are bounded: a file is added only when enough
    others are closed. But a consumer may need further files before it closes any, so after a wait
    in which none was closed, the file is added anyway.
    """

    def __init__(self, directory: bytes | None = None, *, open_bytes: int = OPEN_BYTES) -> None:
        self._directory = directory
        self._room = open_bytes
        self._changed = threading.Condition()
        self._open = 0
        self._ended = False

    def pin(
        self,
        sighting: Sighting,
        size: int,
        pieces: Iterable[bytes | memoryview],
        extents: tuple[tuple[int, int], ...] | None = None,
    ) -> Spooled:
        """Return a file of ``size`` bytes, made of ``pieces``; may wait until others are closed.

        ``extents``, (offset, size), are the places of the pieces if the file has holes. Raises
        OSError, errors of ``pieces``, and `Ended`.
        """
        self._enter(size)
        leave = partial(self._leave, size)
        with on_error(leave):
            fd = self.file(size, pieces, extents)
        return Spooled(sighting, fd, is_copy=True, done=leave)

    def file(
        self,
        size: int,
        pieces: Iterable[bytes | memoryview],
        extents: tuple[tuple[int, int], ...] | None = None,
    ) -> int:
        """Make a file of ``size`` bytes, which does not count for the limit, and return its
        descriptor. Raises OSError.
        """
        fd = memory_file(b"member", b"") if size <= MEMORY_BYTES else self._unnamed()
        with closing_on_error(fd):
            if extents is None:
                for piece in pieces:
                    file_ops.write_fully(fd, piece)
            else:
                os.ftruncate(fd, size)
                _write_extents(fd, pieces, extents)
        return fd

    def end(self) -> None:
        """Make all waiting calls of `pin` raise `Ended`."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _enter(self, size: int) -> None:
        with self._changed:
            while self._open and self._open + size > self._room and not self._ended:
                if not self._changed.wait(_PATIENCE_S):
                    break
            if self._ended:
                raise Ended
            self._open += size

    def _leave(self, size: int) -> None:
        with self._changed:
            self._open -= size
            self._changed.notify_all()

    def _unnamed(self) -> int:
        import tempfile  # imports much that scans of processes do not need

        return file_ops.unnamed_file(self._directory or os.fsencode(tempfile.gettempdir()))


def _write_extents(
    fd: int, pieces: Iterable[bytes | memoryview], extents: tuple[tuple[int, int], ...]
) -> None:
    """Write the pieces to the extents; both have the same total length."""
    remaining = iter(extents)
    offset = left = 0
    for piece in pieces:
        view = memoryview(piece)
        while view:
            while not left:
                offset, left = next(remaining)
            written = os.pwrite(fd, view[:left], offset)
            view, offset, left = view[written:], offset + written, left - written
