# SPDX-License-Identifier: Apache-2.0
"""Owners of the files that this process obeys: its configuration and its store.

The user of the process and root may, and the user who became root with sudo(8): they can make this
process do anything as it is.
"""

from __future__ import annotations

import os
import stat

from buildidfs.linux import machine


def weakness(status: os.stat_result) -> tuple[str, str]:
    """Return a clause on the others who may change a file or directory, and the command that ends
    it, without the path; two empty texts if there are none.

    A group with the number of the owner is that user's own.
    """
    uid, shared = os.geteuid(), status.st_gid not in (0, status.st_uid)
    trusted = {"0", str(uid), os.environ.get("SUDO_UID", "") if uid == 0 else ""}
    if str(status.st_uid) not in trusted and not _is_unmapped(status.st_uid):
        return f"belongs to user {status.st_uid}", f"chown {uid}"
    if status.st_mode & stat.S_IWOTH:
        return "may be changed by all users", "chmod go-w"
    if shared and status.st_mode & stat.S_IWGRP:
        return f"may be changed by group {status.st_gid}", "chmod g-w"
    return "", ""


def _is_unmapped(uid: int) -> bool:
    """Return True for the owner of files of the host in a user namespace that lacks its users."""
    if machine.is_first_user():
        return False
    with open("/proc/sys/kernel/overflowuid", "rb") as file:
        return uid == int(file.read())


def read_own(path: str | bytes | os.PathLike[str], most: int) -> bytes:
    """Return the content of a file that this process obeys, up to ``most`` bytes.

    Raises OSError: PermissionError if other users may change the file, see `openat2.open_regular`.
    """
    from buildidfs.linux import openat2  # takes long to import; most commands only need `weakness`

    with open(openat2.open_regular(path), "rb", buffering=0) as file:
        clause, command = weakness(os.fstat(file.fileno()))
        if clause:
            raise PermissionError(f"it {clause}: {command} {os.fsdecode(path)}")
        return file.read(most)
