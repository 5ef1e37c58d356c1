# SPDX-License-Identifier: Apache-2.0
"""``buildidfs journal``: the build IDs that were seen, each with path, container and time."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from buildidfs.catalog import history
from buildidfs.catalog.containers import Names, is_held
from buildidfs.cli import table
from buildidfs.cli.common import (
    SeenPath,
    Session,
    container_option,
    exit_status,
    namespaces_option,
    since_option,
)
from buildidfs.cli.output import moment, path_fields
from buildidfs.cli.table import Column
from buildidfs.store.run_files import Lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.model import FileIdentity
    from buildidfs.store import JournalRecord, Store

    Row = JournalRecord | Lost

_MOST_LABELS = 5


class _Line(NamedTuple):
    """A row of the journal in a table. ``files`` that were lost for the same reason share a row."""

    row: Row
    build_id: str | None
    last_seen_ns: int
    container: str
    state: str
    path: bytes
    files: int
    reason: str


def _shown_path(line: _Line) -> bytes:
    more = b" and %d more" % (line.files - 1) if line.files > 1 else b""
    return (line.path or b"(no names kept)") + more


def _columns(*, lost: bool) -> tuple[Column[_Line], ...]:
    """Return the columns. If all rows are ``lost``, a narrow terminal shows their reasons instead
    of build IDs.
    """
    return (
        Column("last_seen", "SEEN", lambda line: line.last_seen_ns, table.AGE),
        Column("container", "CONTAINER", lambda line: line.container, table.LABEL),
        Column("build_id", "BUILD ID", lambda line: line.build_id, table.HEX, 120 * lost),
        Column("state", "BYTES", lambda line: line.state, table.TEXT, 120 * lost),
        Column("path", "PATH", _shown_path, table.PATH),
        Column("reason", "REASON", lambda line: line.reason, table.LABEL, 0 if lost else 120),
    )


_COLUMNS: Final = _columns(lost=False)


@click.command(
    "journal",
    short_help="Show the files that were seen, with place and time.",
    epilog=exit_status(
        [
            "buildidfs journal --since 10m",
            "buildidfs journal --since 1h --lost",
            "buildidfs journal --path '*/libc.so.6' --container docker:0f5c3e8d1b2a",
            "buildidfs journal --since 2026-11-22 --namespaces pid,uts --json",
        ],
        {
            2: "not a time, or no such namespace",
            11: "no store at that place; 13 unknown format",
            20: "a row of the journal is damaged",
        },
    ),
)
@since_option
@container_option()
@click.option(
    "--path",
    "globs",
    metavar="GLOB",
    type=SeenPath(),
    multiple=True,
    help="Only files seen at a path of this pattern.",
)
@namespaces_option
@click.option("--lost", is_flag=True, help="Only lost files, with the reason.")
@table.options(_COLUMNS)
@click.pass_obj
def journal(
    session: Session,
    since: int,
    container: str | None,
    globs: tuple[str, ...],
    names: tuple[str, ...] | None,
    lost: bool,
    layout: table.Layout,
) -> None:
    """Show the build IDs that were seen, with path, container and time, by the time of the last
    sighting.

    A line without bytes in the store says missing, removed if a limit has removed them, or noted if
    there was no room and the host still had the file at that path. A line says lost, with the
    reason, if the watch saw a file and could not capture it.
    """
    labels = set[str]()
    with session.open_store() as store:
        called = Names(store)
        columns = table.named(_columns(lost=lost), called.short, _group)
        wanted = history.journal_filter(store, globs, container, names)
        lines = _lines(store, history.journal_rows(store, since, lost), wanted, names, labels)
        if not layout.print(columns, lines, partial(_fields, names, called)):
            session.say_why_empty(
                _why_empty(store, since, lost, {called.short(label) for label in labels})
            )


def _lines(
    store: Store,
    rows: Iterable[Row],
    wanted: Callable[[Row], bool],
    names: tuple[str, ...] | None,
    labels: set[str],
) -> Iterator[_Line]:
    """Yield the wanted rows; add the labels of a few containers of unwanted rows to ``labels``."""
    for row in rows:
        label = history.row_container(row, names)
        if not wanted(row):
            if len(labels) < _MOST_LABELS:
                labels.add(label)
        elif isinstance(row, Lost):
            yield _Line(
                row, row.build_id or None, row.time_ns, label, "lost", row.raw_path, row.count,
                row.reason,
            )  # fmt: skip
        else:
            held = is_held(store, row.build_id)
            state = "missing"
            if held:
                state = "held"
            elif row.removed is not None:
                state = "removed"
            elif row.noted is not None:
                state = "noted"
            yield _Line(row, row.build_id.hex(), row.last_seen_ns, label, state, row.path, 1, "")


def _why_empty(store: Store, since: int, lost: bool, labels: set[str]) -> str:
    """Return the reason why no row was shown.

    ``since`` is the start of the shown time. ``labels`` are those of some containers whose rows
    were not wanted.
    """
    if labels:
        some = ", ".join(sorted(label or "the host" for label in labels))
        return f"no row matches; the journal has rows of {some}"
    last = history.last_in_journal(store, lost=lost)
    if not last and lost:
        return "no watch on this store has lost a file"
    scans = "buildidfs list shows what scans have captured"
    if not last:
        return (
            "the journal is empty: only watch writes what it sees there (buildidfs up starts one);"
            f" {scans}"
        )
    what = "lost" if lost else "seen by a watch"
    return f"nothing was {what} since {moment(since)}, the last time was {moment(last)}; {scans}"


def _group(line: _Line) -> bytes:
    return b"" if isinstance(line.row, Lost) else line.row.cgroup


def _fields(names: tuple[str, ...] | None, called: Names, line: _Line) -> dict[str, object]:
    row = line.row
    if isinstance(row, Lost):
        return {
            "build_id": row.build_id or None,
            **path_fields(row.raw_path),
            "held": False,
            "lost": row.reason,
            "count": row.count,
            **called.fields(row.container),
            "mnt_ns_id": row.mnt_ns_id,
            "host": row.host,
            "last_seen": row.time_ns / 1e9,
        }
    return {
        "build_id": row.build_id.hex(),
        "held": line.state == "held",
        "removed": None if row.removed is None else row.removed.time,
        "noted": None if row.noted is None else _identity(row.noted),
        "lost": None,
        **history.sighted_fields(row, row, names, called),
        "boot_id": row.boot.hex(),
    }


def _identity(identity: FileIdentity) -> dict[str, int]:
    """Return the JSON fields that identify a file; times in nanoseconds."""
    return {
        "dev": identity.dev,
        "ino": identity.ino,
        "size": identity.size,
        "mtime_ns": identity.mtime_ns,
        "ctime_ns": identity.ctime_ns,
    }
