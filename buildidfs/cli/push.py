# SPDX-License-Identifier: Apache-2.0
"""``buildidfs push``: upload files of the store to the bucket of the fleet."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import click

from buildidfs.cli import terminal
from buildidfs.cli.common import BuildIdArgument, Session, exit_status
from buildidfs.cli.output import counted, json_line, one_line, size
from buildidfs.errors import UsageError

if TYPE_CHECKING:
    from buildidfs.fleet.push import Pusher, Summary
    from buildidfs.model import BuildId
    from buildidfs.store import Store


@click.command(
    "push",
    short_help="Upload captured files to a bucket.",
    epilog=exit_status(
        [
            "buildidfs push --all",
            "buildidfs push --watch --rate 10MiB",
            "buildidfs push 5d8f",
        ],
        {
            2: "no bucket is configured, or the extra for it is not installed",
            3: "some files could not be pushed; a line for each is on standard error",
            30: "nothing known under a build ID",
            50: "the bucket is missing, refuses the request, or does not answer",
        },
    ),
)
@click.argument("ids", metavar="ID...", nargs=-1, type=BuildIdArgument())
@click.option("--all", "all_", is_flag=True, help="Push all files of the store.")
@click.option("--watch", is_flag=True, help="Push all files, then new captures, until stopped.")
@click.option(
    "--rate", metavar="SIZE", help="Send at most this many bytes per second.  [default: no limit]"
)
@click.option("--verify", is_flag=True, help="Compare all files again.")
@click.option("--json", "json_", is_flag=True, help="Print the counts as a JSON object.")
@click.pass_obj
def push(
    session: Session,
    ids: tuple[str, ...],
    all_: bool,
    watch: bool,
    rate: str | None,
    verify: bool,
    json_: bool,
) -> int:
    """Push the files of build IDs, or all, to the bucket in [remote] url.

    The push sends the files that the bucket lacks, and overwrites nothing: if the bucket has other
    bytes for a build ID, the file goes below variant/. Files that not every user could read go to
    the bucket in [remote] private, or stay here. A push continues one that was interrupted.
    """
    if sum((bool(ids), all_, watch)) != 1:
        raise UsageError("push takes build IDs, or one of --all and --watch")
    from buildidfs.fleet.push import PATIENCE_S, Pusher, settings_of

    if watch and not session.verbosity:
        session.start_logging()
    patience = None if watch else PATIENCE_S
    options = settings_of(session.settings.remote, rate=rate, verify=verify, patience_s=patience)
    with (
        session.open_store() as store,
        Pusher(store, session.settings.remote, options) as pusher,
    ):
        if watch:
            _watch(pusher)
            return 0
        chosen = [_found(store, text) for text in ids] if ids else None
        with session.progress("Pushing") as line:
            summary = pusher.run(chosen, line)
    return _report(session, summary, json_=json_)


def _watch(pusher: Pusher) -> None:
    from buildidfs.linux.sdnotify import Notifier

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: pusher.stop())
    pusher.follow(Notifier(os.environ).ready)


def _found(store: Store, text: str) -> tuple[int, BuildId]:
    build_id = store.match(text)
    ordinal = store.index.ordinal(build_id)
    assert ordinal is not None
    return ordinal, build_id


def _report(session: Session, summary: Summary, *, json_: bool) -> int:
    for failure in summary.failed:
        terminal.complain(f"cannot push {one_line(failure)}")
    if json_:
        names = ("pushed", "variants", "present", "private", "leased")
        counts = {name: getattr(summary, name) for name in names}
        json_line({**counts, "failed": len(summary.failed), "bytes": summary.bytes})
    elif not session.is_quiet:
        left_out = (
            (summary.private, "private and not pushed"),
            (summary.leased, "being pushed by other hosts"),
        )
        terminal.say(
            f"{counted(summary.pushed, 'file')} pushed ({size(summary.bytes)}),"
            f" {counted(summary.variants, 'variant')}, {summary.present} in the bucket before"
            + "".join(f", {count} {what}" for count, what in left_out if count)
        )
    return 3 if summary.failed else 0
