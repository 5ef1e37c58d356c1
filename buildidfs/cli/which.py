# SPDX-License-Identifier: Apache-2.0
"""``buildidfs which``: the build IDs that a path has had."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from buildidfs.cli.common import AnyPath, Session, exit_status
from buildidfs.cli.output import json_line, moment, path_fields, printable

if TYPE_CHECKING:
    from buildidfs.app.history import Place


@click.command(
    "which",
    short_help="Show the build IDs that a path has had.",
    epilog=exit_status(
        [
            "buildidfs which /usr/lib/x86_64-linux-gnu/libc.so.6",
            "buildidfs which /app/server --container docker:0f5c3e8d1b2a",
            "buildidfs which --glob '*/libssl.so*' --json",
        ],
        {11: "no store at that place; 13 unknown format", 30: "nothing was ever seen there"},
    ),
)
@click.argument("path", metavar="PATH", type=AnyPath())
@click.option("--container", metavar="LABEL", help="Only what was seen in this container.")
@click.option("--glob", "is_glob", is_flag=True, help="PATH is a pattern ('*/libc.so.6').")
@click.option("--json", "json_", is_flag=True, help="One JSON object a line.")
@click.pass_obj
def which(session: Session, path: str, container: str | None, is_glob: bool, json_: bool) -> None:
    """Show every build ID that was seen at PATH, in whatever container, the last one first.

    PATH is whole. It is taken with and without /usr where distributions have merged the two, and
    with its symbolic links as they are on this host; a line for another path than PATH names it. A
    line says missing where the store holds no bytes.
    """
    from buildidfs.app import history
    from buildidfs.errors import ArtifactMissing

    with session.open_store() as store:
        if is_glob:
            places = history.at_paths(store, path, container)
        else:
            # The name that ldd prints is a link, and the kernel tells what that leads to.
            here = [os.fsencode(os.path.realpath(path))] if container is None else []
            places = history.at_path(store, os.fsencode(path), container, others=here)
    if not places:
        where = "" if container is None else f" in container {container}"
        hint = "" if is_glob else f"; for a part of a path try --glob '*/{os.path.basename(path)}'"
        text = printable(os.fsencode(f"nothing was ever seen at {path}{where}{hint}"))
        raise ArtifactMissing(text)
    for place in places:
        if json_:
            json_line(place_fields(place))
        else:
            _text(place, with_path=is_glob or place.path != os.fsencode(path))
    sys.stdout.flush()


def place_fields(place: Place) -> dict[str, object]:
    """What JSON output says of a place."""
    return {
        "build_id": place.build_id.hex(),
        **path_fields(place.path),
        "container": place.container,
        "host": place.host,
        "held": place.held,
        "first_seen": place.first_seen_ns / 1e9,
        "last_seen": place.last_seen_ns / 1e9,
    }


def _text(place: Place, *, with_path: bool) -> None:
    where = printable(place.container.encode("utf-8", "surrogateescape")) or "-"
    path = f"  {printable(place.path)}" if with_path else ""
    sys.stdout.write(
        f"{moment(place.last_seen_ns)}  {where:20}  {place.build_id.hex():40}"
        f"  {'' if place.held else 'missing':7}  since {moment(place.first_seen_ns)}{path}\n"
    )
