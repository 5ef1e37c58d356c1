# SPDX-License-Identifier: Apache-2.0
"""What a scan came to, for people and for programs."""

from __future__ import annotations

import errno
from collections import Counter
from typing import TYPE_CHECKING

import click

from buildidfs.cli.output import (
    evicted_fields,
    evicted_line,
    eviction,
    json_line,
    path_fields,
    printable,
    size,
)

if TYPE_CHECKING:
    from buildidfs.ingest import Summary
    from buildidfs.store.retention.evicted import Tally

_FEW = 3  # evicted blobs that can be had again
_SHOWN = 10  # unreadable files that are named one by one


def as_json(summary: Summary, **more: object) -> None:
    """One JSON object; everything unreadable is in it, and whatever else there is."""
    json_line(
        {
            **more,
            "files": summary.files,
            "captured": summary.captured,
            "held": summary.held,
            "new_build_ids": summary.new_ids,
            "copied_bytes": summary.copied_bytes,
            "noted": summary.noted,
            "noted_bytes": summary.noted_bytes,
            "evicted": evicted_fields(summary.removed, summary.removed.named),
            "absent": {str(reason): count for reason, count in summary.absent.items()},
            "unreadable": [
                {
                    **path_fields(item.path),
                    "reason": item.reason,
                    "errno": errno.errorcode.get(item.errno, ""),
                    "build_id": str(item.build_id) if item.build_id else None,
                }
                for item in summary.unreadable
            ],
        }
    )


def report(summary: Summary, *, quiet: bool = False) -> None:
    """Lines for a person: what is captured on standard output, what is not on standard error.

    If ``quiet``, only the latter.
    """
    if not quiet:
        click.echo(
            f"{summary.captured} captured ({size(summary.copied_bytes)},"
            f" {summary.new_ids} new build IDs), {summary.held} already held"
        )
        for reason, count in summary.absent.most_common():
            click.echo(f"{count} without a build ID: {reason}")
        if summary.noted:
            click.echo(
                f"{summary.noted} only noted ({size(summary.noted_bytes)}), since there is no room"
                " and they can be had again: buildidfs journal has them"
            )
        if summary.removed.aged:
            click.echo(f"{summary.removed.aged} removed that were older than max-age")
    report_evictions(summary.removed, quiet=quiet)
    if not summary.unreadable:
        return
    reasons = Counter(item.reason for item in summary.unreadable)
    for why, count in reasons.most_common():
        click.echo(f"buildidfs: {count} not readable: {why}", err=True)
        items = [item for item in summary.unreadable if item.reason == why]
        for item in items[:_SHOWN]:
            known = f" (build ID {item.build_id})" if item.build_id else ""
            click.echo(f"    {printable(item.path)}{known}", err=True)
        if len(items) > _SHOWN:
            click.echo(f"    and {len(items) - _SHOWN} more", err=True)


def report_evictions(removed: Tally, *, quiet: bool = False) -> None:
    """What was removed to make room, and the foremost of it; if ``quiet``, only losses."""
    if not removed.losses and (quiet or not removed.again):
        return
    click.echo(f"removed to make room: {eviction(removed)}", err=bool(removed.losses))
    losses = [each for each in removed.named if not each.again]
    for each in losses or removed.named[:_FEW]:
        click.echo(f"    {evicted_line(each)}", err=bool(removed.losses))
    if removed.losses > len(losses):
        click.echo(f"    and {removed.losses - len(losses)} more, see buildidfs journal", err=True)
