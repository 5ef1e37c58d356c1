# SPDX-License-Identifier: Apache-2.0
"""Calls of the C library for which Python 3.11 has no wrapper, and their errors.

Importing this costs one dlopen of a library that is already loaded. Each interface declares its
functions and constants in its own file; this module has only shared ones.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

libc = ctypes.CDLL(None, use_errno=True)

AT_FDCWD = -100
AT_SYMLINK_NOFOLLOW = 0x100
AT_NO_AUTOMOUNT = 0x800
AT_EMPTY_PATH = 0x1000
AT_STATX_DONT_SYNC = 0x4000

# The same on every architecture that got the call at or after Linux 5.1 (except alpha).
SYS_OPENAT2 = 437

PR_SET_PDEATHSIG = 1
PR_GET_DUMPABLE = 3
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
PR_GET_NAME = 16
PR_SET_SECCOMP = 22
PR_SET_NO_NEW_PRIVS = 38

# struct __user_cap_header_struct of linux/capability.h; two __user_cap_data_struct follow.
_CAPABILITY_HEADER = struct.pack("=Ii", 0x20080522, 0)
_NO_CAPABILITIES = bytes(24)

_IOC_WRITE = 1
_IOC_READ = 2

_syscall = libc.syscall
_syscall.restype = ctypes.c_long


def last_error(filename: bytes | None = None) -> OSError:
    """Return the error of the C call just made, ready to raise; ``filename`` is named
    in its text.
    """
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), filename)


def syscall(number: int, *args: int | bytes, filename: bytes | None = None) -> int:
    """Make a system call by number and return its result; pointers are given as addresses, or as
    bytes that the kernel only reads.

    Raises OSError.
    """
    words = [arg if isinstance(arg, bytes) else ctypes.c_ulong(arg) for arg in args]
    result: int = _syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise last_error(filename)
    return result


def prctl(option: int, value: int = 0) -> None:
    """Call prctl(2) with one argument. Raises OSError."""
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise last_error()


def end_with(parent: int, number: int) -> None:
    """Let the kernel send signal ``number`` to this process when the thread that started it ends.

    ``parent`` is the process ID of the starter. The child calls this function before or after exec;
    the setting survives exec, unless the program has more privileges than its caller. If the parent
    is gone already, the signal comes at once. Raises OSError.
    """
    prctl(PR_SET_PDEATHSIG, number)
    # 0 is a parent outside our PID namespace; the heir of one that is gone is inside.
    if os.getppid() not in (parent, 0):
        os.kill(os.getpid(), number)


def unshare(flags: int) -> None:
    """Move this thread into new namespaces, see unshare(2). Raises OSError."""
    if libc.unshare(flags):
        raise last_error()


def setns(fd: int, flags: int) -> None:
    """Move this thread into a namespace, see setns(2). Raises OSError."""
    if libc.setns(fd, flags):
        raise last_error()


def drop_capabilities() -> None:
    """Give up all capabilities of this thread, see capset(2). Raises OSError."""
    held = bytearray(len(_NO_CAPABILITIES))
    if libc.capget(_CAPABILITY_HEADER, (ctypes.c_char * len(held)).from_buffer(held)):
        raise last_error()
    if any(held) and libc.capset(_CAPABILITY_HEADER, _NO_CAPABILITIES):
        raise last_error()


def check_path(path: bytes) -> bytes:
    """Return the path, unless it contains a NUL, at which C would silently end it.

    Raises OSError(EINVAL).
    """
    if b"\0" in path:
        raise OSError(errno.EINVAL, "NUL byte in a path", path)
    return path


def ioc_read(kind: int, number: int, size: int) -> int:
    """Return the request code of an ioctl that fills ``size`` bytes (_IOR of
    asm-generic/ioctl.h).
    """
    return _IOC_READ << 30 | size << 16 | kind << 8 | number


def ioc_read_write(kind: int, number: int, size: int) -> int:
    """Return the request code of an ioctl that takes and fills ``size`` bytes (_IOWR)."""
    return (_IOC_READ | _IOC_WRITE) << 30 | size << 16 | kind << 8 | number
