# SPDX-License-Identifier: Apache-2.0
"""A control group of a test process and its descendants, so that a watch can follow them alone."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.support.containers.imitating import new_group, unified_hierarchy

_MEMBERS: Final = "cgroup.procs"
_PATIENCE_S: Final = 30.0


@contextlib.contextmanager
def own_group() -> Iterator[Path]:
    """Move this process and its descendants into a new control group, and back at the end.

    Descendants in another group than this process, such as those of container engines, stay there.
    Groups of nested blocks are nested: a watch of the outer one follows the inner one, too.
    """
    home = _group_of(os.getpid())
    group = new_group(home)
    try:
        _move(_family(home), group)
        yield group
    finally:
        _dissolve(group, home)


def _group_of(pid: int) -> Path:
    """Return the directory of a process's group of version 2."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            return unified_hierarchy() / line[3:].lstrip("/")
    raise FileNotFoundError(f"process {pid} is in no control group of version 2")


def _family(home: Path) -> list[int]:
    """Return this process and its descendants that are in a group, parents first."""
    members = _members(home)
    parents = {}
    for pid in members:
        with contextlib.suppress(OSError):  # it has ended
            stat = Path(f"/proc/{pid}/stat").read_text()
            parents[pid] = int(stat.rpartition(")")[2].split()[1])
    found = [os.getpid()]
    for parent in found:
        found += [pid for pid in members if parents.get(pid) == parent]
    return found


def _members(group: Path) -> list[int]:
    return [int(word) for word in (group / _MEMBERS).read_text().split()]


def _move(pids: list[int], group: Path) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            (group / _MEMBERS).write_text(str(pid))


def _dissolve(group: Path, home: Path) -> None:
    """Move all processes of a group back, also those that are forked meanwhile; remove it."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        _move(_members(group), home)
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return
