# SPDX-License-Identifier: Apache-2.0
"""The package that a file of a process belongs to, from the package databases in its root.

The author of the container wrote these databases, so they are claims, shown to people only. They
are read below the root of the process only, in bounded amounts, and skipped if their filesystem
does not answer. A confined process reads those of rpm.

A file that was replaced while a process runs it belongs to an earlier version of its package: the
one in a note of the file itself, or else the one that dpkg's log says was replaced then.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias

from buildidfs import names
from buildidfs.capture import base
from buildidfs.capture.process.rpm_reader import RpmReader
from buildidfs.capture.unresponsive.filesystems import Patience
from buildidfs.formats import package_databases
from buildidfs.formats.package_databases import UNKNOWN, Package
from buildidfs.linux import inodes, procfs
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import BuildId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.capture.process.process import PinnedProcess

_DPKG_LISTS: Final = b"/var/lib/dpkg/info"
_DPKG_STATUS: Final = b"/var/lib/dpkg/status"
_DPKG_PARTS: Final = b"/var/lib/dpkg/status.d"
_RPM: Final = (b"/var/lib/rpm/rpmdb.sqlite", b"/usr/lib/sysimage/rpm/rpmdb.sqlite")
_APK: Final = (b"/lib/apk/db/installed", b"/usr/lib/apk/db/installed")

_DPKG_LOGS: Final = (b"/var/log/dpkg.log.1", b"/var/log/dpkg.log")

_WAIT_S: Final = 5.0
_MOST_LISTS: Final = 20_000
_LIST_MAX: Final = 16 << 20
_MOST_BYTES: Final = 64 << 20  # for all databases of a root
_TICKS: Final = os.sysconf("SC_CLK_TCK")
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
        self._logs: dict[_Root, tuple[bytes, float]] = {}

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

    def before(self, process: PinnedProcess, package: Package, replaced: float) -> Package:
        """Return the version of a package that a process runs, whose file an upgrade has replaced
        at the time ``replaced`` (Unix time in seconds); `UNKNOWN` if that is in doubt. Does not
        raise.
        """
        if package.manager != "dpkg":
            return UNKNOWN
        try:
            log, written = self._log(process)
            started = procfs.start_ticks(process.fd) / _TICKS + _boot_time()
        except (OSError, TimeoutError, RuntimeError):
            return UNKNOWN
        version = package_databases.dpkg_version_before(
            log, written, package.name, replaced, started
        )
        return Package(package.name, version, package.manager) if version else UNKNOWN

    def _log(self, process: PinnedProcess) -> tuple[bytes, float]:
        """Return dpkg's log in the root of a process, and the time when it was written.

        Raises OSError, TimeoutError and RuntimeError.
        """
        root = _root(process.root_fd, process.mount_namespace)
        known = self._logs.get(root)
        if known is None:
            while len(self._logs) >= _MOST_ROOTS:
                del self._logs[next(iter(self._logs))]
            known = self._patience.ask_about((0, root[2]), process.root_fd, _dpkg_log)
            self._logs[root] = known
        return known

    def build_id_at(self, process: PinnedProcess, path: bytes) -> BuildId | None:
        """Return the build ID of the file that is at a path in the root of a process now; None if
        it has none. Does not raise.
        """
        try:
            device = (0, process.mount_namespace)
            return self._patience.ask_about(
                device, process.root_fd, functools.partial(_build_id_at, path=path)
            )
        except (OSError, TimeoutError, RuntimeError):
            return None

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


def _boot_time() -> float:
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def _dpkg_log(root_fd: int) -> tuple[bytes, float]:
    """Return the text of dpkg's log, and the time when it was written. Raises OSError."""
    with closing_fd(inodes.open_regular_in_root(root_fd, _DPKG_LOGS[-1])) as fd:
        written = os.fstat(fd).st_mtime
    return b"".join(_content(root_fd, path) for path in _DPKG_LOGS), written


def _build_id_at(root_fd: int, path: bytes) -> BuildId | None:
    with closing_fd(inodes.open_regular_in_root(root_fd, path)) as fd:
        answer = base.identify(fd)
    return answer if isinstance(answer, BuildId) else None


def _all(root_fd: int) -> list[_Owner]:
    """Read the databases of all package managers below a root."""
    return [*_dpkg(root_fd), *_apk(root_fd), *_rpm(root_fd)]


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


def _rpm(root_fd: int) -> Iterator[_Owner]:
    """Copy the databases of rpm, which a confined process reads."""
    for path in _RPM:
        with contextlib.suppress(OSError):
            with closing_fd(inodes.open_regular_in_root(root_fd, path)) as fd:
                reader = RpmReader(fd)
            yield reader.owner


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
