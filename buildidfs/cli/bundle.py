# SPDX-License-Identifier: Apache-2.0
"""Carry artifacts to another machine: ``buildidfs bundle`` and ``buildidfs import``."""

from __future__ import annotations

import os
import sys
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

import click

from buildidfs.answers import Removed
from buildidfs.catalog import remedies
from buildidfs.cli import table, terminal
from buildidfs.cli.common import AnyPath, Session, container_option, exit_status, json_option
from buildidfs.cli.output import (
    json_line,
    one_line,
    path_fields,
    print_first,
    printable,
    report_evictions,
)
from buildidfs.wording import counted, size

if TYPE_CHECKING:
    from buildidfs.formats.bundle_archive import Manifest
    from buildidfs.profile.inputs import NamedIds


_SHOWN = 10


@click.command(
    "bundle",
    short_help="Pack the files that a profile or core file needs elsewhere.",
    epilog=exit_status(
        [
            "buildidfs bundle perf.data -o perf.tar.zst",
            "buildidfs mount --bundle perf.tar.zst /mnt",
        ],
        {
            2: "no such file, or a prefix that several build IDs share",
            3: "written, but the store lacks a build ID, or files of a FILE have none",
            20: "a file of the store does not match its digest",
            30: "nothing is known of a build ID that was given",
        },
    ),
)
@click.argument("what", metavar="FILE|ID|PATH...", nargs=-1, type=AnyPath())
@container_option("Pack all files captured of this container.", multiple=True)
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    required=True,
    type=AnyPath(),
    help="Write the bundle to FILE; - is standard output.",
)
@click.option("--include-inputs", is_flag=True, help="Also pack the profiles and core files.")
@click.option("--no-sources", is_flag=True, help="Leave out the list of source files.")
@json_option()
@click.pass_obj
def bundle(
    session: Session,
    what: tuple[str, ...],
    containers: tuple[str, ...],
    output: str,
    include_inputs: bool,
    no_sources: bool,
    json_: bool,
) -> int:
    """Pack all files that profiles and core files need on another machine into one file.

    The build IDs are those that the profiles and core files name, those of a container, and those
    given. The bundle has executables, debuginfo, dwz files, vDSO, the symbols of the kernel, and a
    list of the source files; it is a tar archive compressed with zstd. Files of a profile without
    build IDs are looked up as by `buildidfs repair`. If there is no file at a PATH, it means the
    build ID that was seen there last.

    `buildidfs mount --bundle` shows the files of a bundle, and `buildidfs import` adds them to a
    store. The command continues an interrupted attempt from FILE.partial.
    """
    from buildidfs.bundle import collect as bundles
    from buildidfs.errors import UsageError
    from buildidfs.profile import inputs as app_inputs

    if not what and not containers:
        raise click.UsageError("nothing to pack: give profiles, core files, IDs or --container")
    if output == "-" and sys.stdout.isatty():
        raise UsageError("not writing a bundle to the terminal; use -o FILE")
    if output == "-" and json_:
        raise UsageError("--json would go into the bundle; use -o FILE")
    with session.open_store() as store:
        looking = partial(session.progress, "Looking up", "record")
        wanted, inputs = app_inputs.wanted(store, what, containers, looking)
        for path in inputs:
            if output != "-" and os.path.exists(output) and os.path.samefile(path, output):
                raise UsageError(f"{output} is what the bundle is made of; use another -o FILE")
        target = sys.stdout.fileno() if output == "-" else output
        with session.progress("Packing", "") as progress:
            manifest, kept = bundles.create(
                store,
                wanted,
                list(inputs),
                target,
                include_inputs=include_inputs,
                list_sources=not no_sources,
                progress=progress,
            )
    if json_:
        json_line(_as_json(manifest, kept, inputs))
    elif not session.is_quiet:
        _print_manifest(manifest)
    return _report_lacking(session, manifest, inputs, len(wanted))


def _report_lacking(
    session: Session, manifest: Manifest, inputs: dict[bytes, NamedIds], wanted: int
) -> int:
    """Print on standard error which files the bundle lacks, and return the exit status.

    Raises `IncompleteError` if the store has no file of a build ID.
    """
    from buildidfs.bundle import collect as bundles
    from buildidfs.cli.output import report_nameless
    from buildidfs.errors import IncompleteError

    lacking = [report_nameless(path, named) for path, named in inputs.items()]
    for path, named in inputs.items():
        if named.is_resolved and not session.is_quiet:
            terminal.print_text(
                f"{printable(path)} does not name all of these build IDs: to read it elsewhere,"
                " send the output of buildidfs repair",
                err=True,
            )
    reasons = [remedies.without_time(each.why) for each in manifest.absent]
    has_profile = any(named.is_profile for named in inputs.values())
    if has_profile and remedies.NOT_CAPTURED in reasons and not session.is_quiet:
        terminal.print_text(
            "buildidfs scan perf-data --all also captures files that no sample fell into", err=True
        )
    whole = counted(wanted, "build ID")
    words = [
        f"{count} of {whole} were {why}"
        for why in (remedies.NOT_CAPTURED, *remedies.REMOVALS)
        if (count := reasons.count(why))
    ]
    if supplements := reasons.count(bundles.NO_SUPPLEMENT):
        dwz = counted(supplements, "dwz file")
        words.append(f"{dwz} of debuginfo in the bundle were {remedies.NOT_CAPTURED}")
    if words:
        raise IncompleteError(", ".join(words))
    return IncompleteError.exit_code if any(lacking) else 0


def _as_json(manifest: Manifest, kept: int, inputs: dict[bytes, NamedIds]) -> dict[str, object]:
    blobs = {item.sha256: item.size for item in manifest.items}
    listed = manifest.sources
    assert listed is not None
    return {
        "build_ids": len({item.build_id for item in manifest.items}),
        "artifacts": len(manifest.items),
        "blobs": len(blobs),
        "bytes": sum(blobs.values()),
        "resumed_bytes": kept,
        "absent": [
            {"build_id": each.build_id, "path": each.path, "reason": each.why}
            for each in manifest.absent
        ],
        "nameless": [
            {
                "input": path_fields(path)["path"],
                "container": each.container,
                **path_fields(each.path),
                "samples": each.samples,
                "share": None if each.share is None else round(each.share, 4),
                "reason": each.why,
            }
            for path, named in inputs.items()
            for each in named.nameless
        ],
        "sources": {
            "files": None if listed.size is None else listed.files,
            "reason": listed.why,
            "absent": [{"build_id": each.build_id, "reason": each.why} for each in listed.absent],
        },
    }


def _of_sources(manifest: Manifest) -> str:
    listed = manifest.sources
    if listed is None:
        return ""
    if listed.size is None:
        return f", no list of source files: {listed.why}"
    lacking = f", not all of {counted(len(listed.absent), 'debug file')}" if listed.absent else ""
    return f", a list of {counted(listed.files, 'source file')}{lacking}"


def _print_manifest(manifest: Manifest) -> None:
    ids = {item.build_id for item in manifest.items}
    blobs = {item.sha256: item.size for item in manifest.items}
    terminal.print_text(
        f"{counted(len(manifest.items), 'artifact')} of {counted(len(ids), 'build ID')},"
        f" {size(sum(blobs.values()))}{_of_sources(manifest)}",
        err=True,
    )
    reasons = Counter(remedies.without_time(each.why) for each in manifest.absent)
    for why, count in reasons.most_common():
        terminal.print_text(f"{count} absent: {one_line(why)}", err=True)
        lines = [
            f"{each.build_id[: table.SHORT_ID]}  {printable(each.path) or '-'}"
            for each in manifest.absent
            if remedies.without_time(each.why) == why
        ]
        print_first(lines, _SHOWN, ", see --json")


@click.command(
    "import",
    short_help="Add the files of a bundle to the store.",
    epilog=exit_status(
        ["buildidfs import crash.tar.zst", "buildidfs import --trust package ours.tar.zst"],
        {
            2: "no such file",
            3: "finished, but some files could not be added",
            14: "no room left",
            20: "not a bundle, not whole, or files do not match their digests; these are not kept",
        },
    ),
)
@click.argument("file", metavar="FILE", type=AnyPath())
@click.option(
    "--trust",
    type=click.Choice(["unknown", "container", "package"]),
    default="container",
    show_default=True,
    help="The highest trust that the files get.",
)
@json_option()
@click.pass_obj
def import_(session: Session, file: str, trust: str, json_: bool) -> None:
    """Add the files of a bundle to the store, each verified first.

    The command does not read files that the store has, so it costs little to repeat it after an
    interruption.
    """
    from buildidfs.bundle import collect as bundles
    from buildidfs.errors import IncompleteError
    from buildidfs.model import Trust

    with session.capturing("Importing") as (store, progress):
        manifest, summary = bundles.import_(
            store, file, trust=Trust[trust.upper()], progress=progress
        )
    if json_:
        json_line(
            {
                "artifacts": len(manifest.items),
                "captured": summary.captured,
                "copied_bytes": summary.copied_bytes,
                "new_build_ids": summary.new_ids,
                "unreadable": len(summary.unreadable),
                "evicted": Removed.of(summary.removed, summary.removed.named),
            }
        )
    elif not session.is_quiet:
        click.echo(
            f"{counted(len(manifest.items), 'artifact')}: {summary.captured} captured"
            f" ({size(summary.copied_bytes)}), {counted(summary.new_ids, 'new build ID')}"
        )
    report_evictions(summary.removed, quiet=json_ or session.is_quiet)
    if summary.unreadable:
        raise IncompleteError(
            f"{counted(len(summary.unreadable), 'file')} could not be taken, the first because:"
            f" {summary.unreadable[0].reason}"
        )
