# SPDX-License-Identifier: Apache-2.0
"""How many files are open or mapped on this host, and how many of them are ELF.

The kernel's maintainers asked for exactly these numbers before they would keep a build ID with
every open file; here they tell an operator how much of the host the store covers. Nothing is
captured: each distinct regular file is opened once, its first page read, and closed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import Counter
from collections.abc import Iterator

import msgspec

from buildidfs.capture import files
from buildidfs.linux import mounts, openat2, procfs
from buildidfs.model import Absence, BuildId


class Census(msgspec.Struct):
    """What was counted; ``refused`` processes or files could not be looked at.

    ``references`` counts open descriptors and mappings of regular files, ``files`` the distinct
    files behind them, ``elf`` those that are ELF.
    """

    processes: int = 0
    refused: int = 0
    references: int = 0
    files: int = 0
    elf: int = 0
    absent: Counter[Absence] = msgspec.field(default_factory=Counter)
    build_ids: set[BuildId] = msgspec.field(default_factory=set)


def take() -> Census:
    """Count the regular files that the processes we may look at have open or mapped."""
    census = Census()
    seen: set[tuple[int, int]] = set()
    own = {os.makedev(*dev) for dev in mounts.own_mount_devices(mounts.mountinfo())}
    for pid in procfs.pids():
        try:
            pid_fd = procfs.open_pid(pid)
        except OSError:
            continue  # it ended meanwhile
        try:
            if procfs.is_kernel_thread(pid_fd):
                continue
            census.processes += 1
            for link in _links(pid_fd, census):
                _count(pid_fd, link, seen, own, census)
        except OSError as error:
            _refuse(error, census)
        finally:
            os.close(pid_fd)
    return census


def _links(pid_fd: int, census: Census) -> Iterator[bytes]:
    """The links to what a process has open and mapped, relative to its directory."""
    refused = False
    for name in (b"fd", b"map_files"):
        try:
            directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=pid_fd)
            try:
                entries = os.listdir(directory)
            finally:
                os.close(directory)
        except OSError as error:
            refused = refused or error.errno in (errno.EACCES, errno.EPERM)
            continue
        for entry in entries:
            yield name + b"/" + os.fsencode(entry)
    census.refused += refused


def _count(
    pid_fd: int, link: bytes, seen: set[tuple[int, int]], own: set[int], census: Census
) -> None:
    """Count one reference, and look into its file if it is a new one."""
    try:
        status = os.stat(link, dir_fd=pid_fd)
        if not stat.S_ISREG(status.st_mode):
            return
        census.references += 1
        key = (status.st_dev, status.st_ino)
        if key in seen or status.st_dev in own:
            return
        seen.add(key)
        census.files += 1
        path_fd = os.open(link, os.O_PATH | os.O_CLOEXEC, dir_fd=pid_fd)
        try:
            fd = openat2.reopen_regular(path_fd)
        finally:
            os.close(path_fd)
    except OSError as error:
        _refuse(error, census)
        return
    try:
        _identify(fd, census)
    except OSError as error:
        _refuse(error, census)
    finally:
        os.close(fd)


def _identify(fd: int, census: Census) -> None:
    answer = files.identify(fd)
    if isinstance(answer, BuildId):
        census.build_ids.add(answer)
    elif answer in (Absence.NOT_ELF, Absence.EMPTY):
        return
    else:
        census.absent[answer] += 1
    census.elf += 1


def _refuse(error: OSError, census: Census) -> None:
    """Count what we may not see; what has ended or been closed meanwhile is no loss."""
    if error.errno not in (errno.ENOENT, errno.ESRCH):
        census.refused += 1
