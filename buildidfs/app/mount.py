# SPDX-License-Identifier: Apache-2.0
"""Mount a store or a bundle, and unmount it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from buildidfs.errors import StoreError

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Sequence

_END_S: Final = 10.0


def mount(
    store_path: str | os.PathLike[str],
    mountpoint: str,
    *,
    options: Sequence[str] = (),
    gdb_scripts: str = "zero",
    list_all: bool = False,
    bundle: bool = False,
    foreground: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Mount the store; returns when it can be read, or, in the foreground, when it is unmounted.

    With ``bundle`` it is one that ``store_path`` leads to. In the foreground ``ready`` is called
    when it can be read. Raises `MountError`, `StoreMissing`, `StoreVersionError`.
    """
    from buildidfs.mount import daemonize
    from buildidfs.mount import options as mount_options

    chosen = mount_options.parse(
        store_path, mountpoint, options, gdb_scripts, list_all=list_all, bundle=bundle
    )
    if foreground:
        from buildidfs.mount import session

        session.run(chosen, ready)
    else:
        daemonize.start(chosen)


def unmount(mountpoint: str, store_path: str | os.PathLike[str]) -> None:
    """Take a mount of ours away, and wait for the end of its process if it is of this store.

    The process records what was opened before it ends, so that until then the store is in use. If
    a file is still open, the process goes on, and is not waited for. Raises `MountError`.
    """
    import os
    import select

    from buildidfs.linux import procfs
    from buildidfs.mount import mountpoint as mount_mountpoint

    point = os.fsencode(os.path.abspath(mountpoint))
    with _server(store_path, mount_mountpoint.resolved(point)) as (pid, pidfd):
        is_in_use = mount_mountpoint.unmount(point)
        if pidfd >= 0 and not is_in_use and not procfs.is_stopped(pid):
            select.select([pidfd], [], [], _END_S)


@contextlib.contextmanager
def _server(store_path: str | os.PathLike[str], point: bytes) -> Iterator[tuple[int, int]]:
    """The pid and a pidfd of the process that has mounted a store at ``point``; -1 if not known."""
    import os

    from buildidfs.store import run_files

    pid = pidfd = -1
    for each in reversed(run_files.present(store_path, "mount")):
        if each.path("mountpoint") == point:  # of several on top of each other the last one
            with contextlib.suppress(ProcessLookupError, StoreError):
                pid, pidfd = each.pid, each.pidfd()
            break
    try:
        yield pid, pidfd
    finally:
        if pidfd >= 0:
            os.close(pidfd)
