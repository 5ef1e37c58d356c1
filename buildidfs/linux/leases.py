# SPDX-License-Identifier: Apache-2.0
"""Whether somebody has a file open for writing. Source: fcntl(2), "Leases"."""

from __future__ import annotations

import fcntl
import os
import signal


def has_writer(fd: int) -> bool | None:
    """Whether any process has the file open, or mapped shared, for writing; None: cannot be told.

    ``fd`` is open for reading only. It takes the owner of the file, or CAP_LEASE, and a filesystem
    of this kernel: those of networks do not know. The kernel gives a read lease where there is no
    writer. It is given back at once: who opens the file for writing in between waits that long.
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
