# SPDX-License-Identifier: Apache-2.0
"""Running a program that reads what strangers have made: with nothing that it does not need.

Source: credentials(7), setrlimit(2), network_namespaces(7).
"""

from __future__ import annotations

import os
import pwd
import resource
import signal
from typing import Final

import msgspec

from buildidfs.linux import credentials, parents, syscalls

_NOBODY: Final = 65534
_CLONE_NEWNET: Final = 0x40000000
_PR_SET_NO_NEW_PRIVS: Final = 38


class Limits(msgspec.Struct, frozen=True):
    """What a program may use: ``memory`` bytes of its own, ``addresses`` bytes with files mapped,
    ``seconds`` of processor time.
    """

    memory: int
    addresses: int
    seconds: int


def unprivileged() -> tuple[int, int]:
    """User and group ID to run a program with: nobody's as root, else our own."""
    if os.geteuid() != 0:
        return os.geteuid(), os.getegid()
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        return _NOBODY, _NOBODY
    return (nobody.pw_uid, nobody.pw_gid) if nobody.pw_uid else (_NOBODY, _NOBODY)


def confine(parent: int, limits: Limits) -> None:
    """Call it in a child of ``parent``, between fork and exec.

    What is run then is an ordinary user without a right of root's (nobody, where the caller is
    root), has no network where we may take that from it, writes no file, dumps no core, and ends
    with its parent. Raises OSError where it cannot be made so.
    """
    uid, gid = unprivileged()
    syscalls.libc.unshare(_CLONE_NEWNET)  # which only root may
    for kind, value in (
        (resource.RLIMIT_DATA, limits.memory),
        (resource.RLIMIT_AS, limits.addresses),
        (resource.RLIMIT_CPU, limits.seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (most, most))
    if os.geteuid() == 0:
        credentials.become(uid, gid)
    elif syscalls.libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise syscalls.last_error()
    # After the change of user, which would undo it.
    parents.end_with(parent, signal.SIGKILL)
