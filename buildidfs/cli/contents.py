# SPDX-License-Identifier: Apache-2.0
"""The contents of the store: ``buildidfs list``, ``containers``, ``add`` and ``get``."""

from __future__ import annotations

import os
import sys
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from buildidfs.cli import table
from buildidfs.cli.common import (
    NO_STORE,
    AnyPath,
    BuildIdArgument,
    ContainerArgument,
    SeenPath,
    Session,
    container_option,
    exit_status,
    json_option,
    since_option,
)
from buildidfs.cli.output import json_line, one_line, printable, report_scan
from buildidfs.cli.table import Column
from buildidfs.errors import UsageError
from buildidfs.wording import abridged, counted, moment, size

if TYPE_CHECKING:
    from collections.abc import Callable

    from buildidfs.catalog.artifacts import Conflict, ListedArtifact
    from buildidfs.catalog.containers import ContainerSummary
    from buildidfs.store import CapturedContainer


def _kind_option(help_: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a command the option ``--kind``."""
    kinds = click.Choice(["executable", "debuginfo", "vdso", "kallsyms"])
    return click.option("--kind", type=kinds, help=help_)


class _Listed(NamedTuple):
    """The artifacts of a build ID; the executable is the first."""

    artifacts: list[ListedArtifact]

    @property
    def first(self) -> ListedArtifact:
        """Return the executable, or else the debug file."""
        return self.artifacts[0]

    @property
    def size(self) -> int:
        """Return the number of bytes of all artifacts; a file of two kinds counts once."""
        return sum({each.sha256: each.size for each in self.artifacts}.values())


_COLUMNS: Final[tuple[Column[_Listed], ...]] = (
    Column("build_id", "BUILD ID", table.BUILD_ID, value=lambda row: row.first.build_id),
    Column("kinds", "KINDS", table.KINDS, value=lambda row: [x.kind for x in row.artifacts]),
    Column("size", "SIZE", table.SIZE, 90),
    Column(
        "last_seen", "SEEN", table.AGE, value=lambda row: max(x.last_seen for x in row.artifacts)
    ),
    Column("container", "CONTAINER", table.LABEL, value=lambda row: row.first.container_called),
    Column("path", "PATH", table.PATH, value=lambda row: row.first.raw_path),
)


@click.command(
    "list",
    short_help="List the build IDs in the store.",
    epilog=exit_status(
        [
            "buildidfs list --path '*/libc.so.6'",
            "buildidfs list --container web --since 2h --json",
        ],
        {**NO_STORE, 30: "no such container was seen"},
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
@_kind_option("Only artifacts of this kind.")
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
    layout: table.TableOptions,
) -> None:
    """List build IDs in the order of their arrival, with kinds, size, age and last place.

    Each build ID has one line; with --json each artifact has one. With --conflicts the command
    lists artifacts with several variants, the served one first, and the reason why it is served.
    """
    from buildidfs.catalog import artifacts

    with session.open_store() as store:
        asked = artifacts.ArtifactQuery(glob, container, kind, since)
        if conflicts:
            wanted = artifacts.origin_filter(store, asked)
            shown = False
            for conflict in artifacts.conflicts(store, kind, wanted):
                shown = True
                (json_line if layout.is_json else _print_conflict)(conflict)
            sys.stdout.flush()
            if not shown:
                session.explain_empty(artifacts.why_no_conflicts(store, asked))
            return
        groups = groupby(artifacts.artifacts(store, asked), lambda each: each.build_id)
        rows = (_Listed(list(group)) for _, group in groups)
        if not layout.print(_COLUMNS, rows, lambda row: row.artifacts):
            session.explain_empty(artifacts.why_no_artifacts(store, asked))


def _print_conflict(conflict: Conflict) -> None:
    sys.stdout.write(f"{conflict.build_id.hex():40}  {conflict.kind.name.lower()}\n")
    for each in conflict.variants:
        where = printable(each.raw_path)
        if each.container:
            where += f"  ({one_line(each.container_called)})"
        sys.stdout.write(
            f"  {'' if each.served else 'not '}served: {each.why}\n"
            f"      {each.sha256}  {size(each.size):>10}  {where}\n"
        )


_SHOWN: Final = 50
_GONE: Final = 5  # containers without any file left that are named

_CONTAINER_COLUMNS: Final[tuple[Column[ContainerSummary], ...]] = (
    Column("name", "NAME", table.LABEL, value=lambda row: row.shown),
    Column("container", "CONTAINER", table.LABEL, value=lambda row: row.shown_label),
    Column("image", "IMAGE", table.LABEL, 100),
    Column("first_seen", "FIRST SEEN", table.AGE, 120),
    Column("last_seen", "SEEN", table.AGE),
    Column("build_ids", "IDS", table.COUNT),
    Column("removed", "REMOVED", table.COUNT, 160),
    Column("size", "SIZE", table.SIZE, value=lambda row: row.bytes),
    Column("executable", "BINARIES", table.SHARE, 140, lambda row: row.coverage.executable),
    Column("symbols", "SYMBOLS", table.SHARE, value=lambda row: row.coverage.symbols),
    Column("debuginfo", "DEBUGINFO", table.SHARE, 140, lambda row: row.coverage.debuginfo),
)


@click.command(
    "containers",
    short_help="List containers by name, with their captured files.",
    epilog=exit_status(
        [
            "buildidfs containers",
            "buildidfs containers shop/cart-7d9f",
        ],
        {**NO_STORE, 30: "no such container was seen"},
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
@table.options(_CONTAINER_COLUMNS)
@click.pass_obj
def containers(
    session: Session, names: tuple[str, ...], since: int, all_: bool, layout: table.TableOptions
) -> None:
    """List the containers whose files were captured, the one seen last first.

    The list includes containers that are gone, and scanned images and packages. NAME is the name of
    a container, its pod (NAMESPACE/POD), its label, or the beginning of its ID. The names are those
    that Docker, Podman, CRI-O or containerd had for it. A namespace without a container, such as
    that of a service of systemd, is listed with --all, with --json, or if NAME is its label
    (mnt:4026532177). The kernel reuses the number of such a label; a later namespace with it is
    listed, and named, as it is in the mount (mnt:4026532177~8589934592). Three columns show the
    shares of a container's build IDs that have an executable, symbols, and debuginfo.
    """
    from buildidfs.catalog import containers as known
    from buildidfs.errors import ArtifactMissing

    with session.open_store() as store:
        tests = [known.chosen(store, name) for name in names]
        unnamed, emptied, removals = 0, 0, known.Removals(store)

        def is_wanted(each: CapturedContainer) -> bool:
            nonlocal unnamed, emptied
            if each.last_seen_ns < since or (tests and not any(test(each) for test in tests)):
                return False
            if layout.is_json or tests or not known.is_bare(each):
                return True
            unnamed += not all_
            emptied += all_ and each.is_empty
            return all_ and not each.is_empty

        found, count = known.last_seen(store, is_wanted, 0 if all_ else _SHOWN, removals)
        rows = [known.summary(each) for each in found]
        layout.print(_CONTAINER_COLUMNS, rows)
        hidden = [counted(count - len(rows), "more container")] if count > len(rows) else []
        if unnamed:
            hidden.append(counted(unnamed, "namespace") + " without a container")
        if emptied:
            session.explain_empty(f"{counted(emptied, 'namespace')} with no file left, see --json")
        if hidden:
            session.explain_empty(f"{' and '.join(hidden)}, see --all")
        for each in [each.container for each in found if not each.build_ids][:_GONE]:
            if (why := removals.why_gone("", [each])) is not None:
                session.explain_empty(why)
        if lost := sum(row.removed for row in rows):
            ids = counted(lost, "build ID")
            session.explain_empty(f"{ids} of them removed to make room, see buildidfs journal")
        if removals.gone and not tests:
            session.explain_empty(
                f"all files of {counted(len(removals.gone), 'other container')} removed to make"
                f" room: {abridged(list(removals.gone), _GONE)}"
            )
        if rows or unnamed:
            return
        when = f" since {moment(since / 1e9)}" if since else ""
        if why := next(filter(None, map(removals.why_gone, names)), ""):
            raise ArtifactMissing(why)
        if names:
            raise ArtifactMissing(
                f"no container {' or '.join(names)} was seen{when}; {known.last_ones(store)}"
            )
        session.explain_empty(
            f"no container was seen{when}; {known.last_ones(store)}"
            if when
            else "nothing was captured of a container yet: buildidfs scan proc, or buildidfs up"
        )


@click.command(
    "add",
    short_help="Capture single files.",
    epilog=exit_status(
        [
            "buildidfs add ./a.out",
            "buildidfs add --build-id 8e9fd827446c2406 firmware.elf",
        ],
        {
            2: "wrong usage: a build ID for several files",
            3: "finished, but some files could not be captured",
            10: "store error; 14 disk full",
        },
    ),
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=AnyPath())
@click.option("--build-id", "text", metavar="HEX", help="Give a file without a build ID this one.")
@click.option("--kallsyms", is_flag=True, help="FILE is a copy of a kernel's /proc/kallsyms.")
@json_option("Print the summary as one JSON object.")
@click.pass_obj
def add(
    session: Session, files: tuple[str, ...], text: str | None, kallsyms: bool, json_: bool
) -> int:
    """Capture single files: executables, debug files, modules, kernels.

    The debug files of each binary are captured as well. They are looked for where debuggers look.
    """
    from buildidfs.ingest import scans
    from buildidfs.model import BuildId

    build_id = None if text is None else BuildId.from_hex(text)
    if build_id is not None and len(files) > 1:
        raise UsageError("--build-id is for one file; several cannot have the same")
    if kallsyms and build_id is None:
        raise UsageError("--kallsyms needs --build-id: symbols do not say of which kernel they are")
    wanted = [os.fsencode(path) for path in files]
    with session.capturing() as (store, show):
        summary = scans.add(
            store, session.settings, wanted, build_id=build_id, kallsyms=kallsyms, progress=show
        )
    return report_scan(summary, json_=json_, quiet=session.is_quiet)


@click.command(
    "get",
    short_help="Write the bytes of a build ID to a file.",
    epilog=exit_status(
        [
            "buildidfs get 8e9f -o libc.so.6",
            "buildidfs get /app/server --container web -o server",
        ],
        {
            2: "a prefix that several build IDs share",
            20: "the bytes do not match their digest; nothing is written",
            30: "nothing is kept under that build ID",
        },
    ),
)
@click.argument("id_", metavar="ID|PATH", type=BuildIdArgument())
@container_option("PATH means the file that was seen there in this container.")
@_kind_option("Write the file of this kind.  [default: the executable, else any other]")
@click.option("-o", "--output", metavar="FILE", type=AnyPath(), help="Write to FILE.")
@click.pass_obj
def get(
    session: Session, id_: str, container: str | None, kind: str | None, output: str | None
) -> None:
    """Write the bytes of a build ID (a unique prefix is enough), or of the file at PATH, verified
    first.

    FILE appears whole or not at all. The command refuses to write to a terminal.
    """
    from buildidfs.catalog import requested_id
    from buildidfs.errors import UsageError
    from buildidfs.store import export

    if output is None and sys.stdout.isatty():
        raise UsageError("not writing a binary to the terminal; use -o FILE")
    with session.open_store() as store:
        build_id = requested_id.build_id(store, id_, container)
        artifact = requested_id.artifact(store, build_id, id_, kind)
        if output is None:
            export.to_stream(store, artifact, sys.stdout.buffer)
        else:
            export.to_file(store, artifact, output)
