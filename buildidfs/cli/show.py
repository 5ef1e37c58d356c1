# SPDX-License-Identifier: Apache-2.0
"""``buildidfs show``: all that is known of a build ID."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import click

from buildidfs.cli.common import (
    BuildIdArgument,
    Session,
    container_of,
    exit_status,
    namespaces_option,
    whose_fields,
)
from buildidfs.cli.output import json_line, moment, path_fields, printable, size
from buildidfs.errors import IntegrityError

if TYPE_CHECKING:
    from buildidfs.app.catalog import SplitDwarf
    from buildidfs.formats.elf.identify import ElfFile
    from buildidfs.model import Absence, Artifact, BuildId, Digest, Kind
    from buildidfs.store import OriginRecord, Pin, Store


@click.command(
    "show",
    short_help="Show all that is known of a build ID.",
    epilog=exit_status(
        [
            "buildidfs show 8e9f",
            "buildidfs show --json 8e9fd827446c24067541ac5390e6f527fb5947bb",
            "buildidfs show --namespaces mnt,pid 8e9f",
        ],
        {
            2: "a prefix that several build IDs share, or no such namespace",
            30: "nothing is known of that build ID",
        },
    ),
)
@click.argument("id_", metavar="ID", type=BuildIdArgument())
@namespaces_option
@click.option("--json", "json_", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def show(session: Session, id_: str, names: tuple[str, ...] | None, json_: bool) -> None:
    """Show all that is known of a build ID (a unique prefix is enough).

    Its variants, the one that is served first, and when they were last of use; where each was
    seen, newest first; what is missing for a debugger; and for whom it is pinned.
    """
    from buildidfs.model import Kind

    with session.open_store() as store:
        build_id = store.index.match(id_)
        ordinal = store.index.ordinal(build_id) or 0
        variants = {kind: store.index.variants(ordinal, kind) for kind in Kind}
        origins = store.index.origins(ordinal)
        known = _known(store, build_id, variants)
    shown = {kind: kept for kind, kept in variants.items() if kept}
    (_as_json if json_ else _as_text)(build_id, shown, origins, known, names)


class Known(NamedTuple):
    """Further facts about a build ID.

    ``missing`` is what a debugger will ask for and not get, in words; ``used`` is when bytes were
    last of use, in seconds of Unix time; ``why`` says of each variant why it is served, or is not;
    ``served`` are the numbers of those that are, and ``truncated`` says why others are not whole.
    """

    missing: list[str]
    split: SplitDwarf | None
    used: dict[Digest, int]
    pins: list[Pin]
    why: dict[Kind, list[str]]
    served: dict[Kind, int | None]
    truncated: dict[Digest, str]


def _known(store: Store, build_id: BuildId, variants: dict[Kind, list[Artifact]]) -> Known:
    from buildidfs import names as spellings
    from buildidfs.app import catalog

    owner = spellings.package_owner(build_id)
    missing = [] if owner is not None else _missing(store, store.index.ordinal(build_id) or 0)
    split = None
    with contextlib.suppress(IntegrityError):  # which is among what is missing
        split = catalog.split_dwarf(store, build_id)
    if split is not None and split.package is None:
        missing.append(
            f"split DWARF: the .dwp file of {split.units} units, the first of which was written to"
            f" {printable(split.files[0])}; put them into one with dwp(1), and add that"
        )
    digests = {each.digest for kept in variants.values() for each in kept}
    used = {digest: store.index.last_use(digest) for digest in digests}
    ordinal = store.index.ordinal(build_id) or 0
    why = {kind: store.why(ordinal, kept) for kind, kept in variants.items()}
    best = {kind: store.index.artifact(ordinal, kind) for kind in variants}
    served = {kind: None if each is None else each.variant for kind, each in best.items()}
    truncated = {
        each.digest: _truncated(store, each)
        for kept in variants.values()
        for each in kept
        if each.truncated
    }
    return Known(missing, split, used, store.pins.of(build_id), why, served, truncated)


def _truncated(store: Store, artifact: Artifact) -> str:
    """Why debuggers refuse a file, in words."""
    from buildidfs.formats.elf.identify import ElfFile

    try:
        file = _described(store, artifact)
    except IntegrityError as error:
        return str(error)
    return file.truncated if isinstance(file, ElfFile) else "truncated"


def _described(store: Store, artifact: Artifact) -> ElfFile | Absence:
    """Describe the bytes of an artifact as ELF. Raises `IntegrityError`."""
    from buildidfs.capture import elf_file

    with store.blobs.open(artifact.digest) as blob:
        return elf_file.describe(blob.fileno())


def _missing(store: Store, ordinal: int) -> list[str]:
    """Return in words what a debugger will ask for and not get."""
    from buildidfs.model import Absence, Kind, Quality

    executable = store.index.artifact(ordinal, Kind.EXECUTABLE)
    debuginfo = store.index.artifact(ordinal, Kind.DEBUGINFO)
    withheld = debuginfo is None and bool(store.index.variants(ordinal, Kind.DEBUGINFO))
    if executable is None and debuginfo is None and not withheld:
        return []  # the vDSO and kallsyms are whole as they are
    found = []
    if executable is None:
        found.append("executable: only its debuginfo was seen")
    if withheld:
        found.append("debuginfo: all that was seen is believed less than the executable")
    elif debuginfo is None or debuginfo.quality < Quality.DEBUGINFO:
        found.append("debuginfo: no file with DWARF was seen")
    for artifact in (executable, debuginfo):
        if artifact is None:
            continue
        try:
            file = _described(store, artifact)
        except IntegrityError as error:
            found.append(str(error))
            continue
        if isinstance(file, Absence):
            continue
        link = file.debuglink
        if artifact is executable and debuginfo is None and link is not None:
            found[-1] += f"; .gnu_debuglink names {printable(link.name)}"
        # Strip leaves the reference in executables, of which no debugger follows it.
        has_dwarf = file.quality >= Quality.DEBUGINFO
        if has_dwarf and file.altlink and store.index.ordinal(file.altlink.build_id) is None:
            found.append(f"dwz file {file.altlink.build_id}, {printable(file.altlink.name)}")
    return list(dict.fromkeys(found))


def _as_json(
    build_id: BuildId,
    variants: dict[Kind, list[Artifact]],
    origins: list[OriginRecord],
    known: Known,
    names: tuple[str, ...] | None,
) -> None:
    json_line(
        {
            "build_id": build_id.hex(),
            "variants": [
                {
                    "kind": kind.name.lower(),
                    "sha256": artifact.digest.hex(),
                    "size": artifact.size,
                    "quality": artifact.quality.name.lower(),
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
                }
                for kind, kept in variants.items()
                for artifact, why in zip(kept, known.why[kind], strict=True)
            ],
            "origins": [
                {
                    **path_fields(record.origin.path),
                    "kinds": [kind.name.lower() for kind in record.kinds],
                    "sha256": record.digest.hex(),
                    **whose_fields(record.origin, names),
                    "device": record.origin.identity.dev,
                    "inode": record.origin.identity.ino,
                    "first_seen": record.first_seen_ns / 1e9,
                    "last_seen": record.last_seen_ns / 1e9,
                }
                for record in origins
            ],
            "missing": known.missing,
            "split_dwarf": None
            if known.split is None
            else {
                "units": known.split.units,
                "files": [printable(path) for path in known.split.files],
                "package": known.split.package.hex() if known.split.package else None,
            },
            "pins": [
                {
                    **{key.replace("path", "name"): x for key, x in path_fields(pin.name).items()},
                    "pinned": pin.created_ns / 1e9,
                }
                for pin in known.pins
            ],
        }
    )


def _as_text(
    build_id: BuildId,
    variants: dict[Kind, list[Artifact]],
    origins: list[OriginRecord],
    known: Known,
    names: tuple[str, ...] | None,
) -> None:
    click.echo(f"build ID   {build_id}")
    for kind, kept in variants.items():
        for artifact, why in zip(kept, known.why[kind], strict=True):
            is_served = artifact.variant == known.served[kind]
            served = "  (served)" if is_served else ""
            reason = f", {'' if is_served else 'not '}served because it {why}" if why else ""
            scripts = ", has gdb scripts" if artifact.scripts else ""
            click.echo(
                f"{kind.name.lower():10} {artifact.digest}  {size(artifact.size)},"
                f" {artifact.quality.name.lower()}, trust {artifact.trust.name.lower()},"
                f" mode {artifact.mode:04o}{scripts}{served}\n"
                f"           used {moment(known.used[artifact.digest] * 1_000_000_000)}{reason}"
            )
            if text := known.truncated.get(artifact.digest):
                click.echo(f"           {text}")
    split = known.split
    if split is not None and split.package is not None:
        click.echo(f"dwp        kept under {split.package}: {split.units} units of split DWARF")
    for pin in known.pins:
        for_whom = f" for {printable(pin.name)}" if pin.name else ""
        click.echo(f"pinned     {moment(pin.created_ns)}{for_whom}")
    click.echo("seen")
    for record in origins:
        where = printable(container_of(record.origin, names).encode()) or "the host"
        click.echo(
            f"  {printable(record.origin.path)}\n"
            f"      in {where} on {record.origin.host}, {moment(record.first_seen_ns)}"
            f" to {moment(record.last_seen_ns)}"
        )
    for text in known.missing:
        click.echo(f"missing    {text}")
