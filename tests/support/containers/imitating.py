# SPDX-License-Identifier: Apache-2.0
"""Control groups of containers, and of a user who gives one the ID of a container of root."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from buildidfs.formats import proc_text
from buildidfs.linux import mounts

USER: Final = 4242

_PREFIX: Final = "buildidfs-test-"

_ENTER: Final = 'echo 0 > "$0/cgroup.procs" && exec "$@"'


def entering(group: Path) -> tuple[str, ...]:
    """Return the beginning of a command that runs in a control group."""
    return ("sh", "-c", _ENTER, os.fspath(group))


def unified_hierarchy() -> Path:
    """Return the directory of the control groups of version 2."""
    return next(
        Path(os.fsdecode(each.mount_point))
        for each in proc_text.mounts_in(mounts.mountinfo())
        if each.fstype == b"cgroup2" and each.root == b"/"
    )


def new_group(parent: Path) -> Path:
    """Make a control group whose name has the process ID of its owner, for `sweep_groups`."""
    group = parent / f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    group.mkdir()
    return group


def sweep_groups() -> None:
    """Remove the groups of owners that have ended, unless processes are left in them."""
    # Groups inside others come first. A group may go while its parent is read.
    for path, names, _ in os.walk(unified_hierarchy(), topdown=False):
        for name in names:
            owner = name.removeprefix(_PREFIX).partition("-")[0]
            if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
                with contextlib.suppress(OSError):
                    Path(path, name).rmdir()


@contextlib.contextmanager
def control_group() -> Iterator[Path]:
    """An empty control group."""
    group = new_group(unified_hierarchy())
    try:
        yield group
    finally:
        _remove(group)


@contextlib.contextmanager
def container_and_imitation() -> Iterator[tuple[Path, Path]]:
    """Two control groups with the ID of one container: its own, and that of a user."""
    hierarchy = unified_hierarchy()
    name = secrets.token_hex(4)
    scope = f"docker-{secrets.token_hex(32)}.scope"
    containers, delegated = hierarchy / f"containers-{name}", hierarchy / f"delegated-{name}"
    groups = (containers / scope, delegated / scope)
    for each in (containers, delegated):
        each.mkdir()
    os.chown(delegated, USER, USER)
    for group in groups:
        group.mkdir()
    os.chown(groups[1], USER, USER)
    try:
        yield groups
    finally:
        for group in (*groups, containers, delegated):
            _remove(group)


def _remove(group: Path) -> None:
    """Remove a group when its last process is gone."""
    until = time.monotonic() + 30
    while True:
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)
        else:
            return
