# SPDX-License-Identifier: Apache-2.0
"""``buildidfs status``: what runs, and how it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.output import (
    json_line,
    limits,
    limits_fields,
    moment,
    path_fields,
    printable,
    size,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from buildidfs.daemon.status import Running, Status
    from buildidfs.store.retention import Policy

_DOWN = 3


@click.command(
    "status",
    short_help="Show what runs, and how it does.",
    epilog=exit_status(
        ["buildidfs status", "buildidfs status --json | jq .processes"],
        {
            3: "nothing runs, or something that should is down",
            11: "no store at that place; 13 unknown format",
        },
    ),
)
@click.option("--json", "json_", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def status(session: Session, json_: bool) -> int:
    """Show the long-running processes of the store: since when they run, and how they do.

    These are what `buildidfs up` has started, and any other watch or mount.
    """
    from buildidfs.daemon import retention
    from buildidfs.daemon import status as daemon_status

    path = session.store_path
    found = daemon_status.take(path)
    policy = retention.policy(session.settings.retention, path)
    if json_:
        _print_json(path, found, policy)
    else:
        _print(path, found, policy)
    return 0 if found.is_well else _DOWN


def _print(path: str, found: Status, policy: Policy) -> None:
    held = found.store
    taken = size(held.stored_bytes + held.index_bytes)
    click.echo(
        f"{'store':<8} {path}: {held.ids} build IDs, {size(held.blob_bytes)}; takes {taken},"
        f" free {size(held.free_bytes)}; keeps {limits(policy)}; {held.pins} pins"
    )
    for each in found.processes:
        click.echo(f"{each.role:<8} {'; '.join(_sentences(each))}")
    if not found.processes:
        click.echo("Nothing runs: buildidfs up starts it.")


def _sentences(each: Running) -> list[str]:
    """What there is to say of a process."""
    part, present = each.part, each.present
    state = "running" if part is None else part.state
    since = present.since if part is None and present is not None else part.since if part else 0
    pid = present.pid if present is not None else part.pid if part is not None else 0
    first = f"{state} since {moment(since)}"
    said = [f"{first}, pid {pid}" if pid else first]
    if part is not None and part.due:
        said.append(f"starts again at {moment(part.due)}")
    if part is not None and part.restarts:
        said.append(f"restarts: {part.restarts}")
    if part is not None and part.reason:
        said.append(f"last failure: {printable(part.reason.encode(errors='replace'))}")
    if part is not None and part.status:
        said.append(printable(part.status.encode(errors="replace")))
    if present is not None:
        if point := present.path("mountpoint"):
            said.append(f"at {printable(point)}")
        said += _facts(present.facts, all_of_them=part is None or not part.status)
    return said


def _facts(facts: Mapping[str, object], *, all_of_them: bool) -> Iterator[str]:
    """What a process says of itself; if not all, only what is amiss."""
    degraded = facts.get("degraded")
    if isinstance(degraded, list):
        yield from (printable(str(each).encode(errors="replace")) for each in degraded)
    for name, value in facts.items():
        if all_of_them and isinstance(value, int) and not isinstance(value, bool):
            yield f"{name.replace('_', ' ')}: {value}"


def _print_json(path: str, found: Status, policy: Policy) -> None:
    json_line(
        {
            "store": path,
            "build_ids": found.store.ids,
            "blob_bytes": found.store.blob_bytes,
            "stored_bytes": found.store.stored_bytes,
            "index_bytes": found.store.index_bytes,
            "free_bytes": found.store.free_bytes,
            "pins": found.store.pins,
            **limits_fields(policy),
            "well": found.is_well,
            "processes": [_fields(each) for each in found.processes],
        }
    )


def _fields(each: Running) -> dict[str, object]:
    part, present = each.part, each.present
    fields: dict[str, object] = {"role": each.role, "state": "running"}
    if present is not None:
        fields |= {"pid": present.pid, "since": present.since / 1e9, "version": present.version}
    if part is not None:
        fields |= {
            "state": part.state,
            "pid": part.pid or None,
            "since": part.since / 1e9,
            "restarts": part.restarts,
            "reason": part.reason,
            "status": part.status,
            "due": part.due / 1e9 if part.due else None,
        }
    if present is not None:
        if point := present.path("mountpoint"):
            for name, value in path_fields(point).items():
                fields[name.replace("path", "mountpoint")] = value
        left_out = ("mountpoint", "mountpoint_b64", "children")
        fields["facts"] = {x: y for x, y in present.facts.items() if x not in left_out}
    return fields
