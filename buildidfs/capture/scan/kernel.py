# SPDX-License-Identifier: Apache-2.0
"""Capture what the running kernel lends to profilers: its symbols, and the modules it has loaded.

What runs has no file that it could be read from; perf takes the text of /proc/kallsyms for it,
under the build ID in /sys/kernel/notes. The files it was loaded from, the kernel's and those of
its modules, are often compressed, and perhaps not the same any more: an upgrade replaces them while
the old ones run. The notes tell.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from typing import TYPE_CHECKING, Final

from buildidfs.capture.base import Found, Memo, PinnedFile, SeenAgain, Unreadable
from buildidfs.capture.origin.host_path import Here
from buildidfs.errors import InvalidBuildId
from buildidfs.formats.elf.header import gnu_build_id
from buildidfs.linux import machine, namespaces, openat2, statx
from buildidfs.model import (
    EVERYBODY,
    BuildId,
    FileIdentity,
    Kind,
    NamespaceSet,
    Origin,
    Sighting,
    Trust,
    fingerprint,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from buildidfs.capture.scan.installed_kernels import KernelFiles

KALLSYMS_PATH: Final = b"[kernel.kallsyms]"

_NOTES: Final = b"/sys/kernel/notes"
_NOTE: Final = b".note.gnu.build-id"
_NOT_LOADED: Final = "is not the module that is loaded: the build IDs differ"
_NOT_RUNNING: Final = "is not the kernel that runs: the build IDs differ"
_HEAD: Final = 1 << 16


class KernelScanner:
    """One pass over the running kernel and its loaded modules; see `capture.base`.

    The symbols have mode 0400: addresses of the kernel are worth something to an attacker.
    ``all_files`` wants the files that the kernel itself is in, and debug files, too. ``root`` is
    where /proc, /sys, /boot, /usr/lib/debug and /lib/modules are looked for and ``release`` the
    kernel's name there; both are for tests. ``spool_directory`` is as for
    `kernelfiles.InstalledKernels`, the others as for `capture.process.scanner.ProcScanner`.
    """

    def __init__(
        self,
        memo: Memo,
        *,
        all_files: bool = False,
        root: bytes = b"",
        release: str | None = None,
        spool_directory: bytes | None = None,
        host: str | None = None,
        initial: NamespaceSet | None = None,
        container_namespaces: Collection[str] = ("mnt",),
    ) -> None:
        self._memo = memo
        self._all_files = all_files
        self._root = root
        self._release = os.fsencode(release or os.uname().release)
        self._spool_directory = spool_directory
        self._host = host or machine.host_name()
        self._initial = initial
        self._container_namespaces = container_namespaces

    def __iter__(self) -> Iterator[Found]:
        try:
            build_id = running_build_id(self._root)
        except InvalidBuildId as error:
            yield Unreadable(self._root + _NOTES, str(error))
        except OSError as error:
            yield Unreadable(self._root + _NOTES, error.strerror or str(error), error.errno or 0)
        else:
            yield self._symbols(build_id)
            if self._all_files:
                yield from self._images(build_id)
        loaded = loaded_modules(self._root + b"/sys/module")
        if loaded:
            yield from self._modules(loaded)

    # --- symbols ---------------------------------------------------------------------------

    def _symbols(self, build_id: BuildId) -> Found:
        path = self._root + b"/proc/kallsyms"
        try:
            origin = Origin(
                KALLSYMS_PATH,
                self._symbols_identity(build_id),
                self._initial or namespaces.initial(),
                host=self._host,
                trust=Trust.HOST,
                scanner="kernel",
                reach=EVERYBODY,  # its mode says it
            )
            sighting = Sighting(origin, time.time_ns())
            known = self._memo.recall(origin.identity)
            if known is not None and known.build_id == build_id:
                return SeenAgain(sighting, known)
            return PinnedFile(sighting, _open_if_shown(path), Kind.KALLSYMS, build_id)
        except OSError as error:
            return Unreadable(path, error.strerror or str(error), error.errno or 0)

    def _symbols_identity(self, build_id: BuildId) -> FileIdentity:
        """They stay the same in one boot, as long as the same modules are in the same places."""
        state = build_id + statx.boot_id()
        try:
            with open(self._root + b"/proc/modules", "rb") as file:
                for line in file:
                    fields = line.split()
                    state += b"%s %s\n" % (fields[0], fields[-1])
        except FileNotFoundError:
            pass  # a kernel that cannot load any
        scope = b"kallsyms:" + fingerprint(state)
        return FileIdentity(0, 0, 0, 0, 0, stat.S_IFREG | 0o400, 0, 0, scope)

    # --- files -----------------------------------------------------------------------------

    def _images(self, build_id: BuildId) -> Iterator[Found]:
        from buildidfs.capture.scan import installed_kernels

        try:
            kernel_files = self._kernel_files()
        except OSError as error:
            yield Unreadable(b"/boot", error.strerror or str(error), error.errno or 0)
            return
        for path in installed_kernels.images(self._release):
            if (found := self._found(kernel_files, path, build_id, _NOT_RUNNING)) is not None:
                yield found

    def _modules(self, loaded: dict[bytes, BuildId]) -> Iterator[Found]:
        directory = b"/lib/modules/" + self._release
        try:
            paths = module_paths(self._root + directory + b"/modules.dep")
            kernel_files = self._kernel_files()
        except OSError as error:
            reason = f"{error.strerror}: {len(loaded)} loaded modules not captured"
            yield Unreadable(directory, reason, error.errno or 0)
            return
        for name, build_id in loaded.items():
            relative = paths.get(name)
            if relative is None:
                yield Unreadable(name, "loaded, but modules.dep knows no file of it")
                continue
            path = os.path.join(directory, relative)
            found = self._found(kernel_files, path, build_id, _NOT_LOADED)
            yield _missing(path) if found is None else found
            if self._all_files:
                yield from self._debug_file(kernel_files, path, build_id)

    def _debug_file(
        self, kernel_files: KernelFiles, path: bytes, build_id: BuildId
    ) -> Iterator[Found]:
        """The first file there is that has the build ID; that of another build is passed over."""
        from buildidfs.capture.scan import installed_kernels

        for candidate in installed_kernels.debug_files(path, build_id):
            found = self._found(kernel_files, candidate, build_id, _NOT_LOADED)
            if isinstance(found, Unreadable) and found.reason == _NOT_LOADED:
                continue
            if found is not None:
                yield found
                return

    def _kernel_files(self) -> KernelFiles:
        """Raises OSError."""
        # Most scans have nothing to unpack, and do not wait for what that takes.
        from buildidfs.capture.archive.spool import Spool
        from buildidfs.capture.scan.installed_kernels import KernelFiles

        here = Here("kernel", self._host, self._initial, self._container_namespaces)
        return KernelFiles(self._memo, here, Spool(self._spool_directory))

    def _found(
        self, kernel_files: KernelFiles, path: bytes, build_id: BuildId, otherwise: str
    ) -> Found | None:
        """The file at a path, if it has the build ID; None if there is none."""
        try:
            path_fd = os.open(self._root + path, os.O_PATH | os.O_CLOEXEC)
            try:
                fd = openat2.reopen_regular(path_fd)
            finally:
                os.close(path_fd)
        except FileNotFoundError:
            return None
        except OSError as error:
            return Unreadable(path, error.strerror or str(error), error.errno or 0)
        return kernel_files.found(path, fd, build_id, otherwise)


def _missing(path: bytes) -> Unreadable:
    return Unreadable(path, os.strerror(errno.ENOENT), errno.ENOENT)


def running_build_id(root: bytes = b"") -> BuildId:
    """That of the running kernel. Raises OSError, `InvalidBuildId` if it has none."""
    with open(root + _NOTES, "rb") as file:
        raw = gnu_build_id(file.read(), sys.byteorder == "little")
    if raw is None:
        raise InvalidBuildId("tells no build ID")
    return BuildId(raw)


def _open_if_shown(path: bytes) -> int:
    """Open kallsyms, if it shows addresses and not the zeros for those not permitted."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        text = os.pread(fd, _HEAD, 0)
        if not any(line.split(b" ", 1)[0].strip(b"0") for line in text.splitlines()):
            raise PermissionError(errno.EPERM, "shows no addresses; needs CAP_SYSLOG")
    except BaseException:
        os.close(fd)
        raise
    return fd


def loaded_modules(directory: bytes) -> dict[bytes, BuildId]:
    """The build IDs of the loaded modules that have one, by the name the kernel calls them."""
    loaded = {}
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return {}
    for name in names:
        try:
            with open(os.path.join(directory, name, b"notes", _NOTE), "rb") as file:
                raw = gnu_build_id(file.read(), sys.byteorder == "little")
            if raw is not None:
                loaded[name] = BuildId(raw)
        except (OSError, InvalidBuildId):
            continue  # built in, or it has none
    return loaded


def module_paths(dep_file: bytes) -> dict[bytes, bytes]:
    """Paths of module files, relative to modules.dep, by the name the kernel calls them.

    Raises OSError. Source: modules.dep(5).
    """
    paths = {}
    with open(dep_file, "rb") as file:
        for line in file:
            path = line.partition(b":")[0]
            name, suffix, _ = os.path.basename(path).partition(b".ko")
            if suffix:
                paths[name.replace(b"-", b"_")] = path
    return paths
