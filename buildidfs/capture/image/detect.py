# SPDX-License-Identifier: Apache-2.0
"""What is at a path: a layout, an archive or the storage of an engine, told by its content."""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, Protocol

from buildidfs.capture import walk
from buildidfs.capture.archive.stream import Region, unpacked
from buildidfs.capture.image.engine_storage import DOCKER, STORED, Docker, Storage
from buildidfs.capture.image.files import ArchiveFiles, DirectoryFiles, has
from buildidfs.capture.image.layouts import (
    CONTENT,
    DOCKERS_CONTENT,
    INDEX,
    LAYOUT,
    SAVED,
    Content,
    Layout,
    Saved,
)
from buildidfs.capture.origin.host_path import access_of
from buildidfs.formats.archive import tar
from buildidfs.formats.archive.common import Damaged
from buildidfs.linux import openat2

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack

    from buildidfs.capture.archive.spool import Spool
    from buildidfs.capture.archive.stream import Limits
    from buildidfs.capture.image.files import Files
    from buildidfs.capture.image.values import Image
    from buildidfs.formats.container.oci import Platform

_BLOBS = b"/blobs/sha256"


class _Place(Protocol):
    def images(self) -> Iterator[Image]: ...


def images_at(
    path: bytes, platform: Platform | None, spool: Spool, limits: Limits, open_files: ExitStack
) -> Iterator[Image]:
    """The images at a path, for that platform if there is a choice, for all of them if it is None.

    What is opened, and may be read as long as an image is, is closed by ``open_files``. An archive
    that is compressed as a whole is decompressed to a file without a name. Raises OSError,
    `Damaged`, `CannotDecompress`.
    """
    path_fd = walk.open_start(path)
    open_files.callback(os.close, path_fd)
    status = os.fstat(path_fd)
    if fstype := walk.Mounts().refused(status.st_dev, path_fd):
        raise Damaged(f"on a {fstype.decode()} filesystem, which has no images")
    places: list[_Place]
    if stat.S_ISDIR(status.st_mode):
        places = _in_directory(DirectoryFiles(path_fd), platform)
    else:
        fd = openat2.reopen_regular(path_fd)
        open_files.callback(os.close, fd)
        access = access_of(fd)
        whole = Region(fd, 0, os.fstat(fd).st_size)
        if whole.packing() is not None:
            fd = spool.file(limits.unpacked_bytes, unpacked(whole, limits.unpacked_bytes).all())
            open_files.callback(os.close, fd)
            whole = Region(fd, 0, os.fstat(fd).st_size)
        if not tar.is_tar(os.pread(fd, tar.BLOCK, 0)):
            raise Damaged("neither a tar archive nor a directory of images")
        places = _of_files(ArchiveFiles(whole, access), platform)
    if not places:
        raise Damaged("holds no images of a kind that is understood")
    for place in places:
        yield from place.images()


def _of_files(files: Files, platform: Platform | None) -> list[_Place]:
    """A layout, or what ``docker save`` has written, which is both in its later versions."""
    if has(files, LAYOUT) and has(files, INDEX):
        return [Layout(files, platform)]
    return [Saved(files)] if has(files, SAVED) else []


def _in_directory(files: DirectoryFiles, platform: Platform | None) -> list[_Place]:
    places = _of_files(files, platform)
    if places:
        return places
    places += (
        Content(files, prefix, platform)
        for prefix in (CONTENT, DOCKERS_CONTENT, b"")
        if _is_directory(files, prefix + _BLOBS)
    )
    if _is_directory(files, DOCKER):
        places.append(Docker(files))
    if has(files, STORED):
        places.append(Storage(files))
    return places


def _is_directory(files: DirectoryFiles, path: bytes) -> bool:
    try:
        os.close(openat2.open_in_root(files.root_fd, path, os.O_PATH | os.O_DIRECTORY))
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
