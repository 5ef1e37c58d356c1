# SPDX-License-Identifier: Apache-2.0
"""``buildidfs prune``: remove what the limits of the store do not leave room for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.output import json_line, moment, path_fields, printable, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.config import RetentionSettings
    from buildidfs.store import Store
    from buildidfs.store.retention.policy import Choice, Policy

_AT_ONCE = 256


@click.command(
    "prune",
    short_help="Remove what the limits leave no room for.",
    epilog=exit_status(
        [
            "buildidfs prune --dry-run",
            "buildidfs prune --max-size 20G --max-age 90d",
            "buildidfs prune --dry-run -v --json | jq 'select(.goes == false)'",
        ],
        {
            2: "not a size, or not an age",
            11: "no store at that place; 13 unknown format",
            14: "the limits cannot be met: what is left may not be removed",
        },
    ),
)
@click.option("--dry-run", "-n", is_flag=True, help="Say what would be removed; change nothing.")
@click.option("--max-size", metavar="SIZE", help="What blobs and index may take: 50G, 80%.")
@click.option("--keep-free", metavar="SIZE", help="What the filesystem is to have left: 10G, 5%.")
@click.option("--max-age", metavar="AGE", help="Remove what was not used for so long: 30d, 12h.")
@click.option("--min-age", metavar="AGE", help="Keep what was used within that time.")
@click.option("-v", "--verbose", is_flag=True, help="Name what stays as well, and why.")
@click.option("--json", "json_", is_flag=True, help="One JSON object a line.")
@click.pass_obj
def prune(
    session: Session,
    dry_run: bool,
    max_size: str | None,
    keep_free: str | None,
    max_age: str | None,
    min_age: str | None,
    verbose: bool,
    json_: bool,
) -> int:
    """Remove blobs until the store is within its limits, and say of each why it goes.

    What can be had again goes first: the host has the very file still. Then what was not used for
    longest. What is pinned stays. Limits that are not given are those of buildidfs.toml(5), which
    scans and watches keep by themselves.
    """
    from msgspec.structs import replace

    given = {
        "max_size": max_size,
        "keep_free": keep_free,
        "max_age": max_age,
        "min_age": min_age,
    }
    wanted = {name: value for name, value in given.items() if value is not None}
    settings = replace(session.settings.retention, **wanted)
    with session.open_store() as store:
        return _prune(session, store, settings, dry_run, verbose, json_)


def _prune(
    session: Session,
    store: Store,
    settings: RetentionSettings,
    dry_run: bool,
    verbose: bool,
    json_: bool,
) -> int:
    from buildidfs.app.upkeep import retention
    from buildidfs.errors import StoreFull

    policy = retention.policy(settings, store.path)
    if not dry_run:
        store.fold_uses()
    blobs = freed = 0
    for choice in _choices(store, policy, dry_run, verbose):
        blobs += choice.goes
        freed += choice.candidate.size if choice.goes else 0
        if json_:
            _as_json(choice)
        elif not session.is_quiet:
            click.echo(_sentence(choice))
    if json_ and not blobs:
        session.say_why_empty("nothing has to go: the store is within its limits")
    if not json_ and not session.is_quiet:
        click.echo(f"{blobs} blobs, {size(freed)}, {'would go' if dry_run else 'removed'}")
    if not dry_run:
        store.collect()
        freed = 0
    lacking = {name: lack - freed for name, lack in store.exceeded(policy).items()}
    left = {name: lack for name, lack in lacking.items() if lack > 0}
    if not left:
        return 0
    if not dry_run and next(store.plan(policy, retention.altlinks(store)), None) is not None:
        return 0  # there is more to remove: somebody captures it at this moment
    what = ", ".join(f"{name} by {size(lack)}" for name, lack in left.items())
    verb = "would still be" if dry_run else "still"
    click.echo(f"buildidfs: {verb} exceeded: {what}: what is left may not be removed", err=True)
    return StoreFull.exit_code


def _choices(store: Store, policy: Policy, dry_run: bool, verbose: bool) -> Iterator[Choice]:
    from buildidfs.app.upkeep import retention

    plan = store.plan(policy, retention.altlinks(store), stays=verbose)
    return plan if dry_run else _removing(store, plan)


def _removing(store: Store, plan: Iterable[Choice]) -> Iterator[Choice]:
    """Remove what goes, some at a time; gives each once it is done."""
    batch: list[Choice] = []
    for choice in plan:
        batch.append(choice)
        if len(batch) == _AT_ONCE:
            store.remove(each.candidate.digest for each in batch if each.goes)
            yield from batch
            batch.clear()
    store.remove(each.candidate.digest for each in batch if each.goes)
    yield from batch


def _sentence(choice: Choice) -> str:
    what = choice.candidate
    build_ids = " ".join(build_id.hex() for build_id in what.build_ids)
    kinds = ",".join(kind.name.lower() for kind in what.kinds)
    days = max(0, int(time.time()) - what.used) // 86_400
    return (
        f"{'remove' if choice.goes else 'keep'}  {build_ids} {kinds}  {size(what.size)},"
        f" used {moment(what.used * 1_000_000_000)} ({days} days ago),"
        f" {printable(choice.path)}: {printable(choice.why.encode(errors='surrogateescape'))}"
    )


def _as_json(choice: Choice) -> None:
    what = choice.candidate
    json_line(
        {
            "build_ids": [build_id.hex() for build_id in what.build_ids],
            "kinds": [kind.name.lower() for kind in what.kinds],
            "sha256": what.digest.hex(),
            "stored_bytes": what.size,
            "last_used": what.used,
            "goes": choice.goes,
            "why": choice.why.encode(errors="surrogateescape").decode(errors="replace"),
            **path_fields(choice.path),
        }
    )
