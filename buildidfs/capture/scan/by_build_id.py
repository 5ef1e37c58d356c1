# SPDX-License-Identifier: Apache-2.0
"""Capture files by build ID, from the places where they were seen or are said to be.

The scanner looks in the files that processes have mapped, at paths in our own mount namespace, and
at paths in the mount namespaces of running processes. It takes a file only if its build ID is
wanted.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs import names
from buildidfs.capture import base as files
from buildidfs.capture.base import (
    Found,
    Memo,
    PinnedFile,
    Resighting,
    Unreadable,
    reached,
    resighted,
)
from buildidfs.capture.origin.builder import trust_of
from buildidfs.capture.origin.path_access import SCAN_KEEP_S, FileUsers, Reach
from buildidfs.capture.process.mapped_by import Mapper, Mappers
from buildidfs.capture.process.process import PinnedProcess, Ways, denied
from buildidfs.capture.process.scanner import ProcScanner
from buildidfs.capture.scan.tree import TreeScanner
from buildidfs.capture.unresponsive.filesystems import Patience
from buildidfs.linux import inodes, machine, mounts, namespaces, procfs
from buildidfs.linux.file_ops import closing_fd, closing_on_error
from buildidfs.model import BuildId, Sighting

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from buildidfs.model import FileIdentity, Mapping

_NOT_THERE: Final = frozenset((errno.ENOENT, errno.ESRCH, errno.ENOTDIR, errno.EINVAL))
_DELETED: Final = b" (deleted)"

File = tuple[bytes, tuple[int, int], int]
"""A path, and the device and inode number that a mapping of it shows."""


class SoughtFiles(msgspec.Struct):
    """The files to look for.

    ``build_ids`` may be at ``paths``, or at the places in mount namespaces (numbers as
    `Origin.mnt_ns_id`) in ``elsewhere``. ``files`` have known inodes, but no known build IDs; those
    at the paths in ``like`` are known by their bytes, which a function compares for a descriptor.
    """

    build_ids: set[BuildId]
    paths: set[bytes]
    elsewhere: dict[int, set[bytes]]
    files: set[File]
    like: dict[bytes, Callable[[int], bool]] = {}


class WantedScanner:
    """One pass over the places where wanted files may be; see `capture.base`.

    If a process maps a wanted file, all files that it maps are yielded; with ``only``, only the
    wanted ones and their debug files. ``found`` are the build IDs that were seen, also those of
    unreadable files. ``container_namespaces`` define a container, ``scanner`` is the name of the
    scanner in origins.
    """

    def __init__(
        self,
        memo: Memo,
        wanted: SoughtFiles,
        container_namespaces: Collection[str] = ("mnt",),
        *,
        scanner: str = "perf-data",
        only: bool = False,
    ) -> None:
        self._memo = memo
        self._scanner = scanner
        self._only = only
        self._wanted = wanted
        self._container_namespaces = tuple(container_namespaces)
        self.found: set[BuildId] = set()

    def __iter__(self) -> Iterator[Found]:
        yield from self._mapped()
        yield from self._here()
        if self._left() and self._wanted.elsewhere:
            yield from self._elsewhere()

    def _left(self) -> set[BuildId]:
        return self._wanted.build_ids - self.found

    # --- mapped by processes ---------------------------------------------------------------

    def _mapped(self) -> Iterator[Found]:
        pids: dict[tuple[str, BuildId], int] = {}
        scan = Mappers(self._is_wanted, container_namespaces=self._container_namespaces)
        for each in scan:
            if isinstance(each, Mapper):
                pids.setdefault((each.container, each.build_id), each.pid)
                self.found.add(each.build_id)
        if pids:
            scanner = ProcScanner(
                self._memo,
                pids=sorted(set(pids.values())),
                may_have_ended=True,
                container_namespaces=self._container_namespaces,
            )
            yield from self._only_wanted(scanner) if self._only else scanner

    def _only_wanted(self, found: Iterable[Found]) -> Iterator[Found]:
        """Yield the wanted files among those that a process maps, with their debug files."""
        paths = {path.removesuffix(_DELETED) for path, _, _ in self._wanted.files}
        taken = False
        for each in found:
            if isinstance(each, Unreadable):
                yield each
                continue
            path = each.sighting.origin.path
            # A binary is followed by its debug files with the same build ID, and their dwz files
            # with another one.
            if not (taken and names.DWZ_MARK in path):
                taken = path in paths or self._has_wanted_id(each)
            if taken:
                yield each
            elif isinstance(each, PinnedFile):
                each.close()

    def _is_wanted(self, build_id: BuildId, mapping: Mapping) -> bool:
        if build_id in self._wanted.build_ids:
            return True
        path = mapping.path + _DELETED if mapping.deleted else mapping.path
        return (path, mapping.dev, mapping.inode) in self._wanted.files

    # --- at their paths here ---------------------------------------------------------------

    def _here(self) -> Iterator[Found]:
        inodes: dict[bytes, set[tuple[tuple[int, int], int]]] = {}
        for path, dev, inode in self._wanted.files:
            inodes.setdefault(path, set()).add((dev, inode))
        patience = Patience()
        for path in sorted(self._wanted.paths | inodes.keys() | self._wanted.like.keys()):
            try:
                # The maker of the profile chose the path. If it does not answer, all of its
                # filesystem is given up, because the profile may name more files there.
                status = patience.ask((-1, 0), partial(_status, path), lambda status: None)
            except OSError:
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            dev = os.major(status.st_dev), os.minor(status.st_dev)
            is_that = (dev, status.st_ino) in inodes.get(path, ())
            for each in TreeScanner(
                self._memo,
                [path],
                container_namespaces=self._container_namespaces,
                given=False,
            ):
                if is_that or self._has_wanted_id(each) or self._is_like(path, each):
                    yield each
                elif isinstance(each, PinnedFile):
                    each.close()

    def _is_like(self, path: bytes, each: Found) -> bool:
        is_like = self._wanted.like.get(path)
        return is_like is not None and isinstance(each, PinnedFile) and is_like(each.fd)

    def _has_wanted_id(self, each: Found) -> bool:
        if isinstance(each, Resighting):
            build_id = each.known.build_id
        elif isinstance(each, PinnedFile):
            answer = files.identify(each.fd)
            build_id = answer if isinstance(answer, BuildId) else None
        else:
            return False
        if build_id is None or build_id not in self._wanted.build_ids:
            return False
        self.found.add(build_id)
        return True

    # --- at their paths in other mount namespaces --------------------------------------------

    def _elsewhere(self) -> Iterator[Found]:
        places = dict(self._wanted.elsewhere)
        look = _Elsewhere(self._memo, self._scanner)
        for pid in procfs.pids():
            if not places:
                return
            try:
                with PinnedProcess(pid, look.ways) as process:
                    number = namespaces.mnt_ns_id(process.fd)
                    if number not in places:
                        continue
                    process.look(look.initial, self._container_namespaces)
                    if process.root_path != b"/":
                        continue  # in a chroot, the paths are different
                    for path in sorted(places.pop(number)):
                        yield from look.at(process, path, self._left(), self.found.add)
            except OSError:
                continue  # this process may not be read, but another one in the same namespace may


def _status(path: bytes) -> os.stat_result:
    """Return the status of a path in our mount namespace; the path must not lead through another
    process. Raises OSError.
    """
    with closing_fd(os.open(b"/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)) as root_fd:
        fd = inodes.open_in_root(root_fd, path, os.O_PATH)
    with closing_fd(fd):
        return os.fstat(fd)


class _Elsewhere:
    """Opens files in the roots of processes."""

    def __init__(self, memo: Memo, scanner: str) -> None:
        self._memo = memo
        self._scanner = scanner
        self._host = machine.host_name()
        self._patience = Patience()
        self._users = FileUsers()
        self._reach = Reach(keep_s=SCAN_KEEP_S)
        self._own_mounts = mounts.own_mount_devices(mounts.mountinfo())
        self.ways = Ways()
        self.initial = namespaces.initial()

    def at(
        self,
        process: PinnedProcess,
        path: bytes,
        wanted: set[BuildId],
        found_it: Callable[[BuildId], None],
    ) -> Iterator[Found]:
        """Yield the file at ``path`` in the root of a process, if its build ID is wanted."""
        root_fd = process.root_fd
        own_mounts = self._own_mounts | mounts.own_mount_devices(procfs.mountinfo(process.fd))
        try:
            # A place that does not answer is given up together with its namespace.
            found = self._patience.ask(
                (-1, process.mount_namespace),
                lambda: _open(root_fd, path, wanted, own_mounts),
                lambda found: os.close(found[0]) if found is not None else None,
            )
        except OSError as error:
            if error.errno not in _NOT_THERE:
                yield Unreadable(path, denied(error), error.errno or 0)
            return
        if found is None:
            return
        fd, build_id, identity = found
        found_it(build_id)
        its, initial = process.namespaces.mnt, self.initial.mnt
        origin = process.surroundings.origin(
            path,
            identity,
            host=self._host,
            trust=trust_of(identity, its, initial, owners_believed=False),
            scanner=self._scanner,
            owner=self._users.of(fd, identity, process.pid) if its == initial else None,
        )
        sighting = Sighting(origin, time.time_ns())

        def reach(each: Sighting) -> Sighting:
            return reached(each, process.reach_of(fd, identity, self._reach, self._patience))

        known = self._memo.recall(identity)
        if known is not None and known.build_id == build_id:
            with closing_fd(fd):
                yield resighted(self._memo, sighting, known, reach)
            return
        yield PinnedFile(reach(sighting), fd)


def _open(
    root_fd: int, path: bytes, wanted: set[BuildId], own_mounts: Collection[tuple[int, int]]
) -> tuple[int, BuildId, FileIdentity] | None:
    """Open a file below a root; return None unless its build ID is wanted. Raises OSError."""
    with closing_fd(inodes.open_in_root(root_fd, path, os.O_PATH)) as path_fd:
        identity = inodes.identity(path_fd)
        if inodes.major_minor(identity.dev) in own_mounts:
            return None
        fd = inodes.reopen_regular(path_fd)
    with closing_on_error(fd):
        answer = files.identify(fd)
    if isinstance(answer, BuildId) and answer in wanted:
        return fd, answer, identity
    os.close(fd)
    return None
