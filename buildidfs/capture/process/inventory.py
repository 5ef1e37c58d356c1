# SPDX-License-Identifier: Apache-2.0
"""Count the files that are open or mapped on this host, and the ELF files among them.

The kernel's maintainers asked for exactly these numbers before they would keep a build ID with
every open file; here they show an operator how much of the host the store covers. Nothing is
captured: each distinct regular file is opened once, its first page is read, and it is closed.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from buildidfs.capture import base as files
from buildidfs.capture.process.silent_processes import NoAnswer, ProcessGate, described
from buildidfs.capture.unresponsive.filesystems import Patience, no_answer, slow_devices
from buildidfs.formats import proc_text
from buildidfs.linux import inodes, mounts, procfs
from buildidfs.linux.file_ops import closing_fd, closing_on_error
from buildidfs.model import Absence, BuildId

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.capture.base import Progress
    from buildidfs.model import FileIdentity


class Census(msgspec.Struct):
    """The counts. ``refused`` processes could not be examined completely; ``unseen``, which are
    among them, not at all.

    ``references`` counts open descriptors and mappings of regular files, ``files`` the distinct
    files behind them, ``elf`` those that are ELF. ``silent`` is a clause that names the processes
    that do not answer, empty if there are none.
    """

    processes: int = 0
    refused: int = 0
    unseen: int = 0
    references: int = 0
    files: int = 0
    elf: int = 0
    silent: str = ""
    absent: Counter[Absence] = msgspec.field(default_factory=Counter)
    build_ids: set[BuildId] = msgspec.field(default_factory=set)


def take(progress: Progress | None = None, patience: Patience | None = None) -> Census:
    """Count the regular files that accessible processes have open or mapped.

    Without the privilege to follow map_files, mapped files are found by their paths. ``progress``
    is called with the number of processes done and the current one; ``patience`` is for filesystems
    that may never answer.
    """
    count = _Count(patience or Patience())
    pids = procfs.pids()
    for done, pid in enumerate(pids):
        if progress is not None:
            progress(done, f"/proc/{pid}", share=done / len(pids))
        try:
            pid_fd = procfs.open_pid(pid)
        except OSError:
            continue  # it ended meanwhile
        try:
            if not procfs.is_kernel_thread(pid_fd):
                count.process(pid, pid_fd)
        except OSError as error:
            count.refuse(error, whole=True)
        finally:
            os.close(pid_fd)
            count.next_process()
    count.census.silent = described(count.gate.silent.rows(), count.gate.silent.unasked())
    return count.census


class _Count:
    """The counts so far: each file is opened once."""

    def __init__(self, patience: Patience) -> None:
        self.census = Census()
        self._patience = patience
        self.gate = ProcessGate()
        self._seen: set[tuple[int, int]] = set()
        self._refused = False
        self._mount_namespaces: set[str] = set()
        self._own_mounts: set[int] = set()
        self._slow: set[int] = set()

    def process(self, pid: int, pid_fd: int) -> None:
        """Count the files that one process has open or mapped. Raises OSError."""
        self.census.processes += 1
        self._note_mounts(pid_fd)
        for link in _links(pid_fd, b"fd"):
            self._link(pid, pid_fd, *link)
        mapped = self.gate.ask(pid_fd, pid, lambda own: _links(own, b"map_files"))
        if mapped and isinstance(mapped[0][1], PermissionError):
            self._paths(pid, pid_fd)
            return
        for link in mapped:
            self._link(pid, pid_fd, *link)

    def _note_mounts(self, pid_fd: int) -> None:
        """Read the mounts of a mount namespace when it is seen for the first time.
        Raises OSError.
        """
        namespace = os.readlink("ns/mnt", dir_fd=pid_fd)
        if namespace in self._mount_namespaces:
            return
        self._mount_namespaces.add(namespace)
        text = procfs.mountinfo(pid_fd)
        self._own_mounts |= {os.makedev(*device) for device in mounts.own_mount_devices(text)}
        self._slow |= {os.makedev(*device) for device in slow_devices(text)}

    def _link(self, pid: int, pid_fd: int, name: bytes, found: FileIdentity | OSError) -> None:
        """Count a link of /proc to a file; open the file only if it is new."""
        if isinstance(found, OSError):
            self.refuse(found)
            return
        if not self._is_new(found):
            return
        if self._patience.is_silent(inodes.major_minor(found.dev)):
            self.refuse(no_answer())
            return
        try:
            path_fd = self.gate.ask(
                pid_fd, pid, functools.partial(_open_same, name=name, file=found), os.close
            )
        except OSError as error:
            # Another process may have the file, too.
            self._seen.discard((found.dev, found.ino))
            self.census.files -= 1
            if isinstance(error, NoAnswer):
                raise
            self.refuse(error)
            return
        self._ask(found.dev, functools.partial(_identify, path_fd))

    def _paths(self, pid: int, pid_fd: int) -> None:
        """Count mapped files by their paths in the root of the process. Raises OSError."""
        text = self.gate.ask(pid_fd, pid, procfs.maps)
        named = {m.path for m in proc_text.mappings_in(text) if m.path[:1] == b"/"}
        with closing_fd(procfs.open_root(pid_fd)) as root_fd:
            for path in named:
                try:
                    path_fd = inodes.open_in_root(root_fd, path, os.O_PATH | os.O_CLOEXEC)
                    identity = inodes.identity(path_fd)
                except OSError as error:
                    self.refuse(error)
                    continue
                if self._is_new(identity):
                    self._ask(identity.dev, functools.partial(_identify, path_fd))
                else:
                    os.close(path_fd)

    def _is_new(self, identity: FileIdentity) -> bool:
        """Count one reference; return True if it is the first one to a regular file."""
        if not stat.S_ISREG(identity.mode):
            return False
        self.census.references += 1
        key = (identity.dev, identity.ino)
        if key in self._seen or identity.dev in self._own_mounts:
            return False
        self._seen.add(key)
        self.census.files += 1
        return True

    def _ask(self, device: int, question: Callable[[], BuildId | Absence]) -> None:
        """Identify a file, and count it."""
        try:
            if device in self._slow:
                answer = self._patience.ask(
                    inodes.major_minor(device), question, lambda answer: None
                )
            else:
                answer = question()
        except OSError as error:
            self.refuse(error)
            return
        if isinstance(answer, BuildId):
            self.census.build_ids.add(answer)
        elif answer in (Absence.NOT_ELF, Absence.EMPTY):
            return
        else:
            self.census.absent[answer] += 1
        self.census.elf += 1

    def refuse(self, error: OSError, *, whole: bool = False) -> None:
        """Record that a file of the process, or the process as a ``whole``, could not be examined.

        If the process has ended or the file was closed meanwhile, nothing is recorded.
        """
        if error.errno not in procfs.GONE:
            self._refused = True
            self.census.unseen += whole

    def next_process(self) -> None:
        """Count the last process as refused if a part of it was refused."""
        self.census.refused += self._refused
        self._refused = False


def _open_same(pid_fd: int, name: bytes, file: FileIdentity) -> int:
    """Return an O_PATH descriptor of the file to which a link of a process leads.

    Raises OSError, FileNotFoundError if it is not ``file`` any more.
    """
    procfs.await_memory_map(pid_fd)  # the name may be one in map_files
    fd = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=pid_fd)
    with closing_on_error(fd):
        identity = inodes.identity(fd, ask=False)
        if (identity.dev, identity.ino) != (file.dev, file.ino):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return fd


def _identify(path_fd: int) -> BuildId | Absence:
    """Return the build ID of a regular file; takes over its O_PATH descriptor. Raises OSError."""
    with closing_fd(path_fd):
        fd = inodes.reopen_regular(path_fd)
    with closing_fd(fd):
        return files.identify(fd)


def _links(pid_fd: int, name: bytes) -> list[tuple[bytes, FileIdentity | OSError]]:
    """Return the links in a directory of the process, with the files to which they lead.

    Asks no filesystem. Raises OSError.
    """
    found: list[tuple[bytes, FileIdentity | OSError]] = []
    directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=pid_fd)
    with closing_fd(directory):
        for entry in os.listdir(directory):
            link = name + b"/" + os.fsencode(entry)
            try:
                found.append((link, inodes.identity_at(pid_fd, link)))
            except OSError as error:
                found.append((link, error))
    return found
