# SPDX-License-Identifier: Apache-2.0
"""Giving up what root may, for ever, to be an ordinary user. Source: credentials(7),
user_namespaces(7), capabilities(7).
"""

from __future__ import annotations

import errno
import os
import struct

from buildidfs.linux import syscalls

_PR_SET_DUMPABLE = 4
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWUSER = 0x10000000

# struct __user_cap_header_struct of linux/capability.h, and two __user_cap_data_struct of zeros.
_CAPABILITY_HEADER = struct.pack("=Ii", 0x20080522, 0)
_NO_CAPABILITIES = bytes(24)

_CAPABILITY_SETS = (b"CapInh", b"CapPrm", b"CapEff", b"CapAmb")


def become(uid: int, gid: int, user_namespace: int = -1) -> tuple[int, int]:
    """Be that user and nobody else, for the rest of this process, which must have one thread.

    No capability, no supplementary group and no saved ID is left, nothing that is run later can
    bring one back, and no process of that user may trace this one. With a ``user_namespace`` (a
    descriptor of /proc/PID/ns/user, not our own) the IDs are those in there. Gives user and group
    ID as they are out here.

    Raises OSError: EPERM without CAP_SETUID, CAP_SETGID and, for a namespace, CAP_SYS_ADMIN, or
    where the user turns out to be root; EINVAL for an ID that the namespace does not have. After
    an error the process may be anything between, and should end.
    """
    # What was opened out here keeps telling IDs in the terms of out here.
    status = os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC)
    try:
        _prctl(_PR_SET_DUMPABLE, 0)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
        os.setgroups([])
        if user_namespace >= 0 and syscalls.libc.setns(user_namespace, _CLONE_NEWUSER):
            raise syscalls.last_error()
        os.setresgid(gid, gid, gid)
        os.setresuid(uid, uid, uid)
        # Entering a namespace gives all capabilities there, and its root keeps them.
        if syscalls.libc.capset(_CAPABILITY_HEADER, _NO_CAPABILITIES):
            raise syscalls.last_error()
        return _checked(os.read(status, 1 << 16))
    finally:
        os.close(status)


def _prctl(option: int, value: int) -> None:
    if syscalls.libc.prctl(option, value, 0, 0, 0):
        raise syscalls.last_error()


def _checked(status: bytes) -> tuple[int, int]:
    """User and group ID of a status text of somebody without any right of root's."""
    fields = {
        key: value.split()
        for key, _, value in (line.partition(b":") for line in status.splitlines())
    }
    uids, gids = set(fields[b"Uid"]), set(fields[b"Gid"])
    powers = [name for name in _CAPABILITY_SETS if int(fields[name][0], 16)]
    if b"0" in uids or len(uids) != 1 or len(gids) != 1 or fields[b"Groups"] or powers:
        raise OSError(errno.EPERM, "this would not give up what root may")
    return int(uids.pop()), int(gids.pop())
