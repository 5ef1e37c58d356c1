# SPDX-License-Identifier: Apache-2.0
"""Mount a store or a bundle, and unmount it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Sequence


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


def unmount(mountpoint: str) -> None:
    """Take a mount of ours away; raises `MountError`."""
    import os

    from buildidfs.mount import mountpoint as mount_mountpoint

    mount_mountpoint.unmount(os.fsencode(os.path.abspath(mountpoint)))
