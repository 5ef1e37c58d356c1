# SPDX-License-Identifier: Apache-2.0
"""The regular files and links in packages that are no ELF files: where sources are."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.capture.archive import packages
from buildidfs.capture.archive.elf_members import Closed
from buildidfs.capture.archive.stream import DEFAULT_LIMITS, CannotDecompress
from buildidfs.capture.base import Unreadable
from buildidfs.formats.archive.common import Damaged, Type, installed
from buildidfs.model import EVERYBODY

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.capture.archive.stream import Limits
    from buildidfs.capture.walk import OpenFile

_READABLE: Final = 0o444


class PackagedFile(NamedTuple):
    """A regular file or a link, by its path when installed.

    ``container`` is the name that sightings in the package have. ``data`` is None unless the file
    was asked for, and may be read by all users.
    """

    container: str
    path: bytes
    size: int = 0
    data: bytes | None = None


def files_in(
    paths: Iterable[bytes],
    is_wanted: Callable[[bytes, int], bool] = lambda path, size: False,
    limits: Limits = DEFAULT_LIMITS,
) -> Iterator[PackagedFile | Unreadable]:
    """The files and links in packages at or below ``paths``, one package after the other.

    ``is_wanted`` is asked for path and size of a file, and tells whether its bytes are wanted.
    """
    for file in packages.files_below(dict.fromkeys(paths)):
        if isinstance(file, Unreadable):
            yield file
            continue
        try:
            yield from _files(file, is_wanted, limits)
        except packages.NotAPackage:
            pass
        except (Damaged, CannotDecompress, OSError) as error:
            yield packages.unreadable(file.path, error)
        finally:
            os.close(file.fd)


def _files(
    file: OpenFile, is_wanted: Callable[[bytes, int], bool], limits: Limits
) -> Iterator[PackagedFile]:
    package = packages.open_package(file.fd, os.fstat(file.fd).st_size, limits)
    container = packages.container_of(package, file.path)
    closed = Closed()
    for number, member in enumerate(package.members, 1):
        if number > limits.members:
            raise Damaged(f"more than {limits.members} members")
        path = installed(member.name)
        if member.type is Type.DIRECTORY:
            closed.note(path, member.mode, member.uid)
        elif member.type is Type.FILE:
            data = None
            is_whole = member.stored == member.size and not member.extents
            if is_whole and is_wanted(path, member.size):
                data = package.stream.take(member.stored)
                is_public = member.mode & _READABLE == _READABLE
                if not is_public or closed.reach(path, member.uid) != EVERYBODY:
                    data = None
            yield PackagedFile(container, path, member.size, data)
        else:
            yield PackagedFile(container, path)
