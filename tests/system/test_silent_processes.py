# SPDX-License-Identifier: Apache-2.0
"""Processes that never answer cost no other process a file, and no command its end."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
import urllib.request
from typing import TYPE_CHECKING

import pytest

from buildidfs.config import Settings
from buildidfs.serve.page import overview
from buildidfs.store import Store
from buildidfs.store.run_files import present
from tests.support.containers.flooding import beside
from tests.support.containers.shortlife import ShortLife
from tests.support.harness.mounts import COMMAND
from tests.support.harness.silentprocesses import silent_processes
from tests.support.harness.waiting import until
from tests.support.harness.watching import watching
from tests.support.servers.serving import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.clients.tools import Argument

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.host]

_PROGRAMS = 50
_END_S = 5.0


_COUNTS = [(1, False), (12, True), (12, False), (24, True), (24, False)]


@pytest.mark.slow
@pytest.mark.watch
@pytest.mark.parametrize(
    ("count", "is_before"), _COUNTS, ids=[f"{n}-{'before' * b or 'after'}" for n, b in _COUNTS]
)
def test_watch_captures_all_other_programs(
    directory: Path, tmp_path: Path, count: int, is_before: bool
) -> None:
    store, address = tmp_path / "store", f"127.0.0.1:{free_port()}"
    with ShortLife(directory / "items") as items, contextlib.ExitStack() as stack:
        silence = silent_processes(directory / "silent", count)
        pids = stack.enter_context(silence) if is_before else []
        with watching(store, "--metrics", address) as watcher:
            pids = pids or stack.enter_context(silence)
            host, container = beside(items, _PROGRAMS)
            assert watcher.captured(host).complete, "of the host"
            assert watcher.captured(container).complete, "of the second container"
            until(lambda: _are_named(str(watcher.facts["degraded"]), pids), "the names of all")
            code, said = _ends(["--store", store, "status"])
            assert code in (4, 5), said  # 5 if the host loses files of other tests
            assert _are_named(said, pids), said
            with Store.open(store, read_only=True) as opened:
                (shown,) = overview.take(opened, Settings(), None).health.degraded
            assert _are_named(shown, pids), shown
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
                assert b"\nbuildidfs_degraded 1.0\n" in answer.read()
            began = time.monotonic()
            watcher.stop()
            assert time.monotonic() - began < 2 * _END_S


def _are_named(said: str, pids: list[int]) -> bool:
    """Return True if a text has the names of some processes, and names or counts all."""
    named = [pid for pid in pids if f"{pid} (silentprocess)" in said]
    others = map(int, re.findall(r"(\d+) more", said))
    return bool(named) and len(named) + sum(others) >= len(pids)


@pytest.mark.slow
def test_down_ends_all_parts_beside_them(directory: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with silent_processes(directory / "silent", 12):
        try:
            code, said = _ends(["--store", store, "up", "--no-mount"])
            assert code in (0, 4, 5), said
        finally:
            began = time.monotonic()
            code, said = _ends(["--store", store, "down"])
        assert code == 0, said
        assert time.monotonic() - began < 2 * _END_S
        assert not present(store)


@pytest.mark.slow
def test_commands_end_and_name_them(directory: Path, tmp_path: Path) -> None:
    commands = (["scan", "proc"], ["stats"], ["where", "--live", "--path", "*/libc.so.6"])
    store = tmp_path / "store"
    # On a busy host a command may take longer than the limit anyway.
    before = [_timed(["--store", store, *words])[0] for words in commands]
    beside = []
    with silent_processes(directory / "silent", 24) as pids:
        for words in commands:
            took, said = _timed(["--store", store, *words])
            beside.append(took)
            assert "not answer" in said, said
            assert any(str(pid) in said for pid in pids), said
    after = [_timed(["--store", store, *words])[0] for words in commands]
    for words, took, *usual in zip(commands, beside, before, after, strict=True):
        # A scan also copies new files of all other tests.
        assert took < max(4 * _END_S, 2 * max(usual)), (words, took, usual)


def _timed(words: list[Argument]) -> tuple[float, str]:
    began = time.monotonic()
    _, said = _ends(words)
    return time.monotonic() - began, said


def _ends(words: list[Argument]) -> tuple[int, str]:
    """Run a command; a command that hangs is killed."""
    ran = subprocess.run(
        [*COMMAND, *words],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        timeout=12 * _END_S, check=False,
    )  # fmt: skip
    return ran.returncode, ran.stdout.decode(errors="replace")
