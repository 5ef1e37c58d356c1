# SPDX-License-Identifier: Apache-2.0
"""fanotify: to be told, or asked, when files are opened.

A group gets events for what is marked. Each event comes with a new descriptor of the very file,
opened by the kernel when the event is read: whatever has become of its name, this is the file.
Those who cause a *permission* event wait until it is answered, or until the last descriptor of
the group is closed. So a group that asks for permission must never be held by a process that
hangs. Sources: fanotify(7), fanotify_init(2), fanotify_mark(2).

Marks on mount namespaces (Linux 6.14) are left out on purpose: with Linux 6.18 the end of a
namespace that has one takes a mutex in a softirq, and was seen to take the kernel down with it.
"""

from __future__ import annotations

import ctypes
import os
import struct

from buildidfs.linux import syscalls

# fanotify_init: what the group is for, and how it reports. CLASS_CONTENT may ask for permission.
CLASS_NOTIF = 0x0
CLASS_CONTENT = 0x4
CLOEXEC = 0x1
NONBLOCK = 0x2
UNLIMITED_MARKS = 0x20

# Events. OPEN_EXEC and its permission: commits 9b076f1c0f48 and 66917a3130f2, Linux 5.0.
OPEN = 0x20
OPEN_EXEC_PERM = 0x40000
Q_OVERFLOW = 0x4000

# What a mark is put on: an inode unless said otherwise.
MARK_FILESYSTEM = 0x100  # the whole superblock, wherever it is mounted: d54f4fba889b, Linux 4.20
_MARK_ADD = 0x1
_MARK_FLUSH = 0x80
_MARK_IGNORED_MASK = 0x20
# The inode may leave the memory and the mark with it: commit 7d5e005d982527, Linux 5.19.
_MARK_EVICTABLE = 0x200

# How the kernel opens the file of an event for us. NOATIME: looking is not using. NONBLOCK: who
# holds a write lease on a file would keep our read(2) waiting for as long as he likes, up to 45 s
# (/proc/sys/fs/lease-break-time); this way that one open fails, and nobody else waits.
_EVENT_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOATIME | os.O_NONBLOCK

# struct fanotify_response: fd, response (FAN_ALLOW, FAN_DENY)
_RESPONSE = struct.Struct("=iI")
_ALLOW = 1
_DENY = 2

_init = syscalls.libc.fanotify_init
_init.argtypes = (ctypes.c_uint, ctypes.c_uint)
_init.restype = ctypes.c_int
_mark = syscalls.libc.fanotify_mark
_mark.argtypes = (ctypes.c_int, ctypes.c_uint, ctypes.c_uint64, ctypes.c_int, ctypes.c_char_p)
_mark.restype = ctypes.c_int


def init(flags: int) -> int:
    """A new group, which neither blocks nor survives an exec; its queue is bounded.

    A full queue loses events, says so with Q_OVERFLOW, and allows what asked for permission
    (/proc/sys/fs/fanotify/max_queued_events). Raises OSError: EPERM without CAP_SYS_ADMIN, EINVAL
    for flags that the kernel does not know, EMFILE for too many groups, ENOSYS.
    """
    group = int(_init(flags | CLOEXEC | NONBLOCK, _EVENT_FLAGS))
    if group < 0:
        raise syscalls.last_error()
    return group


def mark(
    group: int, kind: int, mask: int, path: bytes | None, *, dir_fd: int = syscalls.AT_FDCWD
) -> None:
    """Add the events of ``mask`` to a mark of ``kind`` on what is at ``path`` below ``dir_fd``.

    Without a path ``dir_fd`` itself is meant, which must not be O_PATH; use `path_of` for those.
    Marking again is allowed and cheap. Raises OSError: EINVAL if the kernel or the filesystem
    does not have such events, ENODEV or EXDEV for filesystems that cannot be watched as a whole,
    ENOSPC for too many marks.
    """
    _do_mark(group, _MARK_ADD | kind, mask, path, dir_fd)


def ignore(group: int, mask: int, event_fd: int) -> None:
    """Ask for no more of these events of the file ``event_fd``, until it is modified.

    The mark does not keep the file in memory, nor anything else alive. Raises OSError: EINVAL
    where the kernel cannot do that (before Linux 5.19), ENOSPC.
    """
    _do_mark(group, _MARK_ADD | _MARK_IGNORED_MASK | _MARK_EVICTABLE, mask, None, event_fd)


def flush(group: int, kind: int) -> None:
    """Remove all marks of ``kind`` (0: of inodes). Raises OSError."""
    _do_mark(group, _MARK_FLUSH | kind, 0, b"/", syscalls.AT_FDCWD)


def path_of(fd: int) -> bytes:
    """A path that leads to the file ``fd``, even if that is O_PATH."""
    return b"/proc/self/fd/%d" % fd


def read(group: int, size: int) -> bytes:
    """The events waiting, as far as ``size`` bytes have room; empty if there are none.

    Any file that comes with them is open from now on. Raises OSError: EINVAL if there is no room
    for one event, and what opening the first file failed with. A permission event whose file
    cannot be opened is denied by the kernel: never run out of descriptors.
    """
    try:
        return os.read(group, size)
    except BlockingIOError:
        return b""


def respond(group: int, event_fd: int, *, allow: bool) -> None:
    """Answer the permission event that came with ``event_fd``; who caused it goes on.

    Any process that has the group may answer. Raises OSError: ENOENT if no such event waits.
    """
    os.write(group, _RESPONSE.pack(event_fd, _ALLOW if allow else _DENY))


def _do_mark(group: int, flags: int, mask: int, path: bytes | None, dir_fd: int) -> None:
    name = None if path is None else syscalls.check_path(path)
    if _mark(group, flags, mask, dir_fd, name):
        raise syscalls.last_error(path)
