# SPDX-License-Identifier: Apache-2.0
"""Mapped files on a FUSE filesystem of a user, which root may not enter.

The kernel still reports the build ID of such a file. Its bytes are read with the rights of the user
who mounted the filesystem (`unresponsive.as_owner`), and accepted only if they have that build ID.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture import elf_file
from buildidfs.capture.base import Known, Memo, Unreadable
from buildidfs.formats.elf.identify import ElfFile
from buildidfs.linux import credentials, namespaces, procfs
from buildidfs.linux.file_ops import closing_fd, closing_on_error
from buildidfs.model import Absence, BuildId, FileIdentity

if TYPE_CHECKING:
    from buildidfs.capture.process.process import Process
    from buildidfs.capture.unresponsive.as_owner import AsOwner, Mounter
    from buildidfs.capture.unresponsive.file_helper import FileHelper
    from buildidfs.model import Mapping

# The errors of processes that are not the mounter's, or not in the mounter's user namespace.
_REFUSED: Final = frozenset((errno.EACCES, errno.EOVERFLOW))

_NEEDED: Final = frozenset(("CAP_SETGID", "CAP_SETUID"))

_REMEDY: Final = (
    "a FUSE filesystem that its user mounted for themselves;"
    " [capture] fuse-as-owner = true reads it as that user"
)


class Owned(msgspec.Struct):
    """A file that was read as its owner: ``fd`` is a copy, or -1 if the memo knows the file
    (``known``).

    ``binary`` has the data for finding its debug files.
    """

    identity: FileIdentity
    fd: int = -1
    known: Known | None = None
    binary: ElfFile | BuildId | None = None


class FuseFiles:
    """Reads files of FUSE mounts that root may not read, as the user who mounted them.

    Without ``as_owner`` it only reports them.
    """

    def __init__(self, memo: Memo, helper: FileHelper, as_owner: AsOwner | None = None) -> None:
        self._memo = memo
        self._helper = helper
        self._as_owner = as_owner
        self._mounters: dict[tuple[int, tuple[int, int]], Mounter] = {}

    def take(self, process: Process, mapping: Mapping, error: OSError) -> Owned | Unreadable | None:
        """Return the file of a mapping that could not be opened because of ``error``.

        Returns None if the cause is not a user's FUSE filesystem. The caller closes the descriptor.
        """
        if error.errno not in _REFUSED:
            return None
        try:
            mounter = self._mounter(process, mapping)
        except OSError:
            return None
        if mounter is None:
            return None
        path = process.path_in_root(mapping)
        if self._as_owner is None:
            reason = f"{os.strerror(error.errno)}: {_REMEDY}"
            return Unreadable(path, reason, error.errno, self._build_id(process, mapping))
        try:
            return self._read(self._as_owner, process, mapping, mounter)
        except OSError as refusal:
            # The number may be that of another filesystem by now.
            self._mounters.pop((process.mount_namespace, mapping.dev), None)
            reason = f"as its owner, uid {mounter.uid}: {refusal.strerror or refusal}"
            lacking = _NEEDED - credentials.effective_capabilities()
            if refusal.errno == errno.EPERM and lacking:
                reason += f"; needs {', '.join(sorted(lacking))}"
            silent = refusal.errno == errno.ETIMEDOUT  # and no further process has to wait
            build_id = None if silent else self._build_id(process, mapping)
            return Unreadable(path, reason, refusal.errno or errno.EIO, build_id)

    def _mounter(self, process: Process, mapping: Mapping) -> Mounter | None:
        """Return the mounter of the filesystem of a mapping, if it is FUSE. Raises OSError."""
        key = process.mount_namespace, mapping.dev
        if key not in self._mounters:
            from buildidfs.capture.unresponsive import (
                as_owner as owners,  # rare: on most hosts root is refused nothing
            )

            if "CAP_SYS_PTRACE" not in credentials.effective_capabilities():
                return None  # the cause is not FUSE
            for device, mounter in owners.mounters(procfs.mountinfo(process.fd)).items():
                self._mounters[process.mount_namespace, device] = mounter
        return self._mounters.get(key)

    def _build_id(self, process: Process, mapping: Mapping) -> BuildId | None:
        """Return the build ID of a mapped file by the kernel, unless that takes too long."""
        try:
            return self._helper.build_id(mapping.dev, process.pid, mapping)
        except OSError:
            return None

    def _read(
        self,
        as_owner: AsOwner,
        process: Process,
        mapping: Mapping,
        mounter: Mounter,
    ) -> Owned:
        """Read a file as its owner, unless the memo knows it. Raises OSError."""
        from buildidfs.capture.unresponsive.as_owner import OwnedFile

        name = procfs.map_file_name(mapping.start, mapping.end)
        users = namespaces.foreign_users(process.fd)
        try:
            with closing_fd(os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=process.fd)) as path_fd:
                place = OwnedFile(path_fd, mapping.dev, mapping.inode, mounter, tuple(users))
                identity = as_owner.look(place)
                build_id = self._build_id(process, mapping)
                known = self._memo.recall(identity)
                # Its server may report the same times for other bytes.
                if known is not None and build_id in (None, known.build_id):
                    return Owned(identity, known=known, binary=known.build_id)
                identity, fd = as_owner.read(place)
        finally:
            for user in users:
                os.close(user)
        with closing_on_error(fd):
            binary = elf_file.describe(fd)
            if isinstance(binary, Absence):
                if build_id is None:
                    return Owned(identity, fd)
                raise OSError(errno.ESTALE, f"not the bytes that are mapped: {binary}")
            if build_id not in (None, binary.build_id):
                raise OSError(errno.ESTALE, f"not the bytes that are mapped: {binary.build_id}")
        return Owned(identity, fd, binary=binary)
