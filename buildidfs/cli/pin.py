# SPDX-License-Identifier: Apache-2.0
"""``buildidfs pin`` and ``buildidfs unpin``: the build IDs that are kept whatever the
limits say.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from buildidfs.cli import table, terminal
from buildidfs.cli.common import AnyPath, BuildIdArgument, Session, container_option, exit_status
from buildidfs.cli.output import counted, one_line, path_fields, printable
from buildidfs.cli.table import Column

if TYPE_CHECKING:
    from buildidfs.store import Pin, Store


class _Listed(NamedTuple):
    pin: Pin
    held: bool


_COLUMNS: Final[tuple[Column[_Listed], ...]] = (
    Column("build_id", "BUILD ID", lambda row: row.pin.build_id, table.BUILD_ID),
    Column("held", "BYTES", lambda row: "held" if row.held else "missing", table.TEXT),
    Column("pinned", "PINNED", lambda row: row.pin.created_ns, table.AGE),
    Column("name", "NAME", lambda row: row.pin.name, table.PATH),
)


class KeptArgument(BuildIdArgument):
    """A build ID, or a profile or core file with build IDs."""

    name = "id"


@click.command(
    "pin",
    short_help="Exempt build IDs from all limits.",
    epilog=exit_status(
        [
            "buildidfs pin 8e9fd827446c24067541ac5390e6f527fb5947bb",
            "buildidfs pin perf.data core.4711",
            "buildidfs pin --name incident-42 8e9f perf.data",
            "buildidfs pin --container shop/cart-7d9f --name incident-42",
            "buildidfs pin --cores /var/lib/systemd/coredump",
            "buildidfs pin --list",
        ],
        {
            2: "neither a build ID nor a file that names one",
            3: "pinned, but some files of a FILE have no build ID, or a core file is unreadable",
            11: "no store at that place",
            30: "nothing is known of that build ID",
        },
    ),
)
@click.argument("what", metavar="ID|FILE...", nargs=-1, type=KeptArgument())
@container_option("Keep all files captured of this container so far.", multiple=True)
@click.option(
    "--cores",
    metavar="DIR",
    type=AnyPath(),
    help="Keep what the core files in DIR name, for as long as they are there.",
)
@click.option(
    "--name", metavar="NAME", help="The name of the pins; unpin --name removes all of them."
)
@click.option("--list", "list_", is_flag=True, help="List the pins.")
@table.options(_COLUMNS, json="With --list: print one JSON object per line.")
@click.pass_obj
def pin(
    session: Session,
    what: tuple[str, ...],
    containers: tuple[str, ...],
    cores: str | None,
    name: str | None,
    list_: bool,
    layout: table.Layout,
) -> int:
    """Exempt build IDs from all limits, with all their captured files.

    FILE is a profile of perf(1), a core file, or a binary. The command pins each build ID that a
    profile or core file names, under the path of FILE, or the build ID of the binary. Files of a
    profile without build IDs are looked up as by `buildidfs repair`. A build ID that the store
    lacks is kept when it arrives; give it in full. A word of hexadecimal digits is a build ID, not
    a file. If there is no file at a path, the path means the build ID that was seen there last.
    With --container the pins get the given name of the container, and `unpin --name` removes them.
    With --cores, each core file in DIR is pinned once, and pins of those that are gone are removed;
    `buildidfs setup coredump` lets systemd run it.
    """
    from buildidfs.errors import IncompleteError

    if list_:
        if what or containers or cores is not None:
            raise click.UsageError("--list takes no build IDs and no files, only --name")
        with session.open_store() as store:
            label = None if name is None else os.fsencode(name)
            if not _list(store, label, layout):
                session.say_why_empty(_why_empty(store, label))
        return 0
    if layout.is_given:
        raise click.UsageError("--json and the options of tables belong to --list")
    if cores is not None and name is not None:
        raise click.UsageError("pins of --cores have the paths of the core files as names")
    if not what and not containers and cores is None:
        raise click.UsageError(
            "nothing to pin: give build IDs, files, --container or --cores, or --list"
        )
    with session.open_store() as store:
        for each in containers:
            _pin_container(session, store, each, name)
        lacking = [_pin(session, store, each, name) for each in what]
        if cores is not None:
            lacking.append(_pin_cores(session, store, cores))
    return IncompleteError.exit_code if any(lacking) else 0


@click.command(
    "unpin",
    short_help="Remove pins, so that the limits apply again.",
    epilog=exit_status(
        [
            "buildidfs unpin 8e9fd827446c24067541ac5390e6f527fb5947bb",
            "buildidfs unpin perf.data",
            "buildidfs unpin shop/cart-7d9f",
            "buildidfs unpin --name incident-42",
        ],
        {11: "no store at that place", 30: "nothing is known of it, or it was not pinned"},
    ),
)
@click.argument("what", metavar="ID|FILE|CONTAINER...", nargs=-1, type=KeptArgument())
@click.option("--name", metavar="NAME", multiple=True, help="Remove all pins of this name.")
@click.pass_obj
def unpin(session: Session, what: tuple[str, ...], name: tuple[str, ...]) -> int:
    """Remove pins: of a build ID, of a FILE, which need not exist any more, of a container, or by
    name.

    A build ID stays exempt while another pin keeps it.
    """
    from buildidfs.errors import ArtifactMissing
    from buildidfs.profile import inputs

    if not what and not name:
        raise click.UsageError("nothing to unpin: give build IDs, files or --name")
    missed = 0
    with session.open_store() as store:
        for each in what:
            count, others = inputs.unpin(store, each)
            for other in others:
                click.echo(f"{other.build_id} stays pinned for {printable(other.name)}", err=True)
            missed += _unpinned(session, each, count)
        for each in name:
            missed += _unpinned(session, each, store.unpin_name(os.fsencode(each)))
    return ArtifactMissing.exit_code if missed else 0


def _unpinned(session: Session, what: str, count: int) -> bool:
    """Print the result of unpinning; return True if there was no pin."""
    shown = printable(os.fsencode(what))
    if not count:
        terminal.complain(f"{shown} was not pinned")
    elif not session.is_quiet:
        click.echo(f"unpinned {counted(count, 'build ID')}: {shown}")
    return not count


def _pin(session: Session, store: Store, what: str, name: str | None) -> bool:
    """Pin the build IDs of one argument; return True if a file has unknown build IDs."""
    from buildidfs.cli.output import report_nameless
    from buildidfs.errors import UsageError
    from buildidfs.profile import inputs

    path, label = os.fsencode(what), None if name is None else os.fsencode(name)
    looking = partial(session.progress, "Looking up", "record")
    named, new = inputs.pin(store, what, label, looking)
    if not named.paths:
        report_nameless(path, named)
        raise UsageError(f"{printable(path)} names no build ID: nothing is pinned for it")
    _report(session, what, len(named.paths), new)
    return named.is_file and report_nameless(path, named)


def _pin_cores(session: Session, store: Store, directory: str) -> bool:
    """Pin for the core files of a directory; return True if one of them cannot be read."""
    from buildidfs.profile import inputs

    done = inputs.pin_cores(store, os.fsencode(directory))
    for path in () if session.is_quiet else (*done.pinned, *done.gone):
        is_new = path in done.pinned
        click.echo(f"{'pinned for' if is_new else 'unpinned, gone:'} {printable(path)}")
    for why in done.unread.values():
        terminal.complain(one_line(why))
    return bool(done.unread)


def _pin_container(session: Session, store: Store, text: str, name: str | None) -> None:
    """Pin all build IDs of the containers that a user means."""
    from buildidfs.catalog import containers

    build_ids = sorted(containers.build_ids(store, text))
    _report(session, text, len(build_ids), store.pin(build_ids, os.fsencode(name or text)))


def _report(session: Session, what: str, count: int, new: int) -> None:
    if not session.is_quiet:
        before = f", {count - new} of them before" if new < count else ""
        shown = printable(os.fsencode(what))
        click.echo(f"pinned {counted(count, 'build ID')}{before}: {shown}")


def _why_empty(store: Store, name: bytes | None) -> str:
    """Return the reason why no pin was listed."""
    if name is not None and next(store.pins.every(), None) is not None:
        return f"nothing is pinned for {printable(name)}; --list alone shows all pins"
    return "nothing is pinned in this store: buildidfs pin keeps build IDs, profiles, core files"


def _list(store: Store, name: bytes | None, layout: table.Layout) -> int:
    """Print the pins; return their number."""
    rows = (
        _Listed(each, store.index.ordinal(each.build_id) is not None)
        for each in store.pins.every(name)
    )
    return layout.print(_COLUMNS, rows, _fields)


def _fields(row: _Listed) -> dict[str, object]:
    pin = row.pin
    return {
        "build_id": pin.build_id.hex(),
        **path_fields(pin.name, "name"),
        "pinned": pin.created_ns / 1e9,
        "held": row.held,
    }
