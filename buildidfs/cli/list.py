# SPDX-License-Identifier: Apache-2.0
"""``buildidfs list``: what is in the store."""

from __future__ import annotations

import fnmatch
import os
import re
import sys
from typing import TYPE_CHECKING, NamedTuple

import click

from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.output import json_line, path_fields, printable, size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from buildidfs.model import Artifact, BuildId, Kind
    from buildidfs.store import OriginRecord, Store

_MOST_LABELS = 5


@click.command(
    "list",
    short_help="List what is in the store.",
    epilog=exit_status(
        [
            "buildidfs list --path '*/libc.so.6'",
            "buildidfs list --container docker:0f5c3e8d1b2a --json",
            "buildidfs list --kind debuginfo",
            "buildidfs list --conflicts",
        ],
        {11: "no store at that place; 13 unknown format"},
    ),
)
@click.option("--path", "glob", metavar="GLOB", help="Only files seen at such a path ('*/libc*').")
@click.option("--container", metavar="LABEL", help="Only files seen in this container.")
@click.option(
    "--kind",
    type=click.Choice(["executable", "debuginfo", "vdso", "kallsyms"]),
    help="Only artifacts of this kind.",
)
@click.option("--conflicts", is_flag=True, help="Only what has several variants, with all of them.")
@click.option("--json", "json_", is_flag=True, help="One JSON object a line.")
@click.pass_obj
def list_(
    session: Session,
    glob: str | None,
    container: str | None,
    kind: str | None,
    conflicts: bool,
    json_: bool,
) -> None:
    """List artifacts in the order of their arrival: build ID, kind, size, last seen path.

    With --conflicts those of which there are several variants, the one that is served first,
    and why that is so.
    """
    wanted = _filter(glob, container)
    shown = False
    with session.open_store() as store:
        if conflicts:
            for conflict in _conflicts(store, kind, wanted):
                shown = True
                (_conflict_as_json if json_ else _conflict_as_text)(conflict)
            sys.stdout.flush()
            if not shown:
                session.say_why_empty(_why_no_conflicts(store, glob, container, kind))
            return
        for build_id, artifact, record in _rows(store, kind, wanted):
            shown = True
            if json_:
                json_line(
                    {
                        "build_id": build_id.hex(),
                        "kind": artifact.kind.name.lower(),
                        "sha256": artifact.digest.hex(),
                        "size": artifact.size,
                        "container": record.origin.container,
                        "last_seen": record.last_seen_ns / 1e9,
                        **path_fields(record.origin.path),
                    }
                )
            else:
                path = printable(record.origin.path)
                where = f"  ({record.origin.container})" if record.origin.container else ""
                sys.stdout.write(
                    f"{build_id.hex():40}  {artifact.kind.name.lower():10}"
                    f"  {size(artifact.size):>10}  {path}{printable(where.encode())}\n"
                )
        sys.stdout.flush()
        if not shown:
            session.say_why_empty(_why_empty(store, glob, container, kind))


def _why_no_conflicts(
    store: Store, glob: str | None, container: str | None, kind: str | None
) -> str:
    """Why no build ID with several variants was shown."""
    if glob is kind is container is None or next(iter(store.index.conflicts()), None) is None:
        return "no build ID in this store has several variants"
    return f"no build ID with several variants fits {_asked(glob, container, kind)}"


def _why_empty(store: Store, glob: str | None, container: str | None, kind: str | None) -> str:
    """Why no artifact was shown."""
    if not store.stats().blobs:
        return "nothing is captured in this store yet: buildidfs scan proc, or buildidfs up"
    why = f"nothing in this store fits {_asked(glob, container, kind)}"
    if container is not None and (labels := _labels(store)):
        return f"{why}; there are some of {', '.join(labels)}"
    if glob is not None:
        return f"{why}; a pattern has to match the whole path ('*/libc.so.6')"
    return why


def _asked(glob: str | None, container: str | None, kind: str | None) -> str:
    given = (("--path", glob), ("--container", container), ("--kind", kind))
    return " ".join(f"{option} {value}" for option, value in given if value is not None)


def _labels(store: Store) -> list[str]:
    """The labels of a few containers that files were seen in."""
    from itertools import islice

    every = (each.label for each in store.containers.every())
    return sorted(set(islice(every, _MOST_LABELS)))


def _filter(glob: str | None, container: str | None) -> Callable[[OriginRecord], bool] | None:
    """The test that an origin has to pass, or None when every one does."""
    if glob is None and container is None:
        return None
    from buildidfs.capture.origin.container import fits

    pattern = re.compile(os.fsencode(fnmatch.translate(glob or "*")))

    def wanted(record: OriginRecord) -> bool:
        if container is not None and not fits(container, record.origin.container):
            return False
        return pattern.match(record.origin.path) is not None

    return wanted


def _rows(
    store: Store, kind: str | None, wanted: Callable[[OriginRecord], bool] | None
) -> Iterator[tuple[BuildId, Artifact, OriginRecord]]:
    """Each artifact with the newest origin that passes the filter."""
    from buildidfs.model import Kind

    kinds = list(Kind) if kind is None else [Kind[kind.upper()]]
    for ordinal, build_id in store.index.build_ids_from(0):
        records = store.index.origins(ordinal)
        for each in kinds:
            artifact = store.index.artifact(ordinal, each)
            if artifact is None:
                continue
            for record in records:
                if each in record.kinds and (wanted is None or wanted(record)):
                    yield build_id, artifact, record
                    break


class Conflict(NamedTuple):
    """An artifact with several variants: each, why it is served or is not, and where it was last
    seen, if that is known. ``served`` is the number of the one that is, None for none.
    """

    build_id: BuildId
    kind: Kind
    served: int | None
    variants: list[tuple[Artifact, str, OriginRecord | None]]


def _conflicts(
    store: Store, kind: str | None, wanted: Callable[[OriginRecord], bool] | None
) -> Iterator[Conflict]:
    """Those of which at least one variant was seen at a place that passes the filter."""
    from buildidfs.model import Kind

    for ordinal, number in store.index.conflicts():
        build_id = store.index.build_id(ordinal)
        if build_id is None or (kind is not None and Kind[kind.upper()] != number):
            continue
        records = store.index.origins(ordinal)
        if wanted is not None and not any(map(wanted, records)):
            continue
        last: dict[bytes, OriginRecord] = {}
        for record in records:
            last.setdefault(record.digest, record)
        kept = store.index.variants(ordinal, number)
        reasons = store.why(ordinal, kept)
        served = store.index.artifact(ordinal, number)
        yield Conflict(
            build_id,
            Kind(number),
            None if served is None else served.variant,
            [(each, why, last.get(each.digest)) for each, why in zip(kept, reasons, strict=True)],
        )


def _conflict_as_json(conflict: Conflict) -> None:
    json_line(
        {
            "build_id": conflict.build_id.hex(),
            "kind": conflict.kind.name.lower(),
            "variants": [
                {
                    "sha256": artifact.digest.hex(),
                    "size": artifact.size,
                    "quality": artifact.quality.name.lower(),
                    "trust": artifact.trust.name.lower(),
                    "first_seen": artifact.first_seen_ns / 1e9,
                    "served": artifact.variant == conflict.served,
                    "why": why,
                    "container": None if record is None else record.origin.container,
                    **({"path": None} if record is None else path_fields(record.origin.path)),
                }
                for artifact, why, record in conflict.variants
            ],
        }
    )


def _conflict_as_text(conflict: Conflict) -> None:
    sys.stdout.write(f"{conflict.build_id.hex():40}  {conflict.kind.name.lower()}\n")
    for artifact, why, record in conflict.variants:
        where = "" if record is None else printable(record.origin.path)
        if record is not None and record.origin.container:
            where += f"  ({printable(record.origin.container.encode())})"
        sys.stdout.write(
            f"  {'' if artifact.variant == conflict.served else 'not '}served: {why}\n"
            f"      {artifact.digest}  {size(artifact.size):>10}  {where}\n"
        )
