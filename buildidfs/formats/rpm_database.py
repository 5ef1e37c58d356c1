# SPDX-License-Identifier: Apache-2.0
"""The records of rpm on installed files, in an SQLite database.

Source: rpm, lib/backend/sqlite.c.
"""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING, Final

from buildidfs.formats.archive.packages import RpmHeader
from buildidfs.formats.budget import Spent
from buildidfs.formats.package_databases import UNKNOWN, Package, shown

if TYPE_CHECKING:
    from collections.abc import Iterable

    from buildidfs.formats.budget import Budget

_MOST_NAMESAKES: Final = 64  # limit of files with one name that are read

# The schema is a stranger's: it may call no function, and a query may only read.
_SQLITE_SETTINGS: Final = ("trusted_schema = OFF", "cell_size_check = ON", "query_only = ON")
_SQLITE_LIMITS: Final = (
    (sqlite3.SQLITE_LIMIT_LENGTH, 32 << 20),
    (sqlite3.SQLITE_LIMIT_SQL_LENGTH, 64 << 10),
    (sqlite3.SQLITE_LIMIT_COLUMN, 64),
    (sqlite3.SQLITE_LIMIT_EXPR_DEPTH, 32),
    (sqlite3.SQLITE_LIMIT_VDBE_OP, 10_000),
    (sqlite3.SQLITE_LIMIT_ATTACHED, 0),
    (sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH, 1),
)
_READING: Final = frozenset((sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ))
_OPERATIONS_OF_CALL: Final = 1000
_STEPS_OF_CALL: Final = 100


class RpmDatabase:
    """The packages that rpm has installed, in an SQLite database that is open for reading only.

    SQLite is not made for hostile databases, so a confined process uses this class. ``budget`` is
    charged the steps of the queries, where its error is not raised but ends a query, and those of
    the headers. Methods raise `sqlite3.Error` and `budget.Spent`.
    """

    def __init__(self, connection: sqlite3.Connection, budget: Budget) -> None:
        self._connection = connection
        self._budget = budget
        connection.text_factory = bytes
        for limit, most in _SQLITE_LIMITS:
            connection.setlimit(limit, most)
        for setting in _SQLITE_SETTINGS:
            connection.execute(f"PRAGMA {setting}")

        def is_over() -> bool:
            try:
                budget.charge(_STEPS_OF_CALL)
            except Spent:
                return True
            return False

        connection.set_authorizer(lambda action, *_: 0 if action in _READING else 1)
        connection.set_progress_handler(is_over, _OPERATIONS_OF_CALL)

    def owner(self, paths: Iterable[bytes]) -> Package:
        """Return the package that has one of the paths."""
        for path in paths:
            name = path.rpartition(b"/")[2]
            for package, file in self._rows(
                "SELECT hnum, idx FROM Basenames WHERE key = CAST(? AS TEXT) LIMIT ?",
                (name, _MOST_NAMESAKES),
            ):
                if isinstance(package, int) and isinstance(file, int):
                    header = self._header(package)
                    if header.path(file) == path:
                        name, version, _ = header.name
                        return Package(shown(name), shown(version), "rpm")
        return UNKNOWN

    def _header(self, number: int) -> RpmHeader:
        match self._rows("SELECT blob FROM Packages WHERE hnum = ? LIMIT 1", (number,)):
            case [(bytes(blob),)]:
                self._budget.charge(len(blob))  # each byte may end a text of its lists
                return RpmHeader.of_database(blob)
        return RpmHeader.of_database(b"")

    def _rows(self, query: str, values: tuple[bytes | int, ...]) -> list[tuple[object, ...]]:
        try:
            return self._connection.execute(query, values).fetchall()
        except UnicodeDecodeError as error:  # the message quotes a name of the schema
            raise sqlite3.DatabaseError("the schema has a name that is not UTF-8") from error
        except MemoryError as error:  # a damaged page names a size, for which SQLite has no room
            raise sqlite3.DatabaseError("the database needs too much memory") from error
