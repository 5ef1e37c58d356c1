# SPDX-License-Identifier: Apache-2.0
"""``buildidfs report``: the overview of `serve` as text, or as one file of HTML."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import click

from buildidfs.answers import NOT_RUNNING
from buildidfs.cli import terminal
from buildidfs.cli.common import AnyPath, Session, exit_status
from buildidfs.cli.output import counted, moment, one_line, size
from buildidfs.errors import needs_extra
from buildidfs.store.index.locations import is_namespace

if TYPE_CHECKING:
    from buildidfs.answers import Container, Health, Missing, Overview, Share

_CONTAINERS: Final = 20
_BUILD_IDS: Final = 10


@click.command(
    "report",
    short_help="Report coverage, missing files, growth and health.",
    epilog=exit_status(
        ["buildidfs report", "buildidfs report --html report.html"],
        {
            2: "FILE cannot be written, or --html without the extra buildidfs[serve]",
            11: "no store at that place; 13 unknown format",
        },
    ),
)
@click.option("--html", metavar="FILE", type=AnyPath(), help="Write a page for browsers to FILE.")
@click.pass_obj
def report(session: Session, html: str | None) -> None:
    """Report coverage by container and image, missing files with the remedy, growth and health.

    The report is the first page of `serve`. It names only files and containers that every user may
    know, so it can be shared.
    """
    from buildidfs.serve.page import overview as page

    with session.open_store() as store, session.progress("Counting", "build ID") as progress:
        taken = page.take(store, session.settings, progress)
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
    terminal.say(
        f"{counted(held.build_ids, 'build ID')} in {counted(held.blobs, 'file')}:"
        f" {size(held.stored_bytes)}{limit}, index {size(held.index_bytes)};"
        f" {size(held.free_bytes)} free"
    )
    rows = [("the whole store", taken.coverage)]
    if taken.host.build_ids:
        rows.append(("the host", taken.host))
    named = [each for each in taken.containers if not _is_bare(each)]
    rows += [(each.name, each.coverage) for each in named[:_CONTAINERS]]
    rows += [(f"image {each.image}", each.coverage) for each in taken.images[:_CONTAINERS]]
    click.echo(f"{'IDS':>7} {'BINARIES':>8} {'SYMBOLS':>8} {'DEBUGINFO':>9}  OF")
    for name, share in rows:
        click.echo(f"{_shares(share)}  {one_line(name)}")
    if not taken.coverage.build_ids:
        click.echo("nothing is captured in this store yet: buildidfs scan proc, or buildidfs up")
    bare = len(taken.containers) - len(named)
    others = taken.left_out + max(len(named) - _CONTAINERS, 0)
    hidden = [counted(others, "more container")] if others else []
    hidden += [counted(bare, "namespace") + " without a container"] if bare else []
    if hidden:
        terminal.say(f"and {' and '.join(hidden)}, see buildidfs containers --all")
    _print_missing(taken.missing)
    _print_health(taken.health)


def _print_missing(missing: Missing) -> None:
    for reason in missing.reasons:
        finding = reason.finding
        terminal.say(f"{counted(reason.count, 'build ID')}: {one_line(finding.why)}")
        terminal.say(one_line(finding.remedy), label="    remedy", indent=12)
        if finding.command:
            terminal.say(one_line(finding.command), label="    run", indent=12)
    shown = missing.build_ids[:_BUILD_IDS]
    if shown:
        click.echo("for example:")
    for each in shown:
        where = one_line(each.container) or "the host"
        text = f"{one_line(each.path)} in {where}: {each.reason}"
        terminal.say(text, label=f"    {each.build_id[:12]}", indent=18)


def _is_bare(container: Container) -> bool:
    return is_namespace(container.label) and container.name == container.label


def _shares(share: Share) -> str:
    parts = (share.executable, share.symbols, share.debuginfo)
    widths = (8, 8, 9)
    shown = [
        f"{part:{width}.1%}" if share.build_ids else f"{'-':>{width}}"
        for part, width in zip(parts, widths, strict=True)
    ]
    return f"{share.build_ids:7} {' '.join(shown)}"


def _print_health(health: Health) -> None:
    terminal.say(f"capture {health.verdict.value}: watch {one_line(health.mode)}{_counts(health)}")
    for finding in health.findings:
        text = f"{finding.reason}; {finding.remedy}"
        terminal.say(f"    {one_line(text)}", indent=4)
    for each in health.losses:
        text = f"{each.count} lost: {one_line(each.reason)}; {one_line(each.remedy)}"
        terminal.say(f"    {text}", indent=4)


def _counts(health: Health) -> str:
    """Return the counts of a watch; empty if none runs, or it has not reported any."""
    if health.since is None:
        return "" if health.mode != NOT_RUNNING else ", buildidfs up starts it"
    return (
        f" since {moment(int(health.since * 1e9))}: {health.captured} captured,"
        f" {health.lost} lost, {health.waiting} waiting"
    )
