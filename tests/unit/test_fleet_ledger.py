# SPDX-License-Identifier: Apache-2.0
"""buildidfs.fleet.ledger: what several processes may do with one ledger at the same time."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
from typing import TYPE_CHECKING

import pytest

from buildidfs.errors import StoreError
from buildidfs.fleet import ledger as ledgers
from buildidfs.fleet.ledger import Ledger, LedgerEntry
from buildidfs.fleet.manifests import PUSHED
from buildidfs.model import BuildId, Digest, Kind

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

URL = "s3://fleet/a"
BUCKET = "11" * 16


def _entry(number: int) -> LedgerEntry:
    return LedgerEntry(BuildId(bytes([number] * 20)), Kind.EXECUTABLE, Digest(bytes(32)), PUSHED)


@contextlib.contextmanager
def _ledger(store: Path) -> Iterator[Ledger]:
    with contextlib.closing(Ledger(os.fsencode(store), URL)) as ledger:
        yield ledger


@contextlib.contextmanager
def _locked(store: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """Lend a connection of another user of the ledger, in a transaction. The ``mode`` of the
    journal is ``delete`` as long as a process is making the ledger, else ``wal``.
    """
    (file,) = (store / "remote").glob("*.sqlite")
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as database:
        database.execute(f"pragma journal_mode = {mode}")
        database.execute("begin immediate")
        yield database


def test_ledger_that_another_process_has_locked_is_not_replaced(
    tmp_path: Path,
) -> None:
    with _ledger(tmp_path) as ledger:
        ledger.recognise(BUCKET)
    with _locked(tmp_path, "delete") as other:
        with pytest.raises(StoreError, match="database is locked"), _ledger(tmp_path):
            pass
        other.execute("insert into about values ('told', '7')")
        other.execute("commit")
    with _ledger(tmp_path) as ledger:
        assert ledger.recognise(BUCKET)
        assert ledger.value("told") == "7"


def test_change_that_must_wait_too_long_is_an_error_of_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledgers, "_BUSY_S", 0.1)
    with _ledger(tmp_path) as ledger:
        ledger.recognise(BUCKET)
        with _locked(tmp_path, "wal"):
            with pytest.raises(StoreError, match="database is locked"):
                ledger.token()
            with pytest.raises(StoreError, match="database is locked"):
                ledger.add([_entry(1)])
        assert len(ledger.token()) == 16
        assert not ledger.has(_entry(1).build_id, Kind.EXECUTABLE, Digest(bytes(32)))


def test_ledgers_that_are_made_at_the_same_time_are_one(tmp_path: Path) -> None:
    start = threading.Barrier(6)
    tokens, problems = [], []

    def use(number: int) -> None:
        start.wait()
        try:
            with _ledger(tmp_path) as ledger:
                ledger.recognise(BUCKET)
                tokens.append(ledger.token())
                ledger.add([_entry(number)])
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert len(set(tokens)) == 1
    with _ledger(tmp_path) as ledger:
        assert len(ledger.unfiltered()) == 6
