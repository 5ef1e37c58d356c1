# SPDX-License-Identifier: Apache-2.0
"""Capture the files that running processes have mapped, in all mount namespaces.

For each process the scan reads its maps, then its namespaces and container, then each file that is
new in this scan. A file is new once in each mount namespace and container, so it gets an origin in
each, however many processes map it there. Files that the memo knows are not opened.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.capture import base
from buildidfs.capture.base import (
    Found,
    Known,
    Memo,
    PinnedFile,
    Resighting,
    Unreadable,
    memory_file,
    reached,
    resighted,
)
from buildidfs.capture.debug_files import (
    DEBUG_ROOT,
    DEFAULT_DIRECTORIES,
    Companion,
    Companions,
    Opener,
    debug_directories,
    have_build_ids,
)
from buildidfs.capture.origin import builder
from buildidfs.capture.origin.builder import Owners, Surroundings, trust_of
from buildidfs.capture.origin.path_access import SCAN_KEEP_S, FileUsers, Reach
from buildidfs.capture.process.process import (
    OPENED_AHEAD,
    Moved,
    PinnedProcess,
    Ways,
    denied,
    is_device,
)
from buildidfs.capture.process.silent_processes import NoAnswer
from buildidfs.capture.unresponsive.file_helper import FileHelper
from buildidfs.capture.unresponsive.filesystems import Devices, Patience, fuse_devices
from buildidfs.formats import proc_text
from buildidfs.formats.elf import identify
from buildidfs.formats.elf.identify import ElfFile
from buildidfs.linux import credentials, inodes, machine, mounts, namespaces, procfs
from buildidfs.linux.file_ops import closing_fd, closing_on_error
from buildidfs.model import (
    EVERYBODY,
    PUBLIC_ACCESS,
    Access,
    BuildId,
    ContainerNames,
    FileIdentity,
    Kind,
    NamespaceSet,
    Sighting,
    Standing,
    Trust,
    fingerprint,
)
from buildidfs.names import merged, targets_of_library
from buildidfs.shares import FairTable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from buildidfs.capture.unresponsive.filesystems import Device
    from buildidfs.model import Mapping
    from buildidfs.shares import Share

_ATTEMPTS: Final = 3  # attempts to read the maps of a process that keeps mapping other files


# The errors of a FUSE filesystem without allow_other: only its mounter, or only the mounter's user
# namespace, may access it.
_PRIVATE: Final = frozenset((errno.EACCES, errno.EOVERFLOW))
_PRIVATE_FUSE: Final = "a FUSE filesystem that its user mounted without allow_other"

# Mount namespace, container, and the file. The path is included because an overlay may show one
# device and inode number for files of different layers, and because each name is worth recording.
_FileKey = tuple[int, str, tuple[int, int], int, bytes]  # the last is a hash of the path
_MOST_FAILED: Final = 1 << 14


class ProcScanner:
    """One pass over the executable file mappings of processes; see `capture.base`.

    Each new binary is followed by its debug files (`capture.debug_files`); for a binary that the
    memo knows, only files under its build ID are looked for. The vDSO is part of the scan.

    ``pids`` and ``containers`` (labels, or beginnings of container IDs) restrict the scan;
    ``containers_only`` skips every process that shares one of ``container_namespaces`` with the
    host. ``initial`` are the host's namespaces; the default is those of this machine.
    ``helper`` opens files on filesystems that may not answer; the caller closes it.
    ``may_have_ended`` skips ``pids`` that are gone, because the caller found them some time ago.
    ``generated`` gets each process that may run generated code. ``debug_directories`` of each root
    have debug files, besides those that the root names. ``ways`` and ``patience`` are for
    tests.

    Iterating raises `UsageError` for a container that does not exist, or is ambiguous. A process
    that ends during the scan is skipped; one that may not be read is `Unreadable`.
    """

    def __init__(
        self,
        memo: Memo,
        *,
        pids: Sequence[int] | None = None,
        containers: Sequence[str] | None = None,
        containers_only: bool = False,
        container_namespaces: Collection[str] = ("mnt",),
        initial: NamespaceSet | None = None,
        ways: Ways | None = None,
        patience: Patience | None = None,
        helper: FileHelper | None = None,
        may_have_ended: bool = False,
        generated: Callable[[int], None] = lambda pid: None,
        debug_directories: Sequence[bytes] = DEFAULT_DIRECTORIES,
    ) -> None:
        self._debug_directories = debug_directories
        self._memo = memo
        self._helper = helper
        self._asked_for = pids is not None and not may_have_ended
        self._pids = pids
        self._containers = containers
        self._containers_only = containers_only
        self._container_namespaces = tuple(container_namespaces)
        self._host = machine.host_name()
        self._initial = initial
        self._ways = ways
        self._patience = patience or Patience()
        self._generated = generated
        self.share: float | None = None
        """The part of the processes that were scanned, 0 to 1; None before the first."""

    def __iter__(self) -> Iterator[Found]:
        if self._helper is not None:
            yield from self._found(self._helper)
            return
        with FileHelper(self._patience.seconds) as helper:
            yield from self._found(helper)

    def _found(self, helper: FileHelper) -> Iterator[Found]:
        scan = _Scan(
            self._memo,
            self._host,
            self._initial or namespaces.initial(),
            self._container_namespaces,
            self._ways or Ways(),
            self._patience,
            helper,
            self._generated,
            self._debug_directories,
        )
        pids = procfs.pids() if self._pids is None else self._pids
        wanted: frozenset[str] | None = None
        if self._containers:
            called = scan.containers(pids)
            wanted = builder.choose(self._containers, called.keys(), called)
        yield from scan.vdso()
        for number, pid in enumerate(pids):
            self.share = number / len(pids)
            yield from scan.process(
                pid,
                wanted=wanted,
                contained=self._containers_only,
                asked_for=self._asked_for,
            )
        yield from scan.failures()


class _Scan:
    """The state of one pass that is kept from process to process."""

    def __init__(
        self,
        memo: Memo,
        host: str,
        initial: NamespaceSet,
        container_namespaces: Collection[str],
        ways: Ways,
        patience: Patience,
        helper: FileHelper,
        generated: Callable[[int], None],
        usual_directories: Sequence[bytes],
    ) -> None:
        self._usual_directories = usual_directories
        self._memo = memo
        self._generated = generated
        self._host = host
        self._initial = initial
        self._container_namespaces = container_namespaces
        self._ways = ways
        self._vdso = VdsoFinder(memo, host, initial)
        self._seen_files: set[_FileKey] = set()
        self._seen_names: set[tuple[int, str, bytes]] = set()
        self._failed: FairTable[_FileKey, Unreadable] = FairTable(_MOST_FAILED)
        self._seen_companions: set[tuple[int, str, FileIdentity, Trust]] = set()
        self._own_mounts = mounts.own_mount_devices(mounts.mountinfo())
        self._devices = Devices()
        self._slow_namespaces: set[int] = set()
        self._patience = patience
        self._helper = helper
        self._fuse_namespaces: set[int] = set()
        self._fuse_devices: set[Device] = set()
        self._mount_namespaces: set[int] = set()
        # By root: the directories with debug files, and True if some have them by build ID.
        self._debug_directories: dict[tuple[int, bytes], tuple[tuple[bytes, ...], bool]] = {}
        self._existing_directories: dict[tuple[int, bytes], dict[bytes, bool]] = {}
        self._owners = Owners(mounts.initial_mountinfo)
        self._users = FileUsers()
        self._reach = Reach(keep_s=SCAN_KEEP_S)
        self._unasking_reach = Reach(ask=False, keep_s=SCAN_KEEP_S)

    def containers(self, pids: Sequence[int]) -> dict[str, ContainerNames]:
        """Return the labels of all visible containers, with their names."""
        from buildidfs.capture.origin.container_names import names_of_cgroup

        found: dict[str, ContainerNames] = {}
        for pid in pids:
            try:
                with PinnedProcess(pid, self._ways) as process:
                    if procfs.is_kernel_thread(process.fd):
                        continue  # kdevtmpfs has a mount namespace of its own
                    process.look(self._initial, self._container_namespaces)
                    if process.container and process.container not in found:
                        found[process.container] = names_of_cgroup(process.surroundings.cgroup)
            except OSError:
                continue
        return found

    def vdso(self) -> Iterator[Found]:
        """Yield the vDSO of our own word size, which every container has, too."""
        try:
            found = self._vdso.own(self._ways)
        except OSError as error:
            yield Unreadable.of(b"[vdso]", error)
            return
        if found is not None:
            yield found

    def failures(self) -> Iterator[Unreadable]:
        """Yield the files that could be reached through none of the processes that map them."""
        yield from self._failed.values()
        if self._failed.refused:
            yield Unreadable(b"/proc", f"{self._failed.refused} more files cannot be read")

    def process(
        self, pid: int, *, wanted: frozenset[str] | None, contained: bool, asked_for: bool
    ) -> Iterator[Found]:
        """Yield the new files of a process, if it is in a ``wanted`` container."""
        try:
            with PinnedProcess(pid, self._ways) as process:
                if procfs.is_kernel_thread(process.fd):
                    return
                for _ in range(_ATTEMPTS):
                    process.look(self._initial, self._container_namespaces)
                    if contained and not process.container:
                        return
                    if wanted is not None and process.container not in wanted:
                        return
                    self._note_mounts(process)
                    mappings = process.executable_mappings(partial(self._is_new, process))
                    if process.has_generated_code:
                        self._generated(pid)
                    try:
                        yield from self._files(process, mappings)
                        others = process.other_programs(mappings)
                        yield from self._files(process, others)
                        yield from self._links(process, mappings + others)
                    except Moved:
                        continue
                    break
                if may_differ(mappings):
                    found = self._vdso.of(process, self._trust_in(process))
                    if found is not None:
                        yield found
        except OSError as error:
            if error.errno not in procfs.GONE:
                yield Unreadable(b"/proc/%d" % pid, denied(error), error.errno or 0)
            elif asked_for and not os.path.exists(f"/proc/{pid}"):
                yield Unreadable(b"/proc/%d" % pid, "no such process", errno.ESRCH)

    def _note_mounts(self, process: PinnedProcess) -> None:
        """Read the mounts of a mount namespace when it is seen for the first time."""
        if process.mount_namespace in self._mount_namespaces:
            return
        self._mount_namespaces.add(process.mount_namespace)
        text = procfs.mountinfo(process.fd)
        self._own_mounts |= mounts.own_mount_devices(text)
        # Any user can have made a mount that was made with the privileges of a user namespace.
        by_root = process.namespaces.user == self._initial.user
        if self._devices.learn(text, overlays_answer=by_root):
            self._slow_namespaces.add(process.mount_namespace)
            if found := fuse_devices(text):
                self._fuse_namespaces.add(process.mount_namespace)
                self._fuse_devices |= found

    def _files(self, process: PinnedProcess, mappings: list[Mapping]) -> Iterator[Found]:
        new: dict[_FileKey, Mapping] = {}
        for each in mappings:
            if self._is_new(process, each):
                new.setdefault(_key(process, each), each)
        for key, mapping in self._opened_ahead(process, list(new.items())):
            try:
                path_fd, identity = self._pin(process, mapping)
                with closing_fd(path_fd):
                    if not process.pins_unasked and process.has_left():
                        raise Moved
                    if stat.S_ISREG(identity.mode):
                        yield from self._file(process, mapping, path_fd, identity)
            except NoAnswer:
                raise
            except OSError as error:
                if error.errno in procfs.GONE and process.is_gone():
                    return
                # The file may be accessible through another process.
                self._failed.pop(key)
                refused = self._refused(process, mapping, error)
                self._failed.put(key, process.share(self._initial), refused)
                continue
            self._seen_files.add(key)
            self._failed.pop(key)

    def _is_new(self, process: PinnedProcess, mapping: Mapping) -> bool:
        """Return True for the mapping of a file that this scan has not seen at that place."""
        return _key(process, mapping) not in self._seen_files and self._may_be_opened(mapping)

    def _opened_ahead(
        self, process: PinnedProcess, new: list[tuple[_FileKey, Mapping]]
    ) -> Iterator[tuple[_FileKey, Mapping]]:
        """Yield the mappings of a process, and open a few of their files ahead. Raises `Moved`."""
        for start in range(0, len(new), OPENED_AHEAD):
            few = new[start : start + OPENED_AHEAD]
            process.open_ahead([mapping for _, mapping in few])
            # A runtime may move a process into its container at any time.
            if process.has_left():
                raise Moved
            yield from few

    def _links(self, process: PinnedProcess, mappings: list[Mapping]) -> Iterator[Found]:
        """Yield the files of a container at the names under which its dynamic linker loaded them,
        if these lead there through symbolic links that `view.layouts.containers` cannot derive.

        Debuggers look up these names below a sysroot. The process chose them, so each counts only
        if it leads to a file that is mapped.
        """
        if not process.container:
            return
        paths = {process.path_in_root(each) for each in mappings}
        for name in process.loaded_names():
            # A directory /lib in the tree would hide that it is a link to usr/lib.
            for path in (*merged(name), name) if not name.startswith(b"/usr/") else (name,):
                key = process.mount_namespace, process.container, path
                is_known = key in self._seen_names or path in paths or _is_derived(path, paths)
                if is_known or os.path.normpath(path) != path:
                    break
                self._seen_names.add(key)
                if (found := self._linked(process, path, mappings)) is not None:
                    yield from found
                    break

    def _linked(
        self, process: PinnedProcess, path: bytes, mappings: list[Mapping]
    ) -> list[Found] | None:
        """Return the sightings of a mapped file at another path, None if it does not lead to one.
        Raises OSError.
        """
        try:
            path_fd, identity = self._opener(process).open(process.root_fd, path)
        except OSError:
            return None  # it leads nowhere any more
        with closing_fd(path_fd):
            mapping = _mapped_as(path_fd, identity, mappings)
            if mapping is None or not self._may_be_opened(mapping):
                return None
            at = msgspec.structs.replace(mapping, path=path, deleted=False)
            return list(self._file(process, at, path_fd, identity))

    def _pin(self, process: PinnedProcess, mapping: Mapping) -> tuple[int, FileIdentity]:
        """Pin a file of a filesystem that may not answer, as `PinnedProcess.pin` does."""
        if not self._devices.may_not_answer(mapping.dev):
            return process.pin(mapping)
        if process.pins_unasked:
            try:
                path_fd, _ = process.pin(mapping, ask=False)
            except PermissionError:
                if process.pins_unasked:
                    raise
            else:
                with closing_on_error(path_fd):
                    share = process.share(self._initial)
                    return path_fd, self._helper.look(mapping.dev, path_fd, share)

        def pin_and_read() -> tuple[int, FileIdentity]:
            return process.pin_and_read(mapping)

        return self._patience.ask(mapping.dev, pin_and_read, lambda answer: os.close(answer[0]))

    def _refused(self, process: PinnedProcess, mapping: Mapping, error: OSError) -> Unreadable:
        """Return the loss of a file that could not be opened, with the build ID of a file on a
        private FUSE filesystem: the kernel reports it even if root may not read the file.
        """
        path, number = process.path_in_root(mapping), error.errno or 0
        is_private = number in _PRIVATE and mapping.dev in self._fuse_devices
        if not is_private or credentials.missing_for_scan():
            return Unreadable(path, denied(error), number)
        build_id = None
        with contextlib.suppress(OSError):
            share = process.share(self._initial)
            build_id = self._helper.build_id(mapping.dev, process.pid, mapping, share)
        return Unreadable(path, f"{os.strerror(number)}: {_PRIVATE_FUSE}", number, build_id)

    def _may_be_opened(self, mapping: Mapping) -> bool:
        return mapping.dev not in self._own_mounts and not is_device(mapping.path)

    def _file(
        self, process: PinnedProcess, mapping: Mapping, path_fd: int, identity: FileIdentity
    ) -> Iterator[Found]:
        path = process.path_in_root(mapping)
        trust = self._trust(process, path, identity, path_fd)
        sighting = self._sighting(process, path, identity, path_fd, trust)
        known = self._memo.recall(identity)
        if known is not None:
            yield self._resighted(sighting, process, path_fd, known)
            if known.build_id is not None:
                yield from self._debug_files(process, path, known.build_id, trust)
            return
        if is_copy := self._devices.may_not_answer(mapping.dev):
            # A server may answer for the first page of the file, and not for the next.
            share = process.share(self._initial)
            identity, fd = self._helper.copy(mapping.dev, path_fd, identity.size, share)
            trust = self._trust(process, path, identity, path_fd)
            sighting = self._sighting(process, path, identity, path_fd, trust)
        else:
            fd = inodes.reopen_regular(path_fd)
        with closing_on_error(fd):
            described = base.describe(fd)
        yield PinnedFile(self._reached(sighting, process, path_fd), fd, is_copy=is_copy)
        if isinstance(described, ElfFile):
            yield from self._debug_files(process, path, described, trust)

    def _sighting(
        self, process: PinnedProcess, path: bytes, identity: FileIdentity, fd: int, trust: Trust
    ) -> Sighting:
        is_hosts = process.namespaces.mnt == self._initial.mnt
        origin = process.surroundings.origin(
            path,
            identity,
            host=self._host,
            trust=trust,
            scanner="proc",
            standing=(self._owners.standing(path) if trust is Trust.HOST else Standing.GIVEN),
            owner=self._users.of(fd, identity, process.pid) if is_hosts else None,
        )
        return Sighting(origin, time.time_ns())

    def _resighted(
        self, sighting: Sighting, process: PinnedProcess, fd: int, known: Known
    ) -> Resighting:
        """Return the record of a file that the memo knows, with its reach if the place is new."""
        return resighted(self._memo, sighting, known, lambda each: self._reached(each, process, fd))

    def _reached(self, sighting: Sighting, process: PinnedProcess, fd: int) -> Sighting:
        """Return the sighting with the reach of the file."""
        identity = sighting.origin.identity
        if process.mount_namespace in self._fuse_namespaces:
            reach = process.reach_of(fd, identity, self._unasking_reach, None)
        else:
            is_slow = process.mount_namespace in self._slow_namespaces
            patience = self._patience if is_slow else None
            reach = process.reach_of(fd, identity, self._reach, patience)
        return reached(sighting, reach)

    def _trust(self, process: PinnedProcess, path: bytes, identity: FileIdentity, fd: int) -> Trust:
        mnt, initial_mnt = process.namespaces.mnt, self._initial.mnt
        trust = trust_of(identity, mnt, initial_mnt)
        if trust is Trust.HOST and not (
            # Root's files in a chroot came with the archive that was unpacked there.
            process.root_path == b"/" and self._owners.believed(path, fd)
        ):
            trust = trust_of(identity, mnt, initial_mnt, owners_believed=False)
        return trust

    def _trust_in(self, process: PinnedProcess) -> Trust:
        in_host = process.namespaces.mnt == self._initial.mnt
        return Trust.UNKNOWN if in_host else Trust.CONTAINER

    # --- debug files -----------------------------------------------------------------------

    def _debug_files(
        self, process: PinnedProcess, path: bytes, binary: ElfFile | BuildId, trust: Trust
    ) -> Iterator[Found]:
        """Yield the debug files of a binary. If only the build ID of the binary is known, the memo
        has the name of its debug file.

        ``trust`` is that of the binary.
        """
        try:
            directories, have_ids = self._directories(process)
            companions = self._companions(process, directories)
            if isinstance(binary, ElfFile):
                yield from self._take(process, companions.of(path, binary), trust)
                return
            link = self._memo.debug_link(binary)
            if link is not None or have_ids:
                yield from self._take(process, companions.of_known(path, binary, link), trust)
        except OSError as error:
            if error.errno not in procfs.GONE:
                yield Unreadable(b"/proc/%d/root" % process.pid, denied(error), error.errno or 0)

    def _companions(self, process: PinnedProcess, directories: Sequence[bytes]) -> Companions:
        opener = self._opener(process)
        root = process.mount_namespace, process.root_path
        existing = self._existing_directories.setdefault(root, {})
        refused = self._own_devices()
        return Companions(process.root_fd, self._memo, refused, opener, directories, existing)

    def _own_devices(self) -> set[int]:
        """Return the devices (st_dev) of the mounts of buildidfs."""
        return {os.makedev(*device) for device in self._own_mounts}

    def _opener(self, process: PinnedProcess) -> Opener:
        """Return an object that opens files by their paths in the root of a process."""
        if process.mount_namespace not in self._slow_namespaces:
            return Opener()
        return _HelpedOpener(
            self._helper,
            self._devices,
            process.mount_namespace,
            process.share(self._initial),
        )

    def _directories(self, process: PinnedProcess) -> tuple[tuple[bytes, ...], bool]:
        """Return the directories with debug files of the root of a process, and True if some have
        them by build ID.
        """
        if process.mount_namespace in self._slow_namespaces:
            # It cannot be found out without waiting which of them exist.
            return tuple(self._usual_directories), True
        key = process.mount_namespace, process.root_path
        known = self._debug_directories.get(key)
        if known is None:
            root_fd = process.root_fd
            found = debug_directories(
                root_fd, self._opener(process), self._usual_directories, self._own_devices()
            )
            known = self._debug_directories[key] = found, have_build_ids(root_fd, found)
        return known

    def _take(
        self, process: PinnedProcess, companions: Iterator[Companion | Unreadable], binary: Trust
    ) -> Iterator[Found]:
        for item in companions:
            if isinstance(item, Unreadable):
                yield item
                continue
            with item:
                # The maker of the binary chose the names and links that lead there, perhaps to a
                # file of root that has nothing to do with the binary.
                trust = min(binary, self._trust(process, item.path, item.identity, item.path_fd))
                key = (process.mount_namespace, process.container, item.identity, trust)
                if key in self._seen_companions:
                    continue
                self._seen_companions.add(key)
                sighting = self._sighting(process, item.path, item.identity, item.path_fd, trust)
                if item.known is not None:
                    yield self._resighted(sighting, process, item.path_fd, item.known)
                else:
                    sighting = self._reached(sighting, process, item.path_fd)
                    yield PinnedFile(
                        sighting, item.release(), item.kind, item.build_id, item.is_copy
                    )


def _key(process: PinnedProcess, mapping: Mapping) -> _FileKey:
    where = process.mount_namespace, process.container
    return *where, mapping.dev, mapping.inode, fingerprint(mapping.path)


def _is_derived(path: bytes, known: Iterable[bytes]) -> bool:
    """Return True for the usual link beside a library, such as libz.so.1 for libz.so.1.3."""
    directory, _, name = path.rpartition(b"/")
    targets = targets_of_library(name)
    beside = (each.rpartition(b"/") for each in known)
    return targets is not None and any(
        where == directory and targets.match(target) for where, _, target in beside
    )


def _mapped_as(path_fd: int, identity: FileIdentity, mappings: Iterable[Mapping]) -> Mapping | None:
    """Return the mapping of an open file, None if there is none. Raises OSError.

    Stacked filesystems may show another inode number in a mapping, but the same path.
    """
    path, dev = os.readlink(b"/proc/self/fd/%d" % path_fd), inodes.major_minor(identity.dev)
    for each in mappings:
        if each.path == path or (each.dev, each.inode) == (dev, identity.ino):
            return each
    return None


class _HelpedOpener(Opener):
    """Opens files for ``share`` in a mount namespace with filesystems that may not answer."""

    def __init__(
        self, helper: FileHelper, devices: Devices, mount_namespace: int, share: Share
    ) -> None:
        self._share = share
        self._helper = helper
        self._devices = devices
        self._mount_namespace = mount_namespace

    def open(self, root_fd: int, path: bytes) -> tuple[int, FileIdentity]:
        """Open a file as `Opener.open` does.

        The device at the end of a path is unknown before the path is followed. So if there is no
        answer, the helper stops asking for a pseudo device number: -2 for /usr/lib/debug, which is
        root's, -1 for directories in which users may have mounted filesystems. No device has these
        numbers.
        """
        place = -2 if path.startswith(DEBUG_ROOT + b"/") else -1
        device = place, self._mount_namespace
        return self._helper.open(device, root_fd, path, self._share)

    def reopen(self, path_fd: int, identity: FileIdentity) -> tuple[int, bool]:
        """Reopen as `Opener.reopen` does; return a copy if the filesystem may not answer."""
        device = inodes.major_minor(identity.dev)
        if not self._devices.may_not_answer(device):
            return super().reopen(path_fd, identity)
        return self._helper.copy(device, path_fd, identity.size, self._share)[1], True


# --- the vDSO ------------------------------------------------------------------------------------

VDSO_PATH: Final = b"[vdso]"
_MAX_BYTES: Final = 1 << 20
_FOUR_GIB: Final = 1 << 32


class VdsoFinder:
    """Finds each vDSO once in a scan. ``host`` names the machine, ``initial`` its namespaces.

    The vDSO is an ELF file that exists only in memory; perf looks it up under a name of its own.
    The kernel maps the same pages into all processes of one word size, so one vDSO is read from our
    own memory, and another from the first process of another word size.
    """

    def __init__(self, memo: Memo, host: str, initial: NamespaceSet) -> None:
        self._memo = memo
        self._host = host
        self._initial = initial
        self._seen: set[BuildId] = set()

    def own(self, ways: Ways) -> PinnedFile | Resighting | None:
        """Return the vDSO of this process. Raises OSError."""
        with PinnedProcess(os.getpid(), ways) as process:
            return self.of(process, Trust.HOST)

    def of(self, process: PinnedProcess, trust: Trust) -> PinnedFile | Resighting | None:
        """Return the vDSO of a process; None if it has none or it was found before. Raises OSError.

        A process can write to its copy of the vDSO, so the vDSO gets ``trust``, the trust in the
        process.
        """
        place = process.ask(_locate)
        if place is None:
            return None
        start, end = place
        data = process.read_memory(start, min(end - start, _MAX_BYTES))
        build_id = identify.identify(
            data[: identify.HEAD_SIZE], lambda offset, size: data[offset : offset + size], len(data)
        )
        if not isinstance(build_id, BuildId) or build_id in self._seen:
            return None
        self._seen.add(build_id)
        return captured_vdso(
            self._memo, data, build_id,
            namespaces=self._initial, host=self._host, trust=trust, scanner="proc",
        )  # fmt: skip


def captured_vdso(
    memo: Memo,
    data: bytes,
    build_id: BuildId,
    *,
    namespaces: NamespaceSet,
    host: str,
    trust: Trust,
    scanner: str,
    access: Access = PUBLIC_ACCESS,
) -> PinnedFile | Resighting:
    """Return the sighting of a vDSO with these bytes, in a file for ``access``. Raises OSError."""
    # There is no file with an identity, so the identity is made from the bytes.
    scope = b"vdso:" + fingerprint(data)
    identity = FileIdentity(0, 0, len(data), 0, 0, stat.S_IFREG | 0o555, 0, 0, scope)
    # Any user may run a process of that word size.
    identity, reach = access.within(identity, EVERYBODY)
    surroundings = Surroundings(namespaces)
    origin = surroundings.origin(
        VDSO_PATH, identity, host=host, trust=trust, scanner=scanner, reach=reach
    )
    sighting = Sighting(origin, time.time_ns())
    known = memo.recall(identity)
    if known is not None and known.build_id == build_id:
        return Resighting(sighting, known)
    return PinnedFile(sighting, memory_file(VDSO_PATH, data), Kind.VDSO)


def may_differ(mappings: Iterable[Mapping]) -> bool:
    """Return True if a process may have another vDSO than ours, because all its mappings are below
    4 GiB.
    """
    ends = [mapping.end for mapping in mappings]
    return bool(ends) and max(ends) <= _FOUR_GIB


def _locate(pid_fd: int) -> tuple[int, int] | None:
    with closing_fd(procfs.open_maps(pid_fd)) as maps_fd:
        try:
            return procfs.vdso(maps_fd)
        except OSError:
            pass
    for mapping in proc_text.mappings_in(procfs.maps(pid_fd)):
        if mapping.path == VDSO_PATH:
            return mapping.start, mapping.end
    return None
