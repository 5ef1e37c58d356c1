# SPDX-License-Identifier: Apache-2.0
"""``buildidfs containers``: the containers whose files were captured, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click
from msgspec.structs import asdict

from buildidfs.cli import table
from buildidfs.cli.common import ContainerArgument, Session, exit_status, since_option
from buildidfs.cli.output import counted, moment
from buildidfs.cli.table import Column

if TYPE_CHECKING:
    from buildidfs.catalog.containers import ContainerSummary
    from buildidfs.store import Container

_SHOWN: Final = 50
_NS: Final = 1_000_000_000
_GONE: Final = 5  # containers without any file left that are named

_COLUMNS: Final[tuple[Column[ContainerSummary], ...]] = (
    Column("name", "NAME", lambda row: row.shown, table.LABEL),
    Column("container", "CONTAINER", lambda row: row.container, table.LABEL),
    Column("image", "IMAGE", lambda row: row.image, table.LABEL, 100),
    Column("first_seen", "FIRST SEEN", lambda row: int(row.first_seen * _NS), table.AGE, 120),
    Column("last_seen", "SEEN", lambda row: int(row.last_seen * _NS), table.AGE),
    Column("build_ids", "IDS", lambda row: row.build_ids, table.COUNT),
    Column("removed", "REMOVED", lambda row: row.removed, table.COUNT, 160),
    Column("size", "SIZE", lambda row: row.bytes, table.SIZE),
    Column("executable", "BINARIES", lambda row: row.coverage.executable, table.SHARE, 140),
    Column("symbols", "SYMBOLS", lambda row: row.coverage.symbols, table.SHARE),
    Column("debuginfo", "DEBUGINFO", lambda row: row.coverage.debuginfo, table.SHARE, 140),
)


@click.command(
    "containers",
    short_help="List containers by name, with their captured files.",
    epilog=exit_status(
        [
            "buildidfs containers",
            "buildidfs containers shop/cart-7d9f",
            "buildidfs containers --since 2h --json",
            "buildidfs containers --all --sort -size",
        ],
        {11: "no store at that place; 13 unknown format", 30: "no such container was seen"},
    ),
)
@click.argument("names", metavar="[NAME ...]", nargs=-1, type=ContainerArgument())
@since_option
@click.option(
    "--all",
    "all_",
    is_flag=True,
    help=f"List all, not only the {_SHOWN} seen last, and namespaces without a container.",
)
@table.options(_COLUMNS)
@click.pass_obj
def containers(
    session: Session, names: tuple[str, ...], since: int, all_: bool, layout: table.Layout
) -> None:
    """List the containers whose files were captured, the one seen last first.

    The list includes containers that are gone, and scanned images and packages. NAME is the name of
    a container, its pod (NAMESPACE/POD), its label, or the beginning of its ID. The names are those
    that Docker, Podman, CRI-O or containerd had for it. A namespace without a container, such as
    that of a service of systemd, is listed with --all, with --json, or if NAME is its label
    (mnt:4026532177). Three columns show the shares of a container's build IDs that have an
    executable, symbols, and debuginfo.
    """
    from buildidfs.catalog import containers as known
    from buildidfs.errors import ArtifactMissing

    with session.open_store() as store:
        tests = [known.meant(store, name) for name in names]
        unnamed, removals = 0, known.Removals(store)

        def is_wanted(each: Container) -> bool:
            nonlocal unnamed
            if each.last_seen_ns < since or (tests and not any(t(each.label) for t in tests)):
                return False
            is_hidden = not (all_ or layout.is_json or tests) and known.is_bare(each)
            unnamed += is_hidden
            return not is_hidden

        found, count = known.last_seen(store, is_wanted, 0 if all_ else _SHOWN, removals)
        rows = [known.summary(each) for each in found]
        layout.print(_COLUMNS, rows, asdict)
        hidden = [counted(count - len(rows), "more container")] if count > len(rows) else []
        if unnamed:
            hidden.append(counted(unnamed, "namespace") + " without a container")
        if hidden:
            session.say_why_empty(f"{' and '.join(hidden)}, see --all")
        if lost := sum(row.removed for row in rows):
            ids = counted(lost, "build ID")
            session.say_why_empty(f"{ids} of them removed to make room, see buildidfs journal")
        if removals.gone and not tests:
            which = ", ".join(list(removals.gone)[:_GONE])
            more = ", ..." if len(removals.gone) > _GONE else ""
            session.say_why_empty(
                f"all files of {counted(len(removals.gone), 'other container')} removed to make"
                f" room: {which}{more}"
            )
        if rows or unnamed:
            return
        when = f" since {moment(since)}" if since else ""
        if why := next(filter(None, map(removals.why_gone, names)), ""):
            raise ArtifactMissing(why)
        if names:
            raise ArtifactMissing(
                f"no container {' or '.join(names)} was seen{when}; {known.last_ones(store)}"
            )
        session.say_why_empty(
            f"no container was seen{when}; {known.last_ones(store)}"
            if when
            else "nothing was captured of a container yet: buildidfs scan proc, or buildidfs up"
        )
