# SPDX-License-Identifier: Apache-2.0
"""The records of package managers on installed files: dpkg, apk and rpm.

Sources: dpkg, lib/dpkg/dump.c and dpkg-query(1) (status, info/PACKAGE.list); distroless,
private/pkg (status.d); apk-tools, src/database.c (installed); rpm, lib/backend/sqlite.c.
"""

from __future__ import annotations

import re
import sqlite3
from typing import TYPE_CHECKING, Final

import msgspec

from buildidfs.formats.archive.packages import RpmHeader
from buildidfs.formats.budget import Spent

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.formats.budget import Budget

_UNPRINTABLE: Final = re.compile(r"[^\w.:+~^-]", re.ASCII)
_TEXT_MAX: Final = 128
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


class Package(msgspec.Struct, frozen=True):
    """An installed package, in printable characters; all fields are empty if none is known.

    ``manager`` is dpkg, apk or rpm.
    """

    name: str = ""
    version: str = ""
    manager: str = ""


UNKNOWN: Final = Package()


def shown(text: bytes) -> str:
    """Return a name or a version in printable characters."""
    return _UNPRINTABLE.sub("?", text[:_TEXT_MAX].decode("ascii", "replace"))


def dpkg_lists(lists: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Join the lists of files of packages, each with its name, for `dpkg_owner`."""
    return b"".join(b"\0" + name + b"\n" + text + b"\n" for name, text in lists)


def dpkg_owner(lists: bytes, paths: Iterable[bytes]) -> bytes:
    """Return the name of the package that has one of the paths, perhaps ``NAME:ARCHITECTURE``.

    The name is empty if no package has one.
    """
    for path in paths:
        at = lists.find(b"\n" + path + b"\n") if b"\n" not in path else -1
        if at >= 0:
            start = lists.rfind(b"\0", 0, at) + 1
            return lists[start : lists.index(b"\n", start)]
    return b""


def md5sums_as_list(text: bytes) -> bytes:
    """Return the paths in a file of checksums (``HASH  usr/lib/x``), one on a line."""
    found = (line.partition(b"  ")[2] for line in text.split(b"\n"))
    return b"\n".join(b"/" + path.removeprefix(b"./") for path in found if path)


def dpkg_version(status: bytes, name: bytes) -> Package:
    """Return a package with its version, from its paragraph in dpkg's status."""
    plain, _, architecture = name.partition(b":")
    version = b""
    for paragraph in _paragraphs(status, b"Package: " + plain + b"\n"):
        fields = dict(_fields(paragraph, b": "))
        if not architecture or fields.get(b"Architecture") == architecture:
            version = fields.get(b"Version", b"")
            break
    return Package(shown(plain), shown(version), "dpkg")


def apk_owner(installed: bytes, paths: Iterable[bytes]) -> Package:
    """Return apk's package that has one of the paths.

    A line ``F:DIRECTORY`` precedes the lines ``R:NAME`` of its files.
    """
    for path in paths:
        directory, _, name = path.lstrip(b"/").rpartition(b"/")
        if not name or b"\n" in path:
            continue
        above, file = b"\nF:" + directory + b"\n", b"\nR:" + name + b"\n"
        start = installed.find(above)
        while start >= 0:
            end = installed.find(b"\nF:", start + 1)
            at = installed.find(file, start, end + 1 if end >= 0 else len(installed))
            if at >= 0:
                before = installed.rfind(b"\n\n", 0, at)
                fields = dict(_fields(installed[before + 2 if before >= 0 else 0 : at], b":"))
                return Package(shown(fields.get(b"P", b"")), shown(fields.get(b"V", b"")), "apk")
            start = installed.find(above, end) if end >= 0 else -1
    return UNKNOWN


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


def _paragraphs(text: bytes, line: bytes) -> Iterator[bytes]:
    """Yield the paragraphs that begin with a line."""
    at = 0 if text.startswith(line) else text.find(b"\n\n" + line)
    while at >= 0:
        start = at + 2 if at or not text.startswith(line) else 0
        end = text.find(b"\n\n", start)
        yield text[start : end if end >= 0 else len(text)]
        at = text.find(b"\n\n" + line, start)


def _fields(paragraph: bytes, colon: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the fields of a paragraph; of several fields with one name, the last comes first."""
    for line in reversed(paragraph.split(b"\n")):
        name, found, value = line.partition(colon)
        if found:
            yield name, value
