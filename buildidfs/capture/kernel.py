# SPDX-License-Identifier: Apache-2.0
"""Capture what the running kernel lends to profilers: its symbols, and the modules it has loaded.

The kernel has no file that it could be read from; perf takes the text of /proc/kallsyms for it,
under the build ID in /sys/kernel/notes. Modules are files below /lib/modules, often compressed,
and perhaps not those that were loaded: an upgrade replaces them while the old ones run. The notes
of a loaded module tell.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from typing import TYPE_CHECKING, Final

from buildidfs.capture import decompress, files
from buildidfs.capture.base import Found, Memo, PinnedFile, SeenAgain, Unreadable
from buildidfs.capture.here import Here
from buildidfs.errors import InvalidBuildId
from buildidfs.formats import notes
from buildidfs.linux import namespaces, openat2, statx
from buildidfs.model import (
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

KALLSYMS_PATH: Final = b"[kernel.kallsyms]"

_NOTE: Final = b".note.gnu.build-id"
_HEAD: Final = 1 << 16


class KernelScanner:
    """One pass over the running kernel and its loaded modules; see `capture.base`.

    The symbols have mode 0400: addresses of the kernel are worth something to an attacker.
    ``root`` is where /proc, /sys and /lib/modules are looked for and ``release`` the kernel's name
    there; both are for tests. The others are as for `capture.proc.ProcScanner`.
    """

    def __init__(
        self,
        memo: Memo,
        *,
        root: bytes = b"",
        release: str | None = None,
        host: str | None = None,
        initial: NamespaceSet | None = None,
        container_namespaces: Collection[str] = ("mnt",),
    ) -> None:
        self._memo = memo
        self._root = root
        uname = os.uname()
        self._release = os.fsencode(release or uname.release)
        self._host = uname.nodename if host is None else host
        self._initial = initial
        self._container_namespaces = container_namespaces

    def __iter__(self) -> Iterator[Found]:
        yield from self._symbols()
        loaded = loaded_modules(self._root + b"/sys/module")
        if loaded:
            yield from self._modules(loaded)

    # --- symbols ---------------------------------------------------------------------------

    def _symbols(self) -> Iterator[Found]:
        path = self._root + b"/proc/kallsyms"
        try:
            with open(self._root + b"/sys/kernel/notes", "rb") as file:
                raw = notes.gnu_build_id(file.read(), sys.byteorder == "little")
            if raw is None:
                yield Unreadable(self._root + b"/sys/kernel/notes", "tells no build ID")
                return
            build_id = BuildId(raw)
            origin = Origin(
                KALLSYMS_PATH,
                self._symbols_identity(build_id),
                self._initial or namespaces.initial(),
                host=self._host,
                trust=Trust.HOST,
                scanner="kernel",
            )
            sighting = Sighting(origin, time.time_ns())
            known = self._memo.recall(origin.identity)
            if known is not None and known.build_id == build_id:
                yield SeenAgain(sighting, known)
                return
            fd = _open_if_shown(path)
        except InvalidBuildId as error:
            yield Unreadable(self._root + b"/sys/kernel/notes", str(error))
        except OSError as error:
            yield Unreadable(path, error.strerror or str(error), error.errno or 0)
        else:
            yield PinnedFile(sighting, fd, Kind.KALLSYMS, build_id)

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

    # --- modules ---------------------------------------------------------------------------

    def _modules(self, loaded: dict[bytes, BuildId]) -> Iterator[Found]:
        directory = b"/lib/modules/" + self._release
        try:
            paths = module_paths(self._root + directory + b"/modules.dep")
            here = Here("kernel", self._host, self._initial, self._container_namespaces)
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
            try:
                yield self._module(path, build_id, here)
            except (OSError, decompress.CannotDecompress) as error:
                number = error.errno if isinstance(error, OSError) else None
                reason = getattr(error, "strerror", None) or str(error)
                yield Unreadable(path, reason, number or 0)

    def _module(self, path: bytes, build_id: BuildId, here: Here) -> Found:
        """A module's file, if it is the one that is loaded. Raises OSError, CannotDecompress."""
        path_fd = os.open(self._root + path, os.O_PATH | os.O_CLOEXEC)
        try:
            sighting = here.sighting(path, path_fd)
            known = self._memo.recall(sighting.origin.identity)
            if known is not None and known.build_id == build_id:
                return SeenAgain(sighting, known)
            fd = openat2.reopen_regular(path_fd)
        finally:
            os.close(path_fd)
        try:
            plain_fd = decompress.decompressed(fd, path)
        except BaseException:
            os.close(fd)
            raise
        if plain_fd is not None:
            os.close(fd)
            fd = plain_fd
        if files.identify(fd) != build_id:
            os.close(fd)
            return Unreadable(path, "is not the module that is loaded: the build IDs differ")
        return PinnedFile(sighting, fd)


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
                raw = notes.gnu_build_id(file.read(), sys.byteorder == "little")
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
