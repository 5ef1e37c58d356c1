# SPDX-License-Identifier: Apache-2.0
"""The files in which JIT compilers write the names of generated code, kept open while the process
lives.

JIT compilers write ``/tmp/perf-PID.map`` (text) or ``jit-PID.dump``; they map a page of the latter
executable so that profilers find it. Both vanish with the container. A map is opened in the root of
its process, without following a symbolic link, and a dump is opened through its mapping. A file
counts only if it is regular and belongs to the user of the process, or to root of its user
namespace. The open file can be read after the process and its mount namespace are gone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from buildidfs.capture.origin import builder
from buildidfs.capture.process.process import PinnedProcess, Ways, is_dump
from buildidfs.capture.unresponsive.filesystems import Patience
from buildidfs.formats.perf.jit import JitDump
from buildidfs.linux import inodes, machine, namespaces, procfs
from buildidfs.linux.file_ops import close_fds, closing_on_error
from buildidfs.model import OWNER, JitProcess, Trust

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from buildidfs.capture.process.silent_processes import ProcessGate
    from buildidfs.capture.unresponsive.file_helper import FileHelper
    from buildidfs.capture.unresponsive.filesystems import SlowMounts
    from buildidfs.model import FileIdentity, Mapping
    from buildidfs.shares import Share

PART_BYTES: Final = 1 << 20
"""The most bytes of a map that are read at once."""

_UNCACHED: Final = frozenset((errno.EAGAIN, errno.EINVAL, errno.ENOSYS))
_MACHINES: Final = {"x86_64": 62, "aarch64": 183, "s390x": 22, "ppc64le": 21, "riscv64": 243}
_MAX_COPIED_BYTES: Final = 128 << 20
_RECORD_COST: Final = 32
_MOST_BYTES: Final = 32 << 20

_log = logging.getLogger(__name__)


class JitNameReceiver(Protocol):
    """The receiver of the names; `store.jit_maps.JitMaps` is one."""

    def write(self, process: JitProcess, at: int, text: bytes) -> int:
        """Keep a part of a map; return the offset of the next part, -1 to begin again."""


class JitOwner(NamedTuple):
    """The share of a process, the name of its container for reports (empty on the host), and its
    mount namespace.
    """

    share: Share
    container: str = ""
    mnt_ns_id: int = 0


class JitFile:
    """One open file with names. ``path_fd`` is an O_PATH descriptor, ``fd`` one for reading. If the
    filesystem may not answer, ``fd`` is -1, and ``helper`` makes a copy for each read, for
    ``share``.
    """

    def __init__(
        self,
        process: JitProcess,
        path_fd: int,
        fd: int,
        helper: FileHelper,
        share: Share,
        *,
        dump: bool,
    ) -> None:
        self.process = process
        self._share = share
        self._path_fd = path_fd
        self._fd = fd
        self._helper = helper
        self._is_dump = dump
        self._rewind()

    def _rewind(self) -> None:
        self._at = 0  # number of bytes of the file that were read
        self._kept = 0  # number of bytes of the map that are kept
        self._dump = JitDump()

    @property
    def file(self) -> tuple[int, int]:
        """Return device and inode."""
        identity = self.process.origin.identity
        return identity.dev, identity.ino

    def close(self) -> None:
        """Close the file; safe to call twice."""
        fd, path_fd = self._fd, self._path_fd
        self._fd = self._path_fd = -1
        close_fds(fd, path_fd)

    def read(self, keeper: JitNameReceiver, most: int) -> int:
        """Give ``keeper`` about ``most`` bytes of new names at most, and return the cost.

        The cost is in bytes, with an addition for each record of a dump; it is 0 if there are no
        new names. Raises OSError, and errors of the keeper.
        """
        fd, close = self._fd, False
        if fd < 0:
            identity = self.process.origin.identity
            device = inodes.major_minor(identity.dev)
            size = self._helper.look(device, self._path_fd, self._share).size
            if size == self._at:
                return 0
            if size > _MAX_COPIED_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            _, fd = self._helper.copy(device, self._path_fd, size, self._share)
            close = True
        try:
            if os.fstat(fd).st_size < self._at:  # the file was started anew
                self._at, self._dump = 0, JitDump()
            return self._read(fd, keeper, most)
        finally:
            if close:
                os.close(fd)

    def _read(self, fd: int, keeper: JitNameReceiver, most: int) -> int:
        if self._kept >= JitProcess.MOST_BYTES:
            return 0  # the rest would not be kept
        before, total = self._dump.records, 0
        for _ in range(2):
            kept = 1
            for text, at in self._parts(fd, most - total):
                kept = keeper.write(self.process, self._kept, text)
                if kept <= 0:
                    break
                self._kept, self._at = kept, at
                total += len(text)
            if kept > 0:
                return total + max(self._dump.records - before, 0) * _RECORD_COST
            # The kept map was removed, or there was no room; the names read so far are not written
            # again.
            self._rewind()
            if not kept:
                break
        return total

    def _parts(self, fd: int, most: int) -> Iterator[tuple[bytes, int]]:
        """Yield the new names as lines of a map, in parts. With each part comes the offset in the
        file up to which it was read.
        """
        if self._is_dump:
            yield from self._dumped(fd, most)
            return
        at, end = self._at, self._at + most
        while at < end:
            text = os.pread(fd, min(PART_BYTES, end - at), at)
            whole = text.rfind(b"\n") + 1
            if not whole:
                return  # an incomplete line, or one that is far too long
            at += whole
            yield text[:whole], at

    def _dumped(self, fd: int, most: int) -> Iterator[tuple[bytes, int]]:
        def read_at(offset: int, size: int) -> bytes:
            return os.pread(fd, size, offset)

        size = os.fstat(fd).st_size
        lines, length = [], 0
        for line in self._dump.lines(read_at, size, most):
            lines.append(line)
            length += len(line)
            if length >= PART_BYTES:
                yield b"".join(lines), self._dump.at
                lines, length = [], 0
        if lines:
            yield b"".join(lines), self._dump.at


class JitFinder:
    """Finds the files of processes; ``container_namespaces`` defines a container.

    ``slow`` knows the mounts that may not answer, whose files ``helper`` reads.
    """

    def __init__(
        self,
        container_namespaces: Collection[str],
        slow: SlowMounts,
        helper: FileHelper,
        gate: ProcessGate | None = None,
    ) -> None:
        self._host = machine.host_name()
        self._initial = namespaces.initial()
        self._container_namespaces = tuple(container_namespaces)
        self._slow = slow
        self._helper = helper
        self._patience = Patience()
        self._ways = Ways(gate=gate)
        self._boot_id = inodes.boot_id().hex()

    def whose(self, pid: int) -> JitOwner:
        """Return the share of a process: its container, on the host its user. Raises OSError."""
        with PinnedProcess(pid, self._ways) as process:
            process.look(self._initial, self._container_namespaces)
            share = process.share(self._initial)
            if process.namespaces.mnt == self._initial.mnt:
                return JitOwner(share)
            seen_in = process.surroundings
            label = builder.shown(seen_in.container, seen_in.cgroup)
            return JitOwner(share, label, seen_in.mnt_ns_id)

    def find(self, pid: int) -> list[JitFile]:
        """Open the files of names that a process has; the caller closes them.

        Raises OSError: ESRCH or ENOENT if there is no such process.
        """
        with PinnedProcess(pid, self._ways) as process:
            process.look(self._initial, self._container_namespaces)
            found = []
            with contextlib.suppress(OSError):
                found.append(self._map(process))
            with contextlib.suppress(OSError):
                found += self._dumps(process)
            return found

    def keep(self, keeper: JitNameReceiver, pids: Iterable[int]) -> None:
        """Keep the names that processes have written so far. Raises errors of ``keeper``."""
        for pid in pids:
            try:
                found = self.find(pid)
            except OSError:
                continue  # the process has ended meanwhile
            for file in found:
                try:
                    left = _MOST_BYTES
                    while left > 0 and (cost := file.read(keeper, left)):
                        left -= cost
                except OSError as error:
                    _log.info("names of generated code of process %d are not kept: %s", pid, error)
                finally:
                    file.close()

    def _map(self, process: PinnedProcess) -> JitFile:
        path = b"/tmp/perf-%d.map" % procfs.innermost_pid(process.fd)
        return self._taken(process, self._open(process, path), path, dump=False)

    def _open(self, process: PinnedProcess, path: bytes) -> int:
        """Return an O_PATH descriptor of the file at a path of a process. Raises OSError."""
        root_fd = process.root_fd
        try:
            return inodes.open_cached_in_root(root_fd, path, os.O_NOFOLLOW)
        except OSError as error:
            if error.errno not in _UNCACHED:
                raise

        def question(own: int) -> int:
            return inodes.open_in_root(own, path, os.O_PATH | os.O_NOFOLLOW)

        device = (-1, process.mount_namespace)
        return self._patience.ask_about(device, root_fd, question, os.close)

    def _dumps(self, process: PinnedProcess) -> Iterator[JitFile]:
        for mapping in process.executable_mappings():
            if is_dump(mapping.path):
                with contextlib.suppress(OSError):
                    yield self._dump(process, mapping)

    def _dump(self, process: PinnedProcess, mapping: Mapping) -> JitFile:
        path_fd = process.open_map_file(mapping)
        return self._taken(process, path_fd, process.path_in_root(mapping), dump=True)

    def _taken(self, process: PinnedProcess, path_fd: int, path: bytes, *, dump: bool) -> JitFile:
        """Return the file at ``path_fd``; close the descriptor and raise if the file must not be
        believed. Raises OSError.
        """
        with closing_on_error(path_fd):
            identity = inodes.identity(path_fd, ask=False)
            if not stat.S_ISREG(identity.mode) or not _is_own(process, identity):
                raise OSError(errno.EPERM, "not a regular file of the process's own user")
            mount, user = process.surroundings.mnt_ns_id, process.namespaces.user
            described = self._described(process, path, identity)
            share = process.share(self._initial)
            is_slow = self._slow.is_slow(path_fd, identity, mount, user)
            fd = -1 if is_slow else inodes.reopen_regular(path_fd)
        return JitFile(described, path_fd, fd, self._helper, share, dump=dump)

    def _described(self, process: PinnedProcess, path: bytes, identity: FileIdentity) -> JitProcess:
        in_host = process.namespaces.mnt == self._initial.mnt
        origin = process.surroundings.origin(
            path,
            identity,
            host=self._host,
            trust=Trust.UNKNOWN if in_host else Trust.CONTAINER,
            scanner="jit",
            reach=OWNER,
        )
        ticks = procfs.start_ticks(process.fd)
        age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * _TICK_NS
        return JitProcess(
            process.pid,
            procfs.innermost_pid(process.fd),
            ticks,
            time.time_ns() - age_ns,
            self._boot_id,
            procfs.comm(process.fd).decode("utf-8", "backslashreplace"),
            _MACHINES.get(os.uname().machine, 0),
            origin,
            procfs.uids(process.fd)[1] if in_host else process.surroundings.owner,
        )


_TICK_NS: Final = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def _is_own(process: PinnedProcess, identity: FileIdentity) -> bool:
    """Return True for a file of the user of the process, or of root of its user namespace."""
    _, effective, _, filesystem = procfs.uids(process.fd)
    return identity.uid in (effective, filesystem, procfs.root_user(process.fd))
