# SPDX-License-Identifier: Apache-2.0
"""Containers by another definition: ``--namespaces``, and how commands show whose file it was.

What a container is, is a setting, and the label that it gave is kept with each capture. Which
namespaces were not the host's is kept, too, so one can ask what another setting would have said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from buildidfs.model import Origin
    from buildidfs.store import JournalRecord


# What was never in a namespace: the label says of which package or image it was.
_PACKED = ("package", "image")


def _names(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    """The names in a list with commas between them."""
    if value is None:
        return None
    from buildidfs.model import NamespaceSet

    names = tuple(dict.fromkeys(part.strip() for part in value.split(",")))
    known = NamespaceSet.__struct_fields__
    for name in names:
        if name not in known:
            raise click.BadParameter(
                f"no such namespace: {name!r}; there are {', '.join(known)}", ctx, param
            )
    return names


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Complete the name behind the last comma."""
    from buildidfs.model import NamespaceSet

    before, comma, start = incomplete.rpartition(",")
    return [
        before + comma + name for name in NamespaceSet.__struct_fields__ if name.startswith(start)
    ]


namespaces_option = click.option(
    "--namespaces",
    "names",
    metavar="LIST",
    callback=_names,
    shell_complete=_complete,
    help="Take for a container what has none of these namespaces from the host (pid,uts).",
)


def container_of(seen: Origin | JournalRecord, names: tuple[str, ...] | None) -> str:
    """The label of the container it was seen in: that of then, or by the definition ``names``.

    Empty for the host.
    """
    if names is None or seen.scanner in _PACKED:
        return seen.container
    from buildidfs.capture.origin import container

    return container.label_by(seen.cgroup, seen.namespaces, seen.apart, names)


def whose_fields(seen: Origin | JournalRecord, names: tuple[str, ...] | None) -> dict[str, object]:
    """What JSON output says of who saw a file."""
    from buildidfs.capture.origin import container

    return {
        "container": container_of(seen, names),
        "cgroup": seen.cgroup.decode("utf-8", "replace"),
        "cgroup_id": seen.cgroup_id,
        "mnt_ns_id": seen.mnt_ns_id,
        "namespaces": {
            name: getattr(seen.namespaces, name) for name in seen.namespaces.__struct_fields__
        },
        "apart": container.apart_names(seen.apart),
        "host": seen.host,
        "scanner": seen.scanner,
    }
