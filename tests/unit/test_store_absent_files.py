# SPDX-License-Identifier: Apache-2.0
"""The table of absent files: what it holds, and what damages it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from buildidfs.model import BuildId, Kind
from buildidfs.store.absent_files import AbsentFiles

ID, OTHER = (BuildId(bytes([number]) * 20) for number in (1, 2))


def table(store: Path, *scope: str) -> AbsentFiles:
    return AbsentFiles(os.fsencode(store), scope)


def test_file_is_absent_in_its_scope_and_kind_only(tmp_path: Path) -> None:
    table(tmp_path, "a").add(ID, Kind.DEBUGINFO, 60)
    later = table(tmp_path, "a")
    assert later.has(ID, Kind.DEBUGINFO)
    assert not later.has(ID, Kind.EXECUTABLE)
    assert not later.has(OTHER, Kind.DEBUGINFO)
    assert not table(tmp_path, "a", "b").has(ID, Kind.DEBUGINFO)
    table(tmp_path, "a").forget(ID, Kind.DEBUGINFO)
    assert not later.has(ID, Kind.DEBUGINFO)


def test_damaged_or_lost_entries_are_forgotten(tmp_path: Path) -> None:
    absent = table(tmp_path)
    path = tmp_path / "upstream/absent"
    changes: list[Callable[[bytes], bytes]] = [
        lambda data: data.replace(b"\1", b"\2"), lambda data: data[:7], lambda data: b"",
    ]  # fmt: skip
    for damage in changes:
        absent.add(ID, Kind.DEBUGINFO, 1 << 24 | 1)
        assert absent.has(ID, Kind.DEBUGINFO)
        path.write_bytes(damage(path.read_bytes()))
        assert not absent.has(ID, Kind.DEBUGINFO)


def test_full_bucket_loses_the_entry_that_ends_first(tmp_path: Path) -> None:
    absent = table(tmp_path)
    key = absent._place(ID, Kind.DEBUGINFO)[1]
    every = (BuildId(number.to_bytes(20)) for number in range(1, 1 << 30))
    same = (each for each in every if absent._place(each, Kind.DEBUGINFO)[1] == key)
    files = [next(same) for _ in range(5)]
    for number, each in enumerate(files):
        absent.add(each, Kind.DEBUGINFO, 1000 - 10 * number if number else 5)
    assert [absent.has(each, Kind.DEBUGINFO) for each in files] == [False, *[True] * 4]


def test_store_that_cannot_be_written_has_a_table_in_memory(tmp_path: Path) -> None:
    (tmp_path / "upstream").write_bytes(b"not a directory")
    absent = table(tmp_path)
    absent.add(ID, Kind.DEBUGINFO, 60)
    assert absent.has(ID, Kind.DEBUGINFO)
    assert not table(tmp_path).has(ID, Kind.DEBUGINFO)
