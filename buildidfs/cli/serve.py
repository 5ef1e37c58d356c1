# SPDX-License-Identifier: Apache-2.0
"""Serve the store over HTTP."""

from __future__ import annotations

import logging
import os
import re
from typing import TYPE_CHECKING, Final

import click

from buildidfs.cli import terminal
from buildidfs.cli.common import Session, exit_status
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
            "buildidfs serve --listen :8002 --workers 2",
            "buildidfs serve --listen unix:/run/buildidfs.sock",
            "DEBUGINFOD_URLS=http://127.0.0.1:8002 gdb -c core",
        ],
        {
            2: "not an address, or the extra buildidfs[serve] is not installed",
            11: "no store at that place; 13 unknown format",
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

    from buildidfs.fleet import reading
    from buildidfs.linux.sdnotify import Notifier
    from buildidfs.serve import options
    from buildidfs.symbolize.addresses import PublicSymbolizer
    from buildidfs.watch import metrics

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
    settings = msgspec.structs.replace(
        session.settings.serve, **{name: each for name, each in given.items() if each is not None}
    )
    with needs_extra("serve"):
        from buildidfs.serve import server
        from buildidfs.serve.page.site import Page
    chosen = options.ServeOptions(
        session.store_path,
        options.parse_address(settings.listen or options.DEFAULT_LISTEN),
        workers=settings.workers,
        cors=settings.cors,
        rate=settings.rate,
        timeout=settings.timeout,
        metrics_of=lambda store: metrics.of_store(store, session.settings.retention),
        pages_of=lambda backend: Page(backend, session.settings, drop=settings.drop),
        engine_of=PublicSymbolizer,
        opened=reading.opener(session.settings, private=False),
        agent_of=_agent_of(session) if settings.fetch else None,
        home=settings.home_redirect,
        hosts=frozenset(name.lower() for name in settings.hosts),
    )
    notifier = Notifier(os.environ)

    def ready(where: str) -> None:
        if not session.is_quiet:
            terminal.complain(f"serving at {where}")
        notifier.ready(f"serving at {where}")

    server.run(chosen, os.environ, ready)


def _agent_of(session: Session) -> Callable[[], Agent] | None:
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
