# SPDX-License-Identifier: Apache-2.0
"""Mount and unmount the store."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from buildidfs.cli.common import AnyPath, Session, exit_status
from buildidfs.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.upstream.agent import Agent


@click.command(
    "mount",
    short_help="Present the store as files.",
    epilog=exit_status(
        [
            "buildidfs mount /buildid",
            "buildidfs mount --foreground -o allow_other ~/buildid",
            "buildidfs mount --fetch /buildid",
            "buildidfs mount --bundle crash.tar.zst /mnt",
            "gdb -iex 'set debug-file-directory /buildid/debug' -c core",
            "perf --buildid-dir /buildid/perf report",
            "DEBUGINFOD_URLS=file:///buildid debuginfod-find executable ID",
        ],
        {
            2: "wrong usage: --fetch, and no upstream is configured",
            11: "no store at that place; 13 unknown format",
            40: "cannot mount: busy, missing, not empty, no /dev/fuse, no fusermount3",
        },
    ),
)
@click.argument("mountpoint", metavar="MOUNTPOINT", type=AnyPath())
@click.option("--foreground", is_flag=True, help="Stay attached; log to standard error.")
@click.option(
    "-o",
    "options",
    metavar="OPT,...",
    multiple=True,
    help="Mount options, see buildidfs-mount(7): allow_other, noallow_other, read_ahead_kb=N,"
    " loop=fast|plain, gdb_scripts=zero|keep, list_all.",
)
@click.option(
    "--gdb-scripts",
    type=click.Choice(["zero", "keep"]),
    help="zero (the default): .debug_gdb_scripts reads as zeros, except in files of system"
    " directories of the host, or that you named. keep: it reads as it is, and gdb may run it.",
)
@click.option(
    "--list-all",
    is_flag=True,
    help="List all build IDs for all users, even those without a file that the user may read.",
)
@click.option(
    "--fetch", is_flag=True, help="Fetch missing debuginfo from upstream servers when it is opened."
)
@click.option(
    "--bundle", metavar="FILE", type=AnyPath(), help="Mount a bundle; no store is needed."
)
@click.pass_obj
def mount(
    session: Session,
    mountpoint: str,
    foreground: bool,
    options: tuple[str, ...],
    gdb_scripts: str | None,
    list_all: bool,
    fetch: bool,
    bundle: str | None,
) -> None:
    """Mount the store at MOUNTPOINT, read-only, for gdb, perf, lldb, elfutils, drgn and people.

    Returns when the files can be read. The mount continues in the background until `buildidfs
    unmount`. New captures appear at once.
    """
    from buildidfs.fleet import reading
    from buildidfs.linux.sdnotify import Notifier
    from buildidfs.mount import daemonize as mounting

    if not session.verbosity:
        session.start_logging()
    chosen = [*session.settings.mount.options]
    for group in options:
        chosen += [option for option in group.split(",") if option]
    mounting.mount(
        session.store_path if bundle is None else bundle,
        mountpoint,
        options=chosen,
        gdb_scripts=gdb_scripts or session.settings.mount.gdb_scripts,
        list_all=list_all or session.settings.mount.list_all,
        bundle=bundle is not None,
        foreground=foreground,
        ready=Notifier(os.environ).ready,
        agent_of=_agent_of(session, fetch=fetch, bundle=bundle is not None),
        opened=None if bundle else reading.opener(session.settings),
    )


def _agent_of(session: Session, *, fetch: bool, bundle: bool) -> Callable[[], Agent] | None:
    """Return a function that makes the agent that fetches missing files; None if it is disabled.

    Raises `UsageError`.
    """
    if fetch and bundle:
        raise UsageError("--fetch is for a store: nothing can be added to a bundle")
    if bundle or not (fetch or session.settings.mount.fetch):
        return None
    from buildidfs.profile import fetch as fetching

    maker = fetching.agent_maker(session.store_path, session.settings, os.environ)
    if maker is None:
        raise UsageError(fetching.NO_UPSTREAM)
    return maker


@click.command(
    "unmount",
    short_help="Unmount the store.",
    epilog=exit_status(
        ["buildidfs unmount /buildid"], {40: "not a mount of buildidfs, or it cannot be unmounted"}
    ),
)
@click.argument("mountpoint", metavar="MOUNTPOINT", type=AnyPath())
@click.pass_obj
def unmount(session: Session, mountpoint: str) -> None:
    """Unmount MOUNTPOINT. Files that are still open stay readable until they are closed.

    The command waits for the end of the mount's process if no file is open and --store selects the
    store of the mount.
    """
    from buildidfs.mount import daemonize as mounting

    mounting.unmount(mountpoint, session.store_path)
