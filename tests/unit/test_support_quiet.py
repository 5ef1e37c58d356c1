# SPDX-License-Identifier: Apache-2.0
"""Tests that watch the host take turns, and failures name the watches beside them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.harness.quiet import Quiet, explain, watches
from tests.support.harness.waiting import until


def _item(path: str, *markers: str) -> Any:
    """The part of a test that is looked at."""
    return SimpleNamespace(path=Path(path), get_closest_marker=lambda name: name in markers)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[tuple[Quiet, Quiet]]:
    """The shares of two processes in one lock."""
    made = Quiet(tmp_path / "lock"), Quiet(tmp_path / "lock")
    yield made
    for each in made:
        each.leave(None)


def test_one_watches_at_a_time(two: tuple[Quiet, Quiet]) -> None:
    first, second = two
    first.enter(_item("a", "watch"))
    assert first.is_alone
    for marker in ("watch", "unwatched"):
        with pytest.raises(pytest.fail.Exception, match="nothing else watches"):
            second.enter(_item("b", marker), patience=0)
    second.enter(_item("b"), patience=0)
    assert not second.is_alone
    first.leave(_item("b", "watch"))
    second.enter(_item("b", "watch"), patience=0)


def test_those_that_no_watch_may_disturb_run_together(two: tuple[Quiet, Quiet]) -> None:
    for each in two:
        each.enter(_item("a", "unwatched"), patience=0)
        assert not each.is_alone
    with pytest.raises(pytest.fail.Exception):
        two[0].enter(_item("b", "watch"), patience=0)


def test_tests_of_a_module_in_a_row_keep_the_lock(two: tuple[Quiet, Quiet]) -> None:
    first, second = two
    first.enter(_item("a", "watch"))
    first.leave(_item("a", "watch"))
    with pytest.raises(pytest.fail.Exception):
        second.enter(_item("b", "watch"), patience=0)
    first.leave(_item("a"))
    second.enter(_item("b", "watch"), patience=0)


def test_a_failure_beside_a_watch_names_it() -> None:
    words = ["/usr/bin/buildidfs", "-c", "open(0).read()", "--store", "/s", "watch"]
    start = "import subprocess, sys; subprocess.Popen(sys.argv[1:], executable=sys.executable)"
    report: Any = SimpleNamespace(failed=True, longrepr=SimpleNamespace())
    report.longrepr.reprcrash = SimpleNamespace(message="target is busy")
    with subprocess.Popen(words, executable=sys.executable, stdin=subprocess.PIPE) as process:
        assert process.pid not in watches(), "it is our own"
        process.kill()
    # Its parent ends at once, so that it is nobody's.
    with subprocess.Popen([sys.executable, "-c", start, *words], stdin=subprocess.PIPE):
        line = " ".join(words)
        (pid,) = until(lambda: [pid for pid, text in watches().items() if text == line], "a watch")
        explain(report)
    assert f"process {pid}: {line}" in report.longrepr.reprcrash.message
    assert report.longrepr.reprcrash.message.endswith("): target is busy")
