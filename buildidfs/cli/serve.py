# SPDX-License-Identifier: Apache-2.0
"""Give the store to clients: ``buildidfs serve`` over HTTP, ``mount`` and ``unmount`` as files."""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, Final

import click

from buildidfs.cli import terminal
from buildidfs.cli.common import NO_STORE, AnyPath, Session, exit_status
from buildidfs.errors import UsageError, needs_extra

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.upstream.agent import Agent


_URL: Final = re.compile(r"[\x21-\x7e]{1,2000}")


@click.command(
    "serve",
    short_help="Serve the store over HTTP, as a debuginfod.",
    epilog=exit_status(
        [
            "buildidfs serve",
            "DEBUGINFOD_URLS=http://127.0.0.1:8002 gdb -c core",
        ],
        {
            2: "not an address, or the extra buildidfs[serve] is not installed",
            **NO_STORE,
            40: "cannot listen at that address",
        },
    ),
)
@click.option(
    "--listen",
    metavar="ADDRESS",
    help="HOST:PORT, :PORT or unix:PATH. Sockets that systemd passes come first."
    "  [default: 127.0.0.1:8002]",
)
@click.option(
    "--workers",
    metavar="N",
    type=click.IntRange(1, 64),
    help="Number of processes that answer.  [default: 1]",
)
@click.option("--cors", is_flag=True, help="Let web pages of other origins read the answers.")
@click.option("--no-fetch", is_flag=True, help="Do not ask upstream servers for missing files.")
@click.option("--drop", is_flag=True, help="Let visitors of the page upload profiles and cores.")
@click.option("--home-redirect", metavar="URL", help="Send browsers that ask for / to this page.")
@click.pass_obj
def serve(
    session: Session,
    listen: str | None,
    workers: int | None,
    cors: bool,
    no_fetch: bool,
    drop: bool,
    home_redirect: str | None,
) -> None:
    """Serve the files that all users may read over HTTP. Clients find the server with
    DEBUGINFOD_URLS.

    The server runs until SIGTERM or SIGINT. It serves new captures at once.
    """
    import msgspec

    from buildidfs.linux.sdnotify import Notifier

    if not session.verbosity:
        session.start_logging()
    if home_redirect is not None and not _URL.fullmatch(home_redirect):
        raise UsageError(f"not an address for a browser: {home_redirect!r}")
    given = {
        "listen": listen,
        "workers": workers,
        "cors": cors or None,
        "fetch": False if no_fetch else None,
        "drop": drop or None,
        "home_redirect": home_redirect,
    }
    serving = msgspec.structs.replace(
        session.settings.serve, **{name: each for name, each in given.items() if each is not None}
    )
    with needs_extra("serve"):
        from buildidfs.serve import server
    chosen = server.ServeOptions(
        session.store_path,
        server.parse_address(serving.listen or server.DEFAULT_LISTEN),
        msgspec.structs.replace(session.settings, serve=serving),
        _server_agent(session) if serving.fetch else None,
    )
    notifier = Notifier(os.environ)

    def ready(where: str) -> None:
        if not session.is_quiet:
            terminal.complain(f"serving at {where}", is_error=False)
        notifier.ready(f"serving at {where}")

    server.run(chosen, os.environ, ready)


def _server_agent(session: Session) -> Callable[[], Agent] | None:
    """Return a function that makes the agent that fetches missing files; None without upstream
    servers.

    Raises `UsageError`.
    """
    from buildidfs.profile import fetch as fetching

    maker = fetching.agent_maker(session.store_path, session.settings, os.environ)
    if maker is not None and not os.access(session.store_path, os.W_OK):
        log = logging.getLogger(__name__)
        log.warning("asking no upstream servers: the store cannot be written by this user")
        return None
    return maker


@click.command(
    "mount",
    short_help="Present the store as files.",
    epilog=exit_status(
        [
            "buildidfs mount /buildid",
            "buildidfs mount --bundle crash.tar.zst /mnt",
        ],
        {
            2: "wrong usage: --fetch, and no upstream is configured",
            **NO_STORE,
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
    unmount`. New captures appear at once. A missing store is made if the files can come from a
    bucket or an upstream server.
    """
    from buildidfs.config import marks
    from buildidfs.fleet import reading
    from buildidfs.linux.sdnotify import Notifier
    from buildidfs.mount import daemonize as mounting

    if not session.verbosity:
        session.start_logging()
    chosen = [*session.settings.mount.options]
    for group in options:
        chosen += [option for option in group.split(",") if option]
    opened = None if bundle else reading.opener(session.settings)
    agent_of = _mount_agent(session, fetch=fetch, bundle=bundle is not None)
    if bundle is None and (opened or agent_of) and not os.path.lexists(session.store_path):
        mounting.make_store(session.store_path, mountpoint)
    mounting.mount(
        session.store_path if bundle is None else bundle,
        mountpoint,
        options=chosen,
        gdb_scripts=gdb_scripts or session.settings.mount.gdb_scripts,
        list_all=list_all or session.settings.mount.list_all,
        bundle=bundle is not None,
        foreground=foreground,
        ready=Notifier(os.environ).ready,
        agent_of=agent_of,
        opened=opened,
        settings=marks(session.settings),
    )


def _mount_agent(session: Session, *, fetch: bool, bundle: bool) -> Callable[[], Agent] | None:
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
