# SPDX-License-Identifier: Apache-2.0
"""The files that images are made of, below a directory or in an archive of them."""

from __future__ import annotations

import contextlib
import os
import posixpath
from typing import TYPE_CHECKING, Final, Protocol

from buildidfs.capture.archive.stream import PlainStream, Region
from buildidfs.capture.origin.builder import access_of
from buildidfs.formats.archive import tar
from buildidfs.formats.archive.common import Damaged, Type, installed
from buildidfs.formats.container import oci
from buildidfs.linux import openat2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from buildidfs.model import Access

_LINKS_MAX: Final = 8
_MEMBERS_MAX: Final = 1 << 20


class Files(Protocol):
    """Files by their path, which comes from an image: it leads nowhere else."""

    def open(self, path: bytes) -> AbstractContextManager[Region]:
        """Give the bytes of a file; raises OSError, FileNotFoundError if there is none."""

    def access(self, path: bytes) -> Access:
        """Return the users who may read a file; raises OSError."""


class DirectoryFiles:
    """Files below a directory, whose descriptor stays the caller's."""

    def __init__(self, root_fd: int) -> None:
        self.root_fd = root_fd

    @contextlib.contextmanager
    def open(self, path: bytes) -> Iterator[Region]:
        """See `Files`. No link leads out of the directory."""
        fd = openat2.open_regular_in_root(self.root_fd, path)
        try:
            yield Region(fd, 0, os.fstat(fd).st_size)
        finally:
            os.close(fd)

    def access(self, path: bytes) -> Access:
        """See `Files`."""
        with self.open(path) as region:
            return access_of(region.fd)


class ArchiveFiles:
    """Files in a tar archive that is not compressed, whose descriptor stays the caller's.

    ``access`` says who may read the archive. Raises OSError, `Damaged`.
    """

    def __init__(self, whole: Region, access: Access) -> None:
        self._access = access
        self._places: dict[bytes, Region] = {}
        self._links: dict[bytes, bytes] = {}
        stream = PlainStream(whole)
        for number, member in enumerate(tar.members(stream)):
            if number == _MEMBERS_MAX:
                raise Damaged(f"more than {_MEMBERS_MAX} members")
            name = installed(member.name)
            if member.type is Type.FILE and member.extents is None:
                at = whole.offset + stream.position
                self._places[name] = Region(whole.fd, at, member.stored)
            elif member.type is Type.HARD_LINK:
                self._links[name] = installed(member.target)
            elif member.target:
                beside = posixpath.join(posixpath.dirname(name), member.target)
                self._links[name] = installed(beside)

    @contextlib.contextmanager
    def open(self, path: bytes) -> Iterator[Region]:
        """See `Files`."""
        name = installed(path)
        for _ in range(_LINKS_MAX):
            if name not in self._links:
                break
            name = self._links[name]
        region = self._places.get(name)
        if region is None:
            raise FileNotFoundError(2, "no such file in the archive", path)
        yield region

    def access(self, path: bytes) -> Access:
        """See `Files`."""
        return self._access


def has(files: Files, path: bytes) -> bool:
    """Return True if there is such a file; raises OSError unless it is missing."""
    try:
        with files.open(path):
            return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def content(files: Files, path: bytes, limit: int = oci.DOCUMENT_MAX) -> bytes:
    """All of a document; raises OSError, and `Damaged` if it is too large to be one."""
    with files.open(path) as region:
        if region.size > limit:
            raise Damaged(f"{os.fsdecode(path)} has {region.size} bytes, which is too much")
        return b"".join(region.chunks())
