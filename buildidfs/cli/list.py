# SPDX-License-Identifier: Apache-2.0
"""``buildidfs list``: the build IDs and files in the store."""

from __future__ import annotations

import sys
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from buildidfs.catalog.containers import Names
from buildidfs.cli import table
from buildidfs.cli.common import SeenPath, Session, container_option, exit_status, since_option
from buildidfs.cli.output import json_line, one_line, path_fields, printable, size
from buildidfs.cli.table import Column

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.catalog.artifacts import Conflict, Place
    from buildidfs.model import Artifact, BuildId, Kind, Origin


class _Listed(NamedTuple):
    """The artifacts of a build ID, each with its newest sighting; the executable is the first."""

    build_id: BuildId
    artifacts: list[tuple[Artifact, Place]]

    @property
    def place(self) -> Place:
        """Return the place of the executable, or else of the debug file."""
        return self.artifacts[0][1]

    @property
    def last_seen_ns(self) -> int:
        return max(place.last_seen_ns for _, place in self.artifacts)

    @property
    def kinds(self) -> list[Kind]:
        return [artifact.kind for artifact, _ in self.artifacts]

    @property
    def size(self) -> int:
        """Return the number of bytes of all artifacts; a file of two kinds counts once."""
        return sum({artifact.digest: artifact.size for artifact, _ in self.artifacts}.values())


_COLUMNS: Final[tuple[Column[_Listed], ...]] = (
    Column("build_id", "BUILD ID", lambda row: row.build_id, table.BUILD_ID),
    Column("kinds", "KINDS", lambda row: row.kinds, table.KINDS),
    Column("size", "SIZE", lambda row: row.size, table.SIZE, 90),
    Column("last_seen", "SEEN", lambda row: row.last_seen_ns, table.AGE),
    Column("container", "CONTAINER", lambda row: row.place.container, table.LABEL),
    Column("path", "PATH", lambda row: row.place.path, table.PATH),
)


@click.command(
    "list",
    short_help="List the build IDs in the store.",
    epilog=exit_status(
        [
            "buildidfs list --path '*/libc.so.6'",
            "buildidfs list --container web --since 2h --json",
            "buildidfs list --kind debuginfo",
            "buildidfs list --conflicts",
        ],
        {11: "no store at that place; 13 unknown format", 30: "no such container was seen"},
    ),
)
@click.option(
    "--path",
    "glob",
    metavar="GLOB",
    type=SeenPath(),
    help="Only files seen at a path of this pattern ('*/libc*').",
)
@container_option()
@since_option
@click.option(
    "--kind",
    type=click.Choice(["executable", "debuginfo", "vdso", "kallsyms"]),
    help="Only artifacts of this kind.",
)
@click.option(
    "--conflicts", is_flag=True, help="Only artifacts with several variants, with all of them."
)
@table.options(_COLUMNS)
@click.pass_obj
def list_(
    session: Session,
    glob: str | None,
    container: str | None,
    since: int,
    kind: str | None,
    conflicts: bool,
    layout: table.Layout,
) -> None:
    """List build IDs in the order of their arrival, with kinds, size, age and last place.

    Each build ID has one line; with --json each artifact has one. With --conflicts the command
    lists artifacts with several variants, the served one first, and the reason why it is served.
    """
    from buildidfs.catalog import artifacts

    shown = False
    with session.open_store() as store:
        names = Names(store)
        asked = artifacts.Asked(glob, container, kind, since)
        if conflicts:
            wanted = artifacts.origin_filter(store, asked)
            for conflict in artifacts.conflicts(store, kind, wanted):
                shown = True
                (_conflict_as_json if layout.is_json else _conflict_as_text)(conflict, names)
            sys.stdout.flush()
            if not shown:
                session.say_why_empty(artifacts.why_no_conflicts(store, asked))
            return
        rows = _rows(artifacts.artifacts(store, asked))
        columns = table.named(_COLUMNS, names.short, lambda row: row.place.cgroup)
        if layout.is_json:
            shown = _as_json(layout.choose(columns, rows), names)
        else:
            shown = layout.print(columns, rows) > 0
        if not shown:
            session.say_why_empty(artifacts.why_no_artifacts(store, asked))


def _rows(found: Iterable[tuple[BuildId, Artifact, Place]]) -> Iterator[_Listed]:
    for build_id, group in groupby(found, lambda each: each[0]):
        yield _Listed(build_id, [(artifact, record) for _, artifact, record in group])


def _as_json(rows: Iterable[_Listed], names: Names) -> bool:
    """Print an object for each artifact; return True if there is any."""
    shown = False
    for row in rows:
        for artifact, place in row.artifacts:
            shown = True
            json_line(
                {
                    "build_id": row.build_id.hex(),
                    "kind": artifact.kind.name.lower(),
                    "sha256": artifact.digest.hex(),
                    "size": artifact.size,
                    "adopted": artifact.adopted,
                    **names.fields(place.container, place.cgroup),
                    "last_seen": place.last_seen_ns / 1e9,
                    **path_fields(place.path),
                }
            )
    sys.stdout.flush()
    return shown


def _container_fields(names: Names, origin: Origin) -> dict[str, object]:
    return names.fields(origin.container, origin.cgroup)


def _conflict_as_json(conflict: Conflict, names: Names) -> None:
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
                    **(
                        {"container": None, "path": None}
                        if record is None
                        else {
                            **_container_fields(names, record.origin),
                            **path_fields(record.origin.path),
                        }
                    ),
                }
                for artifact, why, record in conflict.variants
            ],
        }
    )


def _conflict_as_text(conflict: Conflict, names: Names) -> None:
    sys.stdout.write(f"{conflict.build_id.hex():40}  {conflict.kind.name.lower()}\n")
    for artifact, why, record in conflict.variants:
        where = "" if record is None else printable(record.origin.path)
        if record is not None and record.origin.container:
            name = names.short(record.origin.container, record.origin.cgroup)
            where += f"  ({one_line(name)})"
        sys.stdout.write(
            f"  {'' if artifact.variant == conflict.served else 'not '}served: {why}\n"
            f"      {artifact.digest}  {size(artifact.size):>10}  {where}\n"
        )
