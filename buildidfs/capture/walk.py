# SPDX-License-Identifier: Apache-2.0
"""Every regular file at or below a path, opened without access to any other file on the way.

The walk holds a descriptor of each directory on its way down and opens everything relative to it
without following links. So a rename cannot lead it out of the tree, and a link cannot lead it in
circles. If a directory entry is a regular file, the file is pinned and checked before it is opened:
otherwise the name might lead to a device meanwhile, and opening a device may have any effect.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from buildidfs.capture.base import Unreadable
from buildidfs.formats import proc_text
from buildidfs.linux import mounts
from buildidfs.linux.file_ops import closing_fd

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_DEPTH: Final = 256
"""The depth to which directories are followed: each level takes a descriptor."""

# Kernel interfaces that look like files, and their magic numbers. None holds a binary, and reading
# some of them has side effects: reading trace_pipe of tracefs removes the events for other readers.
_NOT_FILES: Final = {
    b"proc": 0x9FA0, b"sysfs": 0x62656572, b"debugfs": 0x64626720, b"tracefs": 0x74726163,
    b"securityfs": 0x73636673, b"configfs": 0x62656570, b"cgroup": 0x27E0EB,
    b"cgroup2": 0x63677270, b"bpf": 0xCAFE4A11, b"pstore": 0x6165676C, b"efivarfs": 0xDE5E81E4,
    b"selinuxfs": 0xF97CFF8C, b"smackfs": 0x43415D53, b"devpts": 0x1CD1, b"mqueue": 0x19800202,
    b"autofs": 0x0187, b"binfmt_misc": 0x42494E4D, b"nsfs": 0x6E736673, b"rpc_pipefs": 0x67596969,
    b"fusectl": 0x65735543, b"resctrl": 0x7655821,
}  # fmt: skip
_BY_MAGIC: Final = {magic: fstype for fstype, magic in _NOT_FILES.items()}

_OPEN_PATH: Final = os.O_PATH | os.O_CLOEXEC
_PIN: Final = _OPEN_PATH | os.O_NOFOLLOW
_OPEN_FILE: Final = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

# The directory entry was a regular file, but by now it is gone or has another type.
_VANISHED: Final = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV))


class OpenFile(NamedTuple):
    """A regular file, open for reading; the receiver closes ``fd``."""

    path: bytes
    fd: int


class Observer(Protocol):
    """Receives each entry of a directory from a walk, before the walk opens the files of that
    directory.
    """

    def directory(self, path: bytes, fd: int) -> None:
        """Called for each directory that was opened."""

    def entry(self, path: bytes, entry: os.DirEntry[str]) -> None:
        """Called for each entry of any type."""


class _Level:
    """A directory being walked; ``subdirectories`` are those still to walk, the next one last.

    Its part of the whole walk, which counts as 1, begins at ``at``; each of its entries adds
    ``step``.
    """

    __slots__ = ("at", "entered", "fd", "prefix", "step", "subdirectories")

    def __init__(self, fd: int, prefix: bytes, at: float = 0.0, part: float = 1.0) -> None:
        self.fd = fd
        self.prefix = prefix
        self.entered = False
        self.subdirectories: list[str] = []
        self.at = at
        self.step = part  # until its entries are counted


class Position:
    """The progress of a walk: ``share`` of it is done, 0 to 1.

    Files are not counted in advance: all entries of a directory have the same weight.
    """

    share: float = 0.0


class Mounts:
    """The mounted filesystems that a walk does not enter."""

    def __init__(self) -> None:
        self._types: dict[int, bytes] = {}
        self._points: dict[bytes, bytes] = {}

    def refused(self, device: int, fd: int) -> bytes | None:
        """Return the type of the filesystem with that st_dev if a walk must not enter it.

        ``fd`` is open on it (O_PATH suffices). Raises OSError.
        """
        if device not in self._types:
            # A filesystem that was mounted since the last look, a btrfs subvolume, or a mount of
            # another namespace, to which /proc/PID/root leads: the latter two are not in our mount
            # table.
            for mount in proc_text.mounts_in(mounts.mountinfo()):
                self._types[os.makedev(*mount.dev)] = mount.fstype
                self._points[mount.mount_point] = mount.fstype
            if device not in self._types:
                self._types[device] = _BY_MAGIC.get(mounts.filesystem_magic(fd), b"")
        return _refused(self._types[device])

    def refused_at(self, path: bytes) -> bool:
        """Return True if a walk must not enter the mount at a path. Makes no request to the
        filesystem, which may not answer.
        """
        return _refused(self._points.get(path, b"")) is not None


def _refused(fstype: bytes) -> bytes | None:
    return fstype if fstype in _NOT_FILES or fstype == mounts.FILESYSTEM_TYPE else None


def open_start(path: bytes) -> int:
    """Pin the start of a walk (O_PATH), following a symbolic link. Raises OSError."""
    return os.open(path, _OPEN_PATH)


def files(
    start_fd: int,
    path: bytes,
    known: Mounts,
    observer: Observer | None = None,
    position: Position | None = None,
) -> Iterator[OpenFile | Unreadable]:
    """Yield every regular file at or below ``start_fd``, whose path is shown as ``path``.

    Directories come in the order of their names, the files of a directory before its
    subdirectories. Mounts of other filesystems are entered, except those of kernel interfaces and
    our own. The caller closes ``start_fd``.
    """
    try:
        yield from _start(start_fd, path, known, observer, position or Position())
    except OSError as error:
        yield Unreadable.of(path, error)


def _start(
    start_fd: int, path: bytes, known: Mounts, observer: Observer | None, position: Position
) -> Iterator[OpenFile | Unreadable]:
    status = os.fstat(start_fd)
    if fstype := known.refused(status.st_dev, start_fd):
        what = "its files are in the store already" if fstype.startswith(b"fuse.") else "no files"
        yield Unreadable(path, f"on a {fstype.decode()} filesystem: {what}")
        return
    link = b"/proc/self/fd/%d" % start_fd
    if stat.S_ISREG(status.st_mode):
        fd = os.open(link, _OPEN_FILE)
        yield OpenFile(path, fd)
    elif stat.S_ISDIR(status.st_mode):
        real = os.readlink(link).rstrip(b"/") + b"/"
        fd = os.open(link, _OPEN_DIRECTORY & ~os.O_NOFOLLOW)
        yield from _descend(fd, path.rstrip(b"/") + b"/", real, known, observer, position)
    else:
        yield Unreadable(path, "neither a regular file nor a directory")


def _descend(
    fd: int,
    prefix: bytes,
    real: bytes,
    known: Mounts,
    observer: Observer | None,
    position: Position,
) -> Iterator[OpenFile | Unreadable]:
    """Walk depth first; takes over ``fd``. ``real`` is the kernel's path of ``prefix``."""
    shown = len(prefix)
    levels = [_Level(fd, prefix)]
    try:
        while levels:
            level = levels[-1]
            if not level.entered:
                yield from _enter(level, known, observer, position)
            if not level.subdirectories:
                os.close(levels.pop().fd)
                continue
            name = level.subdirectories.pop()
            at = position.share = level.at
            level.at += level.step
            path = level.prefix + os.fsencode(name)
            if known.refused_at(real + path[shown:]):
                continue
            try:
                fd = os.open(name, _OPEN_DIRECTORY, dir_fd=level.fd)
            except OSError as error:
                if error.errno not in _VANISHED:
                    yield Unreadable.of(path, error)
                continue
            if _is_refused(fd, known):
                os.close(fd)
            elif len(levels) == MAX_DEPTH:
                os.close(fd)
                yield Unreadable(path, f"more than {MAX_DEPTH} directories deep")
            else:
                levels.append(_Level(fd, path + b"/", at, level.step))
    finally:
        for level in levels:
            os.close(level.fd)


def _is_refused(fd: int, known: Mounts) -> bool:
    """Return True if a walk must not enter an open directory, or its filesystem is unknown."""
    try:
        return known.refused(os.fstat(fd).st_dev, fd) is not None
    except OSError:
        return True


def _enter(
    level: _Level, known: Mounts, observer: Observer | None, position: Position
) -> Iterator[OpenFile | Unreadable]:
    """Yield the regular files of a directory, and collect its subdirectories."""
    level.entered = True
    regular = []
    try:
        if observer is not None:
            observer.directory(level.prefix, level.fd)
        with os.scandir(level.fd) as entries:
            for entry in entries:
                if observer is not None:
                    observer.entry(level.prefix + os.fsencode(entry.name), entry)
                if entry.is_file(follow_symlinks=False):
                    regular.append(entry.name)
                elif entry.is_dir(follow_symlinks=False):
                    level.subdirectories.append(entry.name)
    except OSError as error:
        yield Unreadable.of(level.prefix, error)
    regular.sort()
    level.subdirectories.sort(reverse=True)
    level.step /= max(len(regular) + len(level.subdirectories), 1)
    for name in regular:
        position.share = level.at
        level.at += level.step
        path = level.prefix + os.fsencode(name)
        try:
            fd = _open(name, level.fd, known)
        except OSError as error:
            if error.errno not in _VANISHED:
                yield Unreadable.of(path, error)
            continue
        if fd >= 0:
            yield OpenFile(path, fd)


def _open(name: str, directory_fd: int, known: Mounts) -> int:
    """Open a regular file; -1 if it is gone, or must not be read. Raises OSError."""
    with closing_fd(os.open(name, _PIN, dir_fd=directory_fd)) as path_fd:
        status = os.fstat(path_fd)
        # A file may be a mount point, and /proc/kmsg is a regular file.
        if not stat.S_ISREG(status.st_mode) or known.refused(status.st_dev, path_fd):
            return -1
        return os.open(b"/proc/self/fd/%d" % path_fd, _OPEN_FILE)
