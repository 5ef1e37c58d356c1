# SPDX-License-Identifier: Apache-2.0
"""``buildidfs watch``: capture what is mapped from now on, until stopped."""

from __future__ import annotations

import math
import os
import time
from typing import TYPE_CHECKING

import click

from buildidfs.cli.common import Session, exit_status

if TYPE_CHECKING:
    import threading

    from buildidfs.app.live.state import WatchOptions
    from buildidfs.app.live.watch import Watch
    from buildidfs.cli.watch_output import Presenter
    from buildidfs.linux.sdnotify import Notifier
    from buildidfs.store.run_files import Presence

_TURN_S = 0.25
_TOLD_S = 2.0


@click.command(
    "watch",
    epilog=exit_status(
        [
            "buildidfs watch",
            "buildidfs watch --exclude '/tmp/*'",
            "buildidfs watch --json --no-scan --container docker:0f5c3e8d1b2a",
        ],
        {
            3: "it could not follow everything: events are refused, or processes are out of sight",
            10: "store error",
            60: "/proc is that of another PID namespace",
        },
    ),
)
@click.option("--no-scan", is_flag=True, help="Leave out what runs already.")
@click.option(
    "--container",
    "containers",
    metavar="LABEL",
    multiple=True,
    help="Only this container: its label, or the beginning of its ID.",
)
@click.option(
    "--exclude", metavar="GLOB", multiple=True, help="Not what has such a path in its container."
)
@click.option(
    "--pin-seconds",
    metavar="N",
    type=click.FloatRange(0.1, 3600),
    help="Keep a file that is not copied yet open for so long.  [default: 30]",
)
@click.option(
    "--pin-bytes", metavar="SIZE", help="Keep files open of so many bytes.  [default: 2GiB]"
)
@click.option("--json", "json_", is_flag=True, help="Print each event as a JSON object.")
@click.pass_obj
def watch(
    session: Session,
    no_scan: bool,
    containers: tuple[str, ...],
    exclude: tuple[str, ...],
    pin_seconds: float | None,
    pin_bytes: str | None,
    json_: bool,
) -> int:
    """Capture every binary in the moment it is mapped, in whatever mount namespace.

    A container may be gone a millisecond later. Begins to follow, then scans what runs already,
    then goes on until it is stopped with SIGTERM or SIGINT. Prints a line of counts each minute.
    """
    from buildidfs import config
    from buildidfs.app.live.state import WatchOptions

    defaults = session.settings.watch
    options = WatchOptions(
        pin_seconds=defaults.pin_seconds if pin_seconds is None else pin_seconds,
        pin_bytes=config.size(defaults.pin_bytes if pin_bytes is None else pin_bytes),
        containers=containers,
        exclude=(*defaults.exclude, *exclude),
        scan=not no_scan,
        container_namespaces=session.settings.container.namespaces,
    )
    return _run(session, options, json_=json_)


def _run(session: Session, options: WatchOptions, *, json_: bool) -> int:
    """Watch until a signal says to stop."""
    import signal
    import threading

    from buildidfs import app
    from buildidfs.app.live.state import PARTIAL
    from buildidfs.app.live.watch import Watch
    from buildidfs.app.upkeep.daily import Upkeep, compress_after
    from buildidfs.app.upkeep.scrub import Scrubbing
    from buildidfs.cli.watch_output import Presenter, as_facts, one_line
    from buildidfs.errors import IncompleteError
    from buildidfs.linux.sdnotify import Notifier
    from buildidfs.store.run_files import Presence

    if session.verbosity == 0:
        session.start_logging()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    presenter = Presenter(json_=json_, quiet=session.is_quiet)
    notifier = Notifier(os.environ)
    # What reads as other users is forked before there are threads.
    with app.as_owner(session.settings) as as_owner, session.open_store(create=True) as store:
        watching = Watch(store, options, as_owner=as_owner, tell=presenter.event)
        try:
            with (
                Upkeep(store, compress_after=compress_after(session.settings)),
                Scrubbing(store, session.settings),
                Presence(store.path, "watch", mode="starting") as presence,
            ):
                watching.start()
                notifier.ready(one_line(as_facts(watching.state())))
                _follow(watching, stop, presenter, presence, notifier)
                notifier.stopping()
        finally:
            watching.close()
        state = watching.state()
        presenter.end(state)
    return IncompleteError.exit_code if state.mode in PARTIAL else 0


def _follow(
    watching: Watch,
    stop: threading.Event,
    presenter: Presenter,
    presence: Presence,
    notifier: Notifier,
) -> None:
    """Until ``stop`` is set: tell everybody who wants to know how it is going."""
    from buildidfs.cli.watch_output import as_facts, one_line

    told = alive = -math.inf
    while True:
        watching.tend()
        now = time.monotonic()
        state = watching.state()
        presenter.turn(state, now)
        if now - told >= _TOLD_S:
            told = now
            facts = as_facts(state)
            presence.update(told=now, **facts)
            notifier.status(one_line(facts))
        if notifier.watchdog_s is not None and now - alive >= notifier.watchdog_s:
            alive = now
            notifier.alive()
        if stop.wait(_TURN_S):
            return
