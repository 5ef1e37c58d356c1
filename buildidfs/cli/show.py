# SPDX-License-Identifier: Apache-2.0
"""``buildidfs show``: all known facts about a build ID."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

import click

from buildidfs.cli import terminal
from buildidfs.cli.common import (
    BuildIdArgument,
    Session,
    container_option,
    exit_status,
    namespaces_option,
)
from buildidfs.cli.output import counted, json_line, moment, one_line, printable, size

if TYPE_CHECKING:
    from buildidfs.answers import Facts, PrivateVariant

_VARIANTS: Final = 10  # for each kind
_PLACES: Final = 20
_INDENT: Final = 11


@click.command(
    "show",
    short_help="Show all facts about a build ID.",
    epilog=exit_status(
        [
            "buildidfs show 8e9f",
            "buildidfs show /usr/lib/x86_64-linux-gnu/libc.so.6",
            "buildidfs show --json 8e9fd827446c24067541ac5390e6f527fb5947bb",
            "buildidfs show --namespaces mnt,pid 8e9f",
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
@click.option("--json", "json_", is_flag=True, help="Print one JSON object.")
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
        click.echo(f"pinned     {_moment(pin.pinned)}{for_whom}")
    click.echo("seen")
    places = [*facts.origins, *facts.journal]
    for seen in places[: _PLACES if bounded else None]:
        first, last = _moment(seen.first_seen), _moment(seen.last_seen)
        when = first if first == last else f"{first} to {last}"
        where = f"in {one_line(seen.where)} on {one_line(seen.host)}, {when}"
        click.echo(f"  {printable(seen.raw_path)}")
        terminal.say(where, label=" " * 6, indent=6)
    _count_left_out(len(places) - _PLACES if bounded else 0, "place", "  ")
    for text in facts.missing:
        _say(text, "missing")


def _moment(seconds: float) -> str:
    return moment(int(seconds * 1_000_000_000))


def _variant(each: PrivateVariant) -> None:
    served = "  (served)" if each.served else ""
    reason = f", {'' if each.served else 'not '}served because it {each.why}" if each.why else ""
    scripts = ", has gdb scripts" if each.gdb_scripts else ""
    made = f", made of {each.made_of}" if each.made_of else ""
    _say(
        f"{each.sha256}  {size(each.size)}, {each.quality}, trust {each.trust},"
        f" mode {each.mode}{scripts}{made}{served}",
        each.kind,
    )
    _say(f"used {_moment(each.last_used)}{reason}")
    if each.truncated:
        _say(each.truncated)
    if each.adopted:
        _say("adopted: the file has no usable build ID, and goes by its htlhash")
    for name, value in each.aliases.items():
        if not (each.adopted and name == "htl"):
            click.echo(f"           {name}:{value}")


def _say(text: str, label: str = "") -> None:
    terminal.say(text, label=f"{label:{_INDENT}}", indent=_INDENT)


def _count_left_out(count: int, noun: str, indent: str) -> None:
    if count > 0:
        click.echo(f"{indent}and {counted(count, f'more {noun}')}, see --all")
