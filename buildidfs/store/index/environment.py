# SPDX-License-Identifier: Apache-2.0
"""The directory of a store and its index in LMDB: one environment per directory and process.

Every read is a transaction of its own (about half a microsecond), so a reader sees commits of other
processes at once and keeps no old pages alive. One thread at a time writes; LMDB itself excludes
other processes.

The map is 1 TiB of address space, so that it never has to grow: LMDB cannot move a map while a
transaction is alive. If this much address space is not available (RLIMIT_AS), the map is smaller,
and an index that outgrows it is an error in this process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import lmdb

from buildidfs.errors import StoreDamaged, StoreError, StoreLocked, StoreMissing, StoreVersionError
from buildidfs.linux.file_ops import closing_fd, on_error, sync_directory
from buildidfs.names import printable
from buildidfs.store import schema
from buildidfs.store.errors import FULL, full, not_to_be_written, remedy, translated
from buildidfs.store.schema import ADDED_TABLES, TABLES

if TYPE_CHECKING:
    Table = lmdb._Database
    Txn = lmdb.Transaction[bytes]


T = TypeVar("T")

#: Bytes of address space, most wanted first.
MAP_SIZES = (1 << 40, 1 << 36, 1 << 33, 1 << 30)

#: About a thousand readers at a time, at 64 bytes each.
_LOCK_BYTES = 64 << 10

#: The number of bytes of a test write that tells a full filesystem from a broken one; a transaction
#: usually adds less.
_PROBE_BYTES = 16 << 20

#: Seconds to wait for a process of another PID namespace that has the same process ID.
_READER_WAIT_S = 10.0
_READER_RETRY_S = 0.05

_open: dict[tuple[int, int], Environment] = {}
_open_lock = threading.Lock()


class Environment:
    """A shared LMDB environment; `acquire` one, `release` it as often as it was acquired."""

    def __init__(
        self,
        root: bytes,
        *,
        read_only: bool,
        create: bool,
        directory: bytes = b"index",
        lock: bool = True,
    ) -> None:
        """Without ``lock`` no process may write, because the caller has locked the index
        (`exclusive`).
        """
        self.root = root
        self._lock = lock
        self.read_only = read_only
        self.users = 1
        self.path = os.path.join(root, directory)
        self._writing = threading.Lock()
        with self._translated():
            self._lmdb = self._map(create)
            with on_error(self._lmdb.close):
                self.tables = self._open_tables(create)
                if self._lock:
                    self._lmdb.reader_check()  # frees the slots of killed readers

    def _map(self, create: bool) -> lmdb.Environment:
        data = os.path.join(self.path, b"data.mdb")
        if not create and (not os.path.exists(data) or os.path.getsize(data) < 2 * 4096):
            raise damaged(self.root, "is missing")
        if self._lock:
            self._allocate_lock_file()
        for size in MAP_SIZES:
            try:
                env = self._open_lmdb(size)
                break
            except (lmdb.MemoryError, MemoryError):
                if size == MAP_SIZES[-1]:
                    raise
        self._check_length(env, data)
        return env

    def _allocate_lock_file(self) -> None:
        """Allocate all blocks of lock.mdb.

        LMDB writes to it through a map, so a write to a block that is not allocated would kill the
        process on a full disk.
        """
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
            fd = os.open(os.path.join(self.path, b"lock.mdb"), flags, 0o600)
        except OSError as error:
            if error.errno in FULL:
                raise full(self.root, error.errno) from error
            return  # a read-only filesystem, or one for which LMDB reports an error
        with closing_fd(fd):
            try:
                status = os.fstat(fd)
                if status.st_size < _LOCK_BYTES or status.st_blocks * 512 < status.st_size:
                    os.posix_fallocate(fd, 0, max(_LOCK_BYTES, status.st_size))
            except OSError as error:
                if error.errno in FULL:
                    raise full(self.root, error.errno) from error

    def _open_lmdb(self, size: int) -> lmdb.Environment:
        def attempt(lock: bool) -> lmdb.Environment:
            return lmdb.open(
                path,
                map_size=size,
                max_dbs=64,
                mode=0o600,
                readonly=self.read_only,
                lock=lock,
                create=False,
                readahead=False,
            )

        with _text(self.path) as path:
            if not self._lock:
                return attempt(lock=False)
            try:
                return self._registered(functools.partial(attempt, lock=True))
            except lmdb.Error:
                # Without a lock file no process can be writing either: a read-only filesystem.
                if self.read_only and _on_read_only_filesystem(self.path):
                    return attempt(lock=False)
                raise

    def _registered(self, attempt: Callable[[], lmdb.Environment]) -> lmdb.Environment:
        """Open the index as soon as no other reader has the process ID of this process.

        LMDB tells readers apart by process ID. Two containers may both run a process 1: the second
        waits until the first has closed the index. Raises `StoreLocked`.
        """
        deadline = time.monotonic() + _READER_WAIT_S
        while True:
            try:
                return attempt()
            except lmdb.LockError as error:
                if error.code != errno.EAGAIN:
                    raise
                if time.monotonic() >= deadline:
                    raise StoreLocked(
                        f"store {printable(self.root)}: a process of another PID namespace that"
                        f" has the same number, {os.getpid()}, has its index open; run both in one"
                        " PID namespace (--pid=host, hostPID: true), or end the other"
                    ) from error
            time.sleep(_READER_RETRY_S)

    def _check_length(self, env: lmdb.Environment, data: bytes) -> None:
        """Refuse a truncated file: a read beyond its end would raise SIGBUS.

        A few pages at the end may be missing without damage (allocated and freed in one
        transaction). So if the file is too short, another process reads everything, to find out if
        a page is lost.
        """
        info, page = env.info(), env.stat()["psize"]
        if os.path.getsize(data) >= (info["last_pgno"] + 1) * page:
            return
        if not is_readable(self.path):
            env.close()
            raise damaged(self.root, "was cut short")

    def _open_tables(self, create: bool) -> dict[str, Table]:
        if self.read_only:
            tables = {}
            for name in TABLES:
                try:
                    tables[name] = self._lmdb.open_db(name.encode(), create=False)
                except lmdb.NotFoundError:
                    if name not in ADDED_TABLES:
                        raise
            return tables
        with self._lmdb.begin(write=True) as txn:
            return {
                name: self._lmdb.open_db(
                    name.encode(), txn=txn, create=create or name in ADDED_TABLES
                )
                for name in TABLES
            }

    # --- transactions ----------------------------------------------------------------------

    def get(self, table: Table, key: bytes) -> bytes | None:
        """Return the current value of a key."""
        try:
            txn = self._lmdb.begin(table)  # its context manager costs a sixth of the call
            try:
                return txn.get(key)
            finally:
                txn.abort()
        except lmdb.Error as error:
            raise self.failure(error) from error

    def get_by(
        self, table: Table, key: bytes, other: Table, at: int = 0
    ) -> tuple[bytes | None, bytes | None]:
        """Return the value of ``key``, and the row of ``other`` whose key this value contains from
        ``at`` on.
        """
        try:
            txn = self._lmdb.begin(table)
            try:
                value = txn.get(key)
                link = value[at:] if value else None
                return value, txn.get(link, None, other) if link else None
            finally:
                txn.abort()
        except lmdb.Error as error:
            raise self.failure(error) from error

    @contextlib.contextmanager
    def read(self) -> Iterator[Txn]:
        """Begin a read transaction; keep it short, because LMDB cannot reuse old pages
        meanwhile.
        """
        try:
            with self._lmdb.begin() as txn:
                yield txn
        except lmdb.Error as error:
            raise self.failure(error) from error

    def write(self, work: Callable[[Txn], T]) -> T:
        """Run ``work`` in a write transaction and commit it durably.

        Raises `StoreFull` or `StoreError`; then nothing was written.
        """
        if self.read_only:
            raise not_to_be_written(self.root)
        with self._writing, self._translated(), self._lmdb.begin(write=True) as txn:
            return work(txn)

    # --- errors ----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (lmdb.Error, MemoryError) as error:
            raise self.failure(error) from error

    def failure(self, error: Exception) -> StoreError:
        """Translate an error of LMDB into an error of the store."""
        code = getattr(error, "code", 0)
        reason = str(error) if code == 0 else getattr(error, "reason", str(error))
        if isinstance(error, lmdb.DiskError) or code in FULL:
            return full(self.root, code)
        if code == errno.EIO and (found := self._probe()):
            return full(self.root, found)  # LMDB reports a short write as EIO
        if isinstance(error, lmdb.MapFullError | lmdb.MapResizedError):
            return StoreError(
                f"store {printable(self.root)}: its index has outgrown the address space of this"
                " process: raise its limit (ulimit -v)"
            )
        if isinstance(error, lmdb.LockError):
            return StoreLocked(f"store {printable(self.root)}: its index is locked: {reason}")
        if isinstance(
            error,
            lmdb.InvalidError
            | lmdb.VersionMismatchError
            | lmdb.CorruptedError
            | lmdb.PageNotFoundError
            | lmdb.NotFoundError
            | lmdb.IncompatibleError,
        ):
            return damaged(self.root, f"is damaged: {reason}")
        return StoreError(f"store {printable(self.root)}: its index: {reason}")

    def _probe(self) -> int:
        """Write to the filesystem to find out if it is full; return ENOSPC or EDQUOT if
        so, else 0.
        """
        try:
            fd = os.open(self.path, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except OSError as error:
            return error.errno if error.errno in FULL else 0
        with closing_fd(fd):
            try:
                os.posix_fallocate(fd, 0, _PROBE_BYTES)
            except OSError as error:
                return error.errno if error.errno in FULL else 0
        return 0

    # --- the rest --------------------------------------------------------------------------

    def entries(self) -> dict[str, int]:
        """Return the number of rows of each table."""
        with self.read() as txn:
            return {name: txn.stat(table)["entries"] for name, table in self.tables.items()}

    def bytes_used(self) -> int:
        """Return the bytes that the index takes on disk."""
        return os.stat(os.path.join(self.path, b"data.mdb")).st_blocks * 512

    def close(self) -> None:
        """Unmap the index; only `release` calls this."""
        self._lmdb.close()


def acquire(root: bytes, *, read_only: bool, create: bool = False) -> Environment:
    """Return the environment of the store at ``root``, which a process can open only once.

    Raises `StoreError` if the process has it open for reading and now wants to write.
    """
    key = _key(root)
    with _open_lock:
        found = _open.get(key)
        if found is None:
            found = Environment(root, read_only=read_only, create=create)
            _open[key] = found
            return found
        if found.read_only and not read_only:
            raise StoreError(f"store {printable(root)} is open for reading only in this process")
        found.users += 1
        return found


def damaged(root: bytes, how: str) -> StoreDamaged:
    """Return the error for an index that cannot be used."""
    return StoreDamaged(
        f"store {printable(root)}: its index {how}: buildidfs check --repair makes a new one"
    )


def _key(root: bytes) -> tuple[int, int]:
    try:
        status = os.stat(os.path.join(root, b"index"))
    except OSError as error:
        raise damaged(root, f"cannot be found ({error.strerror})") from error
    return status.st_dev, status.st_ino


def release(environment: Environment) -> None:
    """Release one use of an environment; the last one closes it."""
    with _open_lock:
        environment.users -= 1
        if environment.users == 0:
            for key, value in list(_open.items()):
                if value is environment:
                    del _open[key]
            environment.close()


@contextlib.contextmanager
def exclusive(root: bytes) -> Iterator[None]:
    """Keep all processes from opening the index of a store, even a damaged one.

    Raises `StoreLocked` if a process has the index open. This check is reliable: LMDB holds a
    shared lock on the first byte of lock.mdb while an environment is open (mdb_env_share_locks),
    and a process that opens one waits for us.
    """
    with _open_lock:
        if _key(root) in _open:
            raise StoreLocked(f"store {printable(root)} is open in this process")
        with translated(root):
            fd = os.open(os.path.join(root, b"index", b"lock.mdb"), os.O_RDWR | os.O_CREAT, 0o600)
        with closing_fd(fd):
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
            except (BlockingIOError, PermissionError):
                raise StoreLocked(
                    f"store {printable(root)} is in use, and needs a new index: end its users"
                    " (buildidfs down), then run buildidfs check --repair"
                ) from None
            yield


@contextlib.contextmanager
def _text(path: bytes) -> Iterator[str]:
    """Yield a path for the LMDB binding, which takes UTF-8 only."""
    try:
        yield path.decode()
        return
    except UnicodeDecodeError:
        fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    with closing_fd(fd):
        yield f"/proc/self/fd/{fd}"


def _on_read_only_filesystem(path: bytes) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


#: Reads every record, a few in each transaction, because another process may be writing.
_READ_ALL: Final = """
import sys, lmdb
def opened(lock):
    how = dict(readonly=True, lock=lock, max_dbs=64, readahead=False)
    for size in map(int, sys.argv[1].split(",")):
        try:
            return lmdb.open(".", map_size=size, **how)
        except lmdb.MemoryError:
            pass  # there is not so much address space
    sys.exit(1)
try:
    env = opened(True)
except lmdb.Error:
    env = opened(False)
for name in sys.argv[2:]:
    try:
        table = env.open_db(name.encode(), create=False)
    except lmdb.NotFoundError:
        continue  # which opening the tables will tell
    key = b""
    while key is not None:
        with env.begin(db=table) as txn:
            cursor = txn.cursor()
            there = cursor.set_range(key) if key else cursor.first()
            for count, (key, value) in enumerate(cursor if there else ()):
                if count == 100000:
                    break
            else:
                key = None
"""


def is_readable(directory: bytes) -> bool:
    """Read every record of the index in a directory; return True if all could be read."""
    import subprocess  # only for a store that looks damaged, or for a check

    command = [sys.executable, "-I", "-c", _READ_ALL, ",".join(map(str, MAP_SIZES)), *TABLES]
    done = subprocess.run(command, cwd=directory, capture_output=True, check=False)
    return done.returncode == 0


def load_counters(environment: Environment, txn: Txn) -> schema.StoreCounters:
    """Return the counters of a store; raises `StoreDamaged` if there are none."""
    value = txn.get(schema.COUNTERS_KEY, db=environment.tables["meta"])
    try:
        return schema.StoreCounters.unpack(value or b"")
    except struct.error:
        raise damaged(environment.root, "has no counters") from None


_PARTS = (
    b"index",
    b"blobs",
    b"staging",
    b"listeners",
    b"lock",
    b"run",
    b"quarantine",
    b"jit",
    b"remote",
    b"upstream",
)
_FORMAT = b"format"


def make(root: bytes) -> None:
    """Lay out a store; the file ``format`` is written last. Raises `StoreError`.

    In a store that lacks only this file, the file is written anew, and all content stays.
    """
    with translated(root):
        os.makedirs(root, 0o700, exist_ok=True)
        foreign = set(os.listdir(root)) - set(_PARTS)
        foreign = {name for name in foreign if not name.startswith(b".format.")}
        if foreign and not os.path.exists(os.path.join(root, _FORMAT)):
            raise StoreError(
                f"{printable(root)} is not a store, and not empty: name another (--store)"
            )
        os.chmod(root, 0o700)
        for part in (b"index", b"blobs", b"listeners"):
            os.makedirs(os.path.join(root, part), 0o700, exist_ok=True)

    env = acquire(root, read_only=False, create=True)
    try:
        env.write(lambda txn: begin(env, txn))
    finally:
        release(env)
    write_format(root)


def begin(env: Environment, txn: Txn) -> None:
    """Write the first rows of an empty index."""
    meta = env.tables["meta"]
    if txn.put(schema.COUNTERS_KEY, schema.StoreCounters().pack(), overwrite=False, db=meta):
        txn.put(schema.FORMAT_KEY, schema.U32.pack(schema.FORMAT_VERSION), db=meta)


def write_format(root: bytes) -> None:
    """Write the number of the present format into the store, and sync it. Raises `StoreError`."""
    with translated(root):
        draft = os.path.join(root, b".format.%d.%d" % (os.getpid(), time.monotonic_ns()))
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with closing_fd(fd):
            os.write(fd, schema.FORMAT_PREFIX + b"%d\n" % schema.FORMAT_VERSION)
            os.fsync(fd)
        os.rename(draft, os.path.join(root, _FORMAT))
        sync_directory(root)


def read_format(root: bytes) -> int:
    """Return the format number in the file ``format`` of a store.

    Raises `StoreMissing`, `StoreError`, and `StoreVersionError` for a file without a number.
    """
    try:
        with open(os.path.join(root, _FORMAT), "rb") as file:
            text = file.read(64)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StoreMissing(
            f"no store at {printable(root)}: a scan makes one, --store names another"
        ) from error
    except OSError as error:
        raise StoreError(f"store {printable(root)}: {error.strerror}{remedy(error)}") from error
    digits = text.removeprefix(schema.FORMAT_PREFIX).strip()
    if not text.startswith(schema.FORMAT_PREFIX) or not digits.isdigit():
        raise StoreVersionError(f"store {printable(root)}: its format file is not that of a store")
    return int(digits)


def acquire_present(root: bytes, *, read_only: bool) -> Environment:
    """Do the same as `acquire` for a store of the present format only. Raises `StoreMissing`, and
    `StoreVersionError` for another format.
    """
    version = read_format(root)
    if version != schema.FORMAT_VERSION:
        raise StoreVersionError(
            f"store {printable(root)} has format {version}, this program reads"
            f" {schema.FORMAT_VERSION}: use the buildidfs that wrote it, name another store"
            " (--store), or have buildidfs"
            " check --repair make a new index, which loses pins, journal and history"
        )
    env = acquire(root, read_only=read_only)
    with on_error(partial(release, env)):
        with env.read() as txn:
            value = txn.get(schema.FORMAT_KEY, db=env.tables["meta"])
        if value != schema.U32.pack(schema.FORMAT_VERSION):
            raise damaged(root, f"has no rows of format {schema.FORMAT_VERSION}")
    return env
