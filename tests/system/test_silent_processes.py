# SPDX-License-Identifier: Apache-2.0
"""Processes that never answer cost no other process a file, and no command its end."""

from __future__ import annotations

import contextlib
import subprocess
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.flooding import beside
from tests.support.mounts import COMMAND
from tests.support.shortlife import ShortLife
from tests.support.silentprocesses import silent_processes
from tests.support.watching import watching

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.clients import Argument

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.host]

_PROGRAMS = 50
_END_S = 5.0


@pytest.mark.slow
@pytest.mark.watch
@pytest.mark.parametrize(
    ("count", "is_before"), [(1, False), (12, True), (24, False)], ids=["1", "12-before", "24"]
)
def test_watch_captures_all_other_programs(directory: Path, count: int, is_before: bool) -> None:
    store = directory / "store"
    with ShortLife(directory / "items") as items, contextlib.ExitStack() as stack:
        silence = silent_processes(directory / "silent", count)
        pids = stack.enter_context(silence) if is_before else []
        with watching(store) as watcher:
            pids = pids or stack.enter_context(silence)
            host, container = beside(items, _PROGRAMS)
            assert watcher.captured(host).complete, "of the host"
            assert watcher.captured(container).complete, "of the second container"
            time.sleep(2.5)  # the watch updates its state every two seconds
            code, said = _ends(["--store", store, "status"])
            assert code == 4, said
            assert "not answer" in said, said
            assert any(f"{pid} (silentprocess)" in said for pid in pids), said
            began = time.monotonic()
            watcher.stop()
            assert time.monotonic() - began < 2 * _END_S


@pytest.mark.slow
def test_commands_end_and_name_them(directory: Path) -> None:
    store = directory / "store"
    _ends(["--store", store, "scan", "proc"])  # the copies take longer than all the rest
    with silent_processes(directory / "silent", 24) as pids:
        for words in (["scan", "proc"], ["stats"], ["where", "--live", "--path", "*/libc.so.6"]):
            began = time.monotonic()
            _, said = _ends(["--store", store, *words])
            assert time.monotonic() - began < _END_S, (words, said)
            assert "not answer" in said, said
            assert any(str(pid) in said for pid in pids), said


def _ends(words: list[Argument]) -> tuple[int, str]:
    """Run a command; a command that hangs is killed."""
    ran = subprocess.run(
        [*COMMAND, *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=4 * _END_S, check=False,
    )  # fmt: skip
    return ran.returncode, ran.stdout.decode(errors="replace")
