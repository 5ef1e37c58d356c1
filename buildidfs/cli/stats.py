# SPDX-License-Identifier: Apache-2.0
"""``buildidfs stats``: the number and size of the files in the store, and its coverage of this
host.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from buildidfs.app.answers import Limits
from buildidfs.cli import terminal
from buildidfs.cli.common import Session, exit_status
from buildidfs.cli.output import counted, json_line, limits, size

if TYPE_CHECKING:
    from buildidfs.capture.process.inventory import Census
    from buildidfs.store import StoreStats


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
    from buildidfs.app import coverage, upkeep

    with session.open_store() as store:
        held = store.stats()
        jit_maps, jit_bytes = store.jit_maps.totals()
        policy = upkeep.policy(session.settings.retention, store.path)
        with session.progress("Counting", "process") as show:
            host, covered = coverage.of_host(store, show)
    share = covered / len(host.build_ids) if host.build_ids else 1.0
    if json_:
        json_line(
            {
                "store": session.store_path,
                "build_ids": held.ids,
                "artifacts": {kind.name.lower(): n for kind, n in held.artifacts.items()},
                "adopted": held.adopted,
                "ambiguous": held.ambiguous,
                "blobs": held.blobs,
                "blob_bytes": held.blob_bytes,
                "stored_bytes": held.stored_bytes,
                "index_bytes": held.index_bytes,
                "origins": held.origins,
                "free_bytes": held.free_bytes,
                "pins": held.pins,
                "jit_maps": jit_maps,
                "jit_bytes": jit_bytes,
                **msgspec.structs.asdict(Limits.of(policy)),
                "host_processes": host.processes,
                "host_refused": host.refused,
                "host_unseen": host.unseen,
                "host_references": host.references,
                "host_files": host.files,
                "host_elf_files": host.elf,
                "host_without_build_id": {str(why): n for why, n in host.absent.items()},
                "host_build_ids": len(host.build_ids),
                "host_build_ids_held": covered,
                "coverage": share,
            }
        )
        return
    _say_of_store(session, held, limits(policy))
    if jit_maps:
        _say(
            "JIT names", f"of {counted(jit_maps, 'process')}, {size(jit_bytes)}: see buildidfs jit"
        )
    _say_of_host(host, covered, share)


def _say_of_store(session: Session, held: StoreStats, kept: str) -> None:
    kinds = ", ".join(f"{n} {kind.name.lower()}" for kind, n in held.artifacts.items() if n)
    _say("store", session.store_path)
    _say("build IDs", f"{held.ids} ({kinds or 'nothing yet'})")
    if held.adopted:
        _say(" ", f"{held.adopted} adopted: of programs without a build ID")
    if held.ambiguous:
        _say(" ", f"{held.ambiguous} of unrelated programs each, not served: see list --conflicts")
    _say(
        "blobs",
        f"{held.blobs}, {size(held.blob_bytes)}; on the disk {size(held.stored_bytes)},"
        f" index {size(held.index_bytes)}; free {size(held.free_bytes)}",
    )
    _say("kept", f"{kept}; {counted(held.pins, 'pin')}")
    _say("origins", str(held.origins))


def _say_of_host(host: Census, covered: int, coverage: float) -> None:
    """Print how many files running processes have open or mapped, and the share that the
    store has.
    """
    from buildidfs.linux import credentials, machine

    _say(
        "host",
        f"{counted(host.processes, 'process')} with"
        f" {counted(host.files, 'file')} open or mapped"
        f" ({counted(host.references, 'reference')}); ELF files: {host.elf},"
        f" {counted(len(host.build_ids), 'distinct build ID')}",
    )
    for reason, count in host.absent.most_common():
        _say(" ", f"{count} without a build ID: {reason}")
    spot = machine.blind_spot()
    if spot is not None:
        _say(" ", f"{spot.unseen}: {spot.remedy}")
    if host.refused:
        lacking = credentials.missing_for_scan()
        why = f"; {credentials.how_to_get(*lacking)}" if lacking else ""
        refused = counted(host.refused, "process")
        _say(" ", f"{refused} could not be looked at, or only in part{why}")
    if host.silent:
        _say(" ", host.silent)
    seen = host.processes - host.unseen
    of_those = f", of {seen} of {counted(host.processes, 'process')} only" if host.unseen else ""
    _say(
        "coverage",
        f"{covered} of {counted(len(host.build_ids), 'build ID')}"
        f"{f' ({coverage:.1%})' if host.build_ids else ''}{of_those}",
    )


def _say(label: str, text: str) -> None:
    terminal.say(text, label=label, indent=11)
