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
from buildidfs.linux import inodes, mounts
from buildidfs.linux.file_ops import closing_fd

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_DEPTH: Final = 256
"""The depth to which directories are followed: each level takes a descriptor."""

# Opening the mount point of an automounter waits for the mount.
_UNOPENED: Final = frozenset((mounts.FILESYSTEM_TYPE, b"autofs"))

_OPEN_PATH: Final = os.O_PATH | os.O_CLOEXEC
_PIN: Final = _OPEN_PATH | os.O_NOFOLLOW
_OPEN_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

# The directory entry was a regular file, but by now it is gone or has another type; or a file of an
# interface of the kernel is mounted there.
_VANISHED: Final = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL))


class WalkedFile(NamedTuple):
    """A regular file, open for reading; the receiver closes ``fd``."""

    path: bytes
    fd: int


class DirectoryObserver(Protocol):
    """Receives each entry of a directory from a walk, before the walk opens the files of that
    directory.
    """

    def directory(self, path: bytes, fd: int) -> None:
        """Called for each directory that was opened."""

    def entry(self, path: bytes, entry: os.DirEntry[str]) -> None:
        """Called for each entry of any type."""


class _Level:
    """A directory being walked; ``subdirectories`` are those still to walk, the next one last."""

    __slots__ = ("entered", "fd", "prefix", "subdirectories")

    def __init__(self, fd: int, prefix: bytes) -> None:
        self.fd = fd
        self.prefix = prefix
        self.entered = False
        self.subdirectories: list[str] = []


class Mounts:
    """The mounted filesystems that a walk does not enter."""

    def __init__(self) -> None:
        self._types: dict[int, bytes] = {}
        self._points: dict[bytes, bytes] = {}

    def refused(self, device: int, fd: int) -> bytes | None:
        """Return the type of the filesystem with that st_dev if a walk must not enter it: an
        interface of the kernel, or ours.

        ``fd`` is open on it (O_PATH suffices). Raises OSError.
        """
        if self.is_ours(device):
            return mounts.FILESYSTEM_TYPE
        if mounts.stores_files(fd):
            return None
        return self._types[device] or b"kernel"

    def is_ours(self, device: int) -> bool:
        """Return True if the filesystem with that st_dev is a mount of ours. Raises OSError."""
        if device not in self._types:
            # A filesystem that was mounted since the last look, a btrfs subvolume, or a mount of
            # another namespace, to which /proc/PID/root leads: the latter two are not in our mount
            # table.
            self._types[device] = b""
            for mount in proc_text.mounts_in(mounts.mountinfo()):
                self._types[os.makedev(*mount.dev)] = mount.fstype
                self._points[mount.mount_point] = mount.fstype
        return self._types[device] == mounts.FILESYSTEM_TYPE

    def refused_at(self, path: bytes) -> bool:
        """Return True if a walk must not enter the mount at a path. Makes no request to the
        filesystem, which may not answer.
        """
        return self._points.get(path, b"") in _UNOPENED


def open_start(path: bytes) -> int:
    """Pin the start of a walk (O_PATH), following a symbolic link. Raises OSError."""
    return os.open(path, _OPEN_PATH)


def files(
    start_fd: int,
    path: bytes,
    known: Mounts,
    observer: DirectoryObserver | None = None,
) -> Iterator[WalkedFile | Unreadable]:
    """Yield every regular file at or below ``start_fd``, whose path is shown as ``path``.

    Directories come in the order of their names, the files of a directory before its
    subdirectories. Mounts of other filesystems are entered, except those of kernel interfaces and
    our own. The caller closes ``start_fd``.
    """
    try:
        yield from _start(start_fd, path, known, observer)
    except OSError as error:
        yield Unreadable.of(path, error)


def _start(
    start_fd: int, path: bytes, known: Mounts, observer: DirectoryObserver | None
) -> Iterator[WalkedFile | Unreadable]:
    status = os.fstat(start_fd)
    if fstype := known.refused(status.st_dev, start_fd):
        is_ours = fstype == mounts.FILESYSTEM_TYPE
        what = "its files are in the store already" if is_ours else "no files"
        yield Unreadable(path, f"on a {fstype.decode()} filesystem: {what}")
        return
    link = b"/proc/self/fd/%d" % start_fd
    if stat.S_ISREG(status.st_mode):
        yield WalkedFile(path, inodes.reopen_regular(start_fd))
    elif stat.S_ISDIR(status.st_mode):
        real = os.readlink(link).rstrip(b"/") + b"/"
        fd = os.open(link, _OPEN_DIRECTORY & ~os.O_NOFOLLOW)
        yield from _descend(fd, path.rstrip(b"/") + b"/", real, known, observer)
    else:
        yield Unreadable(path, "neither a regular file nor a directory")


def _descend(
    fd: int, prefix: bytes, real: bytes, known: Mounts, observer: DirectoryObserver | None
) -> Iterator[WalkedFile | Unreadable]:
    """Walk depth first; takes over ``fd``. ``real`` is the kernel's path of ``prefix``."""
    shown = len(prefix)
    levels = [_Level(fd, prefix)]
    try:
        while levels:
            level = levels[-1]
            if not level.entered:
                yield from _enter(level, known, observer)
            if not level.subdirectories:
                os.close(levels.pop().fd)
                continue
            name = level.subdirectories.pop()
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
                levels.append(_Level(fd, path + b"/"))
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
    level: _Level, known: Mounts, observer: DirectoryObserver | None
) -> Iterator[WalkedFile | Unreadable]:
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
    for name in regular:
        path = level.prefix + os.fsencode(name)
        try:
            fd = _open(name, level.fd, known)
        except OSError as error:
            if error.errno not in _VANISHED:
                yield Unreadable.of(path, error)
            continue
        if fd >= 0:
            yield WalkedFile(path, fd)


def _open(name: str, directory_fd: int, known: Mounts) -> int:
    """Open a regular file; -1 if it is gone, or must not be read. Raises OSError."""
    with closing_fd(os.open(name, _PIN, dir_fd=directory_fd)) as path_fd:
        status = os.fstat(path_fd)
        if known.is_ours(status.st_dev):  # a file may be a mount point
            return -1
        return inodes.reopen_regular(path_fd, status)
