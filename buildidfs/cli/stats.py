# SPDX-License-Identifier: Apache-2.0
"""``buildidfs stats``: the number and size of the files in the store, and its coverage of this
host.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from buildidfs.cli import terminal
from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.output import counted, json_line, limits, printable, size

if TYPE_CHECKING:
    from buildidfs.answers import Stats


@click.command(
    "stats",
    short_help="Show the size of the store and its coverage of this host.",
    epilog=exit_status(
        ["buildidfs stats", "buildidfs stats --json | jq .coverage"],
        {11: "no store at that place; 13 unknown format"},
    ),
)
@click.option("--json", "json_", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def stats(session: Session, json_: bool) -> None:
    """Count the build IDs, files and bytes in the store, and its coverage of this host.

    Coverage is the share of the build IDs in use by running processes that the store has. Only
    processes that may be inspected count.
    """
    from buildidfs.watch import status

    with session.open_store() as store, session.progress("Counting", "process") as show:
        found = status.stats(store, session.settings.retention, show)
    if json_:
        json_line(found)
        return
    _say_of_store(found)
    if found.jit_maps:
        processes = counted(found.jit_maps, "process")
        _say("JIT names", f"of {processes}, {size(found.jit_bytes)}: see buildidfs jit")
    _say_of_host(found)


def _say_of_store(found: Stats) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in found.artifacts.items() if count)
    _say("store", printable(os.fsencode(found.store)))
    _say("build IDs", f"{found.build_ids} ({kinds or 'nothing yet'})")
    if found.adopted:
        _say(" ", f"{found.adopted} adopted: of programs without a build ID")
    if found.ambiguous:
        _say(" ", f"{found.ambiguous} of unrelated programs each, not served: see list --conflicts")
    _say(
        "blobs",
        f"{found.blobs}, {size(found.blob_bytes)}; on the disk {size(found.stored_bytes)},"
        f" index {size(found.index_bytes)}; free {size(found.free_bytes)}",
    )
    _say("kept", f"{limits(found)}; {counted(found.pins, 'pin')}")
    _say("origins", str(found.origins))


def _say_of_host(found: Stats) -> None:
    """Print how many files running processes have open or mapped, and the share that the
    store has.
    """
    from buildidfs.linux import credentials, machine

    processes = counted(found.host_processes, "process")
    _say(
        "host",
        f"{processes} with {counted(found.host_files, 'file')} open or mapped"
        f" ({counted(found.host_references, 'reference')}); ELF files: {found.host_elf_files},"
        f" {counted(found.host_build_ids, 'distinct build ID')}",
    )
    for reason, count in found.host_without_build_id.items():
        _say(" ", f"{count} without a build ID: {reason}")
    spot = machine.blind_spot()
    if spot is not None:
        _say(" ", f"{spot.unseen}: {spot.remedy}")
    if found.host_refused:
        lacking = credentials.missing_for_scan()
        why = f"; {credentials.how_to_get(*lacking)}" if lacking else ""
        refused = counted(found.host_refused, "process")
        _say(" ", f"{refused} could not be looked at, or only in part{why}")
    if found.host_silent:
        _say(" ", found.host_silent)
    seen = found.host_processes - found.host_unseen
    of_those = f", of {seen} of {processes} only" if found.host_unseen else ""
    share = f" ({found.coverage:.1%})" if found.host_build_ids else ""
    covered = f"{found.host_build_ids_held} of {counted(found.host_build_ids, 'build ID')}"
    _say("coverage", f"{covered}{share}{of_those}")


def _say(label: str, text: str) -> None:
    terminal.say(text, label=label, indent=11)
