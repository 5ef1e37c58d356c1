# SPDX-License-Identifier: Apache-2.0
"""The store over time: ``buildidfs journal``, ``stats`` and ``report``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from buildidfs.answers import NOT_RUNNING
from buildidfs.catalog import history
from buildidfs.catalog.containers import Names
from buildidfs.cli import table, terminal
from buildidfs.cli.common import (
    NO_STORE,
    AnyPath,
    SeenPath,
    Session,
    container_option,
    exit_status,
    json_option,
    namespaces_option,
    since_option,
)
from buildidfs.cli.output import json_line, limits, one_line, printable
from buildidfs.cli.table import Column
from buildidfs.errors import needs_extra
from buildidfs.wording import counted, moment, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from buildidfs.answers import Health, IdShares, Missing, Overview, Stats
    from buildidfs.catalog.history import JournalEntry, JournalRow
    from buildidfs.store import Store


_MOST_LABELS = 5


def _shown_path(row: JournalEntry) -> bytes:
    if not isinstance(row, history.JournalLoss):
        return row.raw_path
    more = b" and %d more" % (row.count - 1) if row.count > 1 else b""
    return (row.raw_path or b"(no names kept)") + more


def _columns(*, lost: bool) -> tuple[Column[JournalEntry], ...]:
    """Return the columns. If all rows are ``lost``, a narrow terminal shows their reasons instead
    of build IDs.
    """
    return (
        Column("last_seen", "SEEN", table.AGE),
        table.CONTAINER,
        Column("build_id", "BUILD ID", table.BUILD_ID, 120 * lost),
        Column("state", "BYTES", table.TEXT, 120 * lost),
        Column("path", "PATH", table.PATH, value=_shown_path),
        Column("reason", "REASON", table.LABEL, 0 if lost else 120, lambda row: row.lost),
    )


_COLUMNS: Final = _columns(lost=False)


@click.command(
    "journal",
    short_help="Show the files that were seen, with place and time.",
    epilog=exit_status(
        [
            "buildidfs journal --since 10m",
            "buildidfs journal --since 1h --lost",
        ],
        {
            2: "not a time, or no such namespace",
            **NO_STORE,
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
@click.option("--lost", is_flag=True, help="Only lost files, with the reason; not removed ones.")
@table.options(_COLUMNS)
@click.pass_obj
def journal(
    session: Session,
    since: int,
    container: str | None,
    globs: tuple[str, ...],
    names: tuple[str, ...] | None,
    lost: bool,
    layout: table.TableOptions,
) -> None:
    """Show the build IDs that were seen, with path, container and time, by the time of the last
    sighting.

    A line without bytes in the store says missing, removed if a limit has removed them, or omitted
    if there was no room and the host still had the file at that path. A line says lost, with the
    reason, if the watch saw a file and could not capture it. So a removed file is not lost: it was
    captured, and a limit took it later.
    """
    labels = set[str]()
    with session.open_store() as store:
        called = Names(store)
        wanted = history.journal_filter(store, globs, container, names)
        rows = _wanted(history.journal_rows(store, since, lost), wanted, names, labels)
        entries = (history.journal_entry(store, row, names, called) for row in rows)
        is_any = layout.print(_columns(lost=lost), entries)
        if lost and any(True for _ in store.journal.removed()):
            session.explain_empty(
                "files that a limit removed were captured, so they are not lost: buildidfs journal"
                " has them as removed"
            )
        if not is_any:
            session.explain_empty(
                _why_empty(store, since, lost, {called.short(label) for label in labels})
            )


def _wanted(
    rows: Iterable[JournalRow],
    wanted: Callable[[JournalRow], bool],
    names: tuple[str, ...] | None,
    labels: set[str],
) -> Iterator[JournalRow]:
    """Yield the wanted rows; add the labels of a few containers of unwanted rows to ``labels``."""
    for row in rows:
        if wanted(row):
            yield row
        elif len(labels) < _MOST_LABELS:
            labels.add(history.row_container(row, names))


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
    return (
        f"nothing was {what} since {moment(since / 1e9)}, the last time was {moment(last / 1e9)};"
        f" {scans}"
    )


@click.command(
    "stats",
    short_help="Show the size of the store and its coverage of this host.",
    epilog=exit_status(
        ["buildidfs stats", "buildidfs stats --json | jq .coverage"],
        NO_STORE,
    ),
)
@json_option()
@click.pass_obj
def stats(session: Session, json_: bool) -> None:
    """Count the build IDs, files and bytes in the store, and its coverage of this host.

    Coverage is the share of the build IDs in use by running processes that the store has. Only
    processes that may be inspected count.
    """
    from buildidfs.watch import status

    with session.open_store() as store, session.progress("Counting", "process") as show:
        found = status.stats(store, session.settings.retention, show)
    if json_:
        json_line(found)
        return
    _print_store(found)
    if found.jit_maps:
        processes = counted(found.jit_maps, "process")
        _print_line("JIT names", f"of {processes}, {size(found.jit_bytes)}: see buildidfs jit")
    _print_host(found)


def _print_store(found: Stats) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.artifacts.items() if count)
    _print_line("store", printable(found.store))
    _print_line("build IDs", f"{found.build_ids} ({kinds or 'nothing yet'})")
    if found.adopted:
        _print_line(" ", f"{found.adopted} adopted: of programs without a build ID")
    if found.ambiguous:
        _print_line(
            " ", f"{found.ambiguous} of unrelated programs each, not served: see list --conflicts"
        )
    _print_line(
        "blobs",
        f"{found.blobs}, {size(found.blob_bytes)}; on the disk {size(found.stored_bytes)},"
        f" index {size(found.index_bytes)}; free {size(found.free_bytes)}",
    )
    _print_line("kept", f"{limits(found)}; {counted(found.pins, 'pin')}")
    _print_line("origins", str(found.origins))


def _print_host(found: Stats) -> None:
    """Print how many build IDs running processes have mapped, and the share that the store has."""
    from buildidfs.linux import credentials, machine

    processes = counted(found.host_processes, "process")
    _print_line(
        "host",
        f"{processes} with code of {counted(found.host_build_ids, 'distinct build ID')}",
    )
    spot = machine.blind_spot()
    if spot is not None:
        _print_line(" ", f"{spot.unseen}: {spot.remedy}")
    if found.host_unseen:
        lacking = credentials.missing_for_scan()
        why = f"; {credentials.how_to_get(*lacking)}" if lacking else ""
        unseen = counted(found.host_unseen, "process")
        _print_line(" ", f"{unseen} could not be looked at{why}")
    if found.host_silent:
        _print_line(" ", found.host_silent)
    seen = found.host_processes - found.host_unseen
    of_those = f", of {seen} of {processes} only" if found.host_unseen else ""
    share = f" ({found.coverage:.1%})" if found.host_build_ids else ""
    covered = f"{found.host_build_ids_held} of {counted(found.host_build_ids, 'build ID')}"
    _print_line("coverage", f"{covered}{share}{of_those}")


def _print_line(label: str, text: str) -> None:
    terminal.print_text(text, label=label, indent=11)


_CONTAINERS: Final = 20
_BUILD_IDS: Final = 10


@click.command(
    "report",
    short_help="Report coverage, missing files, growth and health.",
    epilog=exit_status(
        ["buildidfs report", "buildidfs report --html report.html"],
        {
            2: "FILE cannot be written, or --html without the extra buildidfs[serve]",
            **NO_STORE,
        },
    ),
)
@click.option("--html", metavar="FILE", type=AnyPath(), help="Write a page for browsers to FILE.")
@json_option()
@click.pass_obj
def report(session: Session, html: str | None, json_: bool) -> None:
    """Report coverage by container and image, missing files with the remedy, growth and health.

    The report is the first page of `serve`. It names only files and containers that every user may
    know, so it can be shared.
    """
    from buildidfs.serve.page import overview as page

    if json_ and html is not None:
        raise click.UsageError("--json and --html contradict each other")
    with session.open_store() as store, session.progress("Counting", "build ID") as progress:
        taken = page.take(store, session.settings, progress)
    if json_:
        json_line(taken)
        return
    if html is None:
        _print(taken)
        return
    from buildidfs.store import export

    with needs_extra("serve"):
        text = page.as_html(taken)
    export.data_to_file(text, html)


def _print(taken: Overview) -> None:
    held = taken.store
    limit = "" if held.limit_bytes is None else f" of {size(held.limit_bytes)}"
    terminal.print_text(
        f"{counted(held.build_ids, 'build ID')} in {counted(held.blobs, 'file')}:"
        f" {size(held.stored_bytes)}{limit}, index {size(held.index_bytes)};"
        f" {size(held.free_bytes)} free"
    )
    rows = [("the whole store", taken.coverage)]
    if taken.host.build_ids:
        rows.append(("the host", taken.host))
    named = [each for each in taken.containers if not each.unnamed]
    for each in named[:_CONTAINERS]:
        removed = f" ({counted(each.removed, 'build ID')} removed)" if each.removed else ""
        rows.append((each.name + removed, each.coverage))
    rows += [(f"image {each.image}", each.coverage) for each in taken.images[:_CONTAINERS]]
    click.echo(f"{'IDS':>7} {'BINARIES':>8} {'SYMBOLS':>8} {'DEBUGINFO':>9}  OF")
    for name, share in rows:
        click.echo(f"{_shares(share)}  {one_line(name)}")
    if not taken.coverage.build_ids:
        click.echo("nothing is captured in this store yet: buildidfs scan proc, or buildidfs up")
    bare = len(taken.containers) - len(named) + taken.namespaces_left_out
    others = taken.left_out + max(len(named) - _CONTAINERS, 0)
    hidden = [counted(others, "more container")] if others else []
    hidden += [counted(bare, "namespace") + " without a container"] if bare else []
    if hidden:
        terminal.print_text(f"and {' and '.join(hidden)}, see buildidfs containers --all")
    _print_missing(taken.missing)
    _print_health(taken.health)


def _print_missing(missing: Missing) -> None:
    for reason in missing.reasons:
        finding = reason.finding
        terminal.print_text(f"{counted(reason.count, 'build ID')}: {one_line(finding.why)}")
        terminal.print_text(one_line(finding.remedy), label="    remedy", indent=12)
        if finding.command:
            terminal.print_text(one_line(finding.command), label="    run", indent=12)
    shown = missing.build_ids[:_BUILD_IDS]
    if shown:
        click.echo("for example:")
    for each in shown:
        where = one_line(each.container) or "the host"
        text = f"{one_line(each.path)} in {where}: {each.reason}"
        terminal.print_text(text, label=f"    {each.build_id[:12]}", indent=18)


def _shares(share: IdShares) -> str:
    parts = (share.executable, share.symbols, share.debuginfo)
    widths = (8, 8, 9)
    shown = [
        f"{part:{width}.1%}" if share.build_ids else f"{'-':>{width}}"
        for part, width in zip(parts, widths, strict=True)
    ]
    return f"{share.build_ids:7} {' '.join(shown)}"


def _print_health(health: Health) -> None:
    terminal.print_text(
        f"capture {health.verdict.value}: watch {one_line(health.mode)}{_counts(health)}"
    )
    for finding in health.findings:
        text = f"{finding.reason}; {finding.remedy}"
        terminal.print_text(f"    {one_line(text)}", indent=4)
    for each in health.losses:
        text = f"{each.count} lost: {one_line(each.reason)}; {one_line(each.remedy)}"
        terminal.print_text(f"    {text}", indent=4)


def _counts(health: Health) -> str:
    """Return the counts of a watch; empty if none runs, or it has not reported any."""
    if health.since is None:
        return "" if health.mode != NOT_RUNNING else ", buildidfs up starts it"
    return (
        f" since {moment(health.since)}: {health.captured} captured,"
        f" {health.lost} lost, {health.waiting} waiting"
    )
