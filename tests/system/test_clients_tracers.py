# SPDX-License-Identifier: Apache-2.0
"""Tools that watch a stripped program run and name its functions from the mount."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.clients.tools import run, tool
from tests.support.elf import programs
from tests.support.elf.programs import line_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.containers.vanished import Vanished

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]


def test_valgrind_by_debuginfod(gone: Vanished, stripped: Path) -> None:
    # valgrind does not look up .build-id, and asks debuginfod through this program
    tool("debuginfod-find")
    argv = [tool("valgrind"), "--leak-check=full", stripped, "leak"]
    overrun = f"lib_static_leak (libhot.c:{line_of('lib_overrun')})"
    caller = f"main (hot.c:{line_of('main_leak')})"
    without = run(argv)
    assert "Invalid write of size 1" in without.err, str(without)
    assert "libhot.c" not in without.err, str(without)
    result = run(argv, env={"DEBUGINFOD_URLS": gone.url})
    assert overrun in result.err, str(result)
    assert caller in result.err, str(result)


def test_bpftrace_by_build_id(gone: Vanished, stripped: Path) -> None:
    program = "profile:hz:199 /pid == %d/ { @[ustack(3)] = count(); } interval:ms:500 { exit(); }"
    with programs.running(stripped, "spin") as pid:
        argv = [tool("bpftrace"), "-p", str(pid), "-e", program % pid]
        without = run(argv, env={"BCC_DEBUGINFO_ROOT": str(gone.debug / "nothing")})
        result = run(argv, env={"BCC_DEBUGINFO_ROOT": str(gone.debug)})
    assert "@[" in without.out, str(without)
    assert "static_hot" not in without.out, str(without)
    assert "exe_static_hot" in result.out, str(result)
    assert "lib_static_hot" in result.out, str(result)
