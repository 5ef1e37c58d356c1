# SPDX-License-Identifier: Apache-2.0
"""One process: its namespaces and container, its mappings, and descriptors of the mapped files.

A link in map_files leads to the mapped file even if its name is gone, but following it takes
CAP_CHECKPOINT_RESTORE. Without that capability the link exe does the same for the executable, and
other files are looked up by their path in the process's own root. Such a path may lead to another
file by now, so the build ID of the file must be the one in memory.

Code may also run from memory into which a program has copied, unpacked or translated it: huge
pages, a packer, an emulator. The files of that code are mapped without the right to execute them,
or not at all, and count as well: see `PinnedProcess.other_programs`.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from buildidfs.capture import base
from buildidfs.capture.base import Unreadable
from buildidfs.capture.origin import builder
from buildidfs.capture.origin.path_access import Root
from buildidfs.capture.process.silent_processes import ANSWER_S, NoAnswer, ProcessGate
from buildidfs.errors import InvalidBuildId
from buildidfs.formats import proc_text
from buildidfs.formats.container import cgroup
from buildidfs.formats.elf import identify, loaded_names
from buildidfs.formats.elf.header import ET_DYN, ET_EXEC, parse_header
from buildidfs.linux import credentials, inodes, machine, namespaces, procfs
from buildidfs.linux.file_ops import close_fds, closing_fd, closing_on_error
from buildidfs.model import OWNER, BuildId, FileIdentity, Mapping, NamespaceSet, is_shared
from buildidfs.shares import Share, of_user

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from buildidfs.capture.origin.path_access import Reach
    from buildidfs.capture.unresponsive.filesystems import Patience

_DELETED: Final = b" (deleted)"

# Errors of a kernel without PROCMAP_QUERY, or of a filter that forbids it.
_NO_QUERY: Final = frozenset((errno.ENOTTY, errno.EINVAL, errno.ENOSYS, errno.EPERM))

# Names of memory that is mapped as a file: memfds, shared anonymous memory, and huge pages.
_MEMORY: Final = (b"/memfd:", b"/dev/zero", b"/anon_hugepage", b"/SYSV")

_HEADER_BYTES: Final = 64  # the ELF header of a file of 64 bits

_DUMP_END: Final = b".dump"
_DUMP: Final = re.compile(rb"(?:^|/)jit-\d{1,10}\.dump$")

_DENIED: Final = frozenset((errno.EACCES, errno.EPERM))


OPENED_AHEAD: Final = 32
"""The number of mapped files that are opened in one question."""

_T = TypeVar("_T")

_Opened: TypeAlias = "dict[tuple[int, int], int | OSError]"


class Moved(Exception):
    """The process has mapped another file there; its map must be read again."""


class Ways:
    """The interfaces for reading processes; an interface that the kernel lacks is tried only once.

    Tests select a way by turning the others off. ``labels`` caches the results for texts of control
    groups. ``gate`` asks all questions that may wait for a process, by default one
    that waits ``answer_s`` seconds.
    """

    def __init__(
        self,
        *,
        query: bool = True,
        map_files: bool = True,
        gate: ProcessGate | None = None,
        answer_s: float = ANSWER_S,
    ) -> None:
        self.gate = gate or ProcessGate(answer_s)
        self.query = query
        self.map_files = map_files
        self.labels: dict[bytes, bytes] = {}

    def cgroup_path(self, text: bytes) -> bytes:
        """Return `formats.container.cgroup.path` of a text; cached, because texts repeat."""
        path = self.labels.get(text)
        if path is None:
            path = self.labels[text] = cgroup.path(text)
        return path


class PinnedProcess:
    """A process pinned by the descriptor of its directory in /proc; a context manager.

    Attributes other than ``pid`` and ``fd`` exist after `look`. ``has_generated_code`` exists after
    `executable_mappings`, and is True if the process may run code that is in no ELF file.
    """

    def __init__(self, pid: int, ways: Ways) -> None:
        """Pin the process; raises OSError (FileNotFoundError: there is none)."""
        self.pid = pid
        self._ways = ways
        self.surroundings = builder.UNKNOWN
        self.root_path = b"/"
        self._root_fd = -1
        self._all_mappings: list[Mapping] | None = None
        self.has_generated_code = False
        self._place = 0, b""
        self._opened: _Opened = {}
        self.fd = procfs.open_pid(pid)

    def __enter__(self) -> PinnedProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        close_fds(self.fd, self._root_fd)
        self._close_opened()

    def look(self, initial: NamespaceSet, container_namespaces: Collection[str]) -> None:
        """Read the namespaces, container and root of the process. Raises OSError."""
        self._place = self._find_place()
        self.surroundings = builder.surroundings_of(
            self.fd, initial, container_namespaces, self._ways.cgroup_path
        )
        self.root_path = os.readlink(b"root", dir_fd=self.fd)

    def _find_place(self) -> tuple[int, bytes]:
        return namespaces.mnt(self.fd), procfs.cgroup(self.fd)

    def has_left(self) -> bool:
        """Return True if the process has entered another mount namespace or control group since
        `look`; False if it has ended.
        """
        try:
            return self._find_place() != self._place
        except OSError:
            return False

    @property
    def namespaces(self) -> NamespaceSet:
        return self.surroundings.namespaces

    @property
    def container(self) -> str:
        """Return the label of its container, empty on the host."""
        return self.surroundings.container

    def share(self, initial: NamespaceSet) -> Share:
        """Return its share: its container, in the host's mount namespace its user. Raises
        OSError.
        """
        if self.namespaces.mnt == initial.mnt:
            return of_user(procfs.uids(self.fd)[1])
        its = self.surroundings
        return cgroup.share(its.cgroup, self.namespaces.mnt, its.owner)

    def is_gone(self) -> bool:
        """Return True if the process has ended, even if its parent has not reaped it yet."""
        return procfs.is_empty(self.fd)

    @property
    def mount_namespace(self) -> int:
        """Return the number of its mount namespace, unique at least during this scan."""
        return self.surroundings.mnt_ns_id or self.namespaces.mnt

    @property
    def root_fd(self) -> int:
        """Return its root directory, pinned. Raises OSError; ESRCH if the root changed since
        `look`.

        The trust in a file depends on the root in which it was found.
        """
        if self._root_fd < 0:
            fd = procfs.open_root(self.fd)
            if os.readlink(b"/proc/self/fd/%d" % fd) != self.root_path:
                os.close(fd)
                raise OSError(errno.ESRCH, "its root is another one by now")
            self._root_fd = fd
        return self._root_fd

    def reach_of(
        self, fd: int, identity: FileIdentity, finder: Reach, patience: Patience | None
    ) -> int:
        """Return `Origin.reach` of an open file that it uses, see `Reach.of`. Does not raise."""
        try:
            root_fd = self.root_fd
        except OSError:
            return OWNER  # the process is gone, and with it the root of its paths
        root = Root(
            root_fd,
            self.root_path,
            partial(procfs.mountinfo, self.fd),
            self.mount_namespace,
            self.namespaces.user,
            builder.maker(self.fd, self.surroundings.apart),
        )
        return finder.of(fd, identity, root, patience)

    def executable_mappings(
        self, is_new: Callable[[Mapping], bool] = lambda mapping: False
    ) -> list[Mapping]:
        """Return its executable mappings of files; empty for kernel threads. Raises OSError.

        In the same question a few files for which ``is_new`` is True are opened, see `open_ahead`.
        """
        every = self._executable_mappings(is_new)
        self.has_generated_code = any(_is_generated(mapping) for mapping in every)
        return [mapping for mapping in every if mapping.inode]

    def other_programs(self, known: list[Mapping]) -> list[Mapping]:
        """Return mappings of files whose code the process may run from other memory; ``known`` are
        its executable mappings.

        The executable of the process always counts; if nothing maps it, a mapping without addresses
        stands for it, which only `pin` understands. If the process may run generated code, each
        other file that is mapped from its beginning and is an ELF file counts as well. Raises
        OSError; NoAnswer if a file is on a filesystem that does not answer.
        """
        if not known and not self.has_generated_code:
            return []  # a kernel thread
        found = self._mapped_programs(known) if self.has_generated_code else []
        return found + self._unmapped_executable(known + found)

    def _mapped_programs(self, known: list[Mapping]) -> list[Mapping]:
        """Return the beginnings of ELF files other than the ``known`` ones. Raises OSError."""
        seen = {(mapping.dev, mapping.inode) for mapping in known}
        found = []
        for mapping in self._file_mappings():
            file = mapping.dev, mapping.inode
            if mapping.offset or not mapping.inode or file in seen or is_device(mapping.path):
                continue
            seen.add(file)
            if self._is_program(mapping.start):
                found.append(mapping)
        return found

    def _is_program(self, address: int) -> bool:
        """Return True if a program or library for any machine begins at an address."""
        try:
            parsed = parse_header(self.read_memory(address, _HEADER_BYTES))
        except NoAnswer:
            raise
        except OSError:
            return False
        return parsed is not None and parsed[1][0] in (ET_EXEC, ET_DYN)

    def _file_mappings(self) -> list[Mapping]:
        if self._ways.query:
            return self.ask(_queried_files)
        return self._mappings()

    def _unmapped_executable(self, known: list[Mapping]) -> list[Mapping]:
        """Return a mapping for the executable, unless it is one of the ``known`` files."""
        try:
            link = procfs.exe(self.fd)
            if any(_same_name(link, mapping) for mapping in known):
                return []
            identity = inodes.identity_at(self.fd, b"exe")
        except OSError:
            return []  # it ended meanwhile, or may not be read
        if any(mapping.inode == identity.ino for mapping in known):
            return []
        dev, deleted = inodes.major_minor(identity.dev), link.endswith(_DELETED)
        path = link.removesuffix(_DELETED) if deleted else link
        return [Mapping(0, 0, False, 0, dev, identity.ino, path, deleted)]

    def _executable_mappings(self, is_new: Callable[[Mapping], bool]) -> list[Mapping]:
        self._all_mappings = None
        self._close_opened()
        if self._ways.query:
            try:
                every, self._opened = self.ask(
                    partial(_queried, is_new), lambda answer: _close_opened(answer[1])
                )
                return every
            except OSError as error:
                if error.errno not in _NO_QUERY:
                    raise
                self._ways.query = False
        return [mapping for mapping in self._mappings() if mapping.executable]

    def _mappings(self) -> list[Mapping]:
        if self._all_mappings is None:
            self._all_mappings = list(proc_text.mappings_in(self.ask(procfs.maps)))
        return self._all_mappings

    def ask(
        self, question: Callable[[int], _T], discard: Callable[[_T], None] = lambda answer: None
    ) -> _T:
        """Ask as `ProcessGate.ask` does. Raises TimeoutError if the process does not answer."""
        return self._ways.gate.ask(self.fd, self.pid, question, discard)

    def open_map_file(self, mapping: Mapping) -> int:
        """Return an O_PATH descriptor of the file that is mapped at the addresses of a mapping.

        Raises OSError.
        """
        opened = self._opened.pop((mapping.start, mapping.end), None)
        if opened is None:
            every = self.ask(partial(_open_map_files, (mapping,)), _close_opened)
            opened = every[mapping.start, mapping.end]
        if isinstance(opened, OSError):
            raise opened
        return opened

    def open_ahead(self, mappings: Sequence[Mapping]) -> None:
        """Do as `open_map_file` for all these mappings in one question, since asking takes more
        time than opening; `open_map_file` then returns the results. Raises NoAnswer.
        """
        missing = [each for each in mappings if (each.start, each.end) not in self._opened]
        if missing and self._ways.map_files:
            opened = self.ask(partial(_open_map_files, missing), _close_opened)
            self._opened.update(opened)

    def _close_opened(self) -> None:
        opened, self._opened = self._opened, {}
        _close_opened(opened)

    def read_memory(self, address: int, size: int) -> bytes:
        """Return `procfs.read_memory` of the process. Raises OSError."""
        return self.ask(lambda pid_fd: procfs.read_memory(pid_fd, address, size))

    def loaded_names(self) -> list[bytes]:
        """Return the names of its files according to its dynamic linker, which are claims of the
        process; none if its memory may not be read. Raises OSError.
        """
        try:
            return self.ask(_loaded_names)
        except PermissionError:
            return []

    def path_in_root(self, mapping: Mapping) -> bytes:
        """Return the path of a mapped file as the process sees it; its root may be a chroot."""
        if self.root_path != b"/" and mapping.path.startswith(self.root_path + b"/"):
            return mapping.path[len(self.root_path) :]
        return mapping.path

    @property
    def pins_unasked(self) -> bool:
        """Return True if `pin` is expected to need no filesystem request."""
        return self._ways.map_files

    def pin(self, mapping: Mapping, *, ask: bool = True) -> tuple[int, FileIdentity]:
        """Return an O_PATH descriptor of exactly the mapped file, and its identity.

        Without ``ask``, no filesystem request is made, and the identity is the one in the kernel's
        memory; if another way than map_files would be needed, PermissionError is raised. Raises
        `Moved` if the file is no longer mapped there, OSError if it cannot be reached.
        """
        if not mapping.end:
            pinned = self._pin_exe(mapping, ask=ask)
            if pinned is None:
                raise Moved
            return pinned
        if self._ways.map_files:
            try:
                return self._pin_map_file(mapping, ask=ask)
            except OSError as error:
                if error.errno in procfs.GONE:  # or the process has continued
                    raise Moved from error
                if error.errno != errno.EPERM:
                    raise
                self._ways.map_files = False
                if not ask:
                    raise
        return self._pin_exe(mapping) or self._pin_by_path(mapping)

    def pin_and_read(self, mapping: Mapping) -> tuple[int, FileIdentity]:
        """Pin as `pin` does, then read a byte, which shows if the filesystem answers at all."""
        fd, identity = self.pin(mapping)
        with closing_on_error(fd):
            if stat.S_ISREG(identity.mode):
                with closing_fd(inodes.reopen_regular(fd)) as readable:
                    os.pread(readable, 1, 0)
        return fd, identity

    def _pin_map_file(self, mapping: Mapping, *, ask: bool) -> tuple[int, FileIdentity]:
        with closing_on_error(self.open_map_file(mapping)) as fd:
            identity = inodes.identity(fd, ask=ask)
            # Stacked filesystems may show one inode number here and another there.
            if identity.ino != mapping.inode:
                name = procfs.map_file_name(mapping.start, mapping.end)
                if not _same_name(self.ask(partial(_link, name)), mapping):
                    raise Moved
        return fd, identity

    def _pin_exe(self, mapping: Mapping, *, ask: bool = True) -> tuple[int, FileIdentity] | None:
        """Pin the executable by the link exe, if the mapping is of the executable."""
        try:
            if not _same_name(procfs.exe(self.fd), mapping):
                return None
            fd = os.open(b"exe", os.O_PATH | os.O_CLOEXEC, dir_fd=self.fd)
        except OSError:
            return None
        try:
            identity = inodes.identity(fd, ask=ask)
            if identity.ino == mapping.inode or self._proven(fd, mapping):
                return fd, identity
        except OSError:
            pass
        os.close(fd)
        return None

    def _pin_by_path(self, mapping: Mapping) -> tuple[int, FileIdentity]:
        if mapping.deleted or not mapping.path.startswith(b"/"):
            raise OSError(errno.EPERM, "has no name any more; needs CAP_CHECKPOINT_RESTORE")
        fd = inodes.open_in_root(self.root_fd, self.path_in_root(mapping), os.O_PATH)
        with closing_on_error(fd):
            identity = inodes.identity(fd)
            same = (os.makedev(*mapping.dev), mapping.inode) == (identity.dev, identity.ino)
            if not same and not self._proven(fd, mapping):
                raise OSError(
                    errno.EPERM, "its name leads to another file; needs CAP_CHECKPOINT_RESTORE"
                )
        return fd, identity

    def _proven(self, path_fd: int, mapping: Mapping) -> bool:
        """Return True if a file has the build ID of the mapped one in memory. Raises OSError."""
        if not stat.S_ISREG(os.fstat(path_fd).st_mode):
            return False
        in_memory = self.build_id_in_memory(mapping)
        if in_memory is None:
            return False
        with closing_fd(inodes.reopen_regular(path_fd)) as fd:
            return base.identify(fd) == in_memory

    def build_id(self, mapping: Mapping) -> BuildId | None:
        """Return the build ID of a mapped file; the kernel may have to ask the filesystem for it.

        The kernel asks with our rights, which a filesystem that was mounted in a user namespace may
        refuse. The build ID is then read from the memory of the process, with its rights. Returns
        None also for an ID that files share by mistake.
        """
        try:
            raw = self.ask(lambda pid_fd: _queried_build_id(pid_fd, mapping.start))
            if raw and not is_shared(raw):
                return BuildId(raw)
        except (OSError, InvalidBuildId):
            pass
        return self.build_id_in_memory(mapping)

    def build_id_in_memory(self, mapping: Mapping) -> BuildId | None:
        """Return the build ID of a mapped file, read through the mappings of its beginning, or
        None.

        The process may have changed these bytes. That is no additional risk, because the process
        could as well map another file.
        """
        parts = [
            part
            for part in self._mappings()
            if part.inode == mapping.inode and part.dev == mapping.dev
        ]

        def read_at(offset: int, size: int) -> bytes:
            for part in parts:
                skip = offset - part.offset
                if 0 <= skip < part.end - part.start:
                    size = min(size, part.end - part.start - skip)
                    return self.read_memory(part.start + skip, size)
            return b""

        try:
            answer = identify.identify(read_at(0, identify.HEAD_SIZE), read_at)
        except NoAnswer:
            raise
        except OSError:
            return None
        return answer if isinstance(answer, BuildId) and not is_shared(answer) else None


def _link(name: bytes, pid_fd: int) -> bytes:
    procfs.await_memory_map(pid_fd)
    return os.readlink(name, dir_fd=pid_fd)


def _open_map_file(mapping: Mapping, pid_fd: int) -> int:
    name = procfs.map_file_name(mapping.start, mapping.end)
    return os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=pid_fd)


def _open_map_files(mappings: Iterable[Mapping], pid_fd: int) -> _Opened:
    opened: _Opened = {}
    procfs.await_memory_map(pid_fd)
    for mapping in mappings:
        place = mapping.start, mapping.end
        try:
            opened[place] = _open_map_file(mapping, pid_fd)
        except OSError as error:
            opened[place] = error
    return opened


def _close_opened(opened: _Opened) -> None:
    close_fds(*(each for each in opened.values() if not isinstance(each, OSError)))


def _queried(is_new: Callable[[Mapping], bool], pid_fd: int) -> tuple[list[Mapping], _Opened]:
    with closing_fd(procfs.open_maps(pid_fd)) as maps_fd:
        every = list(procfs.executable_mappings(maps_fd, only_files=False))
    new = (mapping for mapping in every if mapping.inode and is_new(mapping))
    return every, _open_map_files(islice(new, OPENED_AHEAD), pid_fd)


def _loaded_names(pid_fd: int) -> list[bytes]:
    with closing_fd(procfs.open_memory(pid_fd)) as memory:
        return loaded_names.names(
            procfs.auxiliary(pid_fd), lambda address, size: procfs.memory_at(memory, address, size)
        )


def _queried_files(pid_fd: int) -> list[Mapping]:
    with closing_fd(procfs.open_maps(pid_fd)) as maps_fd:
        return list(procfs.file_mappings(maps_fd))


def _queried_build_id(pid_fd: int, address: int) -> bytes | None:
    with closing_fd(procfs.open_maps(pid_fd)) as maps_fd:
        return procfs.build_id(maps_fd, address)


def _is_generated(mapping: Mapping) -> bool:
    """Return True for a mapping in which a JIT compiler may have put code."""
    path = mapping.path
    if mapping.inode:
        return path.startswith(_MEMORY) or (path.endswith(_DUMP_END) and is_dump(path))
    return not path.startswith(b"[") or path.startswith(b"[anon")


def is_device(path: bytes) -> bool:
    """Return True for memory shared through a device, whose name is in /dev; files in /dev/shm are
    ordinary.
    """
    return path.startswith(b"/dev/") and not path.startswith(b"/dev/shm/")


def is_dump(path: bytes) -> bool:
    """Return True for the path of a dump of a JIT compiler."""
    return _DUMP.search(path) is not None


def out_of_sight() -> list[Unreadable]:
    """Return one entry if a scan from here cannot see all processes of this machine; else an empty
    list.
    """
    spot = machine.blind_spot()
    return [] if spot is None else [Unreadable(b"/proc", f"{spot.unseen}: {spot.remedy}")]


def denied(error: OSError) -> str:
    """Return the reason of a refusal, with the remedy."""
    reason = error.strerror or str(error)
    if error.errno in _DENIED and "CAP_" not in reason:
        lacking = credentials.missing_for_scan()
        if lacking:
            reason += f"; {credentials.how_to_get(*lacking)}"
    return reason


def _same_name(link: bytes, mapping: Mapping) -> bool:
    return link == (mapping.path + _DELETED if mapping.deleted else mapping.path)
