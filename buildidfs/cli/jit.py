# SPDX-License-Identifier: Apache-2.0
"""``buildidfs jit``: the processes whose names of generated code are kept."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from buildidfs.cli import table
from buildidfs.cli.common import Session, container_option, exit_status
from buildidfs.cli.output import path_fields
from buildidfs.cli.table import Column

if TYPE_CHECKING:
    from buildidfs.catalog.containers import Names
    from buildidfs.store.jit_maps import JitMap

_COLUMNS: Final[tuple[Column[JitMap], ...]] = (
    Column("pid", "PID", lambda row: row.process.pid, table.COUNT),
    Column("comm", "COMMAND", lambda row: row.process.comm, table.TEXT),
    Column("started", "STARTED", lambda row: row.process.start_ns, table.AGE),
    Column("last_seen", "SEEN", lambda row: row.last_ns, table.AGE),
    Column("size", "SIZE", lambda row: row.size, table.SIZE),
    Column("container", "CONTAINER", lambda row: row.process.origin.container, table.LABEL),
    Column("path", "PATH", lambda row: row.process.origin.path, table.PATH),
)


@click.command(
    "jit",
    short_help="List the processes whose JIT code can be named.",
    epilog=exit_status(
        ["buildidfs jit", "buildidfs jit --container shop/cart-7d9f --json"],
        {11: "no store at that place; 13 unknown format"},
    ),
)
@container_option("Only processes of this container: its name, pod, label, or start of its ID.")
@table.options(_COLUMNS)
@click.pass_obj
def jit(session: Session, container: str | None, layout: table.Layout) -> None:
    """List the processes whose names of generated code are kept, the one that began last first.

    JIT compilers write these names for perf, if an option tells them to: into /tmp/perf-PID.map or
    jit-PID.dump. `buildidfs repair` uses them.
    """
    from buildidfs.catalog import containers

    with session.open_store() as store:
        names = containers.Names(store)
        columns = table.named(_COLUMNS, names.short, lambda row: row.process.origin.cgroup)
        is_meant = None if container is None else containers.meant(store, container)
        rows = sorted(
            (
                each
                for each in store.jit_maps.all()
                if is_meant is None or is_meant(each.process.origin.container)
            ),
            key=lambda each: -each.process.start_ns,
        )
        if not layout.print(columns, rows, partial(_fields, names)):
            session.say_why_empty(
                "no process wrote a map for perf (node --perf-basic-prof, python -X perf) while a"
                " watch or a scan saw it"
                + ("" if container is None else f" in container {container}")
            )


def _fields(names: Names, row: JitMap) -> dict[str, object]:
    process = row.process
    return {
        "pid": process.pid,
        "ns_pid": process.ns_pid,
        "comm": process.comm,
        **names.fields(process.origin.container, process.origin.cgroup),
        "mnt_ns_id": process.origin.mnt_ns_id,
        "host": process.origin.host,
        "uid": process.origin.identity.uid,
        "started": process.start_ns / 1e9,
        "last_seen": row.last_ns / 1e9,
        "size": row.size,
        **path_fields(process.origin.path),
        "file": os.fsdecode(row.path),
    }
