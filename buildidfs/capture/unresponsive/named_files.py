# SPDX-License-Identifier: Apache-2.0
"""Files that the operator named: see that they can be read, before this process reads them."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from typing import TYPE_CHECKING, Final

from buildidfs.capture.unresponsive.file_helper import FileHelper
from buildidfs.capture.unresponsive.filesystems import is_slow_type
from buildidfs.errors import UsageError
from buildidfs.formats import mountinfo
from buildidfs.linux import mounts

if TYPE_CHECKING:
    from types import TracebackType

    from buildidfs.capture.unresponsive.timeouts import Device

_MOST_STEPS: Final = 4096
_OF_PROCESS: Final = re.compile(rb"/proc/[0-9]+/(root|cwd)$")


class NamedFileProbe:
    """Sees that files which the operator named can be read, before this process reads them.

    Only files on FUSE filesystems are read, and those that another process sees. A server may
    still fall silent later. A context manager.
    """

    def __init__(self, seconds: float = 10.0) -> None:
        self._helper = FileHelper(seconds)
        self._fuse = {
            mount.mount_point: mount.dev
            for mount in mountinfo.parse(mounts.mountinfo())
            if is_slow_type(mount.fstype)
        }

    def __enter__(self) -> NamedFileProbe:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._helper.close()

    def check(self, path: bytes) -> None:
        """Raises TimeoutError if the filesystem does not answer; other errors are for who reads."""
        try:
            device = self._device(path)
            if device is None:
                return
            here = os.open(b".", os.O_PATH | os.O_CLOEXEC)
            try:
                path_fd, identity = self._helper.start(device, here, path)
            finally:
                os.close(here)
            try:
                if stat.S_ISREG(identity.mode):
                    self._helper.read(device, path_fd, identity.size)
            finally:
                os.close(path_fd)
        except TimeoutError:
            raise
        except OSError:
            return

    def _device(self, path: bytes) -> Device | None:
        """The filesystem that a path leads to, if it may not answer, without asking it.

        Raises OSError.
        """
        if not self._fuse and not path.startswith(b"/proc/"):
            return None
        current, rest = b"/", os.path.join(os.getcwdb(), path).split(b"/")[::-1]
        for _ in range(_MOST_STEPS):
            if not rest:
                return None
            if (name := rest.pop()) in (b"", b"."):
                continue
            current = os.path.normpath(os.path.join(current, name))
            if current in self._fuse:
                return self._fuse[current]
            if _OF_PROCESS.match(current):
                return -1, int(current.split(b"/")[2])
            with contextlib.suppress(OSError):
                target = os.readlink(current)
                rest += target.split(b"/")[::-1]
                current = b"/" if target.startswith(b"/") else os.path.dirname(current)
        return None


def check_readable(path: bytes) -> None:
    """Raise `UsageError` if a file that the operator named is on a filesystem that is silent."""
    with NamedFileProbe() as probe:
        try:
            probe.check(path)
        except TimeoutError as error:
            raise UsageError(f"cannot read {os.fsdecode(path)!r}: {error.strerror}") from error
