# SPDX-License-Identifier: Apache-2.0
"""Capture the ELF files below directories.

A file is judged by its first page: 64,000 of them take less than a second, so what has no build
ID is looked at again each time, which costs less than to remember it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from buildidfs.capture import debug_files, walk
from buildidfs.capture.base import Found, Known, Memo, PinnedFile, SeenAgain, Unreadable
from buildidfs.capture.elf_file import reader
from buildidfs.capture.origin.host_path import Here, is_foreign
from buildidfs.formats.elf import identify
from buildidfs.linux import openat2
from buildidfs.model import Absence, BuildId, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from buildidfs.model import NamespaceSet


def identify_tree(
    paths: Iterable[bytes],
) -> Iterator[tuple[bytes, BuildId | Absence | Unreadable]]:
    """The build ID of every regular file at or below ``paths``, or why there is none.

    Nothing is captured, nothing remembered. Paths begin with the one given. The answers are those
    of `TreeScanner`.
    """
    known = walk.Mounts()
    for path in paths:
        try:
            start_fd = walk.open_start(path)
        except OSError as error:
            yield path, walk.unreadable(path, error)
            continue
        try:
            open_at = _opener(start_fd, path)
            for file in walk.files(start_fd, path, known):
                if isinstance(file, Unreadable):
                    yield file.path, file
                    continue
                try:
                    yield file.path, _judged(file, open_at)[0]
                except OSError as error:
                    yield file.path, walk.unreadable(file.path, error)
                finally:
                    os.close(file.fd)
        finally:
            os.close(start_fd)


def _opener(start_fd: int, shown: bytes) -> Callable[[bytes], int]:
    """A function that opens files of a tree, whose start is shown as ``shown``, by their paths."""

    def open_at(path: bytes) -> int:
        return openat2.open_regular_in_root(start_fd, path.removeprefix(shown))

    return open_at


def _judged(
    file: walk.OpenFile, open_at: Callable[[bytes], int]
) -> tuple[BuildId | Absence, Kind | None]:
    """What a file is kept under, or why it is not; its kind where the file does not tell it.

    Raises OSError.
    """
    answer = _identify(file.fd)
    if answer is Absence.NO_BUILD_ID:
        package_id = debug_files.package_id(file.path, file.fd, open_at)
        if package_id:
            return package_id, Kind.DEBUGINFO
    return answer, None


def _identify(fd: int) -> BuildId | Absence:
    head = os.pread(fd, identify.HEAD_SIZE, 0)
    if head[:4] != b"\x7fELF" and head:
        return Absence.NOT_ELF  # most files: saves two calls
    return identify.identify(head, reader(fd))


class TreeScanner:
    """One pass over the regular files at or below ``paths``; see `capture.base`.

    A path may be a symbolic link; none below it is followed. Mounts of other filesystems are
    entered, except those of kernel interfaces and our own. What cannot be read comes as
    `Unreadable`; a file without a build ID as `SeenAgain`, since all about it is known. ``host``
    names the machine and ``initial`` its namespaces, by default those we run on.
    ``container_namespaces`` say what a container is, in case we are in one. ``given`` says that the
    operator chose the paths.
    """

    def __init__(
        self,
        memo: Memo,
        paths: Iterable[bytes],
        *,
        host: str | None = None,
        initial: NamespaceSet | None = None,
        container_namespaces: Collection[str] = ("mnt",),
        given: bool = True,
    ) -> None:
        self._memo = memo
        self._paths = list(paths)
        self._here = Here("tree", host, initial, container_namespaces, given=given)

    def __iter__(self) -> Iterator[Found]:
        known = walk.Mounts()
        for path in self._paths:
            try:
                start_fd = walk.open_start(path)
            except OSError as error:
                yield walk.unreadable(path, error)
                continue
            try:
                # A path such as /proc/PID/root/usr leads into a mount namespace not ours.
                foreign = is_foreign(start_fd)
                shown = os.readlink(b"/proc/self/fd/%d" % start_fd)
                open_at = _opener(start_fd, shown)
                for file in walk.files(start_fd, shown, known):
                    if isinstance(file, Unreadable):
                        yield file
                    else:
                        yield self._found(file, foreign, open_at)
            finally:
                os.close(start_fd)

    def _found(self, file: walk.OpenFile, foreign: bool, open_at: Callable[[bytes], int]) -> Found:
        """Judge a file; takes over its descriptor. ``open_at`` opens others by their paths."""
        keep = False
        try:
            answer, kind = _judged(file, open_at)
            sighting = self._here.sighting(file.path, file.fd, foreign=foreign)
            if isinstance(answer, Absence):
                return SeenAgain(sighting, Known(absence=answer))
            known = self._memo.recall(sighting.origin.identity)
            if known is not None and known.build_id == answer:
                return self._here.seen_again(self._memo, sighting, known, file.fd)
            sighting = self._here.reached(sighting, file.fd)
            keep = True
            return PinnedFile(sighting, file.fd, kind, answer if kind is not None else None)
        except OSError as error:
            return walk.unreadable(file.path, error)
        finally:
            if not keep:
                os.close(file.fd)
