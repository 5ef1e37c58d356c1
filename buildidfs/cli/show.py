# SPDX-License-Identifier: Apache-2.0
"""``buildidfs show``: all known facts about a build ID."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import click

from buildidfs.app.containers import Names
from buildidfs.app.history import container_of
from buildidfs.cli import terminal
from buildidfs.cli.common import (
    BuildIdArgument,
    Session,
    container_option,
    exit_status,
    namespaces_option,
    whose_fields,
)
from buildidfs.cli.output import counted, json_line, moment, one_line, path_fields, printable, size

if TYPE_CHECKING:
    from buildidfs.app.catalog import Known
    from buildidfs.model import Artifact, BuildId, Kind, Origin
    from buildidfs.store import JournalRecord, OriginRecord

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
    from buildidfs.app import catalog, requested_id
    from buildidfs.model import Kind

    with session.open_store() as store:
        build_id = requested_id.build_id(store, id_, container)
        ordinal = store.index.ordinal(build_id) or 0
        variants = {kind: store.index.variants(ordinal, kind) for kind in Kind}
        origins = store.index.origins(ordinal)
        known = catalog.known(store, build_id, variants)
        kept = {kind: each for kind, each in variants.items() if each}
        journal = [] if origins else store.journal.of(build_id)
        shown = _Shown(build_id, kept, origins, journal, known, names, Names(store))
        if json_:
            _as_json(shown)
        else:
            _as_text(shown, bounded=not all_)


class _Shown(NamedTuple):
    """A build ID with all printed facts; ``names`` are the namespaces that define a container.

    ``journal`` has its sightings if the store has none of its bytes.
    """

    build_id: BuildId
    variants: dict[Kind, list[Artifact]]
    origins: list[OriginRecord]
    journal: list[JournalRecord]
    known: Known
    names: tuple[str, ...] | None
    called: Names


def _as_json(shown: _Shown) -> None:
    build_id, variants, origins, _, known, names, called = shown
    json_line(
        {
            "build_id": build_id.hex(),
            "variants": [
                {
                    "kind": kind.name.lower(),
                    "sha256": artifact.digest.hex(),
                    "size": artifact.size,
                    "quality": artifact.quality.name.lower(),
                    "made_of": artifact.made_of,
                    "trust": artifact.trust.name.lower(),
                    "standing": artifact.standing.name.lower(),
                    "first_seen": artifact.first_seen_ns / 1e9,
                    "last_used": known.used[artifact.digest],
                    "mode": f"{artifact.mode:04o}",
                    "uid": artifact.uid,
                    "gid": artifact.gid,
                    "served": artifact.variant == known.served[kind],
                    "why": why,
                    "truncated": known.truncated.get(artifact.digest, ""),
                    "gdb_scripts": bool(artifact.scripts),
                    "adopted": artifact.adopted,
                    "aliases": known.aliases[artifact.digest],
                }
                for kind, kept in variants.items()
                for artifact, why in zip(kept, known.why[kind], strict=True)
            ],
            "origins": [
                {
                    **path_fields(record.origin.path),
                    "kinds": [kind.name.lower() for kind in record.kinds],
                    "sha256": record.digest.hex(),
                    **whose_fields(record.origin, names, called),
                    "device": record.origin.identity.dev,
                    "inode": record.origin.identity.ino,
                    "first_seen": record.first_seen_ns / 1e9,
                    "last_seen": record.last_seen_ns / 1e9,
                }
                for record in origins
            ],
            "missing": known.missing,
            "removed": None if known.removed is None else known.removed.time,
            "split_dwarf": None
            if known.split is None
            else {
                "units": known.split.units,
                "files": [printable(path) for path in known.split.files],
                "package": known.split.package.hex() if known.split.package else None,
            },
            "pins": [
                {**path_fields(pin.name, "name"), "pinned": pin.created_ns / 1e9}
                for pin in known.pins
            ],
        }
    )


def _as_text(shown: _Shown, *, bounded: bool) -> None:
    build_id, variants, origins, journal, known, names, called = shown
    click.echo(f"build ID   {build_id}")
    for kind, kept in variants.items():
        rows = list(zip(kept, known.why[kind], strict=True))
        for artifact, why in rows[: _VARIANTS if bounded else None]:
            _variant(artifact, why, known, is_served=artifact.variant == known.served[kind])
        _count_left_out(len(rows) - _VARIANTS if bounded else 0, "variant", " " * 11)
    split = known.split
    if split is not None and split.package is not None:
        units = counted(split.units, "unit")
        click.echo(f"dwp        kept under {split.package}: {units} of split DWARF")
    for pin in known.pins:
        for_whom = f" for {printable(pin.name)}" if pin.name else ""
        click.echo(f"pinned     {moment(pin.created_ns)}{for_whom}")
    click.echo("seen")
    places: list[tuple[Origin | JournalRecord, int, int]]
    places = [(each.origin, each.first_seen_ns, each.last_seen_ns) for each in origins]
    places += [(each, each.first_seen_ns, each.last_seen_ns) for each in journal]
    for seen, first_ns, last_ns in places[: _PLACES if bounded else None]:
        where = one_line(called.long(container_of(seen, names), seen.cgroup))
        first, last = moment(first_ns), moment(last_ns)
        when = first if first == last else f"{first} to {last}"
        click.echo(f"  {printable(seen.path)}")
        terminal.say(f"in {where} on {one_line(seen.host)}, {when}", label=" " * 6, indent=6)
    _count_left_out(len(places) - _PLACES if bounded else 0, "place", "  ")
    for text in known.missing:
        _say(text, "missing")


def _variant(artifact: Artifact, why: str, known: Known, *, is_served: bool) -> None:
    served = "  (served)" if is_served else ""
    reason = f", {'' if is_served else 'not '}served because it {why}" if why else ""
    scripts = ", has gdb scripts" if artifact.scripts else ""
    made = f", made of {artifact.made_of}" if artifact.made_of else ""
    _say(
        f"{artifact.digest}  {size(artifact.size)},"
        f" {artifact.quality.name.lower()}, trust {artifact.trust.name.lower()},"
        f" mode {artifact.mode:04o}{scripts}{made}{served}",
        artifact.kind.name.lower(),
    )
    _say(f"used {moment(known.used[artifact.digest] * 1_000_000_000)}{reason}")
    if text := known.truncated.get(artifact.digest):
        _say(text)
    if artifact.adopted:
        _say("adopted: the file has no usable build ID, and goes by its htlhash")
    for name, value in known.aliases[artifact.digest].items():
        if not (artifact.adopted and name == "htl"):
            click.echo(f"           {name}:{value}")


def _say(text: str, label: str = "") -> None:
    terminal.say(text, label=f"{label:{_INDENT}}", indent=_INDENT)


def _count_left_out(count: int, noun: str, indent: str) -> None:
    if count > 0:
        click.echo(f"{indent}and {counted(count, f'more {noun}')}, see --all")
