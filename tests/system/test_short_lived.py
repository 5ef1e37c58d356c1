# SPDX-License-Identifier: Apache-2.0
"""Programs that are gone after a millisecond, with their filesystem, are in the store, whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from buildidfs.store import Store
from tests.support.clients.tools import perf_tool
from tests.support.containers.knownprogram import KnownProgram
from tests.support.containers.shortlife import CONFIGS, ShortLife, compare, compare_perf_cache
from tests.support.harness import captures
from tests.support.harness.watching import watching

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.containers.shortlife import Result
    from tests.support.harness.mounts import BuildIdFs
    from tests.support.harness.watching import Watcher

pytestmark = [pytest.mark.root, pytest.mark.host, pytest.mark.watch, pytest.mark.slow]

_ITEMS = 20
_TRIES = 3


@pytest.fixture(scope="module")
def items(scratch: Path) -> Iterator[ShortLife]:
    """What makes and runs the programs."""
    with ShortLife(scratch / "shortlife") as made:
        yield made


@pytest.fixture(scope="module")
def plain(scratch: Path) -> Iterator[Watcher]:
    """A watch with its defaults, which has to end well after all of it."""
    with watching(scratch / "plain-store", "--no-scan") as watcher:
        yield watcher


def _best(
    items: ShortLife,
    watcher: Watcher,
    config: str,
    concurrency: int,
    is_good: Callable[[Result], bool],
) -> Result:
    """The first good result of a few, else the last: a virtual CPU may stand still for longer than
    these programs live. How much is lost of many is what the benchmarks measure.
    """
    for _ in range(_TRIES):
        result = watcher.captured(items.run(config, _ITEMS, concurrency))
        assert result.wrong_bytes == 0
        if is_good(result):
            break
    return result


@pytest.mark.parametrize(
    ("config", "concurrency"), [("tmpfs", 1), *((each, 8) for each in CONFIGS)]
)
def test_nearly_nothing_is_lost(
    items: ShortLife, plain: Watcher, config: str, concurrency: int
) -> None:
    def enough(result: Result) -> bool:
        return result.exe_percent >= 95 and result.so_percent >= 95

    result = _best(items, plain, config, concurrency, enough)
    assert enough(result), result


def test_unknown_libraries_of_a_known_program_are_captured(
    items: ShortLife, plain: Watcher, directory: Path
) -> None:
    for number in range(_TRIES):  # see `_best`
        program = KnownProgram(items, directory / f"known{number}", 3 * _ITEMS)
        result = plain.captured(program.run(0))
        if result.so_percent >= 98:
            break
    assert result.so_percent >= 98, result
    assert result.wrong_bytes == 0


def test_large_files_are_copied_after_their_end(directory: Path, plain: Watcher) -> None:
    with ShortLife(directory / "large", padding=8_000_000) as large:
        result = plain.captured(large.run("overlay", 3, 3))
    assert result.wrong_bytes == 0
    assert result.exe_captured == result.so_captured == 3, result


def test_scan_finds_only_what_still_runs(items: ShortLife, buildidfs: BuildIdFs) -> None:
    """What watch is for: the same programs, looked for a moment later."""
    gone = items.run("tmpfs", 2)
    with items.lasting("tmpfs", 2) as alive:
        buildidfs("scan", "proc", check=False)
    assert compare(buildidfs.store, alive).complete
    assert len(compare(buildidfs.store, gone).lost) == 4


def test_comparison_notices_what_is_wrong(items: ShortLife, directory: Path) -> None:
    """So that all the others can fail: other bytes under a build ID, and nothing under another."""
    expected = items.write(directory / "exe", directory / "libitem.so")
    (build_id,) = expected.executables
    content = (directory / "exe").read_bytes()
    with Store.create(directory / "store") as store:
        at = captures.sighting()
        captures.commit(
            store, captures.capture(store, content[:-1], bytes.fromhex(build_id), at=at)
        )
    result = compare(directory / "store", expected)
    assert (result.exe_captured, result.so_captured, result.wrong_bytes) == (0, 0, 1)
    assert result.lost == tuple(expected.shared_objects)
    with Store.open(directory / "store") as store:
        captures.commit(store, captures.capture(store, content, bytes.fromhex(build_id), at=at))
    assert compare(directory / "store", expected).exe_captured == 1


@pytest.mark.client
def test_perf_has_none_of_it(items: ShortLife, directory: Path) -> None:
    """perf copies at the end of a recording, and finds only what still runs then."""
    record = [
        perf_tool(), "--buildid-dir", directory / "cache", "record", "-q", "-a", "--buildid-all",
        "-e", "cpu-clock", "-o", directory / "perf.data", "--",
    ]  # fmt: skip
    with items.lasting("tmpfs", 2) as alive:
        gone = items.run("tmpfs", 10, under=record)
    assert compare_perf_cache(directory / "cache", alive).complete
    assert len(compare_perf_cache(directory / "cache", gone).lost) == 20
