# SPDX-License-Identifier: Apache-2.0
"""buildidfs.formats.sqlite: the rows that SQLite has written, and files that are none of its."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from typing import TYPE_CHECKING

import pytest

from buildidfs.formats.package_notes import RpmDatabase
from buildidfs.formats.sqlite import Database, Unusable

if TYPE_CHECKING:
    from pathlib import Path

_ROWS = 3000


@pytest.fixture(scope="module", params=[512, 4096, 65536])
def raw(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A database with a table of texts and blobs, some larger than a page, and an index."""
    path = tmp_path_factory.mktemp("sqlite") / "db"
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA page_size={request.param}")
    connection.execute("CREATE TABLE pairs (id INTEGER PRIMARY KEY, key TEXT, blob BLOB, n)")
    connection.execute("CREATE INDEX pairs_key ON pairs(key ASC)")
    rows = [(2 * n, text_of(n), blob_of(n), n * 257 - 7) for n in range(_ROWS)]
    random.Random(7).shuffle(rows)
    connection.executemany("INSERT INTO pairs VALUES (?, ?, ?, ?)", rows)
    connection.commit()
    connection.close()
    return path.read_bytes()


def text_of(number: int) -> str:
    """Each third text is that of two others, and some are longer than a page."""
    return f"key-{number // 3}" + "x" * (9000 if number % 500 == 0 else 0)


def blob_of(number: int) -> bytes:
    return bytes([number % 251]) * (number if number % 7 else 20 * number)


def opened(raw: bytes) -> Database:
    return Database(lambda size, offset: raw[offset : offset + size])


def test_rows_by_number(raw: bytes) -> None:
    database = opened(raw)
    table = database.roots()[b"table", b"pairs"]
    for number in (*range(0, 100), 1234, _ROWS - 1):
        row = database.row(table, 2 * number)
        assert row == [None, text_of(number).encode(), blob_of(number), number * 257 - 7]
        assert database.row(table, 2 * number + 1) == []


def test_rows_by_text(raw: bytes) -> None:
    database = opened(raw)
    index = database.roots()[b"index", b"pairs_key"]
    expected: dict[str, list[int]] = {}
    for number in range(_ROWS):
        expected.setdefault(text_of(number), []).append(2 * number)
    for text, numbers in expected.items():
        assert sorted(database.matches(index, text.encode())) == numbers
    assert database.matches(index, b"key") == []
    assert database.matches(index, b"zzz") == []


def test_damage_ends_with_one_exception(raw: bytes) -> None:
    """Whatever a container writes, a question ends soon, with an answer or `Unusable`."""
    dice = random.Random(11)
    for _ in range(150):
        damaged = bytearray(raw[: dice.randrange(len(raw))] if dice.random() < 0.2 else raw)
        for _ in range(dice.randrange(1, 40)):
            if damaged:
                at = dice.choice([dice.randrange(min(len(damaged), 4096)),
                                  dice.randrange(len(damaged))])  # fmt: skip
                damaged[at] = dice.randrange(256)
        with contextlib.suppress(Unusable):
            database = opened(bytes(damaged))
            for root in (*database.roots().values(), 1, 2, dice.randrange(1 << 32)):
                with contextlib.suppress(Unusable):
                    database.row(root, 8)
                with contextlib.suppress(Unusable):
                    database.matches(root, b"key-1")


def test_page_that_is_its_own_child_is_left(raw: bytes) -> None:
    database = opened(raw)
    size = int.from_bytes(raw[16:18], "big") % 65535 or 65536
    size = 65536 if size == 1 else size
    root = database.roots()[b"index", b"pairs_key"]
    looped = bytearray(raw)
    start = (root - 1) * size
    looped[start + 8 : start + 12] = root.to_bytes(4, "big")
    with pytest.raises(Unusable):
        opened(bytes(looped)).matches(root, b"zzz")


@pytest.mark.parametrize("text", [b"", b"SQLite format 3\0", b"x" * 4096])
def test_file_that_is_no_database(text: bytes) -> None:
    with pytest.raises(Unusable):
        opened(text)


def test_database_of_something_else_is_none_of_rpm(raw: bytes) -> None:
    with pytest.raises(Unusable, match="no database of rpm"):
        RpmDatabase(lambda size, offset: raw[offset : offset + size])


def test_databases_are_read_where_they_are(tmp_path: Path) -> None:
    """An empty database has a page for its schema only."""
    sqlite3.connect(tmp_path / "db").execute("CREATE TABLE t (a)").connection.close()
    assert opened((tmp_path / "db").read_bytes()).roots() == {(b"table", b"t"): 2}
