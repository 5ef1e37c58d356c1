# SPDX-License-Identifier: Apache-2.0
"""The package that a file of a process belongs to, from the package databases in its root.

The author of the container wrote these databases, so they are claims, shown to people only. They
are read below the root of the process only, in bounded amounts, and skipped if their filesystem
does not answer. The databases of rpm are not read: the binaries of distributions that use rpm have
a note on their package.

A file that was replaced while a process runs it belongs to an earlier version of its package, which
only a note of the file itself names.
"""

from __future__ import annotations

import contextlib
import functools
import os
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

from buildidfs import names
from buildidfs.capture import base
from buildidfs.capture.unresponsive.filesystems import Patience
from buildidfs.formats import package_databases
from buildidfs.formats.elf import identify as elf_identify
from buildidfs.formats.elf import other_ids
from buildidfs.formats.package_databases import UNKNOWN, Package
from buildidfs.linux import inodes
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import BuildId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.capture.process.process import PinnedProcess

_DPKG_LISTS: Final = b"/var/lib/dpkg/info"
_DPKG_STATUS: Final = b"/var/lib/dpkg/status"
_DPKG_PARTS: Final = b"/var/lib/dpkg/status.d"
_APK: Final = (b"/lib/apk/db/installed", b"/usr/lib/apk/db/installed")

_WAIT_S: Final = 5.0
_MOST_LISTS: Final = 20_000
_LIST_MAX: Final = 16 << 20
_MOST_BYTES: Final = 64 << 20  # for all databases of a root
_MOST_ROOTS: Final = 2
_MOST_ANSWERS: Final = 1 << 16

_Root = tuple[int, int, int]
_Owner: TypeAlias = "Callable[[list[bytes]], Package]"


class PackageDatabases:
    """The package databases below the roots of processes, each read once."""

    def __init__(self) -> None:
        self._patience = Patience(_WAIT_S)
        self._roots: dict[_Root, list[_Owner]] = {}
        self._known: dict[tuple[_Root, bytes], Package] = {}

    def owner(self, process: PinnedProcess, path: bytes) -> Package:
        """Return the package that has installed a file at ``path`` in the root of a process.

        `UNKNOWN` if no database has the path. Does not raise.
        """
        try:
            root_fd = process.root_fd
        except OSError:
            return UNKNOWN
        return self._owner(root_fd, process.mount_namespace, path)

    def owner_here(self, path: bytes) -> Package:
        """Return the package of a file at a path in our own root, as `owner` does."""
        try:
            root_fd = os.open(b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return UNKNOWN
        with closing_fd(root_fd):
            return self._owner(root_fd, 0, path)

    def _owner(self, root_fd: int, namespace: int, path: bytes) -> Package:
        root = _root(root_fd, namespace)
        known = self._known.get((root, path))
        if known is None:
            if len(self._known) >= _MOST_ANSWERS:
                self._known.clear()
            paths = [path, *names.merged(path)]  # a package has one of them in its list
            owners = self._read(root_fd, root)
            known = _first(owners, paths)
            self._known[root, path] = known
        return known

    def file_at(self, process: PinnedProcess, path: bytes) -> tuple[BuildId | None, Package]:
        """Return the build ID of the file that is at a path in the root of a process now, None if
        it has none, and the package in its note. Does not raise.
        """
        try:
            device = (0, process.mount_namespace)
            return self._patience.ask_about(
                device, process.root_fd, functools.partial(_file_at, path=path)
            )
        except (OSError, TimeoutError, RuntimeError):
            return None, UNKNOWN

    def _read(self, root_fd: int, root: _Root) -> list[_Owner]:
        notes = self._roots.get(root)
        if notes is None:
            try:
                notes = self._patience.ask_about((0, root[2]), root_fd, _all)
            except (TimeoutError, RuntimeError):
                notes = []
            while len(self._roots) >= _MOST_ROOTS:
                del self._roots[next(iter(self._roots))]
            self._roots[root] = notes
        return notes


def _root(root_fd: int, namespace: int) -> _Root:
    status = os.fstat(root_fd)
    return status.st_dev, status.st_ino, namespace


def _file_at(root_fd: int, path: bytes) -> tuple[BuildId | None, Package]:
    with closing_fd(inodes.open_regular_in_root(root_fd, path)) as fd:
        answer, package = base.identify(fd), noted(fd)
    return answer if isinstance(answer, BuildId) else None, package


def noted(fd: int) -> Package:
    """Return the package in the note of an open file; `UNKNOWN` without one. Raises OSError."""
    read_at = base.reader(fd)
    head = read_at(0, elf_identify.HEAD_SIZE)
    text = other_ids.package_note(head, read_at, os.fstat(fd).st_size)
    return package_databases.from_note(text)


def _all(root_fd: int) -> list[_Owner]:
    """Read the databases of all package managers below a root."""
    return [*_dpkg(root_fd), *_apk(root_fd)]


def _dpkg(root_fd: int) -> Iterator[_Owner]:
    lists = package_databases.dpkg_lists(
        (name.removesuffix(b".list"), text) for name, text in _files(root_fd, _DPKG_LISTS, b".list")
    )
    if lists:
        yield functools.partial(_dpkg_owner, lists, _content(root_fd, _DPKG_STATUS))
    parts = dict(_files(root_fd, _DPKG_PARTS))
    if parts:
        sums = package_databases.dpkg_lists(
            (name.removesuffix(b".md5sums"), package_databases.md5sums_as_list(text))
            for name, text in parts.items()
            if name.endswith(b".md5sums")
        )
        yield functools.partial(_dpkg_owner, sums, b"\n\n".join(parts.values()))


def _dpkg_owner(lists: bytes, status: bytes, paths: list[bytes]) -> Package:
    name = package_databases.dpkg_owner(lists, paths)
    return package_databases.dpkg_version(status, name) if name else UNKNOWN


def _apk(root_fd: int) -> Iterator[_Owner]:
    for path in _APK:
        installed = _content(root_fd, path)
        if installed:
            yield functools.partial(package_databases.apk_owner, installed)


def _first(owners: list[_Owner], paths: list[bytes]) -> Package:
    found = (owner(paths) for owner in owners)
    return next((each for each in found if each != UNKNOWN), UNKNOWN)


def _content(root_fd: int, path: bytes) -> bytes:
    """Return the content of a regular file below a root; empty if it is missing or too large."""
    with contextlib.suppress(OSError):
        fd = inodes.open_regular_in_root(root_fd, path)
        with open(fd, "rb") as file:
            data = file.read(_LIST_MAX + 1)
        return data if len(data) <= _LIST_MAX else b""
    return b""


def _files(root_fd: int, path: bytes, suffix: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
    """Yield name and content of the files in a directory with a suffix, up to `_MOST_BYTES`."""
    left = _MOST_BYTES
    for name in _names(root_fd, path):
        if name.endswith(suffix):
            text = _content(root_fd, path + b"/" + name)
            left -= len(text)
            if left < 0:
                return
            yield name, text


def _names(root_fd: int, path: bytes) -> list[bytes]:
    with contextlib.suppress(OSError):
        fd = inodes.open_in_root(root_fd, path, os.O_RDONLY | os.O_DIRECTORY)
        with closing_fd(fd), os.scandir(fd) as entries:
            return [os.fsencode(entry.name) for entry in islice(entries, _MOST_LISTS)]
    return []
