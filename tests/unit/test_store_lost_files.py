# SPDX-License-Identifier: Apache-2.0
"""buildidfs.store.run_files: rows of lost files, appended, and read again."""

from __future__ import annotations

import os
from pathlib import Path

from buildidfs.store import run_files
from buildidfs.store.run_files import LossLog, LostFiles


def _lost(number: int, path: bytes = b"/bin/x") -> LostFiles:
    return LostFiles(number, run_files.lost_text(path), "gone", "docker:a", 7, "host", "abcd", 3)


def test_rows_come_back_in_order(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path)
    assert list(run_files.lost_since(root)) == []
    log = LossLog(root)
    rows = [_lost(1), _lost(2, b"/caf\xe9\n"), LostFiles(3, "", "gone")]
    assert log.append(rows[:2])
    assert log.append([])
    assert log.append(rows[2:])
    assert list(run_files.lost_since(root)) == rows
    assert [row.raw_path for row in run_files.lost_since(root)] == [b"/bin/x", b"/caf\xe9\n", b""]
    assert list(run_files.lost_since(root, 2)) == rows[1:]
    assert (tmp_path / "run/lost").stat().st_mode & 0o777 == 0o600


def test_only_so_much_is_kept(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path)
    log = LossLog(root, most_bytes=2000)
    for number in range(100):
        assert log.append([_lost(number)])
    found = [row.time_ns for row in run_files.lost_since(root)]
    assert found == list(range(found[0], 100))
    assert 10 < len(found) < 40
    assert sum(path.stat().st_size for path in (tmp_path / "run").iterdir()) < 5000


def test_what_was_cut_short_is_passed_over(tmp_path: Path) -> None:
    root = os.fsencode(tmp_path)
    LossLog(root).append([_lost(1)])
    with (tmp_path / "run/lost").open("ab") as file:
        file.write(b'{"time_ns": 2, "pa\n\xff\n[]\n')
    LossLog(root).append([_lost(3)])
    assert [row.time_ns for row in run_files.lost_since(root)] == [1, 3]


def test_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    assert not LossLog(os.fsencode(tmp_path)).append([_lost(1)])
    assert list(run_files.lost_since(os.fsencode(tmp_path))) == []
