# SPDX-License-Identifier: Apache-2.0
"""``buildidfs list``: what is in the store."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.output import json_line, path_fields, printable, size

if TYPE_CHECKING:
    from buildidfs.app.catalog import Conflict


@click.command(
    "list",
    short_help="List what is in the store.",
    epilog=exit_status(
        [
            "buildidfs list --path '*/libc.so.6'",
            "buildidfs list --container docker:0f5c3e8d1b2a --json",
            "buildidfs list --kind debuginfo",
            "buildidfs list --conflicts",
        ],
        {11: "no store at that place; 13 unknown format"},
    ),
)
@click.option("--path", "glob", metavar="GLOB", help="Only files seen at such a path ('*/libc*').")
@click.option("--container", metavar="LABEL", help="Only files seen in this container.")
@click.option(
    "--kind",
    type=click.Choice(["executable", "debuginfo", "vdso", "kallsyms"]),
    help="Only artifacts of this kind.",
)
@click.option("--conflicts", is_flag=True, help="Only what has several variants, with all of them.")
@click.option("--json", "json_", is_flag=True, help="One JSON object a line.")
@click.pass_obj
def list_(
    session: Session,
    glob: str | None,
    container: str | None,
    kind: str | None,
    conflicts: bool,
    json_: bool,
) -> None:
    """List artifacts in the order of their arrival: build ID, kind, size, last seen path.

    With --conflicts those of which there are several variants, the one that is served first,
    and why that is so.
    """
    from buildidfs.app import catalog

    wanted = catalog.origin_filter(glob, container)
    shown = False
    with session.open_store() as store:
        if conflicts:
            for conflict in catalog.conflicts(store, kind, wanted):
                shown = True
                (_conflict_as_json if json_ else _conflict_as_text)(conflict)
            sys.stdout.flush()
            if not shown:
                session.say_why_empty(catalog.why_no_conflicts(store, glob, container, kind))
            return
        for build_id, artifact, record in catalog.artifacts(store, kind, wanted):
            shown = True
            if json_:
                json_line(
                    {
                        "build_id": build_id.hex(),
                        "kind": artifact.kind.name.lower(),
                        "sha256": artifact.digest.hex(),
                        "size": artifact.size,
                        "container": record.origin.container,
                        "last_seen": record.last_seen_ns / 1e9,
                        **path_fields(record.origin.path),
                    }
                )
            else:
                path = printable(record.origin.path)
                where = f"  ({record.origin.container})" if record.origin.container else ""
                sys.stdout.write(
                    f"{build_id.hex():40}  {artifact.kind.name.lower():10}"
                    f"  {size(artifact.size):>10}  {path}{printable(where.encode())}\n"
                )
        sys.stdout.flush()
        if not shown:
            session.say_why_empty(catalog.why_no_artifacts(store, glob, container, kind))


def _conflict_as_json(conflict: Conflict) -> None:
    json_line(
        {
            "build_id": conflict.build_id.hex(),
            "kind": conflict.kind.name.lower(),
            "variants": [
                {
                    "sha256": artifact.digest.hex(),
                    "size": artifact.size,
                    "quality": artifact.quality.name.lower(),
                    "trust": artifact.trust.name.lower(),
                    "first_seen": artifact.first_seen_ns / 1e9,
                    "served": artifact.variant == conflict.served,
                    "why": why,
                    "container": None if record is None else record.origin.container,
                    **({"path": None} if record is None else path_fields(record.origin.path)),
                }
                for artifact, why, record in conflict.variants
            ],
        }
    )


def _conflict_as_text(conflict: Conflict) -> None:
    sys.stdout.write(f"{conflict.build_id.hex():40}  {conflict.kind.name.lower()}\n")
    for artifact, why, record in conflict.variants:
        where = "" if record is None else printable(record.origin.path)
        if record is not None and record.origin.container:
            where += f"  ({printable(record.origin.container.encode())})"
        sys.stdout.write(
            f"  {'' if artifact.variant == conflict.served else 'not '}served: {why}\n"
            f"      {artifact.digest}  {size(artifact.size):>10}  {where}\n"
        )
