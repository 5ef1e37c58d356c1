# SPDX-License-Identifier: Apache-2.0
"""``buildidfs remove``: take files out of the store again."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from buildidfs.cli.common import BuildIdArgument, Session, exit_status
from buildidfs.cli.output import json_line, path_fields, printable, size
from buildidfs.errors import UsageError

if TYPE_CHECKING:
    from buildidfs.app.ingesting import Chosen


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
    from buildidfs.app import ingesting

    with session.open_store() as store:
        chosen = ingesting.choose(store, wanted)
        pinned = next((each for each in chosen if each.is_pinned), None)
        if pinned is not None and not dry_run and not force:
            raise UsageError(
                f"build ID {pinned.build_id} is pinned: unpin it, or remove it with --force"
            )
        if not dry_run:
            store.remove(each.artifact.digest for each in chosen)
    for each in chosen:
        _print(each, json_)
    if not json_ and not session.is_quiet:
        total = size(sum(each.artifact.size for each in chosen))
        sys.stdout.write(f"{len(chosen)} {'to remove' if dry_run else 'removed'} ({total})\n")
    sys.stdout.flush()


def _print(each: Chosen, json_: bool) -> None:
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
