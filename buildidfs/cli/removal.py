# SPDX-License-Identifier: Apache-2.0
"""Remove or compress what the store holds: ``remove``, ``prune``, ``gc``, ``compress``."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import click

from buildidfs.cli.common import BuildIdArgument, Session, exit_status
from buildidfs.cli.output import counted, json_line, moment, path_fields, printable, size
from buildidfs.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.app.catalog import Chosen
    from buildidfs.config import RetentionSettings
    from buildidfs.store import Store
    from buildidfs.store.retention.policy import Choice, Policy
_AT_ONCE = 256
_DEFAULT = "30d"


@click.command(
    "remove",
    short_help="Remove files from the store.",
    epilog=exit_status(
        [
            "buildidfs remove 8e9fd827446c24067541ac5390e6f527fb5947bb",
            "buildidfs remove --dry-run '*/a.out' '/home/*/build/*'",
        ],
        {
            2: "a prefix that several build IDs share, or something is pinned",
            11: "no store at that place; 13 unknown format",
            30: "nothing is known of that build ID, or was seen at such a path",
        },
    ),
)
@click.argument("wanted", metavar="ID|GLOB...", nargs=-1, required=True, type=BuildIdArgument())
@click.option("--dry-run", is_flag=True, help="Say what would be removed; change nothing.")
@click.option("--force", is_flag=True, help="Remove also what is pinned.")
@click.option("--json", "json_", is_flag=True, help="One JSON object a line.")
@click.pass_obj
def remove(
    session: Session, wanted: tuple[str, ...], dry_run: bool, force: bool, json_: bool
) -> None:
    """Remove everything kept under a build ID, or the files seen at certain paths.

    A unique prefix of an ID is enough; a GLOB has to match the whole path. Who has such a file
    open in a mount can read it to its end. What is still in use is captured again by the next scan.
    """
    from buildidfs.app import catalog

    with session.open_store() as store:
        chosen = catalog.choose(store, wanted)
        pinned = next((each for each in chosen if each.is_pinned), None)
        if pinned is not None and not dry_run and not force:
            raise UsageError(
                f"build ID {pinned.build_id} is pinned: unpin it, or remove it with --force"
            )
        if not dry_run:
            store.remove((each.artifact.digest for each in chosen), forget=True)
    for each in chosen:
        _print_removed(each, json_)
    if not json_ and not session.is_quiet:
        total = size(sum(each.artifact.size for each in chosen))
        sys.stdout.write(f"{len(chosen)} {'to remove' if dry_run else 'removed'} ({total})\n")
    sys.stdout.flush()


def _print_removed(each: Chosen, json_: bool) -> None:
    artifact = each.artifact
    if json_:
        json_line(
            {
                "build_id": each.build_id.hex(),
                "kind": artifact.kind.name.lower(),
                "sha256": artifact.digest.hex(),
                "size": artifact.size,
                "pinned": each.is_pinned,
                **path_fields(each.path),
            }
        )
    else:
        sys.stdout.write(
            f"{each.build_id.hex():40}  {artifact.kind.name.lower():10}"
            f"  {size(artifact.size):>10}  {printable(each.path)}"
            f"{'  (pinned)' if each.is_pinned else ''}\n"
        )


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
    from buildidfs.app import upkeep
    from buildidfs.errors import StoreFull

    policy = upkeep.policy(settings, store.path)
    if not dry_run:
        store.fold_uses()
    blobs = freed = 0
    for choice in _choices(store, policy, dry_run, verbose):
        blobs += choice.goes
        freed += choice.candidate.size if choice.goes else 0
        if json_:
            _choice_json(choice)
        elif not session.is_quiet:
            click.echo(_choice_text(choice))
    if json_ and not blobs:
        session.say_why_empty("nothing has to go: the store is within its limits")
    if not json_ and not session.is_quiet:
        click.echo(
            f"{counted(blobs, 'blob')}, {size(freed)}, {'would go' if dry_run else 'removed'}"
        )
    if not dry_run:
        store.collect()
        freed = 0
    lacking = {name: lack - freed for name, lack in store.exceeded(policy).items()}
    left = {name: lack for name, lack in lacking.items() if lack > 0}
    if not left:
        return 0
    if not dry_run and next(store.plan(policy, upkeep.altlinks(store)), None) is not None:
        return 0  # there is more to remove: another process captures at this moment
    what = ", ".join(f"{name} by {size(lack)}" for name, lack in left.items())
    verb = "would still be" if dry_run else "still"
    click.echo(f"buildidfs: {verb} exceeded: {what}: what is left may not be removed", err=True)
    return StoreFull.exit_code


def _choices(store: Store, policy: Policy, dry_run: bool, verbose: bool) -> Iterator[Choice]:
    from buildidfs.app import upkeep

    plan = store.plan(policy, upkeep.altlinks(store), stays=verbose)
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


def _choice_text(choice: Choice) -> str:
    what = choice.candidate
    build_ids = " ".join(build_id.hex() for build_id in what.build_ids)
    kinds = ",".join(kind.name.lower() for kind in what.kinds)
    days = max(0, int(time.time()) - what.used) // 86_400
    return (
        f"{'remove' if choice.goes else 'keep'}  {build_ids} {kinds}  {size(what.size)},"
        f" used {moment(what.used * 1_000_000_000)} ({counted(days, 'day')} ago),"
        f" {printable(choice.path)}: {printable(choice.why.encode(errors='surrogateescape'))}"
    )


def _choice_json(choice: Choice) -> None:
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


@click.command(
    "gc",
    short_help="Remove what killed processes have left.",
    epilog=exit_status(
        ["buildidfs gc", "buildidfs gc --json"],
        {11: "no store at that place; 13 unknown format"},
    ),
)
@click.option("--json", "json_", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def gc(session: Session, json_: bool) -> None:
    """Remove what nothing in the store speaks of: blobs of captures that were cut off, the rest of
    removals that were, and drafts.

    What is younger than an hour is left alone. Captures and readers go on meanwhile. A watch does
    the same once a day. The quarantine is counted, and kept for inspection.
    """
    with session.open_store() as store:
        found = store.collect()
    if json_:
        json_line(
            {
                "blobs": found.blobs,
                "bytes": found.bytes,
                "build_ids": found.ids,
                "names": found.names,
                "drafts": found.drafts,
                "quarantined": found.quarantined,
                "quarantine_bytes": found.quarantine_bytes,
            }
        )
        return
    if not session.is_quiet:
        click.echo(
            f"removed {counted(found.blobs, 'blob')} that nothing spoke of ({size(found.bytes)}),"
            f" what was left of {counted(found.ids, 'build ID')}, {counted(found.drafts, 'draft')}"
        )
    if found.quarantined:
        click.echo(
            f"kept {counted(found.quarantined, 'file')} in quarantine"
            f" ({size(found.quarantine_bytes)})"
        )


@click.command(
    "compress",
    short_help="Compress what was not used for long.",
    epilog=exit_status(
        ["buildidfs compress", "buildidfs compress --unused-for 7d"],
        {10: "the Python package zstandard is missing", 11: "no store at that place"},
    ),
)
@click.option(
    "--unused-for", metavar="AGE", help="For so long, e.g. 30d.  [default: as set, or 30d]"
)
@click.option("--json", "json_", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def compress(session: Session, unused_for: str | None, json_: bool) -> None:
    """Compress what was not used for long. It is read as before, from any place.

    A watch does the same once a day, if [retention] compress-after is set.
    """
    from buildidfs import config
    from buildidfs.app import upkeep

    after = upkeep.compress_after(session.settings)
    if unused_for is not None or after is None:
        after = config.seconds(unused_for or _DEFAULT)
    with session.open_store() as store:
        blobs, before, now = upkeep.compress(store, after)
    if json_:
        json_line({"blobs": blobs, "before": before, "after": now})
    elif not session.is_quiet:
        click.echo(f"compressed {counted(blobs, 'blob')}, from {size(before)} to {size(now)}")
