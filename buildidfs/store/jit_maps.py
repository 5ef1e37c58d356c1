# SPDX-License-Identifier: Apache-2.0
"""The names of generated code in ``jit/``: one file for each process that had such code.

    jit/PID-TICKS-BOOT-SHARE    `JitProcess` as one line of JSON, then the lines of its map

PID and TICKS (the start time) are decimal, BOOT and SHARE are hashes of the boot and of the owner
in `cgroup.share` (a container or user), in hexadecimal. Writers only append to a file, under
flock(2), and its mtime is the time at which the process was last known to live. The index has no
rows for these files. If there are too many, the oldest are removed.

A container may write maps without end. So a file, all files of a container (or of a user of the
host) and all files together have limits, and the container with the most bytes loses its oldest
file first.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import threading
import time
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs import shares
from buildidfs.formats.container import cgroup
from buildidfs.linux import file_ops
from buildidfs.linux.file_ops import closing_fd
from buildidfs.model import JitProcess, fingerprint
from buildidfs.store.errors import translated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DIRECTORY: Final = b"jit"

MAX_MAP_BYTES: Final = JitProcess.MOST_BYTES
MAX_SHARE_BYTES: Final = 128 << 20
MAX_BYTES: Final = 256 << 20
MAX_MAPS: Final = 4096
#: Maps may take 1/32 of the filesystem and of the largest size of the store; as much of the
#: filesystem has to stay free.
_SHARE_OF_DISK: Final = 32

_HEADER_MAX: Final = 32 << 10
_RECOUNT_S: Final = 60.0
_NAME: Final = re.compile(rb"(\d{1,10})-(\d{1,20})-([0-9a-f]{16})-([0-9a-f]{16})")

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(JitProcess).decode


class JitMap(NamedTuple):
    """A kept map: its process, its file, its number of bytes, and the time at which the process was
    last known to live (Unix time, ns).
    """

    process: JitProcess
    path: bytes
    last_ns: int
    size: int

    def text(self) -> bytes:
        """Return the map itself. Raises OSError, also if the map was removed meanwhile."""
        with open(self.path, "rb") as file:
            file.readline(_HEADER_MAX)
            return file.read(MAX_MAP_BYTES)


class _Entry(NamedTuple):
    path: bytes
    share: bytes
    size: int
    mtime_ns: int


class JitMaps:
    """The maps in the store at ``root``. Methods may be called from any thread and process."""

    def __init__(self, root: bytes, max_size: Callable[[], int | None] = lambda: None) -> None:
        """``max_size`` returns the number of bytes that the store may take, None for no limit."""
        self._root = root
        self._max_size = max_size
        self._directory = os.path.join(root, DIRECTORY)
        self._lock = threading.Lock()
        self._counted_at = float("-inf")
        self._share_bytes: Counter[bytes] = Counter()
        self._count = 0

    # --- reading ---------------------------------------------------------------------------

    def of(self, pid: int) -> list[JitMap]:
        """Return the maps of processes of this host with that process ID, the latest first."""
        found = [self._read(each) for each in self._entries(b"%d-" % pid)]
        return sorted(
            (each for each in found if each is not None), key=lambda each: -each.process.start_ns
        )

    def all(self) -> Iterator[JitMap]:
        """Yield all maps, in no order."""
        for entry in self._entries():
            found = self._read(entry)
            if found is not None:
                yield found

    def totals(self) -> tuple[int, int]:
        """Return the number of maps and of their bytes."""
        entries = list(self._entries())
        return len(entries), sum(each.size for each in entries)

    def damaged(self) -> Iterator[bytes]:
        """Yield the paths of files that are not maps."""
        for entry in self._entries():
            if self._read(entry) is None and os.path.exists(entry.path):
                yield entry.path

    def remove(self, path: bytes) -> None:
        """Remove a file that `damaged` or `all` returned. Raises `StoreError`."""
        with translated(self._root), contextlib.suppress(FileNotFoundError):
            os.unlink(path)

    def _entries(self, prefix: bytes = b"") -> Iterator[_Entry]:
        try:
            names = os.listdir(self._directory)
        except OSError:
            return
        for name in names:
            match = _NAME.fullmatch(name)
            if match is None or not name.startswith(prefix):
                continue
            path = os.path.join(self._directory, name)
            with contextlib.suppress(OSError):
                status = os.stat(path, follow_symlinks=False)
                yield _Entry(path, match[4], status.st_size, status.st_mtime_ns)

    def _read(self, entry: _Entry) -> JitMap | None:
        try:
            with open(entry.path, "rb") as file:
                head = file.readline(_HEADER_MAX)
                process = _decode(head)
        except (OSError, ValueError, msgspec.MsgspecError, RecursionError):
            return None
        if not os.path.basename(entry.path).startswith(_name(process).rpartition(b"-")[0] + b"-"):
            return None  # earlier versions had other shares
        return JitMap(process, entry.path, entry.mtime_ns, max(entry.size - len(head), 0))

    # --- writing ---------------------------------------------------------------------------

    def write(self, process: JitProcess, at: int, text: bytes) -> int:
        """Append ``text``, which comes after the first ``at`` bytes of the map of a process.

        Bytes that are there already are not written again, even if another process wrote them. If
        the file has other bytes there, all of ``text`` is appended after them. Returns the offset
        of the next part; -1 if the kept map is shorter than ``at``, so that the map must be passed
        from its beginning; 0 if there is no room. Raises `StoreError`.
        """
        with self._lock, translated(self._root):
            os.makedirs(self._directory, 0o700, exist_ok=True)
            path = os.path.join(self._directory, _name(process))
            if not self._has_room(path, len(text)):
                return 0
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            with closing_fd(os.open(path, flags, 0o600)) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX)
                return self._append(fd, process, at, text)

    def alive(self, process: JitProcess) -> None:
        """Record that a process with a map lives now."""
        path = os.path.join(self._directory, _name(process))
        with contextlib.suppress(OSError):  # the map was removed to make room for others
            os.utime(path, follow_symlinks=False)

    def _append(self, fd: int, process: JitProcess, at: int, text: bytes) -> int:
        header = _encode(process) + b"\n"
        size = os.fstat(fd).st_size
        if not size:
            if at:
                return -1
            file_ops.write_fully_at(fd, header, 0)
            size = len(header)
        else:
            header = os.pread(fd, _HEADER_MAX, 0).partition(b"\n")[0] + b"\n"
        begin, length = len(header), size - len(header)
        if at > length:
            return at + len(text) if length >= MAX_MAP_BYTES else -1
        there = os.pread(fd, len(text), begin + at)
        if text.startswith(there):
            rest, end = text[len(there) :], at + len(text)
        else:
            rest, end = text, length + len(text)
            if end > MAX_MAP_BYTES:  # the existing text is older
                os.ftruncate(fd, begin)
                length, end = 0, len(text)
        rest = rest[: max(MAX_MAP_BYTES - length, 0)]
        file_ops.write_fully_at(fd, rest, begin + length)
        os.utime(fd)
        self._share_bytes[_share(process)] += len(rest)
        return end

    # --- bounds ----------------------------------------------------------------------------

    def _has_room(self, path: bytes, more: int) -> bool:
        """Make room for ``more`` bytes at ``path``; False if the filesystem is too full."""
        disk = os.statvfs(self._root)
        part = disk.f_blocks * disk.f_frsize // _SHARE_OF_DISK
        if disk.f_bavail * disk.f_frsize < part + more:
            return False
        limit = min(MAX_BYTES, part)
        max_size = self._max_size()
        if max_size is not None:
            limit = min(limit, max_size // _SHARE_OF_DISK)
        now = time.monotonic()
        total = sum(self._share_bytes.values()) + more
        most = max(self._share_bytes.values(), default=0) + more
        if (
            now - self._counted_at > _RECOUNT_S
            or total > limit
            or most > MAX_SHARE_BYTES
            or self._count >= MAX_MAPS
        ):
            self._make_room(path, more, limit)
            self._counted_at = now
        if not os.path.exists(path):
            self._count += 1
        return True

    def _make_room(self, keep: bytes, more: int, limit: int) -> None:
        """Recount, and remove the oldest maps of the containers that have the most bytes."""
        by_share: dict[bytes, list[_Entry]] = {}
        for entry in self._entries():
            by_share.setdefault(entry.share, []).append(entry)
        sizes = Counter({share: sum(e.size for e in each) for share, each in by_share.items()})
        for entries in by_share.values():
            entries.sort(key=lambda entry: -entry.mtime_ns)
        count = sum(len(each) for each in by_share.values())
        while sizes:
            share, size = sizes.most_common(1)[0]
            if (
                size + more <= MAX_SHARE_BYTES
                and sizes.total() + more <= limit
                and count < MAX_MAPS
            ):
                break
            if count >= MAX_MAPS:
                share = max(by_share, key=lambda each: len(by_share[each]))
            entry = by_share[share].pop()
            if entry.path != keep:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)
            count -= 1
            sizes[share] -= entry.size
            if not by_share[share]:
                del by_share[share], sizes[share]
        self._share_bytes = sizes
        self._count = count


def disk_bytes(root: bytes) -> int:
    """Return the number of bytes that the maps of the store at ``root`` take on disk."""
    size = 0
    with contextlib.suppress(OSError), os.scandir(os.path.join(root, DIRECTORY)) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):  # removed to make room for others
                size += entry.stat(follow_symlinks=False).st_blocks * 512
    return size


def _name(process: JitProcess) -> bytes:
    boot = fingerprint(process.boot_id.encode(), 8).hex()
    text = f"{process.pid}-{process.start_ticks}-{boot}-{_share(process).decode()}"
    return text.encode()


def _share(process: JitProcess) -> bytes:
    """Return the share to whose limit a map counts: its container, or a user of the host."""
    origin = process.origin
    share = shares.of_user(process.owner or origin.identity.uid)
    if origin.container:
        share = cgroup.share(origin.cgroup, origin.namespaces.mnt, process.owner)
    return fingerprint(os.fsencode(share.owner), 8).hex().encode()
