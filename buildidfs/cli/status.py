# SPDX-License-Identifier: Apache-2.0
"""``buildidfs status``: what runs, and how it does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.output import (
    evicted_fields,
    evicted_line,
    eviction,
    json_line,
    limits,
    limits_fields,
    moment,
    path_fields,
    printable,
    size,
)
from buildidfs.cli.watch_output import MODES, one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from buildidfs.app.service.status import Running, Status
    from buildidfs.store.retention.evicted import Evictions
    from buildidfs.store.retention.policy import Policy


_LOST = 5  # evicted blobs that are named


@click.command(
    "status",
    short_help="Show what runs, and how it does.",
    epilog=exit_status(
        ["buildidfs status", "buildidfs status --json | jq .processes"],
        {
            3: "down: nothing runs, or something that should does not run, or does not answer",
            4: "degraded: it works, but some of what starts may be missed",
            5: "losing: files were lost in the last ten minutes, or nothing is followed",
            11: "no store at that place; 13 unknown format",
        },
    ),
)
@click.option("--json", "json_", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def status(session: Session, json_: bool) -> int:
    """Show how the long-running processes of the store do: healthy, degraded, losing or down.

    These are what `buildidfs up` has started, and any other watch or mount. With what is amiss
    comes what to do. The words are explained in buildidfs(1).
    """
    from buildidfs.app.service import status as daemon_status
    from buildidfs.app.upkeep import retention

    path = session.store_path
    found = daemon_status.take(path)
    policy = retention.policy(session.settings.retention, path)
    if json_:
        _print_json(path, found, policy)
    else:
        _print(path, found, policy)
    return found.verdict.exit_code


def _print(path: str, found: Status, policy: Policy) -> None:
    click.echo(f"{found.verdict.name.lower()}{_doing(found)}")
    for finding in found.findings:
        click.echo(f"{finding.verdict.name.lower():<8} {_shown(finding.reason)}")
        click.echo(f"         -> {_shown(finding.remedy)}")
    held = found.store
    taken = size(held.stored_bytes + held.index_bytes)
    click.echo(
        f"{'store':<8} {path}: {held.ids} build IDs, {size(held.blob_bytes)}; takes {taken},"
        f" free {size(held.free_bytes)}; keeps {limits(policy)}; {held.pins} pins"
    )
    _print_evictions(found.evictions)
    for each in found.processes:
        click.echo(f"{each.role:<8} {'; '.join(_sentences(each))}")


def _doing(found: Status) -> str:
    """What is done, for the first line; empty where nothing is."""
    done = []
    for each in found.processes:
        if each.present is None or each.state != "running":
            continue
        if each.role == "watch" and (mode := str(each.present.facts.get("mode", ""))):
            done.append(_shown(MODES.get(mode, mode)))
        elif each.role == "mount":
            done.append(f"mounted at {printable(each.present.path('mountpoint'))}")
    return f": {', '.join(done)}" if done else ""


def _print_evictions(what: Evictions) -> None:
    """What there was no room for, if anything."""
    said = []
    if removed := eviction(what):
        said.append(f"removed to make room: {removed}")
    if what.noted:
        said.append(f"{what.noted} files only noted, which can be had again")
    if said:
        click.echo(f"{'room':<8} {'; '.join(said)}")
    for each in what.last[:_LOST]:
        click.echo(f"{'':<8} {moment(each.when * 1_000_000_000)} lost {evicted_line(each)}")
    if what.losses > _LOST:
        click.echo(f"{'':<8} and {what.losses - _LOST} before, see buildidfs journal")


def _sentences(each: Running) -> list[str]:
    """What there is to say of a process."""
    part, present = each.part, each.present
    since = present.since if present is not None else part.since if part is not None else 0
    first = f"{each.state} since {moment(since)}"
    if each.state in ("stopped", "not answering"):
        first = f"{each.state}, started {moment(since)}"
    said = [f"{first}, pid {each.pid}" if each.pid else first]
    if part is not None and part.due:
        said.append(f"starts again at {moment(part.due)}")
    if part is not None and part.restarts:
        said.append(f"restarts: {part.restarts}")
    if part is not None and part.reason:
        said.append(f"last failure: {_shown(part.reason)}")
    if present is not None:
        if point := present.path("mountpoint"):
            said.append(f"at {printable(point)}")
        said += _facts(present.facts)
    return said


def _facts(facts: Mapping[str, object]) -> Iterator[str]:
    """What a process has counted."""
    if line := one_line(facts):
        yield _shown(line)
        return
    for name, value in facts.items():
        if isinstance(value, int) and not isinstance(value, bool):
            yield f"{name.replace('_', ' ')}: {value}"


def _shown(text: str) -> str:
    """Text that may have come from elsewhere, fit for a terminal."""
    return printable(text.encode(errors="replace"))


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
            "evicted": evicted_fields(found.evictions, found.evictions.last),
            "noted": found.evictions.noted,
            **limits_fields(policy),
            "verdict": found.verdict.name.lower(),
            "well": found.verdict == 0,
            "findings": [
                {
                    "verdict": each.verdict.name.lower(),
                    "reason": each.reason,
                    "remedy": each.remedy,
                }
                for each in found.findings
            ],
            "processes": [_fields(each) for each in found.processes],
        }
    )


def _fields(each: Running) -> dict[str, object]:
    part, present = each.part, each.present
    fields: dict[str, object] = {"role": each.role, "state": each.state}
    if present is not None:
        fields |= {"pid": present.pid, "since": present.since / 1e9, "version": present.version}
    if part is not None:
        fields |= {
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
