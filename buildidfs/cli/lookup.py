# SPDX-License-Identifier: Apache-2.0
"""Look up paths and build IDs: ``buildidfs which`` and ``buildidfs where``."""

from __future__ import annotations

import os
import sys
from itertools import groupby
from typing import TYPE_CHECKING

import click

from buildidfs.cli.common import AnyPath, BuildIdArgument, Session, exit_status
from buildidfs.cli.output import json_line, moment, path_fields, printable
from buildidfs.errors import IncompleteError

if TYPE_CHECKING:
    from buildidfs.app.history import Place
    from buildidfs.capture.base import Unreadable
    from buildidfs.capture.process.mapped_by import Mapper


@click.command(
    "which",
    short_help="Show the build IDs that a path has had.",
    epilog=exit_status(
        [
            "buildidfs which /usr/lib/x86_64-linux-gnu/libc.so.6",
            "buildidfs which /app/server --container docker:0f5c3e8d1b2a",
            "buildidfs which --glob '*/libssl.so*' --json",
        ],
        {11: "no store at that place; 13 unknown format", 30: "nothing was ever seen there"},
    ),
)
@click.argument("path", metavar="PATH", type=AnyPath())
@click.option("--container", metavar="LABEL", help="Only what was seen in this container.")
@click.option("--glob", "is_glob", is_flag=True, help="PATH is a pattern ('*/libc.so.6').")
@click.option("--json", "json_", is_flag=True, help="One JSON object a line.")
@click.pass_obj
def which(session: Session, path: str, container: str | None, is_glob: bool, json_: bool) -> None:
    """Show every build ID that was seen at PATH, in whatever container, the last one first.

    PATH is whole. It is taken with and without /usr where distributions have merged the two, and
    with its symbolic links as they are on this host; a line for another path than PATH names it. A
    line says missing where the store holds no bytes.
    """
    from buildidfs.app import history
    from buildidfs.errors import ArtifactMissing

    with session.open_store() as store:
        if is_glob:
            places = history.at_paths(store, path, container)
        else:
            # The name that ldd prints is a link, and the kernel tells what that leads to.
            here = [os.fsencode(os.path.realpath(path))] if container is None else []
            places = history.at_path(store, os.fsencode(path), container, others=here)
    if not places:
        where = "" if container is None else f" in container {container}"
        hint = "" if is_glob else f"; for a part of a path try --glob '*/{os.path.basename(path)}'"
        text = printable(os.fsencode(f"nothing was ever seen at {path}{where}{hint}"))
        raise ArtifactMissing(text)
    for place in places:
        if json_:
            json_line(place_fields(place))
        else:
            _which_text(place, with_path=is_glob or place.path != os.fsencode(path))
    sys.stdout.flush()


def place_fields(place: Place) -> dict[str, object]:
    """Return the JSON fields of a place."""
    return {
        "build_id": place.build_id.hex(),
        **path_fields(place.path),
        "container": place.container,
        "host": place.host,
        "held": place.held,
        "first_seen": place.first_seen_ns / 1e9,
        "last_seen": place.last_seen_ns / 1e9,
    }


def _which_text(place: Place, *, with_path: bool) -> None:
    where = printable(place.container.encode("utf-8", "surrogateescape")) or "-"
    path = f"  {printable(place.path)}" if with_path else ""
    sys.stdout.write(
        f"{moment(place.last_seen_ns)}  {where:20}  {place.build_id.hex():40}"
        f"  {'' if place.held else 'missing':7}  since {moment(place.first_seen_ns)}{path}\n"
    )


@click.command(
    "where",
    short_help="Show where a build ID was seen, or who runs it now.",
    epilog=exit_status(
        [
            "buildidfs where 8e9f",
            "buildidfs where --live 8e9fd827446c24067541ac5390e6f527fb5947bb",
            "buildidfs where --live --json 8e9f | jq .pid",
        ],
        {
            2: "a prefix that several build IDs share",
            3: "--live: some processes could not be looked at",
            11: "no store at that place; 13 unknown format",
            30: "nothing is known of that build ID",
        },
    ),
)
@click.argument("id_", metavar="ID", type=BuildIdArgument())
@click.option("--live", is_flag=True, help="The processes that have it mapped now; needs no store.")
@click.option("--json", "json_", is_flag=True, help="One JSON object a line.")
@click.pass_obj
def where(session: Session, id_: str, live: bool, json_: bool) -> int:
    """Show every place where a build ID was seen (a unique prefix is enough), by container.

    Also where its bytes could not be had. With --live, the processes that have it mapped at this
    moment: who still runs this libc?
    """
    if live:
        return _print_mappers(session, id_, json_)
    from buildidfs.app import history

    with session.open_store() as store:
        build_id, places = history.of_build_id(store, id_)
    if json_:
        for place in places:
            json_line(place_fields(place))
    else:
        held = "" if any(place.held for place in places) else "  missing"
        sys.stdout.write(f"{build_id.hex()}{held}\n")
        _where_text(places)
    sys.stdout.flush()
    return 0


def _where_text(places: list[Place]) -> None:
    """The places by container, the one seen last first."""
    order = {place.container: number for number, place in reversed([*enumerate(places)])}
    for label, group in groupby(
        sorted(places, key=lambda place: order[place.container]), lambda place: place.container
    ):
        sys.stdout.write(f"{_name(label)}\n")
        for place in group:
            sys.stdout.write(
                f"    {printable(place.path)}\n"
                f"        on {printable(place.host.encode('utf-8', 'surrogateescape'))},"
                f" {moment(place.first_seen_ns)} to {moment(place.last_seen_ns)}\n"
            )


def _name(label: str) -> str:
    return printable(label.encode("utf-8", "surrogateescape")) or "the host"


def _print_mappers(session: Session, text: str, json_: bool) -> int:
    """Print who maps it; the exit status."""
    from buildidfs.app import history

    mappers, refused = history.who_maps(session.settings, text)
    if json_:
        for mapper in mappers:
            json_line(
                {
                    "build_id": mapper.build_id.hex(),
                    "pid": mapper.pid,
                    "comm": mapper.comm.decode("utf-8", "replace"),
                    "container": mapper.container,
                    **path_fields(mapper.path),
                    "deleted": mapper.deleted,
                }
            )
    else:
        _mappers_text(mappers)
    sys.stdout.flush()
    return _report_refused(refused)


def _mappers_text(mappers: list[Mapper]) -> None:
    if not mappers:
        sys.stdout.write("No process has it mapped.\n")
        return
    sys.stdout.write(f"{mappers[0].build_id.hex()}\n")
    for label, group in groupby(mappers, lambda mapper: mapper.container):
        members = list(group)
        count = len({mapper.pid for mapper in members})
        sys.stdout.write(f"{_name(label)}: {count} process{'' if count == 1 else 'es'}\n")
        for mapper in members:
            deleted = " (deleted)" if mapper.deleted else ""
            sys.stdout.write(
                f"    {mapper.pid:>7}  {printable(mapper.comm):15}  {printable(mapper.path)}"
                f"{deleted}\n"
            )


def _report_refused(refused: list[Unreadable]) -> int:
    """Say what could not be looked at; the exit status."""
    processes = [each for each in refused if each.path != b"/proc"]
    for each in refused:
        if each not in processes:
            click.echo(f"buildidfs: {each.reason}", err=True)
    if processes:
        count = len(processes)
        click.echo(
            f"buildidfs: {count} process{'' if count == 1 else 'es'} could not be looked at"
            f" ({printable(processes[0].path)}: {processes[0].reason})",
            err=True,
        )
    return IncompleteError.exit_code if refused else 0
