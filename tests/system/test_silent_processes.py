# SPDX-License-Identifier: Apache-2.0
"""Processes that never answer cost no other process a file, and no command its end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
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

pytestmark = [
    pytest.mark.root,
    pytest.mark.fuse,
    pytest.mark.host,
    pytest.mark.slow,
    pytest.mark.watch,
]

_PROGRAMS = 50
_END_S = 5.0
_HANGS_S = 60.0


_COUNTS = [(24, True), (12, False)]


@pytest.mark.parametrize(
    ("count", "is_before"), _COUNTS, ids=["before-the-watch", "after-its-start"]
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
            watcher.stop()  # which fails if it does not end


def _are_named(said: str, pids: list[int]) -> bool:
    """Return True if a text has the names of some processes, and names or counts all."""
    named = [pid for pid in pids if f"{pid} (silentprocess)" in said]
    others = map(int, re.findall(r"(\d+) more", said))
    return bool(named) and len(named) + sum(others) >= len(pids)


def test_down_ends_all_parts_beside_them(directory: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with silent_processes(directory / "silent", 12):
        try:
            code, said = _ends(["--store", store, "up", "--no-mount"])
            assert code in (0, 4, 5), said
        finally:
            code, said = _ends(["--store", store, "down"])
        assert code == 0, said
        assert not present(store)


def test_commands_end_and_name_them(directory: Path, tmp_path: Path) -> None:
    commands = (["scan", "proc"], ["stats"], ["where", "--live", "--path", "*/libc.so.6"])
    store = tmp_path / "store"
    beside = []
    with silent_processes(directory / "silent", 24) as pids:
        for words in commands:
            took, said = _timed(["--store", store, *words])
            beside.append(took)
            assert "not answer" in said, said
            assert any(str(pid) in said for pid in pids), said
    # On a busy host a command may take longer than the limit anyway.
    after = [_timed(["--store", store, *words])[0] for words in commands]
    for words, took, usual in zip(commands, beside, after, strict=True):
        # A scan also copies new files of all other tests.
        assert took < max(4 * _END_S, 3 * usual), (words, took, usual)


def _timed(words: list[Argument]) -> tuple[float, str]:
    began = time.monotonic()
    _, said = _ends(words)
    return time.monotonic() - began, said


def _ends(words: list[Argument]) -> tuple[int, str]:
    """Run a command; one that hangs fails the test.

    A killed process ends only when the kernel lets go of its threads. If one of them waits for a
    silent process, that is after the block of the silent processes, so the test does not wait here.
    """
    with tempfile.TemporaryFile("w+b") as output:
        argv = [*map(os.fsdecode, [*COMMAND, *words])]
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = process.wait(_HANGS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.returncode = -signal.SIGKILL  # nobody waits for it
            pytest.fail(f"not done after {_HANGS_S} s: {argv}")
        output.seek(0)
        return code, output.read().decode(errors="replace")


_LOOKUP = """
import os, sys
print("begins", flush=True)
os.stat(f"/proc/{sys.argv[1]}/map_files/400000-401000")
"""

_QUESTION = """
import sys
from buildidfs.capture.process.silent_processes import NoAnswer
from buildidfs.capture.process.process import PinnedProcess, Ways
from buildidfs.model import Mapping

with PinnedProcess(int(sys.argv[1]), Ways()) as process:
    try:
        process.open_map_file(Mapping(0x400000, 0x401000, True, 0, (0, 0), 1, b"/bin/true"))
    except NoAnswer:
        print("no answer", flush=True)
"""


def test_a_lookup_of_another_process_does_not_hold_the_end_of_ours(directory: Path) -> None:
    with silent_processes(directory / "silent", 1) as (pid,):
        with subprocess.Popen(
            [sys.executable, "-c", _LOOKUP, str(pid)], stdout=subprocess.PIPE
        ) as first:
            assert first.stdout is not None
            assert first.stdout.readline() == b"begins\n"
            until(lambda: "map_files_lookup" in _stack(first.pid), "the wait for the map")
            done = subprocess.run(
                [sys.executable, "-c", _QUESTION, str(pid)],
                stdout=subprocess.PIPE, timeout=20, check=True,
            )  # fmt: skip
            first.kill()
        assert done.stdout == b"no answer\n"


def _stack(pid: int) -> str:
    with open(f"/proc/{pid}/stack") as stack:
        return stack.read()
