# SPDX-License-Identifier: Apache-2.0
"""Upload what the store holds to the bucket of the fleet."""

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
    from buildidfs.app.fleet.push import Pusher
    from buildidfs.app.fleet.uploader import Summary
    from buildidfs.model import BuildId
    from buildidfs.store import Store


@click.command(
    "push",
    short_help="Upload what the store holds to the bucket of the fleet.",
    epilog=exit_status(
        [
            "buildidfs push --all",
            "buildidfs push --watch --rate 10MiB",
            "buildidfs push 5d8f",
        ],
        {
            2: "no bucket is configured, or the extra buildidfs[remote] is not installed",
            3: "some files could not be pushed; a line for each is on standard error",
            30: "nothing known under a build ID",
            50: "the bucket is missing, refuses the request, or does not answer",
        },
    ),
)
@click.argument("ids", metavar="ID...", nargs=-1, type=BuildIdArgument())
@click.option("--all", "all_", is_flag=True, help="Push all files of the store.")
@click.option("--watch", is_flag=True, help="Push all files, then new captures, until stopped.")
@click.option("--rate", metavar="SIZE", help="Bytes a second at most.  [default: no limit]")
@click.option("--verify", is_flag=True, help="Compare all files with the bucket once more.")
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
    """Push the files of build IDs, or all, to the bucket that [remote] url names.

    Sends what the bucket lacks. Nothing in the bucket is overwritten: other bytes for a build ID
    that the bucket has go below variant/. Files that not every user could read go to the bucket
    that [remote] private names, or nowhere. A push that was interrupted goes on where it was.
    """
    if sum((bool(ids), all_, watch)) != 1:
        raise UsageError("push takes build IDs, or one of --all and --watch")
    from buildidfs.app.fleet import uploader
    from buildidfs.app.fleet.push import Pusher

    if watch and not session.verbosity:
        session.start_logging()
    patience = None if watch else uploader.PATIENCE_S
    options = uploader.settings_of(
        session.settings.remote, rate=rate, verify=verify, patience_s=patience
    )
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
        json_line(
            {
                "pushed": summary.pushed,
                "variants": summary.variants,
                "present": summary.present,
                "private": summary.private,
                "leased": summary.leased,
                "failed": len(summary.failed),
                "bytes": summary.bytes,
            }
        )
    elif not session.is_quiet:
        click.echo(
            f"{counted(summary.pushed, 'file')} pushed ({size(summary.bytes)}),"
            f" {counted(summary.variants, 'variant')}, {summary.present} in the bucket before"
            + (f", {summary.private} private" if summary.private else "")
            + (f", {summary.leased} being pushed by other hosts" if summary.leased else "")
        )
    return 3 if summary.failed else 0
