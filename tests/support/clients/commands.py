# SPDX-License-Identifier: Apache-2.0
"""The programs that documents and examples call by name, in a directory to put on PATH."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.clients.tools import LLDB, Argument, perf_tool, tool
from tests.support.harness import quiet
from tests.support.harness.mounts import COMMAND

ROOT = Path(__file__).resolve().parents[3]


def script(path: Path, *lines: str) -> Path:
    """An executable shell script of these lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines, ""]))
    path.chmod(0o755)
    return path


def calling(path: Path, argv: Sequence[Argument]) -> Path:
    """An executable script that is the command ``argv`` under another name."""
    return script(path, f'exec {shlex.join(map(str, argv))} "$@"')


def program_directory(directory: Path) -> Path:
    """Put ``buildidfs`` into ``directory``; returns that."""
    script(
        directory / "buildidfs",
        f"export PYTHONPATH={shlex.quote(str(ROOT))}",
        f'exec {shlex.join(COMMAND)} "$@"',
    )
    return directory


def client_directory(directory: Path) -> Path:
    """Put clients whose name depends on the system into ``directory``, under their usual one."""
    # some versions of lldb hang now and then
    calling(directory / "lldb", [tool("timeout"), "-k", "5", "60", tool(*LLDB)])
    drgn = shutil.which("drgn", path=str(Path(sys.executable).parent)) or tool("drgn")
    calling(directory / "drgn", [drgn])
    calling(directory / "perf", [tool("flock"), "--close", str(quiet.RECORDINGS), perf_tool()])
    return directory


def path_with(directory: Path) -> str:
    """A value for PATH in which the programs of ``directory`` come first."""
    return f"{directory}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
