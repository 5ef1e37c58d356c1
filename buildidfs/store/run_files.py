# SPDX-License-Identifier: Apache-2.0
"""Files in ``run/``: the long-running processes of a store, and the log of files that a watch lost.

**Processes** (`Presence`, `present`). Each has a file named after its role and pid, which it keeps
locked with flock(2) for as long as it lives. Only the lock shows that the process lives, not the
pid: the kernel releases the lock at the end of the process in any case. A file that is not locked
is a leftover, and is removed by the next process that reads the directory. A process that forks
without exec closes `Presence.fileno` in the child, since a lock lasts until its last descriptor is
closed.

The content is one JSON object: ``role``, ``pid``, ``since`` (Unix time in nanoseconds),
``version``, ``kernel`` (the scope of the pid) and the facts that the process reports. It is
rewritten in place, so a reader may read parts of two versions: the first member, ``crc``, is the
CRC-32 of the bytes after it, and the reader reads until it is right.

**Lost files** (`LossLog`, `lost_since`). Losses come by the thousand when the store is busiest or
cannot be written, so they are not in the index: one write(2) appends many of them to a file and
waits for no other writer. A full file is renamed to ``lost.old``.

    run/lost        one JSON object a line, a `LostFiles` each; the latest
    run/lost.old    those before

A line that is not such an object, because a write was cut short, is skipped.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import logging
import os
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, Final, Self

import msgspec
from msgspec import UNSET

from buildidfs import __version__
from buildidfs.errors import StoreError, StoreLocked
from buildidfs.formats import proc_text
from buildidfs.linux import inodes, mounts
from buildidfs.linux.file_ops import Fd, closing_fd, closing_on_error
from buildidfs.located import path_fields, raw
from buildidfs.names import printable

log = logging.getLogger(__name__)

_DIRECTORY: Final = b"run"
_SUFFIX = b".json"
_MOUNT: Final = "mount"
_MOST_BYTES = 64 << 10
_TRIES = 20
# The size, in bytes, of a run file with the losses of many containers.
_ROOM = 16 << 10
_LOOKS = 50
_CRC: Final = b'{"crc":"'
_PAUSE_S = 0.01

_decoder = msgspec.json.Decoder(dict[str, Any])


class Present(msgspec.Struct, frozen=True):
    """A process that was alive at the time of the look.

    ``facts`` are its own reports; they are empty if it has none. ``since`` is Unix time in
    nanoseconds. ``kernel`` names the boot and the PID namespace of ``pid``.
    """

    role: str
    pid: int
    since: int
    version: str
    kernel: str
    facts: dict[str, Any]
    file: bytes

    @property
    def is_here(self) -> bool:
        """Return True if ``pid`` means the process in our PID namespace, too."""
        return self.kernel == _kernel()

    def path(self, fact: str) -> bytes:
        """Return a path that is one of the facts, as bytes; empty if there is none."""
        text, encoded = str(self.facts.get(fact, "")), self.facts.get(f"{fact}_b64")
        with contextlib.suppress(ValueError):
            return raw(text, encoded if isinstance(encoded, str) else UNSET)
        return text.encode()

    def pidfd(self) -> int:
        """Return a descriptor of the process, for signals and for waiting (pidfd_open(2)).

        Raises ProcessLookupError if it has ended, `StoreError` if its pid is not valid here because
        it runs on another host, or in another PID namespace.
        """
        if not self.is_here:
            raise StoreError(
                f"{self.role} (pid {self.pid}) runs on another host or in another PID namespace"
            )
        with closing_on_error(os.pidfd_open(self.pid)) as fd:
            # The lock is still held, so the pid has not passed to another process.
            if not _is_held(self.file):
                raise ProcessLookupError(f"{self.role} (pid {self.pid}) has ended")
        return fd


class Presence(Fd):
    """Registers this process as running, until it ends or calls `close`; a context manager.

    If the store cannot be written, the process is not registered, and all methods work without
    effect. Paths are given as bytes: as JSON they are text, and ``NAME_b64`` if they are not UTF-8.
    Methods may be called from any thread, and never fail. ``fd`` is locked, or -1 if nothing is
    registered.
    """

    def __init__(self, root: str | bytes | os.PathLike[str], role: str, **facts: object) -> None:
        self._directory = os.path.join(os.fsencode(root), _DIRECTORY)
        self._lock = threading.Lock()
        self._facts: dict[str, object] = {
            "role": role,
            "pid": os.getpid(),
            "since": time.time_ns(),
            "version": __version__,
            "kernel": _kernel(),
        }
        super().__init__()
        self._path = b""
        self._length = _ROOM
        try:
            self._register(f"{role}-{os.getpid()}".encode())
        except OSError as error:
            log.info("%s is not registered: %s", role, error.strerror)
        self.update(**facts)

    @classmethod
    def only(cls, root: str | bytes | os.PathLike[str], role: str, **facts: object) -> Self:
        """Register for a role that only one process at a time may have."""
        directory = os.path.join(os.fsencode(root), _DIRECTORY)
        try:
            os.makedirs(directory, 0o700, exist_ok=True)
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise StoreError(f"store {printable(os.fsencode(root))}: {error.strerror}") from error
        with closing_fd(fd):
            fcntl.flock(fd, fcntl.LOCK_EX)
            for other in present(root, role):
                raise StoreLocked(f"{role} runs on this store already (pid {other.pid})")
            presence = cls(root, role, **facts)
        if presence.fileno() < 0:
            raise StoreError(f"store {printable(os.fsencode(root))} cannot be written")
        return presence

    def update(self, **facts: object) -> None:
        """Update the facts of this process; other facts stay."""
        with self._lock:
            self._facts |= _as_json(facts)
            if self.fd < 0:
                return
            text = encode(self._facts) + b"\n"
            self._length = max(self._length, len(text))
            # Blanks cover the end of a longer text, and reserve room in case the disk is full
            # later.
            with contextlib.suppress(OSError):  # the disk is full; only the lock matters
                os.pwrite(self.fd, text.ljust(self._length), 0)

    def close(self) -> None:
        """Remove the file; safe to call twice."""
        with self._lock:
            if self.fd >= 0:
                with contextlib.suppress(OSError):
                    os.unlink(self._path)
                super().close()

    def _register(self, name: bytes) -> None:
        os.makedirs(self._directory, 0o700, exist_ok=True)
        for number in range(_TRIES):
            # Another host's process, or another one of our own, may have the plain name.
            numbered = name if number == 0 else name + b"-%d" % number
            path = os.path.join(self._directory, numbered + _SUFFIX)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            with contextlib.suppress(BlockingIOError), Fd(os.open(path, flags, 0o600)) as file:
                fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(file.fd, path):  # no other process has removed it as a leftover meanwhile
                    os.ftruncate(file.fd, 0)
                    self.fd, self._path = file.release(), path
                    return
        raise BlockingIOError(0, "all names are taken")


def mount_point(root: str | bytes | os.PathLike[str]) -> bytes:
    """Return the place where a store is mounted now; empty if it is not."""
    places = (each.path("mountpoint") for each in present(root, _MOUNT))
    return next(filter(None, places), b"")


def present(
    root: str | bytes | os.PathLike[str], role: str | None = None, *, looks: int = _LOOKS
) -> list[Present]:
    """Return the living processes of one role or of all, the oldest first; remove leftovers.

    A file that is still empty is read up to ``looks`` times, 10 ms apart. The list is empty if the
    store does not exist, or may not be read.
    """
    found = (_look(path, of, pid, looks) for path, of, pid in _files(root) if role in (None, of))
    there = (each for each in found if each is not None)
    return sorted(there, key=lambda each: (each.since, each.pid))


def _files(root: str | bytes | os.PathLike[str]) -> Iterator[tuple[bytes, str, int]]:
    """Yield the path, the role and the pid of each file of a process, living or not."""
    directory = os.path.join(os.fsencode(root), _DIRECTORY)
    try:
        names = os.listdir(directory)
    except OSError:
        return
    for name in names:
        parts = name.removesuffix(_SUFFIX).split(b"-")
        if name.endswith(_SUFFIX) and len(parts) > 1 and parts[1].isdigit():
            yield os.path.join(directory, name), parts[0].decode(errors="replace"), int(parts[1])


def _open(path: bytes) -> int:
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def abandoned_mounts(root: str | bytes | os.PathLike[str]) -> list[bytes]:
    """Return the mount points of mounts whose process has ended without unmounting them."""
    found = set()
    for path, role, _ in _files(root):
        with contextlib.suppress(OSError):
            if role == _MOUNT:
                with closing_fd(_open(path)) as fd:
                    found.add(b"" if _is_locked(fd) else _mount_left_by(fd))
    return sorted(found - {b""})


def _mount_left_by(fd: int) -> bytes:
    """Return the mount point in a leftover run file, if a filesystem of ours is still there; else
    nothing.
    """
    facts = _read(fd, 1)
    point = Present("", 0, 0, "", "", facts, b"").path("mountpoint")
    try:
        lines = proc_text.mounts_in(mounts.mountinfo())
    except OSError:
        return b""
    is_there = any(
        each.mount_point == point and each.fstype == mounts.FILESYSTEM_TYPE for each in lines
    )
    return point if is_there else b""


def store_with_role(open_files: Iterable[bytes], role: str, pid: int) -> bytes | None:
    """Return the root of the store in which a process has a role, found by the files that it has
    open.
    """
    name = f"{role}-{pid}".encode()
    for path in open_files:
        directory, _, file = path.rpartition(b"/")
        root, _, last = directory.rpartition(b"/")
        is_its = file.endswith(_SUFFIX) and (file == name + _SUFFIX or file.startswith(name + b"-"))
        if last == _DIRECTORY and is_its:
            return root
    return None


def _look(path: bytes, role: str, pid: int, looks: int) -> Present | None:
    try:
        fd = _open(path)
    except OSError:
        return None
    with closing_fd(fd):
        try:
            if not _is_locked(fd):
                # While we hold the lock, no process registers under this name. The file of a killed
                # mount stays with the mount, see `abandoned_mounts`.
                if _is_at(fd, path) and not (role == _MOUNT and _mount_left_by(fd)):
                    with contextlib.suppress(OSError):
                        os.unlink(path)
                return None
            facts = _read(fd, looks)
        except OSError:
            return None
    since, version, kernel = (facts.pop(key, None) for key in ("since", "version", "kernel"))
    facts.pop("role", None), facts.pop("pid", None)
    return Present(
        role=role,
        pid=pid,
        since=since if isinstance(since, int) else 0,
        version=str(version or ""),
        kernel=str(kernel or ""),
        facts=facts,
        file=path,
    )


def _read(fd: int, looks: int) -> dict[str, Any]:
    """Return the content; empty if no read of several finds a whole one."""
    for number in range(looks):
        if number:
            time.sleep(_PAUSE_S)  # the file is locked first, and gets its content then
        text = os.pread(fd, _MOST_BYTES, 0).rstrip()
        if not text.startswith(_CRC) or not text[len(_CRC) :].startswith(_crc(text)):
            continue
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            facts = _decoder.decode(text)
            del facts["crc"]
            return facts
    return {}


def encode(facts: dict[str, object]) -> bytes:
    """Return the content of a run file."""
    text = _CRC + b"00000000" + b'",' + msgspec.json.encode(facts).removeprefix(b"{")
    return text.replace(b"00000000", _crc(text), 1)


def _crc(text: bytes) -> bytes:
    """Return the check sum of a content: of the bytes behind the place of the check sum."""
    return b"%08x" % zlib.crc32(text[len(_CRC) + 8 :])


def _is_held(path: bytes) -> bool:
    try:
        with closing_fd(_open(path)) as fd:
            return _is_locked(fd)
    except OSError:
        return False


def _is_locked(fd: int) -> bool:
    """Return True if the process of a file lives.

    If it does not, the file is locked by us until ``fd`` is closed.
    """
    try:
        # The lock is shared, so that two readers do not take each other for the process.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def _is_at(fd: int, path: bytes) -> bool:
    """Return True if the name still leads to the open file."""
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(fd), there)


def _kernel() -> str:
    """Return the scope of a process ID: this boot of this kernel and this PID namespace."""
    try:
        namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        namespace = 0
    return f"{inodes.boot_id().hex()}:{namespace}"


def _as_json(facts: dict[str, object]) -> dict[str, object]:
    plain: dict[str, object] = {}
    for name, value in facts.items():
        if isinstance(value, bytes):
            plain |= path_fields(value, name)
        elif isinstance(value, str):
            plain[name] = value.encode("utf-8", "replace").decode()
        else:
            plain[name] = value
    return plain


_LOST: Final = b"lost"
_LOST_OLD: Final = b"lost.old"
_MOST_LOST_BYTES: Final = 8 << 20


class LostFiles(msgspec.Struct, frozen=True, omit_defaults=True):
    """``count`` files at one path that were seen by ``time_ns`` (Unix), and not captured.

    ``path`` is base64, because it may have any bytes; `raw_path` decodes it. It is empty for the
    files of a container that are beyond the limit of named ones. ``build_id`` is hexadecimal, empty
    if unknown; ``container`` and ``mnt_ns_id`` mean the same as in `Origin`.
    """

    time_ns: int
    path: str
    reason: str
    container: str = ""
    mnt_ns_id: int = 0
    host: str = ""
    build_id: str = ""
    count: int = 1

    @property
    def raw_path(self) -> bytes:
        """Return the decoded path."""
        with contextlib.suppress(ValueError):
            return base64.b64decode(self.path)
        return b""


def lost_text(path: bytes) -> str:
    """Return a path in the encoding of `LostFiles`."""
    return base64.b64encode(path).decode()


_encode_lost = msgspec.json.Encoder().encode
_decode_lost = msgspec.json.Decoder(LostFiles).decode


class LossLog:
    """Appends rows for the store in the directory ``root``. For one thread; never raises."""

    def __init__(self, root: bytes, most_bytes: int = _MOST_LOST_BYTES) -> None:
        self._directory = os.path.join(root, _DIRECTORY)
        self._most_bytes = most_bytes

    def append(self, rows: Iterable[LostFiles]) -> bool:
        """Write all rows at once; return False if the write failed or was cut short."""
        data = b"".join(_encode_lost(row) + b"\n" for row in rows)
        if not data:
            return True
        path = os.path.join(self._directory, _LOST)
        try:
            os.makedirs(self._directory, 0o700, exist_ok=True)
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            with closing_fd(os.open(path, flags, 0o600)) as fd:
                written = os.write(fd, data)
                is_full = os.fstat(fd).st_size >= self._most_bytes
            if is_full:
                os.rename(path, os.path.join(self._directory, _LOST_OLD))
        except OSError:
            return False
        return written == len(data)


def lost_since(root: bytes, time_ns: int = 0) -> Iterator[LostFiles]:
    """Yield the rows from a time (Unix, ns) on, in the order in which they were written."""
    for name in (_LOST_OLD, _LOST):
        try:
            file = open(os.path.join(root, _DIRECTORY, name), "rb")  # noqa: SIM115
        except OSError:
            continue
        with file:
            for line in file:
                with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
                    row = _decode_lost(line)
                    if row.time_ns >= time_ns:
                        yield row
