# SPDX-License-Identifier: Apache-2.0
"""Questions about all hosts that push to one bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from buildidfs.cli import table, terminal
from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.group import LazyGroup
from buildidfs.cli.output import counted, json_line, moment, one_line, size
from buildidfs.cli.table import Column

if TYPE_CHECKING:
    from buildidfs.fleet.questions import Host, Location

_CODES: Final = {
    2: "no bucket is configured, or the extra buildidfs[remote] is not installed",
    50: "the bucket is missing, refuses the request, or does not answer",
}
_HOSTS: Final[tuple[Column[Host], ...]] = (
    Column("host", "HOST", lambda row: row.name, table.TEXT),
    Column("files", "FILES", lambda row: row.files, table.COUNT),
    Column("size", "SIZE", lambda row: row.bytes, table.SIZE),
    Column("private", "PRIVATE", lambda row: row.private, table.COUNT),
    Column("manifests", "MANIFESTS", lambda row: row.manifests, table.COUNT, 100),
    Column("last_push", "PUSHED", lambda row: row.last_ns, table.AGE),
)
_LOCATIONS: Final[tuple[Column[Location], ...]] = (
    Column("build_id", "BUILD ID", lambda row: row.build_id, table.HEX),
    Column("kind", "KIND", lambda row: row.kind, table.TEXT),
    Column("host", "HOST", lambda row: row.host, table.TEXT),
    Column("container", "CONTAINER", lambda row: row.container or None, table.LABEL),
    Column("last_seen", "SEEN", lambda row: row.last_ns, table.AGE),
    Column("state", "STATE", lambda row: row.state, table.TEXT, 120),
    Column("path", "PATH", lambda row: row.path, table.LABEL),
)


@click.group(
    cls=LazyGroup,
    short_help="Ask about all hosts that push to one bucket.",
    epilog=exit_status(["buildidfs fleet status", "buildidfs fleet where 5d8f"], _CODES),
)
def fleet() -> None:
    """Ask about all hosts that push to the bucket of [remote]. No store is needed."""


@fleet.command(
    "status",
    short_help="List the hosts, and what they have pushed.",
    epilog=exit_status(["buildidfs fleet status", "buildidfs fleet status --json"], _CODES),
)
@table.options(_HOSTS)
@click.pass_obj
def status(session: Session, layout: table.Layout) -> None:
    """List the hosts that have pushed, the one that pushed last first."""
    from buildidfs.fleet import questions

    rows = questions.status(questions.bucket_of(session.settings.remote))
    if not layout.print(_HOSTS, rows, _host_fields):
        session.say_why_empty("no host has pushed to the bucket yet: buildidfs push --all")


def _host_fields(host: Host) -> dict[str, object]:
    return {
        "host": host.name,
        "files": host.files,
        "bytes": host.bytes,
        "private": host.private,
        "manifests": host.manifests,
        "last_push": host.last_ns / 1e9,
    }


@fleet.command(
    "which",
    short_help="Show the build IDs at a path, on all hosts.",
    epilog=exit_status(["buildidfs fleet which '*/libssl.so.3'"], _CODES),
)
@click.argument("path", metavar="PATH")
@table.options(_LOCATIONS)
@click.pass_obj
def which(session: Session, path: str, layout: table.Layout) -> None:
    """Show the build IDs that hosts have seen at PATH, a path or a pattern with * and ?."""
    from buildidfs.fleet import questions

    rows = questions.which(questions.bucket_of(session.settings.remote), path)
    if not layout.print(_LOCATIONS, rows, _location_fields):
        session.say_why_empty(f"no manifest of a host lists a file at {one_line(path)}")


@fleet.command(
    "where",
    short_help="Show the hosts that have seen a build ID.",
    epilog=exit_status(
        ["buildidfs fleet where 5d8f"], {**_CODES, 30: "no host has reported that build ID"}
    ),
)
@click.argument("id_", metavar="ID")
@table.options(_LOCATIONS)
@click.pass_obj
def where(session: Session, id_: str, layout: table.Layout) -> None:
    """Show the hosts, containers and paths where a build ID was seen. A unique beginning of ID is
    enough.
    """
    from buildidfs.fleet import questions

    rows = questions.where(questions.bucket_of(session.settings.remote), id_)
    layout.print(_LOCATIONS, rows, _location_fields)


def _location_fields(location: Location) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.structs.asdict(location)
    fields["first_seen"] = fields.pop("first_ns") / 1e9
    fields["last_seen"] = fields.pop("last_ns") / 1e9
    return fields


@fleet.command(
    "why",
    short_help="Say why the bucket has a build ID, or lacks it.",
    epilog=exit_status(
        ["buildidfs fleet why 8e9f"],
        {
            **_CODES,
            2: "a beginning that several build IDs share, or no bucket is configured",
            30: "the bucket has no file of that build ID",
        },
    ),
)
@click.argument("id_", metavar="ID")
@click.option("--json", "json_", is_flag=True, help="Print one JSON object per line.")
@click.pass_obj
def why(session: Session, id_: str, json_: bool) -> int:
    """Say if the bucket has the executable and the debuginfo of ID, or why it lacks them.

    The command names the host that pushed each file. The beginning of a build ID is enough.
    """
    from buildidfs.fleet import questions

    reasons = questions.why(questions.bucket_of(session.settings.remote), id_)
    for reason in reasons:
        if json_:
            json_line(msgspec.structs.asdict(reason))
            continue
        terminal.say(f"{reason.kind}: {one_line(reason.text)}", indent=2)
        if reason.remedy:
            terminal.say(reason.remedy, label="  ", indent=2)
    return 0 if any(each.state == "present" for each in reasons) else 30


@fleet.command(
    "filter",
    short_help="Show the filter of the bucket, or make a new one.",
    epilog=exit_status(["buildidfs fleet filter", "buildidfs fleet filter --rebuild"], _CODES),
)
@click.option("--rebuild", is_flag=True, help="Make a new filter from a listing of the bucket.")
@click.option("--json", "json_", is_flag=True, help="Print a JSON object.")
@click.pass_obj
def filter_(session: Session, rebuild: bool, json_: bool) -> None:
    """Show how many files the filter has, and how old it is.

    Pushes keep the filter up to date. If other programs write to the bucket, use --rebuild, which
    takes a request for each thousand objects.
    """
    from buildidfs.fleet import questions

    state = questions.filter_state(questions.bucket_of(session.settings.remote), rebuild=rebuild)
    if json_:
        fields: dict[str, Any] = msgspec.structs.asdict(state)
        fields["made"] = fields.pop("made_ns") / 1e9
        json_line(fields)
    elif not state.generation:
        click.echo("The bucket has no filter: buildidfs fleet filter --rebuild makes one.")
    else:
        click.echo(
            f"{counted(state.files, 'file')} in {counted(state.runs, 'run')} of"
            f" {size(state.bytes)}, generation {state.generation},"
            f" made {moment(state.made_ns)}"
        )
