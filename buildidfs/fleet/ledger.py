# SPDX-License-Identifier: Apache-2.0
"""The record of files that this store has pushed: `Ledger`, a file beside the store's index.

The ledger only saves requests: what counts is what the receiver has. If the ledger is lost, or the
bucket was made anew, the next push compares each file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import sqlite3
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from buildidfs.errors import StoreError
from buildidfs.linux.file_ops import closing_fd, on_error
from buildidfs.model import BuildId, Digest, Kind, fingerprint
from buildidfs.names import printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_TABLES: Final = """
create table if not exists about (name text primary key, value text) without rowid;
create table if not exists pushed (
    build_id blob, kind integer, digest blob, state text, at integer, filtered integer,
    primary key (build_id, kind, digest)
) without rowid;
"""
_VALUE: Final = "select value from about where name = ?"
_BUSY_S: Final = 30.0
_CLOCK_S: Final = 60


class LedgerEntry(NamedTuple):
    """A file that the receiver has, and its state: `manifests.ManifestRow.state`."""

    build_id: BuildId
    kind: Kind
    digest: Digest
    state: str


class Ledger:
    """The entries for one receiver. May be used from several threads and processes."""

    def __init__(self, store_path: bytes, url: str) -> None:
        """Open the ledger in ``STORE/remote``. Raises `StoreError`."""
        directory = os.path.join(store_path, b"remote")
        name = fingerprint(url.encode(), 8).hex().encode() + b".sqlite"
        self._path = os.path.join(directory, name)
        self._lock = threading.RLock()
        try:
            os.makedirs(directory, 0o700, exist_ok=True)
            # Two processes that make one file would fail: SQLite does not wait for the other one
            # while it changes the file to WAL, whatever the timeout is.
            with closing_fd(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
                fcntl.flock(fd, fcntl.LOCK_EX)
                self._db = self._opened()
        except OSError as error:
            raise StoreError(f"{printable(directory)}: {error.strerror}") from error
        self._known = {_key(*row) for row in self._rows("select build_id, kind, digest")}

    def _opened(self) -> sqlite3.Connection:
        """Open the file; replace it if it is damaged, because it holds nothing of value.

        A file that is locked, or that cannot be read or written at present, is not damaged: other
        processes may have it open.
        """
        for _ in range(2):
            database = sqlite3.connect(
                os.fsdecode(self._path),
                timeout=_BUSY_S,
                isolation_level=None,
                check_same_thread=False,
            )
            with on_error(database.close):
                try:
                    database.execute("pragma journal_mode = wal")
                    # If a crash loses entries, the next push compares their files with the bucket
                    # again.
                    database.execute("pragma synchronous = normal")
                    database.executescript(_TABLES)
                except sqlite3.OperationalError as error:
                    raise self._failed(error) from error
                except sqlite3.DatabaseError:
                    database.close()
                    for suffix in (b"", b"-wal", b"-shm"):
                        with contextlib.suppress(FileNotFoundError):
                            os.unlink(self._path + suffix)
                else:
                    return database
        raise StoreError(f"{printable(self._path)} cannot be used")

    def has(self, build_id: bytes, kind: Kind, digest: Digest) -> bool:
        """Return True if a file was pushed."""
        return _key(build_id, kind, digest) in self._known

    def add(self, entries: Iterable[LedgerEntry]) -> None:
        """Record files that are in the bucket; its filter may lack them so far."""
        rows = [
            (bytes(each.build_id), int(each.kind), bytes(each.digest), each.state, _now(), 0)
            for each in entries
        ]
        self._write("insert or replace into pushed values (?, ?, ?, ?, ?, ?)", rows)
        self._known.update(_key(*row[:3]) for row in rows)

    def unfiltered(self) -> list[LedgerEntry]:
        """Return the files that the filter of the bucket may lack."""
        return [
            LedgerEntry(BuildId(row[0]), Kind(row[1]), Digest(row[2]), row[3])
            for row in self._rows("select build_id, kind, digest, state", "where filtered = 0")
        ]

    def set_filtered(self, entries: Iterable[LedgerEntry]) -> None:
        """Record that the filter has these files."""
        rows = [(bytes(each.build_id), int(each.kind), bytes(each.digest)) for each in entries]
        self._write(
            "update pushed set filtered = 1 where build_id = ? and kind = ? and digest = ?", rows
        )

    def older_than(self, age_s: float) -> list[LedgerEntry]:
        """Return the files that were pushed or touched more than ``age_s`` seconds ago.

        Files with a time in the future are included, because a wrong clock set it.
        """
        now = _now()
        found = self._rows(
            "select build_id, kind, digest, state",
            f"where at < {int(now - age_s)} or at > {now + _CLOCK_S}",
        )
        return [LedgerEntry(BuildId(row[0]), Kind(row[1]), Digest(row[2]), row[3]) for row in found]

    def set_touched(self, entry: LedgerEntry) -> None:
        """Record that the object of a file is so new that the bucket keeps it for some time."""
        row = (_now(), bytes(entry.build_id), int(entry.kind), bytes(entry.digest))
        self._write(
            "update pushed set at = ? where build_id = ? and kind = ? and digest = ?", [row]
        )

    def forget(self, entry: LedgerEntry) -> None:
        """Record that the bucket lacks a file that it was thought to have."""
        row = (bytes(entry.build_id), int(entry.kind), bytes(entry.digest))
        self._write("delete from pushed where build_id = ? and kind = ? and digest = ?", [row])
        self._known.discard(_key(*row))

    def recognise(self, bucket: str) -> bool:
        """Record the ID of the bucket; return False if the ledger was of another bucket, and is now
        empty.
        """
        with self._transaction() as database:
            known = self._read(_VALUE, "bucket")
            if known == [(bucket,)]:
                return True
            database.execute("delete from pushed")
            database.execute("delete from about")
            self._known.clear()
            database.execute("insert into about values ('bucket', ?)", (bucket,))
        return not known

    def token(self) -> str:
        """Return a name that is unique to this ledger, even among hosts with the same name."""
        with self._transaction() as database:
            row = ("token", secrets.token_hex(8))
            database.execute("insert or ignore into about values (?, ?)", row)
            return str(self._read(_VALUE, "token")[0][0])

    def value(self, name: str) -> str:
        """Return a value that was set; empty if none was."""
        rows = self._read(_VALUE, name)
        return rows[0][0] if rows else ""

    def set_value(self, name: str, value: str) -> None:
        """Set a value."""
        self._write("insert or replace into about values (?, ?)", [(name, value)])

    def close(self) -> None:
        """Close the file; safe to call twice."""
        self._db.close()

    def _rows(self, columns: str, condition: str = "") -> list[tuple[bytes, int, bytes, str]]:
        return self._read(f"{columns} from pushed {condition}")

    def _read(self, statement: str, *values: str) -> list[Any]:
        try:
            with self._lock:
                return self._db.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _write(self, statement: str, rows: Sequence[tuple[object, ...]]) -> None:
        with self._transaction() as database:
            database.executemany(statement, rows)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Lend the database, which no other process changes meanwhile. Raises `StoreError`."""
        try:
            with self._lock, self._db:
                self._db.execute("begin immediate")
                yield self._db
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _failed(self, error: sqlite3.Error) -> StoreError:
        return StoreError(f"{printable(self._path)}: {error}")


def _key(build_id: bytes, kind: int, digest: bytes, *_: object) -> bytes:
    return fingerprint(bytes((kind,)) + digest + build_id)


def _now() -> int:
    return int(time.time())
