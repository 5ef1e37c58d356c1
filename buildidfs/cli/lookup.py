# SPDX-License-Identifier: Apache-2.0
"""Look up paths and build IDs: ``buildidfs which``, ``where`` and ``show``."""

from __future__ import annotations

import os
from itertools import groupby
from typing import TYPE_CHECKING, Final

import click

from buildidfs.cli import table, terminal
from buildidfs.cli.common import (
    NO_STORE,
    BuildIdArgument,
    SeenPath,
    Session,
    container_option,
    exit_status,
    json_option,
    namespaces_option,
    since_option,
)
from buildidfs.cli.output import json_line, one_line, printable
from buildidfs.cli.table import Column
from buildidfs.errors import IncompleteError
from buildidfs.wording import abridged, counted, moment, size

if TYPE_CHECKING:
    from buildidfs.answers import Facts, PrivateVariant
    from buildidfs.capture.base import Unreadable
    from buildidfs.catalog.history import SeenPlace
    from buildidfs.watch import running
    from buildidfs.watch.running import FileNow, MappedFile


def _package(row: MappedFile) -> str | None:
    """Return the package of a mapped file, and that of the file that has replaced it."""
    running, now = _versioned(row), row.now
    if now is None:
        return running
    successor = _versioned(now)
    if now.build_id == row.build_id:
        same = f"same build ID as {successor or 'the file'} now"
        return f"{running} ({same})" if running else same
    if successor is None:
        return running
    return f"{running or 'unknown version'} (now {successor})"


def _versioned(of: MappedFile | FileNow) -> str | None:
    return f"{of.package} {of.package_version or ''}".rstrip() if of.package else None


_PLACES: Final[tuple[Column[SeenPlace], ...]] = (
    Column("build_id", "BUILD ID", table.BUILD_ID),
    Column("held", "BYTES", table.TEXT, value=lambda row: row.state),
    Column("first_seen", "FIRST SEEN", table.AGE, 100),
    Column("last_seen", "SEEN", table.AGE),
    Column("host", "HOST", table.LABEL, 140),
    table.CONTAINER,
    table.LOCATION,
)
_MAPPERS: Final[tuple[Column[MappedFile], ...]] = (
    Column("build_id", "BUILD ID", table.BUILD_ID),
    Column("pid", "PID", table.COUNT),
    Column("comm", "COMMAND", table.TEXT),
    Column("deleted", "FILE", table.TEXT, value=lambda x: "deleted" if x.deleted else "present"),
    Column("package", "PACKAGE", table.ANSWER, value=_package),
    table.CONTAINER,
    table.LOCATION,
)


@click.command(
    "which",
    short_help="Show the build IDs that a path has had.",
    epilog=exit_status(
        [
            "buildidfs which /usr/lib/x86_64-linux-gnu/libc.so.6",
            "buildidfs which --glob '*/libssl.so*' --json",
        ],
        {**NO_STORE, 30: "no file was seen there"},
    ),
)
@click.argument("path", metavar="PATH", type=SeenPath())
@container_option()
@since_option
@click.option("--glob", "is_glob", is_flag=True, help="PATH is a pattern ('*/libc.so.6').")
@table.options(_PLACES)
@click.pass_obj
def which(
    session: Session,
    path: str,
    container: str | None,
    since: int,
    is_glob: bool,
    layout: table.TableOptions,
) -> None:
    """Show the build IDs that were seen at PATH, in all containers, the newest first.

    PATH is a whole path. The command also finds it with or without /usr where distributions have
    merged the two, and through the symbolic links of this host. Build IDs without bytes in the
    store are marked as missing, or as removed if a limit has removed them.
    """
    from buildidfs.catalog import history
    from buildidfs.errors import ArtifactMissing

    with session.open_store() as store:
        if is_glob:
            found = history.at_paths(store, path, container)
        else:
            # The name that ldd prints is a link, and the kernel reports its target.
            here = [os.fsencode(os.path.realpath(path))] if container is None else []
            found = history.at_path(store, os.fsencode(path), container, others=here)
        places = history.seen_places(store, found)
        recent = [place for place in places if place.last_seen >= since / 1e9]
        layout.print(_PLACES, recent)
    if not recent:
        where = "" if container is None else f" in container {container}"
        hint = "" if is_glob else f"; for a part of a path try --glob '*/{os.path.basename(path)}'"
        if places:
            hint = f" since {moment(since / 1e9)}; the last time was {moment(places[0].last_seen)}"
        ever = "" if places else "ever "
        text = printable(f"nothing was {ever}seen at {path}{where}{hint}")
        raise ArtifactMissing(text)


@click.command(
    "where",
    short_help="Show where a build ID was seen, or which processes run it.",
    epilog=exit_status(
        [
            "buildidfs where 8e9f",
            "buildidfs where --live --path '*/libcrypto.so*'",
        ],
        {
            2: "a prefix that several build IDs share",
            3: "--live: some processes could not be inspected",
            **NO_STORE,
            30: "nothing is known of that build ID",
        },
    ),
)
@click.argument("id_", metavar="[ID|PATH]", required=False, type=BuildIdArgument())
@container_option()
@click.option(
    "--live", is_flag=True, help="Show the processes that have it mapped now; needs no store."
)
@click.option(
    "--path",
    "glob",
    metavar="GLOB",
    help="With --live: show files at a path of this pattern ('*/libssl.so*').",
)
@click.option(
    "--deleted",
    is_flag=True,
    help="With --live: show files that are no longer at their mapped path.",
)
@table.options(_PLACES, _MAPPERS)
@click.pass_obj
def where(
    session: Session,
    id_: str | None,
    container: str | None,
    live: bool,
    glob: str | None,
    deleted: bool,
    layout: table.TableOptions,
) -> int:
    """Show each place where a build ID, or the file at PATH, was seen, the newest first.

    This includes places where the file could not be captured. With --live the command shows the
    processes that have the file mapped now, or any file that --path and --deleted select, with its
    package in the root of the process. So it finds the processes that still run an old libcrypto.
    For a replaced file the command prints the version that runs, from a note in the file or from
    the log of dpkg, and the version that is installed now.
    """
    if live:
        if id_ is None and glob is None and not deleted:
            raise click.UsageError("--live wants an ID, a PATH, --path or --deleted")
        from buildidfs.watch import running

        asked = running.MappingFilter(id_, glob, container, deleted)
        return _print_mappers(session, asked, layout)
    if glob is not None or deleted:
        raise click.UsageError(
            "--path and --deleted go with --live; buildidfs which --glob finds paths of the past"
        )
    if id_ is None:
        raise click.UsageError("where wants an ID or a PATH")
    from buildidfs.catalog import history, requested_id

    with session.open_store() as store:
        places = history.of_build_id(store, requested_id.build_id(store, id_, container))
        layout.print(_PLACES, history.seen_places(store, places))
    return 0


def _print_mappers(
    session: Session, asked: running.MappingFilter, layout: table.TableOptions
) -> int:
    """Print the processes that map the requested files, and return the exit status."""
    from buildidfs.watch import running

    mapped, refused = running.who_maps(session.settings, asked)
    if not layout.print(_MAPPERS, mapped):
        session.explain_empty(f"no process has {asked} mapped")
    return _report_refused(refused)


_NAMED: Final = 4


def _report_refused(refused: list[Unreadable]) -> int:
    """Print the processes that could not be examined; return the exit status for them."""
    processes = [each for each in refused if each.path != b"/proc"]
    for each in refused:
        if each not in processes:
            terminal.complain(each.reason)
    by_reason: dict[str, list[str]] = {}
    for each in processes:
        by_reason.setdefault(each.reason, []).append(printable(each.path))
    for reason, paths in by_reason.items():
        those = counted(len(paths), "process")
        terminal.complain(f"{those} could not be inspected ({abridged(paths, _NAMED)}: {reason})")
    return IncompleteError.exit_code if refused else 0


_VARIANTS: Final = 10  # for each kind
_MOST_PLACES: Final = 20
_INDENT: Final = 11


@click.command(
    "show",
    short_help="Show all facts about a build ID.",
    epilog=exit_status(
        [
            "buildidfs show 8e9f",
            "buildidfs show /usr/lib/x86_64-linux-gnu/libc.so.6",
        ],
        {
            2: "a prefix that several build IDs share, or no such namespace",
            30: "nothing is known of that build ID",
        },
    ),
)
@click.argument("id_", metavar="ID|PATH", type=BuildIdArgument())
@container_option("PATH means the file that was seen there in this container.")
@click.option("--all", "all_", is_flag=True, help="Print all variants and places.")
@namespaces_option
@json_option()
@click.pass_obj
def show(
    session: Session,
    id_: str,
    container: str | None,
    all_: bool,
    names: tuple[str, ...] | None,
    json_: bool,
) -> None:
    """Show all facts about a build ID (a unique prefix is enough), or about the file at PATH.

    These are its variants, the served one first, with their last use; its places, the newest first;
    the files that a debugger would miss; and its pins. Without --all the command prints only the
    first variants and the newest places, and counts the others.
    """
    from buildidfs.catalog import artifacts, requested_id

    with session.open_store() as store:
        build_id = requested_id.build_id(store, id_, container)
        facts = artifacts.facts(store, build_id, names)
    if json_:
        json_line(facts)
    else:
        _print(facts, bounded=not all_)


def _print(facts: Facts, *, bounded: bool) -> None:
    click.echo(f"build ID   {facts.build_id}")
    for _, group in groupby(facts.variants, lambda each: each.kind):
        rows = list(group)
        for each in rows[: _VARIANTS if bounded else None]:
            _variant(each)
        _count_left_out(len(rows) - _VARIANTS if bounded else 0, "variant", " " * 11)
    split = facts.split_dwarf
    if split is not None and split.package is not None:
        units = counted(split.units, "unit")
        click.echo(f"dwp        kept under {split.package}: {units} of split DWARF")
    for pin in facts.pins:
        for_whom = f" for {printable(pin.raw_name)}" if pin.name else ""
        click.echo(f"pinned     {moment(pin.pinned)}{for_whom}")
    click.echo("seen")
    places = [*facts.origins, *facts.journal]
    for seen in places[: _MOST_PLACES if bounded else None]:
        first, last = moment(seen.first_seen), moment(seen.last_seen)
        when = first if first == last else f"{first} to {last}"
        where = f"in {one_line(seen.where)} on {one_line(seen.host)}, {when}"
        click.echo(f"  {printable(seen.raw_path)}")
        terminal.print_text(where, label=" " * 6, indent=6)
    _count_left_out(len(places) - _MOST_PLACES if bounded else 0, "place", "  ")
    for text in facts.missing:
        _print_line(text, "missing")


def _variant(each: PrivateVariant) -> None:
    served = "  (served)" if each.served else ""
    reason = f", {'' if each.served else 'not '}served because it {each.why}" if each.why else ""
    scripts = ", has gdb scripts" if each.gdb_scripts else ""
    made = f", made of {each.made_of}" if each.made_of else ""
    _print_line(
        f"{each.sha256}  {size(each.size)}, {each.quality}, trust {each.trust},"
        f" mode {each.mode}{scripts}{made}{served}",
        each.kind,
    )
    _print_line(f"used {moment(each.last_used)}{reason}")
    if each.truncated:
        _print_line(each.truncated)
    if each.adopted:
        _print_line("adopted: the file has no usable build ID, and goes by its htlhash")
    for name, value in each.aliases.items():
        if not (each.adopted and name == "htl"):
            click.echo(f"           {name}:{value}")


def _print_line(text: str, label: str = "") -> None:
    terminal.print_text(text, label=f"{label:{_INDENT}}", indent=_INDENT)


def _count_left_out(count: int, noun: str, indent: str) -> None:
    if count > 0:
        click.echo(f"{indent}and {counted(count, f'more {noun}')}, see --all")
