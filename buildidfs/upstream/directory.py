# SPDX-License-Identifier: Apache-2.0
"""A directory with files by build ID, in any of the layouts that clients and servers use.

    .build-id/ab/cdef[.debug]                      /usr/lib/debug, and executables by link
    .build-id/ab/cdef/{elf,debug}                  perf's build ID cache (--buildid-dir)
    buildid/ID/{executable,debuginfo}              a bucket; what file:// in DEBUGINFOD_URLS names
    ID/{executable,debuginfo}                      the cache of debuginfod clients

Links are followed within the directory only.
"""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Final

from buildidfs import names
from buildidfs.capture import walk
from buildidfs.capture.origin.builder import access_of
from buildidfs.capture.unresponsive.filesystems import Patience
from buildidfs.linux import openat2
from buildidfs.model import Kind
from buildidfs.upstream.server import Found, NotThere, Unavailable, identity_of_copy

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.model import BuildId
    from buildidfs.upstream.server import Wanted

_ABSENT: Final = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EINVAL, errno.ELOOP))
_NAMES: Final = {
    Kind.EXECUTABLE: (b"", (b"elf", b"executable"), b"executable"),
    Kind.DEBUGINFO: (b".debug", (b"debug", b"debuginfo"), b"debuginfo"),
}


class Directory:
    """A directory on this machine, whose filesystem may not answer."""

    is_local = True

    def __init__(self, path: bytes, timeout_s: float) -> None:
        self.label = os.fsdecode(path)
        self._path = path
        self._timeout_s = timeout_s

    def fetch(self, wanted: Wanted) -> Found:
        """The file. Raises what `Server.fetch` does."""
        if wanted.kind not in _NAMES:
            raise NotThere
        try:
            return Patience(self._timeout_s).ask(
                (0, 0), lambda: self._find(wanted), lambda found: found.close()
            )
        except TimeoutError:
            raise Unavailable(
                f"its filesystem gave no answer within {self._timeout_s:g} s", hangs=True
            ) from None

    def close(self) -> None:
        """Nothing is kept open."""

    def _find(self, wanted: Wanted) -> Found:
        try:
            root_fd = os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise Unavailable(f"cannot be opened: {error.strerror}") from error
        try:
            refused = walk.Mounts().refused(os.fstat(root_fd).st_dev, root_fd)
            if refused is not None:
                # A mount of this store would wait for us.
                raise Unavailable(
                    f"is on a filesystem of type {os.fsdecode(refused)}", lasting=True
                )
            for path in _paths(wanted.build_id, wanted.kind):
                found = _opened(root_fd, path)
                if found is not None:
                    return found
        finally:
            os.close(root_fd)
        raise NotThere


def _paths(build_id: BuildId, kind: Kind) -> Iterator[bytes]:
    """The names that a file may have in a directory, relative to it."""
    suffix, in_perf, in_buildid = _NAMES[kind]
    first, rest = names.split(build_id)
    for base in (b".build-id/", b""):
        split = base + first + b"/" + rest
        yield split + suffix
        for name in in_perf:
            yield split + b"/" + name
    spelled = names.spell(build_id)
    for base in (b"buildid/", b""):
        yield base + spelled + b"/" + in_buildid


def _opened(root_fd: int, path: bytes) -> Found | None:
    """A regular file below a directory; None if there is none. Raises `Unavailable`."""
    try:
        fd = openat2.open_regular_in_root(root_fd, path)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise Unavailable(f"cannot be read: {error.strerror}") from error
    status = os.fstat(fd)
    identity = identity_of_copy(status.st_size, status.st_mtime_ns, access_of(fd))
    return Found(fd, identity, is_copy=False)
