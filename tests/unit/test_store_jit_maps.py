# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from buildidfs.store import Store, jit_maps
from buildidfs.store.jit_maps import JitMaps
from buildidfs.store.retention.eviction import Policy
from tests.support.elf.jit import jit_process as process


@pytest.fixture
def maps(tmp_path: Path) -> JitMaps:
    return JitMaps(os.fsencode(tmp_path))


def test_map_grows(maps: JitMaps) -> None:
    assert maps.write(process(7), 0, b"1 1 a\n") == 6
    assert maps.write(process(7), 6, b"2 1 b\n") == 12
    (kept,) = maps.of(7)
    assert kept.process == process(7)
    assert (kept.text(), kept.size) == (b"1 1 a\n2 1 b\n", 12)
    assert maps.of(70) == []
    assert [each.path for each in maps.all()] == [kept.path]
    assert os.stat(kept.path).st_mode & 0o777 == 0o600


def test_two_writers_keep_one_map(maps: JitMaps, tmp_path: Path) -> None:
    other = JitMaps(os.fsencode(tmp_path))
    assert maps.write(process(7), 0, b"1 1 a\n") == 6
    assert other.write(process(7), 0, b"1 1 a\n2 1 b\n") == 12
    assert maps.write(process(7), 6, b"2 1 b\n3 1 c\n") == 18
    assert other.write(process(7), 12, b"3 1 c\n") == 18
    assert maps.of(7)[0].text() == b"1 1 a\n2 1 b\n3 1 c\n"


def test_map_that_was_written_anew_comes_after_the_old_one(maps: JitMaps) -> None:
    maps.write(process(7), 0, b"1 1 a\n")
    assert maps.write(process(7), 0, b"5 1 z\n") == 12
    assert maps.write(process(7), 12, b"6 1 y\n") == 18
    assert maps.of(7)[0].text() == b"1 1 a\n5 1 z\n6 1 y\n"


def test_processes_with_one_number_are_told_apart(maps: JitMaps) -> None:
    for ticks in (300, 100, 200):
        maps.write(process(7, ticks=ticks), 0, b"1 1 t%d\n" % ticks)
    assert [each.process.start_ticks for each in maps.of(7)] == [300, 200, 100]


def test_removed_map_is_asked_for_again(maps: JitMaps) -> None:
    maps.write(process(7), 0, b"1 1 a\n")
    maps.remove(maps.of(7)[0].path)
    assert maps.write(process(7), 6, b"2 1 b\n") == -1
    assert maps.write(process(7), 0, b"1 1 a\n2 1 b\n") == 12


def test_map_has_a_bound(maps: JitMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_maps, "MAX_MAP_BYTES", 15)
    at = maps.write(process(7), 0, b"1 1 a\n2 1 b\n")
    at = maps.write(process(7), at, b"3 1 c\n4 1 d\n")
    assert maps.of(7)[0].size == 15
    assert maps.write(process(7), at, b"5 1 e\n") > 0  # it is not asked for again
    assert maps.of(7)[0].size == 15
    assert maps.write(process(7), 0, b"9 1 new\n") == 8  # what was there is older
    assert maps.of(7)[0].text() == b"9 1 new\n"


def test_container_with_most_loses_its_oldest(
    maps: JitMaps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit_maps, "MAX_BYTES", 8000)
    line = b"1 1 %b\n" % (b"n" * 990)
    maps.write(process(1, container="docker:quiet"), 0, line)
    for pid in range(10, 30):
        maps.write(process(pid, container="docker:loud"), 0, line)
        os.utime(maps.of(pid)[0].path, ns=(pid, pid))
    assert maps.of(1)
    assert maps.of(29)
    assert not maps.of(10)
    assert maps.totals()[1] <= 8000


def test_number_of_maps_has_a_bound(maps: JitMaps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit_maps, "MAX_MAPS", 5)
    maps.write(process(1, container="docker:quiet"), 0, b"1 1 a\n")
    for pid in range(10, 20):
        maps.write(process(pid), 0, b"1 1 a\n")
        os.utime(maps.of(pid)[0].path, ns=(pid, pid))
    assert maps.of(1)
    assert maps.of(19)
    assert maps.totals()[0] <= 5


def test_what_is_no_map_is_told_and_passed_over(maps: JitMaps, tmp_path: Path) -> None:
    maps.write(process(7), 0, b"1 1 a\n")
    (kept,) = maps.of(7)
    copied = kept.path.replace(b"/7-", b"/8-")
    shutil.copy(kept.path, copied)  # its header is of another process
    cut = kept.path.replace(b"/7-", b"/9-")
    with open(cut, "wb") as file:
        file.write(b'{"pid": 9')
    (tmp_path / "jit/README").write_text("of no one")
    assert sorted(maps.damaged()) == [copied, cut]
    assert maps.of(8) == maps.of(9) == []
    assert [each.process.pid for each in maps.all()] == [7]


def test_store_with_maps_is_a_store(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store") as store:
        store.jit_maps.write(process(7), 0, b"1 1 a\n")
    (tmp_path / "store/format").unlink()
    with Store.create(tmp_path / "store") as store:
        assert store.jit_maps.of(7)[0].text() == b"1 1 a\n"


def test_maps_take_a_part_of_the_largest_size_of_the_store(tmp_path: Path) -> None:
    line = b"1 1 function\n"
    maps = JitMaps(os.fsencode(tmp_path), lambda: 32 * 4096)
    for pid in range(1, 200):
        assert maps.write(process(pid), 0, line * 10) > 0
    _, size = maps.totals()
    assert 0 < size <= 2 * 4096


def test_maps_count_for_the_largest_size_of_the_store(tmp_path: Path) -> None:
    with Store.create(tmp_path / "store") as store:
        store.jit_maps.write(process(1), 0, b"1 1 function\n" * 10_000)
        taken = jit_maps.disk_bytes(store.path)
        policy = Policy(max_size=0)
        with_maps = store.exceeded(policy)["max-size"]
    os.unlink(next((tmp_path / "store/jit").iterdir()))
    with Store.open(tmp_path / "store") as store:
        without = store.exceeded(policy)["max-size"]
    assert taken >= 130_000
    assert with_maps - without == taken
