# SPDX-License-Identifier: Apache-2.0
"""``buildidfs where``: where a build ID was seen, and who runs it now."""

from __future__ import annotations

import sys
from itertools import groupby
from typing import TYPE_CHECKING

import click

from buildidfs.cli.common import BuildIdArgument, Session, exit_status
from buildidfs.cli.output import json_line, moment, path_fields, printable
from buildidfs.errors import IncompleteError

if TYPE_CHECKING:
    from buildidfs.app.history import Place
    from buildidfs.capture.base import Unreadable
    from buildidfs.capture.process.mapped_by import Mapper


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
        return _live(session, id_, json_)
    from buildidfs.app import history
    from buildidfs.cli.which import place_fields

    with session.open_store() as store:
        build_id, places = history.of_build_id(store, id_)
    if json_:
        for place in places:
            json_line(place_fields(place))
    else:
        held = "" if any(place.held for place in places) else "  missing"
        sys.stdout.write(f"{build_id.hex()}{held}\n")
        _text(places)
    sys.stdout.flush()
    return 0


def _text(places: list[Place]) -> None:
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


def _live(session: Session, text: str, json_: bool) -> int:
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
        _live_text(mappers)
    sys.stdout.flush()
    return _report(refused)


def _live_text(mappers: list[Mapper]) -> None:
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


def _report(refused: list[Unreadable]) -> int:
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
