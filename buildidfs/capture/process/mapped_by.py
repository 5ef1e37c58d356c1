# SPDX-License-Identifier: Apache-2.0
"""The processes that run code of a file with a given build ID now.

Nothing is captured. Each file is read only once for each mount namespace, however many processes
map it. A file that may not be opened is identified by its pages in memory.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from buildidfs.capture import base
from buildidfs.capture.base import Unreadable
from buildidfs.capture.process.package_databases import PackageDatabases
from buildidfs.capture.process.process import (
    Moved,
    PinnedProcess,
    Ways,
    denied,
    is_device,
    out_of_sight,
)
from buildidfs.capture.process.silent_processes import NoAnswer
from buildidfs.capture.unresponsive.filesystems import Devices, Patience
from buildidfs.formats import package_databases
from buildidfs.formats.elf import identify as elf_identify
from buildidfs.formats.elf import other_ids
from buildidfs.formats.package_databases import UNKNOWN, Package
from buildidfs.linux import inodes, mounts, namespaces, procfs
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import BuildId, fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from buildidfs.model import Mapping

_ATTEMPTS: Final = 3

_T = TypeVar("_T")
_FileKey = tuple[str, tuple[int, int], int, bytes]


class Successor(msgspec.Struct, frozen=True):
    """The file that has the path of a deleted one now: its build ID, None if there is none, and
    its package.
    """

    build_id: BuildId | None
    package: Package


class Mapper(msgspec.Struct, frozen=True):
    """A process that has a file mapped executable.

    ``path`` is that of the file in the root of the process; ``deleted`` is True if the path does
    not lead to the file any more. ``comm`` is the name of the process. ``container`` is empty on
    the host, ``cgroup`` is the path of its control group. ``package`` is the one that has installed
    this file. ``successor`` is known if the file is deleted.
    """

    build_id: BuildId
    pid: int
    comm: bytes
    container: str
    path: bytes
    deleted: bool
    cgroup: bytes = b""
    package: Package = UNKNOWN
    successor: Successor | None = None


class NamelessMapping(msgspec.Struct, frozen=True):
    """An executable mapping of a process whose file has no build ID, or none that can be read."""

    pid: int
    container: str
    path: bytes
    cgroup: bytes = b""


class Mappers:
    """One pass over all processes. It yields those that map ``wanted`` files, and those that cannot
    be seen.

    With ``nameless``, mappings without a build ID are included; with ``packages``, the package of
    each file. ``container_namespaces`` define a container. ``ways`` are for tests.
    """

    def __init__(
        self,
        wanted: Callable[[BuildId, Mapping], bool],
        *,
        nameless: bool = False,
        packages: bool = False,
        container_namespaces: Collection[str] = ("mnt",),
        ways: Ways | None = None,
    ) -> None:
        self._wanted = wanted
        self._nameless = nameless
        self._packages = PackageDatabases() if packages else None
        self._container_namespaces = tuple(container_namespaces)
        self._initial = namespaces.initial()
        self._ways = ways or Ways()
        self._patience = Patience()
        self._known: dict[_FileKey, BuildId | None] = {}
        self._own_mounts = mounts.own_mount_devices(mounts.mountinfo())
        self._devices = Devices()
        self._mount_namespaces: set[str] = set()

    def __iter__(self) -> Iterator[Mapper | NamelessMapping | Unreadable]:
        yield from out_of_sight()
        for pid in procfs.pids():
            try:
                with PinnedProcess(pid, self._ways) as process:
                    yield from self._process(process)
            except OSError as error:
                if error.errno not in procfs.GONE:
                    yield Unreadable(b"/proc/%d" % pid, denied(error), error.errno or 0)

    def _process(self, process: PinnedProcess) -> list[Mapper | NamelessMapping]:
        """Yield the wanted files that one process maps, each once. Raises OSError."""
        for _ in range(_ATTEMPTS):
            mappings = process.executable_mappings()
            if not mappings and not process.has_generated_code:
                return []  # a kernel thread
            with contextlib.suppress(NoAnswer):
                mappings += process.other_programs(mappings)
            namespace = os.readlink("ns/mnt", dir_fd=process.fd)
            self._note_mounts(process, namespace)
            found: dict[tuple[BuildId | None, bytes], Mapping] = {}
            try:
                for mapping in mappings:
                    build_id = self._build_id(process, namespace, mapping)
                    if self._wants(build_id, mapping):
                        found.setdefault((build_id, mapping.path), mapping)
            except Moved:
                continue
            if not found:
                return []
            process.look(self._initial, self._container_namespaces)
            comm = procfs.comm(process.fd)
            return [
                self._found(process, comm, build_id, mapping)
                for (build_id, _), mapping in found.items()
            ]
        return []

    def _wants(self, build_id: BuildId | None, mapping: Mapping) -> bool:
        if build_id is None:
            return self._nameless and mapping.dev not in self._own_mounts
        return self._wanted(build_id, mapping)

    def _note_mounts(self, process: PinnedProcess, namespace: str) -> None:
        """Read the mounts of a mount namespace when it is seen for the first time."""
        if namespace in self._mount_namespaces:
            return
        self._mount_namespaces.add(namespace)
        text = procfs.mountinfo(process.fd)
        self._own_mounts |= mounts.own_mount_devices(text)
        by_root = namespaces.of(process.fd).user == self._initial.user
        self._devices.learn(text, overlays_answer=by_root)

    def _build_id(self, process: PinnedProcess, namespace: str, mapping: Mapping) -> BuildId | None:
        """Return the build ID of a mapped file; None if it is unknown. Raises `Moved`."""
        key = (namespace, mapping.dev, mapping.inode, fingerprint(mapping.path))
        try:
            return self._known[key]
        except KeyError:
            pass
        if mapping.dev in self._own_mounts or is_device(mapping.path):
            return None
        try:
            answer = self._ask(mapping, lambda: _look_into(process, mapping))
        except NoAnswer:
            raise
        except OSError as error:
            if error.errno in procfs.GONE:
                raise Moved from error
            # The file may be accessible through the next process.
            return self._in_memory(process, mapping)
        self._known[key] = answer
        return answer

    def _in_memory(self, process: PinnedProcess, mapping: Mapping) -> BuildId | None:
        """Return the build ID in the memory of the process."""
        try:
            return self._ask(mapping, lambda: process.build_id_in_memory(mapping))
        except NoAnswer:
            raise
        except OSError:
            return None

    def _found(
        self, process: PinnedProcess, comm: bytes, build_id: BuildId | None, mapping: Mapping
    ) -> Mapper | NamelessMapping:
        path = process.path_in_root(mapping)
        container, cgroup = process.container, process.surroundings.cgroup
        if build_id is None:
            return NamelessMapping(process.pid, container, path, cgroup)
        package, successor = UNKNOWN, None
        if self._packages is not None:
            package = self._packages.owner(process, path)
            if mapping.deleted:
                successor = Successor(self._packages.build_id_at(process, path), package)
                package = self._replaced(self._packages, process, mapping, package)
        return Mapper(
            build_id, process.pid, comm, container, path, mapping.deleted, cgroup, package,
            successor,
        )  # fmt: skip

    def _replaced(
        self, packages: PackageDatabases, process: PinnedProcess, mapping: Mapping, owner: Package
    ) -> Package:
        """Return the package of a deleted file that a process maps, of the version that it runs;
        `UNKNOWN` if it is in doubt. ``owner`` is the package that has its path now.
        """
        try:
            note, changed_ns = self._ask(mapping, lambda: _note_of(process, mapping))
        except (OSError, Moved):
            return UNKNOWN
        package = package_databases.from_note(note)
        return packages.before(process, owner, changed_ns / 1e9) if package == UNKNOWN else package

    def _ask(self, mapping: Mapping, look: Callable[[], _T]) -> _T:
        """Return the result of ``look``, which may wait for the filesystem. Raises its errors."""
        if not self._devices.may_not_answer(mapping.dev):
            return look()
        return self._patience.ask(mapping.dev, look, lambda answer: None)


@contextlib.contextmanager
def _opened(process: PinnedProcess, mapping: Mapping) -> Iterator[int | None]:
    """Open a mapped file for reading; None if it is not a regular one. Raises `Moved`, OSError."""
    path_fd, identity = process.pin(mapping)
    with closing_fd(path_fd):
        fd = inodes.reopen_regular(path_fd) if stat.S_ISREG(identity.mode) else None
    if fd is None:
        yield None
        return
    with closing_fd(fd):
        yield fd


def _look_into(process: PinnedProcess, mapping: Mapping) -> BuildId | None:
    """Return the build ID of a mapped file by reading it. Raises `Moved`, OSError."""
    with _opened(process, mapping) as fd:
        answer = None if fd is None else base.identify(fd)
    return answer if isinstance(answer, BuildId) else None


def _note_of(process: PinnedProcess, mapping: Mapping) -> tuple[bytes, int]:
    """Return the text of the package note of a mapped file, and the time in nanoseconds of its last
    change: that of its replacement, if it has lost its last name. Raises `Moved`, OSError.
    """
    with _opened(process, mapping) as fd:
        if fd is None:
            return b"", 0
        status, read_at = os.fstat(fd), base.reader(fd)
        head = read_at(0, elf_identify.HEAD_SIZE)
        return other_ids.package_note(head, read_at, status.st_size), status.st_ctime_ns
