# SPDX-License-Identifier: Apache-2.0
"""Capture the ELF files below directories.

Each file is identified by its first page: 64,000 pages take less than a second. Therefore files
without a build ID are not remembered: to read them again in each scan costs less.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture import base, debug_files, walk
from buildidfs.capture.archive.elf_members import MemberSpool
from buildidfs.capture.base import Found, Known, Memo, PinnedFile, Resighting, Unreadable, reader
from buildidfs.capture.origin.builder import UNKNOWN, Here, is_foreign
from buildidfs.capture.scan.kernel import KALLSYMS_PATH, KernelFiles
from buildidfs.capture.unresponsive.file_helper import NamedFileProbe
from buildidfs.formats.elf import identify
from buildidfs.formats.elf.core import is_core
from buildidfs.formats.elf.identify import ElfFile
from buildidfs.linux import inodes
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import Absence, BuildId, FileIdentity, Kind, Sighting, Trust

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from buildidfs.model import NamespaceSet

_NONE: Final = FileIdentity(0, 0, 0, 0, 0, 0, 0, 0)


def identify_tree(
    paths: Iterable[bytes],
) -> Iterator[tuple[bytes, BuildId | Absence | Unreadable]]:
    """Yield the build ID of every regular file at or below ``paths``, or why it has none.

    Nothing is captured or remembered. Paths begin with the given one. The results are those of
    `TreeScanner`.
    """
    known = walk.Mounts()
    for path in paths:
        try:
            start_fd = walk.open_start(path)
        except OSError as error:
            yield path, Unreadable.of(path, error)
            continue
        with closing_fd(start_fd):
            open_at = _opener(start_fd, path)
            for file in walk.files(start_fd, path, known):
                if isinstance(file, Unreadable):
                    yield file.path, file
                    continue
                with closing_fd(file.fd):
                    try:
                        yield file.path, _judged(file, open_at)[0]
                    except OSError as error:
                        yield file.path, Unreadable.of(file.path, error)


def _opener(start_fd: int, shown: bytes) -> Callable[[bytes], int]:
    """Return a function that opens files of a tree by path; the start of the tree is shown as
    ``shown``.
    """

    def open_at(path: bytes) -> int:
        return inodes.open_regular_in_root(start_fd, path.removeprefix(shown))

    return open_at


def _judged(
    file: walk.WalkedFile, open_at: Callable[[bytes], int]
) -> tuple[BuildId | Absence, Kind | None]:
    """Return the build ID under which to keep a file, or why it has none, and its kind if it is
    fixed.

    Raises OSError.
    """
    answer = _identify(file.fd)
    if answer is Absence.NO_BUILD_ID:
        package_id = debug_files.package_id(file.path, file.fd, open_at)
        if package_id:
            return package_id, Kind.DEBUGINFO
    return base.adopted(answer, file.fd), None


def _identify(fd: int) -> BuildId | Absence:
    head = os.pread(fd, identify.HEAD_SIZE, 0)
    if head[:4] != b"\x7fELF" and head:
        return Absence.NOT_ELF  # most files: saves two calls
    return identify.identify(head, reader(fd))


class TreeScanner:
    """One pass over the regular files at or below ``paths``; see `capture.base`.

    A path may be a symbolic link; no link below it is followed. Mounts of other filesystems are
    entered, except those of kernel interfaces and our own. An unreadable file is yielded as
    `Unreadable`. A file without a build ID is yielded as `Resighting`, because there is nothing
    left to read. ``initial`` are the host's namespaces; the default is those of this machine.
    ``container_namespaces`` define a container, in case we are in one. ``given`` is True if the
    operator chose the paths.
    """

    def __init__(
        self,
        memo: Memo,
        paths: Iterable[bytes],
        *,
        initial: NamespaceSet | None = None,
        container_namespaces: Collection[str] = ("mnt",),
        given: bool = True,
    ) -> None:
        self._memo = memo
        self._paths = list(paths)
        self._here = Here("tree", initial, container_namespaces, given=given)

    def __iter__(self) -> Iterator[Found]:
        known = walk.Mounts()
        for path in self._paths:
            try:
                start_fd = walk.open_start(path)
            except OSError as error:
                yield Unreadable.of(path, error)
                continue
            with closing_fd(start_fd):
                # A path such as /proc/PID/root/usr leads into a mount namespace that is not ours.
                foreign = is_foreign(start_fd)
                shown = os.readlink(b"/proc/self/fd/%d" % start_fd)
                open_at = _opener(start_fd, shown)
                for file in walk.files(start_fd, shown, known):
                    if isinstance(file, Unreadable):
                        yield file
                    else:
                        yield self._found(file, foreign, open_at)

    def _found(
        self, file: walk.WalkedFile, foreign: bool, open_at: Callable[[bytes], int]
    ) -> Found:
        """Identify a file; takes over its descriptor. ``open_at`` opens other files by path."""
        keep = False
        try:
            answer, kind = _judged(file, open_at)
            if isinstance(answer, Absence):  # of nearly all files, and only the path is reported
                nowhere = UNKNOWN.origin(file.path, _NONE, host="", trust=Trust.UNKNOWN, scanner="")
                return Resighting(Sighting(nowhere, 0), Known(absence=answer))
            sighting = self._here.sighting(file.path, file.fd, foreign=foreign)
            known = self._memo.recall(sighting.origin.identity)
            if known is not None and known.build_id == answer:
                return self._here.resighted(self._memo, sighting, known, file.fd)
            sighting = self._here.reached(sighting, file.fd)
            keep = True
            return PinnedFile(sighting, file.fd, kind, answer if kind is not None else None)
        except OSError as error:
            return Unreadable.of(file.path, error)
        finally:
            if not keep:
                os.close(file.fd)


# --- named files ----------------------------------------------------------------------------------

_SYMBOL: Final = re.compile(rb"[0-9a-f]{8,16} [a-zA-Z?] \S+[^\n]*\n")
_KALLSYMS: Final = b"/proc/kallsyms"
_LINE_MAX: Final = 1024
_ANOTHER: Final = "has another build ID of its own"
_HEAD: Final = 32


class GivenFiles:
    """One pass over named regular files; see `capture.base`. Links are followed.

    Debug files that belong to them are captured, too, from ``debug_directories`` among others. A
    file without a build ID, which other scanners skip, is an error unless one is given. Compressed
    modules and kernels are unpacked as by `kernel.KernelFiles`. ``build_id`` is for files without
    one; with ``kallsyms`` the files are copies of /proc/kallsyms, of the kernel with that build ID.
    The other arguments are as for `kernel.InstalledKernels`.
    """

    def __init__(
        self,
        memo: Memo,
        paths: Iterable[bytes],
        *,
        build_id: BuildId | None = None,
        kallsyms: bool = False,
        spool_directory: bytes | None = None,
        initial: NamespaceSet | None = None,
        container_namespaces: Collection[str] = ("mnt",),
        debug_directories: Sequence[bytes] = debug_files.DEFAULT_DIRECTORIES,
    ) -> None:
        self._debug_directories = debug_directories
        self._memo = memo
        self._paths = list(paths)
        self._build_id = build_id
        self._kallsyms = kallsyms
        self._here = Here("add", initial, container_namespaces)
        self._files = KernelFiles(memo, self._here, MemberSpool(spool_directory))

    def __iter__(self) -> Iterator[Found]:
        with NamedFileProbe() as probe:
            for path in self._paths:
                yield from self._given(path, probe)

    def _given(self, path: bytes, probe: NamedFileProbe) -> Iterator[Found]:
        if self._kallsyms and os.path.realpath(path) == _KALLSYMS:
            yield Unreadable(path, "those of the running kernel are captured by scan kernel")
            return
        try:
            probe.check(path)
            fd = _opened(path)
        except OSError as error:
            yield Unreadable.of(path, error)
            return
        with closing_fd(fd):
            try:
                shown = os.readlink(b"/proc/self/fd/%d" % fd)
                if self._kallsyms:
                    yield self._symbols(path, shown, fd)
                else:
                    yield from self._file(path, shown, fd)
            except OSError as error:
                yield Unreadable.of(path, error)

    def _file(self, path: bytes, shown: bytes, fd: int) -> Iterator[Found]:
        foreign = is_foreign(fd)
        found = self._found(path, shown, fd, foreign)
        if isinstance(found, Resighting) and (absence := found.known.absence) is not None:
            found = Unreadable(path, _why_not(absence, fd))
        if isinstance(found, Unreadable):
            yield found
            return
        trust = found.sighting.origin.trust
        yield found
        binary = base.describe(fd, self._build_id)
        if isinstance(binary, ElfFile) and not foreign:
            yield from self._companions(shown, binary, trust)

    def _found(self, path: bytes, shown: bytes, fd: int, foreign: bool) -> Found:
        kept_under, kind = self._build_id, None
        if base.own_id(fd) is Absence.NO_BUILD_ID:
            if kept_under is None:
                kept_under, kind = debug_files.package_id(path, fd, _opened), Kind.DEBUGINFO
            if kept_under is not None:
                sighting = self._here.sighting(shown, fd, foreign=foreign)
                known = self._memo.recall(sighting.origin.identity)
                if known is not None and known.build_id == kept_under:
                    return self._here.resighted(self._memo, sighting, known, fd)
                sighting = self._here.reached(sighting, fd)
                return PinnedFile(sighting, os.dup(fd), kind, kept_under)
        return self._files.found(shown, os.dup(fd), kept_under, _ANOTHER, foreign=foreign)

    def _companions(self, path: bytes, binary: ElfFile, trust: Trust) -> Iterator[Found]:
        """Yield the debug files of a binary. They get no more trust than the binary, because its
        author chose their paths.
        """
        with closing_fd(os.open(b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root_fd:
            companions = debug_files.Companions(
                root_fd, self._memo, directories=self._debug_directories
            )
            for item in companions.of(path, binary):
                if isinstance(item, Unreadable):
                    yield item
                    continue
                with item:
                    sighting = self._here.sighting(item.path, item.path_fd)
                    sighting = _changed(sighting, trust=min(trust, sighting.origin.trust))
                    if item.known is not None:
                        yield self._here.resighted(self._memo, sighting, item.known, item.path_fd)
                    else:
                        sighting = self._here.reached(sighting, item.path_fd)
                        yield PinnedFile(sighting, item.release(), item.kind, item.build_id)

    def _symbols(self, path: bytes, shown: bytes, fd: int) -> Found:
        if not _SYMBOL.match(os.pread(fd, _LINE_MAX, 0)):
            return Unreadable(path, "not a copy of /proc/kallsyms")
        sighting = self._here.sighting(shown, fd, foreign=is_foreign(fd))
        known = self._memo.recall(sighting.origin.identity)
        # The name under which perf looks for a kernel's symbols.
        if known is not None and known.build_id == self._build_id:
            return Resighting(_changed(sighting, path=KALLSYMS_PATH), known)
        sighting = _changed(self._here.reached(sighting, fd), path=KALLSYMS_PATH)
        return PinnedFile(sighting, os.dup(fd), Kind.KALLSYMS, self._build_id)


def _changed(sighting: Sighting, **changes: object) -> Sighting:
    return Sighting(msgspec.structs.replace(sighting.origin, **changes), sighting.seen_ns)


def _why_not(absence: Absence, fd: int) -> str:
    """Return the reason why a file cannot be added, with the remedy."""
    if absence is not Absence.NO_BUILD_ID:
        return str(absence)
    if is_core(os.pread(fd, _HEAD, 0)):
        return "a core file: use scan core"
    return f"{absence}; --build-id gives it one"


def _opened(path: bytes) -> int:
    """Return a descriptor that reads a regular file. Raises OSError."""
    with closing_fd(walk.open_start(path)) as path_fd:
        if stat.S_ISDIR(os.fstat(path_fd).st_mode):
            raise IsADirectoryError(errno.EISDIR, "a directory: use scan tree")
        return inodes.reopen_regular(path_fd)
