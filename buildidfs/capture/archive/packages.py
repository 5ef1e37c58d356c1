# SPDX-License-Identifier: Apache-2.0
"""Capture the ELF files in packages of Debian, rpm, Alpine and Arch.

Several packages are unpacked at once, each in a thread: decompression is nearly all of the work,
and runs outside the interpreter lock.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs.capture import walk
from buildidfs.capture.archive.elf_members import ArchiveOrigin, Ended, Members, MemberSpool
from buildidfs.capture.archive.stream import (
    DEFAULT_LIMITS,
    ArchiveLimits,
    LimitedStream,
    PlainStream,
    Region,
    unpacked,
)
from buildidfs.capture.base import Found, Memo, PinnedFile, Unreadable, month
from buildidfs.capture.origin.builder import access_of
from buildidfs.formats.archive import common, packages, tar
from buildidfs.formats.archive.common import Damaged, Member, installed
from buildidfs.linux import inodes
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import FileIdentity, Trust, archive_scope

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.model import Access

_MOST_WORKERS: Final = 8
_MEASURING_S: Final = 5.0
_AHEAD: Final = 64  # packages among which the largest, which takes longest, is chosen
_WAITING: Final = 32  # items that wait for their receiver


class PackageScanner:
    """One pass over the packages at or below ``paths``; see `capture.base`.

    A package is recognised by its first bytes; other files in directories are skipped. A package
    that the memo knows (see `whole`) is read only with ``reread``. Members that are too large for
    memory go to files in ``spool_directory``.
    """

    def __init__(
        self,
        memo: Memo,
        paths: Iterable[bytes],
        *,
        spool_directory: bytes | None = None,
        limits: ArchiveLimits = DEFAULT_LIMITS,
        reread: bool = False,
        measured: bool = False,
        workers: int | None = None,
    ) -> None:
        self._memo = memo
        self._measured = measured
        self._total_bytes = 0
        self._run: _Run | None = None
        self._paths = dict.fromkeys(paths)
        self._spool_directory = spool_directory
        self._limits = limits
        self._reread = reread
        self._workers = workers or min(_MOST_WORKERS, os.cpu_count() or 1)
        self.packages = 0
        """Number of packages found."""
        self.unchanged = 0
        """Number of packages that were read before."""
        self.whole: list[FileIdentity] = []
        """The packages that were read to their end. The caller must add them to the memo, as files
        without a build ID, once all items yielded before are committed.
        """

    @property
    def share(self) -> float | None:
        """The part of the files that was read, 0 to 1; None if their size was not ``measured``."""
        if self._run is None or not self._total_bytes:
            return None
        return min(self._run.read_bytes / self._total_bytes, 1.0)

    def __iter__(self) -> Generator[Found, None, None]:
        if self._measured:
            self._total_bytes = self._measure()
        run = _Run(
            self._workers, files_below(self._paths), self._read, MemberSpool(self._spool_directory)
        )
        self._run = run
        try:
            for item in run.items():
                if isinstance(item, _Done):
                    self.packages += 1
                    self.unchanged += item.unchanged
                    if item.whole is not None:
                        self.whole.append(item.whole)
                else:
                    yield item
        finally:
            run.end()

    def _measure(self) -> int:
        """Return the size of all files; 0 if there are too many to measure."""
        deadline, total = time.monotonic() + _MEASURING_S, 0
        for file in files_below(self._paths):
            if isinstance(file, walk.WalkedFile):
                total += os.fstat(file.fd).st_size
                os.close(file.fd)
            if time.monotonic() > deadline:
                return 0
        return total

    def _read(self, file: walk.WalkedFile, spool: MemberSpool) -> Iterator[Found | _Done]:
        """Yield the ELF files in a file if it is a package. Raises `Ended`."""
        try:
            identity = inodes.identity(file.fd)
            access = access_of(file.fd)
            mark = _mark(identity, access)
            if not self._reread and mark is not None and self._memo.recall(mark) is not None:
                yield _Done(unchanged=True)
                return
            package = open_package(file.fd, identity.size, self._limits)
        except NotAPackage:
            if file.path in self._paths:
                yield Unreadable(file.path, "not a package")
            return
        except (Damaged, OSError) as error:
            yield Unreadable.of(file.path, error)
            return
        complete = True
        try:
            for item in self._members(file, package, identity, access, spool):
                complete = complete and not isinstance(item, Unreadable)
                yield item
        except (Damaged, OSError) as error:
            yield Unreadable.of(file.path, error)
            complete = False
        unchanged = inodes.identity(file.fd) == identity
        yield _Done(mark if complete and unchanged else None)

    def _members(
        self,
        file: walk.WalkedFile,
        package: PackageArchive,
        identity: FileIdentity,
        access: Access,
        spool: MemberSpool,
    ) -> Iterator[Found]:
        name = os.fsdecode(os.path.basename(file.path))
        archive = _lasting(file.path, identity)
        whose = ArchiveOrigin(
            container_of(package, file.path), name, Trust.PACKAGE, "package", archive
        )
        members = Members(
            _scope(identity), file.path, lambda _: (whose,),
            memo=self._memo, spool=spool, limits=self._limits, access=access,
            signatures=package.signatures,
        )  # fmt: skip
        return members.scan(package.members, package.stream)


def files_below(paths: Iterable[bytes]) -> Iterator[walk.WalkedFile | Unreadable]:
    """Yield the files at or below paths that may be packages; the receiver closes them."""
    known = walk.Mounts()
    for path in paths:
        try:
            start_fd = walk.open_start(path)
        except OSError as error:
            yield Unreadable.of(path, error)
            continue
        with closing_fd(start_fd):
            yield from walk.files(start_fd, path, known)


class _Done(msgspec.Struct, frozen=True):
    """The end of a package; ``whole`` is True if the package was read to its end."""

    whole: FileIdentity | None = None
    unchanged: bool = False


_Item = Found | _Done
_Read = Callable[[walk.WalkedFile, MemberSpool], Iterator[_Item]]


class _Run:
    """Threads that read packages, with one queue for their results."""

    def __init__(
        self,
        workers: int,
        files: Iterator[walk.WalkedFile | Unreadable],
        read: _Read,
        spool: MemberSpool,
    ) -> None:
        self._read = read
        self._spool = spool
        self._files = files
        self._lock = threading.Lock()
        self._ahead: list[tuple[int, int, walk.WalkedFile]] = []
        self._count = itertools.count()
        self._found: queue.Queue[_Item | BaseException | None] = queue.Queue(_WAITING)
        self._ending = threading.Event()
        self.read_bytes = 0
        """The size of the files that were read to their end."""
        self._threads = [
            threading.Thread(target=self._work, daemon=True, name=f"buildidfs-unpack-{number}")
            for number in range(workers)
        ]

    def items(self) -> Iterator[_Item]:
        """Yield all files, those of one package in their order, followed by its `_Done`."""
        for thread in self._threads:
            thread.start()
        running = len(self._threads)
        while running:
            item = self._found.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item

    def end(self) -> None:
        """Stop all threads and close everything."""
        self._ending.set()
        self._spool.end()
        for thread in self._threads:
            while thread.is_alive():
                with contextlib.suppress(queue.Empty):
                    _close(self._found.get(timeout=0.05))
        with contextlib.suppress(queue.Empty):
            while True:
                _close(self._found.get_nowait())
        for _, _, file in self._ahead:
            os.close(file.fd)
        self._ahead.clear()

    def _work(self) -> None:
        try:
            while not self._ending.is_set() and (file := self._next()) is not None:
                if isinstance(file, Unreadable):
                    self._found.put(file)
                    continue
                try:
                    for item in self._read(file, self._spool):
                        self._found.put(item)
                        if self._ending.is_set():
                            return
                finally:
                    with self._lock:
                        self.read_bytes += os.fstat(file.fd).st_size
                    os.close(file.fd)
        except Ended:
            pass  # a package that is no longer wanted is not read to its end
        except BaseException as error:
            # The consumer of the items gets the error.
            self._found.put(error)
        finally:
            self._found.put(None)

    def _next(self) -> walk.WalkedFile | Unreadable | None:
        """Return the largest of the next few files. If a large file began last, all threads would
        wait for its end.
        """
        with self._lock:
            while len(self._ahead) < _AHEAD and (file := next(self._files, None)) is not None:
                if isinstance(file, Unreadable):
                    return file
                size = os.fstat(file.fd).st_size
                heapq.heappush(self._ahead, (-size, next(self._count), file))
            return heapq.heappop(self._ahead)[2] if self._ahead else None


def _close(item: object) -> None:
    if isinstance(item, PinnedFile):
        item.close()


def _mark(identity: FileIdentity, access: Access) -> FileIdentity | None:
    """Return the identity under which the memo knows for a month that this package was read.

    It includes the users who could read the package then. Returns None if the package cannot be
    recognised again.
    """
    if identity.scope is None:
        return None
    text = b"!package%d/%o" % (month(identity.ino), access.mode)
    return msgspec.structs.replace(identity, scope=identity.scope + text)


def _scope(identity: FileIdentity) -> bytes:
    """Return the scope of the members of a package: with it, their numbers are unambiguous."""
    return archive_scope(identity) or secrets.token_bytes(16)


def _lasting(path: bytes, identity: FileIdentity) -> bytes:
    """Return the path of a package if only root can have written the package; else an
    empty path.
    """
    if identity.uid or identity.mode & 0o022:
        return b""
    return os.path.abspath(path)


# --- one package ---------------------------------------------------------------------------------

_HEAD: Final = tar.BLOCK
_CONTROL_BYTES: Final = 16 << 20  # of a Debian package's control archive; most have some 10 KB
_CONTROL_MEMBERS: Final = 256
_ADB: Final = (b"ADB.", b"ADBd", b"ADBc")


class NotAPackage(Exception):
    """A file is not a package."""


class PackageArchive(NamedTuple):
    """A package that is being read. ``name`` is empty if the package has none.

    ``signatures`` are those of the files of an rpm package, by path. ``members`` take their headers
    from ``stream``; both raise the errors of `formats.archive.tar` and `capture.archive.stream`.
    """

    name: str
    members: Iterator[Member]
    stream: LimitedStream
    signatures: Mapping[bytes, bytes] = MappingProxyType({})


def container_of(package: PackageArchive, path: bytes) -> str:
    """Return the container field for sightings in the package at a path."""
    return f"package:{package.name or os.fsdecode(os.path.basename(path))}"


def open_package(fd: int, size: int, limits: ArchiveLimits) -> PackageArchive:
    """Start reading the package in an open file of that size; the caller closes the file.

    Raises `NotAPackage`, OSError, `Damaged`.
    """
    head = os.pread(fd, _HEAD, 0)
    whole = Region(fd, 0, size)
    if head.startswith(packages.AR_MAGIC):
        return _debian(whole, limits)
    if head.startswith(packages.RPM_MAGIC):
        return _rpm(whole, limits)
    if head.startswith(_ADB):
        raise Damaged("a package of Alpine's third format, which is not understood")
    if common.packing(head) is not None or tar.is_header(head):
        return _tar(whole, limits)
    raise NotAPackage


def _debian(whole: Region, limits: ArchiveLimits) -> PackageArchive:
    outer = PlainStream(whole)
    parts = packages.ar_members(outer)
    if next(parts, (b"",))[0] != b"debian-binary":
        raise NotAPackage  # a static library
    name = ""
    for part in parts:
        region = Region(whole.fd, outer.position, part.size)
        if part.name.startswith(b"control.tar"):
            name = _debian_name(region)
        elif part.name.startswith(b"data.tar"):
            stream = unpacked(region, limits.unpacked_bytes)
            return PackageArchive(name, tar.members(stream), stream)
    raise Damaged("a Debian package without data")


def _debian_name(region: Region) -> str:
    """Return the name in the control file; empty if there is no readable one. Raises OSError."""
    try:
        stream = unpacked(region, _CONTROL_BYTES)
        for member in itertools.islice(tar.members(stream), _CONTROL_MEMBERS):
            if installed(member.name) == b"/control":
                return packages.debian(_text(member, stream)).text
    except Damaged:
        pass  # the data of the package may be intact
    return ""


def _rpm(whole: Region, limits: ArchiveLimits) -> PackageArchive:
    outer = PlainStream(whole)
    header = packages.rpm_header(outer)
    at = outer.position
    stream = unpacked(Region(whole.fd, whole.offset + at, whole.size - at), limits.unpacked_bytes)
    name = packages.PackageName(*header.name).text
    members = packages.cpio_members(stream, header.files)
    return PackageArchive(name, members, stream, header.signatures())


def _tar(whole: Region, limits: ArchiveLimits) -> PackageArchive:
    stream = unpacked(whole, limits.unpacked_bytes)
    # The three parts of an Alpine package are archives of their own.
    members = tar.members(stream, concatenated=True)
    try:
        first = next(members, None)
    except Damaged:
        raise NotAPackage from None
    if first is None or not packages.is_metadata(first.name):
        raise NotAPackage
    name = ""
    for member in itertools.islice(itertools.chain((first,), members), _CONTROL_MEMBERS):
        path = installed(member.name)
        if path == b"/" + packages.PKGINFO:
            name = packages.pkginfo(_text(member, stream)).text
        elif not path.startswith(b"/.") or b"/" in path[1:]:
            members = itertools.chain((member,), members)
            break
    return PackageArchive(name, members, stream)


def _text(member: Member, stream: LimitedStream) -> bytes:
    return stream.take(min(member.stored, packages.METADATA_MAX))
