# SPDX-License-Identifier: Apache-2.0
"""The regular files and links in archives that are not ELF files; sources are among them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.capture.archive import packages
from buildidfs.capture.archive.elf_members import NamedMembers
from buildidfs.capture.archive.stream import DEFAULT_LIMITS
from buildidfs.capture.base import Unreadable
from buildidfs.capture.origin.builder import access_of
from buildidfs.formats.archive.common import Damaged, Member, Type, installed
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import EVERYBODY

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.capture.archive.elf_members import IsThere
    from buildidfs.capture.archive.stream import ArchiveLimits, LimitedStream
    from buildidfs.capture.walk import WalkedFile
    from buildidfs.model import Access

_READABLE: Final = 0o444
_NAME_BYTES: Final = 100

IsWanted = Callable[[bytes, int], bool]
"""Returns True if the bytes of a file with that path and size are wanted."""


class PlainFile(NamedTuple):
    """A regular file or a link, by its path after installation.

    ``data`` is None unless the file is wanted and all users may read it; ``is_private`` is True if
    not all users may read it. A link has size 0 and no data.
    """

    path: bytes
    size: int = 0
    data: bytes | None = None
    is_private: bool = False


def is_readable(mode: int) -> bool:
    """Return True if these permission bits let all users read a file."""
    return mode & _READABLE == _READABLE


class PlainFiles(NamedMembers):
    """Reads the plain files of one archive. If ``access`` is not public, all of its files are
    private.
    """

    def __init__(
        self,
        is_wanted: IsWanted,
        limits: ArchiveLimits,
        access: Access,
        is_there: IsThere | None = None,
    ) -> None:
        super().__init__(limits, is_there, _NAME_BYTES)
        self._is_wanted = is_wanted
        self._access = access
        self.missed: dict[bytes, list[bytes]] = {}
        """Wanted names of files whose bytes came before, under another name; the key is that other
        name. `later` reads these files.
        """

    def read(self, members: Iterable[Member], stream: LimitedStream) -> Iterator[PlainFile]:
        """Yield the files; ``members`` take their headers from ``stream``.

        Raises the errors of both, and `Damaged`.
        """
        for _, member, path in self._present(members):
            if member.type is Type.FILE:
                yield from self._file(member, self._names(member, path), stream)
            else:
                if member.type is Type.HARD_LINK and self._is_wanted(path, 0):
                    self._count(path)
                    self.missed.setdefault(installed(member.target), []).append(path)
                yield PlainFile(path)

    def later(self, members: Iterable[Member], stream: LimitedStream) -> Iterator[PlainFile]:
        """Yield the missed files, under their wanted names."""
        for member in members:
            names = self.missed.pop(installed(member.name), [])
            if member.type is Type.FILE:
                yield from self._file(member, names, stream)

    def _file(
        self, member: Member, names: list[bytes], stream: LimitedStream
    ) -> Iterator[PlainFile]:
        is_whole = member.stored == member.size and not member.extents
        data = None
        for path in names:
            if not is_whole or not self._is_wanted(path, member.size):
                yield PlainFile(path, member.size)
                continue
            if data is None:
                data = stream.take(member.stored)
                if len(data) < member.size:
                    raise Damaged("ends in the middle of a member")
            is_public = self._is_public(member, path)
            yield PlainFile(path, member.size, data if is_public else None, not is_public)

    def _is_public(self, member: Member, path: bytes) -> bool:
        return (
            is_readable(self._access.mode)
            and is_readable(member.mode)
            and self._closed.reach(path, member.uid) == EVERYBODY
        )


class PackagedFile(NamedTuple):
    """A file of a package; ``container`` is that of sightings in the package."""

    container: str
    file: PlainFile


def in_packages(
    paths: Iterable[bytes],
    is_wanted: IsWanted = lambda path, size: False,
) -> Iterator[PackagedFile | Unreadable]:
    """Yield the files in packages at or below ``paths``, one package after another."""
    for file in packages.files_below(dict.fromkeys(paths)):
        if isinstance(file, Unreadable):
            yield file
            continue
        with closing_fd(file.fd):
            try:
                yield from _in_package(file, is_wanted)
            except packages.NotAPackage:
                pass
            except (Damaged, OSError) as error:
                yield Unreadable.of(file.path, error)


def _in_package(file: WalkedFile, is_wanted: IsWanted) -> Iterator[PackagedFile]:
    size = os.fstat(file.fd).st_size
    package = packages.open_package(file.fd, size, DEFAULT_LIMITS)
    container = packages.container_of(package, file.path)
    found = PlainFiles(is_wanted, DEFAULT_LIMITS, access_of(file.fd))
    for each in found.read(package.members, package.stream):
        yield PackagedFile(container, each)
    if found.missed:
        package = packages.open_package(file.fd, size, DEFAULT_LIMITS)
        for each in found.later(package.members, package.stream):
            yield PackagedFile(container, each)
