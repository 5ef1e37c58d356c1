# SPDX-License-Identifier: Apache-2.0
"""A confined process reads the database of rpm; a hostile one costs little and ends it."""

from __future__ import annotations

import os
import random
import resource
import sqlite3
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.process import rpm_reader
from buildidfs.capture.process.rpm_reader import RpmReader
from buildidfs.formats.budget import Budget, Spent
from buildidfs.formats.package_databases import UNKNOWN, Package
from buildidfs.formats.rpm_database import RpmDatabase
from tests.fuzz.other_inputs import COSTLY, rpm_database
from tests.support.harness.scans import open_descriptors

COREUTILS = Package("coreutils", "9.4-1", "rpm")
PATHS = [b"/none", b"/usr/bin/true"]


@pytest.fixture(autouse=True)
def _nothing_left_open() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert open_descriptors() <= before


def reader_of(raw: bytes) -> RpmReader:
    fd = os.memfd_create("rpmdb.sqlite")
    os.write(fd, raw)
    try:
        return RpmReader(fd)
    finally:
        os.close(fd)


def of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.parametrize("write_ahead", [False, True])
def test_package_of_a_file(write_ahead: bool) -> None:
    raw = bytearray(rpm_database())
    if write_ahead:
        raw[18:20] = b"\2\2"  # as rpm leaves it
    reader = reader_of(bytes(raw))
    assert reader.owner([b"/usr/bin/false"]) == UNKNOWN
    assert reader.owner([b"/usr/lib/true", b"/usr/bin/\xff\n"]) == UNKNOWN
    assert reader.owner(PATHS) == COREUTILS


def test_process_has_no_privileges_and_ends_with_its_reader() -> None:
    reader = reader_of(rpm_database())
    reader.owner(PATHS)
    assert reader._process is not None
    place = Path(f"/proc/{reader._process.pid}")
    lines = (place / "status").read_text().splitlines()
    status = dict(line.split(":\t", 1) for line in lines if ":\t" in line)
    assert (int(status["CapEff"], 16), status["Seccomp"], status["NoNewPrivs"]) == (0, "2", "1")
    if os.geteuid() == 0:
        assert int(status["Uid"].split()[0]) >= 1 << 16
    (limit,) = (line for line in (place / "limits").read_text().splitlines() if "cpu time" in line)
    assert limit.split()[3:5] == ["1", "1"]
    del reader
    assert not place.exists()


@pytest.mark.parametrize("statements", COSTLY)
def test_costly_database_takes_less_than_a_second(statements: tuple[str, ...]) -> None:
    raw = rpm_database(*statements)
    before = of_children()
    reader = reader_of(raw)
    assert reader.owner([b"/usr/lib/true"]) == UNKNOWN
    del reader
    assert of_children() - before < 1


def test_damaged_database_is_passed_over() -> None:
    raw = rpm_database()
    dice = random.Random(3)
    for number in range(6):
        damaged = bytearray(raw)
        for _ in range(30):
            damaged[dice.randrange(100 if number else 16, len(raw))] = dice.randrange(256)
        assert reader_of(bytes(damaged)).owner(PATHS) in (UNKNOWN, COREUTILS)
    assert reader_of(raw[:700]).owner(PATHS) == UNKNOWN
    with pytest.raises(OSError, match="no database"):
        reader_of(b"x" * 4096)


def test_process_that_does_not_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each later question is answered at once."""
    monkeypatch.setattr(rpm_reader, "_ANSWER_S", 0.0)
    reader = reader_of(rpm_database())
    assert reader.owner(PATHS) == UNKNOWN
    monkeypatch.undo()
    assert reader.owner(PATHS) == UNKNOWN
    assert reader._process is not None
    assert reader._process.code is not None


def test_headers_of_many_empty_names_are_charged_before_they_are_decoded() -> None:
    """64 files of one name are in a header with a million of names."""
    names = 1 << 20
    entries = struct.pack(">IIII", 1117, 8, 0, names) + struct.pack(">IIII", 1118, 8, 0, names)
    blob = struct.pack(">II", 2, names) + entries + bytes(names)
    connection = sqlite3.connect(":memory:")
    connection.execute("CREATE TABLE Packages (hnum INTEGER, blob BLOB)")
    connection.execute("CREATE TABLE Basenames (key TEXT, hnum INTEGER, idx INTEGER)")
    connection.execute("INSERT INTO Packages VALUES (1, ?)", (blob,))
    connection.executemany("INSERT INTO Basenames VALUES ('true', 1, ?)", [(n,) for n in range(64)])
    database = RpmDatabase(connection, Budget(3 << 20))
    began = time.process_time()
    with pytest.raises(Spent):
        database.owner([b"/usr/bin/true"])
    assert time.process_time() - began < 2
