# SPDX-License-Identifier: Apache-2.0
"""Owners of the files that this process obeys: its configuration and its store.

The user of the process and root may, and the user who became root with sudo(8): they can make this
process do anything as it is.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

from buildidfs.formats import posix_acl
from buildidfs.linux import machine

_ACCESS: Final = b"system.posix_acl_access"


def weakness(status: os.stat_result) -> tuple[str, str]:
    """Return a clause on the others who may change a file or directory, and the command that ends
    it, without the path; two empty texts if there are none.

    A group with the number of the owner is that user's own.
    """
    shared = status.st_gid not in (0, status.st_uid)
    if not _is_trusted(status.st_uid) and not _is_unmapped(status.st_uid):
        return f"belongs to user {status.st_uid}", f"chown {os.geteuid()}"
    if status.st_mode & stat.S_IWOTH:
        return "may be changed by all users", "chmod go-w"
    if shared and status.st_mode & stat.S_IWGRP:
        return f"may be changed by group {status.st_gid}", "chmod g-w"
    return "", ""


def weak_place(path: str | bytes | os.PathLike[str]) -> str | None:
    """Return a clause on the others who may change or replace a file or directory, with the remedy;
    None if there are none.

    Who may change a directory above it, of the path as it is written or without its symbolic links,
    may replace it. Raises OSError.
    """
    text = os.fsencode(path)
    places = [os.path.realpath(text)]
    for start in (os.path.abspath(text), places[0]):
        while (above := os.path.dirname(start)) != start:
            places.append(start := above)
    for number, each in enumerate(dict.fromkeys(places)):
        status = os.stat(each)
        # In a directory like /tmp, a user can replace only files of their own.
        if number and status.st_mode & stat.S_ISVTX and _is_trusted(status.st_uid):
            continue
        clause, command = weakness(status)
        if not clause and (named := _writers(each, status)):
            clause, command = f"may be changed by {named} in its access control list", "setfacl -b"
        if clause:
            where = f"is in {os.fsdecode(each)}, which " if number else ""
            return f"{where}{clause}: {command} {os.fsdecode(each)}"
    return None


def _writers(path: bytes, status: os.stat_result) -> str | None:
    """Return a user or group whom an access control list allows to write; None if none is named.

    Raises OSError.
    """
    try:
        users, groups = posix_acl.writers(os.getxattr(path, _ACCESS))
    except OSError as error:
        if error.errno in (errno.ENODATA, errno.ENOTSUP):
            return None
        raise
    except ValueError:
        return "others"
    named = [f"user {uid}" for uid in users if not _is_trusted(uid)]
    named += [f"group {gid}" for gid in groups if gid not in (0, status.st_uid)]
    return next(iter(named), "")


def _is_trusted(uid: int) -> bool:
    """Return True for root, the user of the process, and the one who became root with sudo."""
    own = os.geteuid()
    return uid in (0, own) or (own == 0 and str(uid) == os.environ.get("SUDO_UID", ""))


def _is_unmapped(uid: int) -> bool:
    """Return True for the owner of files of the host in a user namespace that lacks its users."""
    if machine.is_first_user():
        return False
    with open("/proc/sys/kernel/overflowuid", "rb") as file:
        return uid == int(file.read())


def read_own(path: str | bytes | os.PathLike[str], most: int) -> bytes:
    """Return the content of a file that this process obeys, up to ``most`` bytes.

    Raises OSError: PermissionError if other users may change the file, see `inodes.open_regular`.
    """
    from buildidfs.linux import inodes

    with open(inodes.open_regular(path), "rb", buffering=0) as file:
        if weak := weak_place(path):
            raise PermissionError(f"it {weak}")
        clause, command = weakness(os.fstat(file.fileno()))
        if clause:
            raise PermissionError(f"it {clause}: {command} {os.fsdecode(path)}")
        return file.read(most)
