# SPDX-License-Identifier: Apache-2.0
"""Ask the kernel whether a file may be written to. Source: fcntl(2), "Leases"."""

from __future__ import annotations

import fcntl
import os
import signal
from typing import Final

from buildidfs.linux import statfs

# From linux/magic.h.
_OVERLAY: Final = 0x794C7630


def has_writer(fd: int) -> bool | None:
    """Return True if a process has the file open, or mapped shared, for writing; None: unknown.

    ``fd`` is open for reading only. It takes the owner of the file, or CAP_LEASE, and a filesystem
    of this kernel: those of networks do not know. The kernel gives a read lease where there is no
    writer. It is given back at once: who opens the file for writing in between waits that long.

    On an overlay False is about open descriptors alone: a shared mapping belongs to the file of
    the layer below, whose writers the overlay does not count. See `has_no_writer`.
    """
    try:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
            return None
        # Who waits for a lease makes the kernel signal its holder, by default with one that kills.
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return True
    except OSError:
        return None
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def has_no_writer(fd: int) -> bool | None:
    """Return True if no process can change the file without opening it first; None: unknown.

    As `has_writer`, but an overlay is not believed where it may overlook a mapping.
    """
    writer = has_writer(fd)
    if writer is not False:
        return None if writer is None else False
    try:
        return None if statfs.magic(fd) == _OVERLAY else True
    except OSError:
        return None
