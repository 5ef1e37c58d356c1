# SPDX-License-Identifier: Apache-2.0
"""Capture binaries in one pass: ``buildidfs scan`` and its commands."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from buildidfs.cli import terminal
from buildidfs.cli.common import AnyPath, Session, container_option, exit_status, json_option
from buildidfs.cli.group import LazyGroup
from buildidfs.cli.output import (
    missing_line,
    one_line,
    path_fields,
    print_first,
    printable,
    report_scan,
)
from buildidfs.errors import IncompleteError
from buildidfs.wording import counted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from buildidfs.catalog.source_files import SourceCounts
    from buildidfs.ingest import ScanSummary
    from buildidfs.profile.cores import CoreDump, CoreScan
    from buildidfs.profile.scan import ProfileScan

_SHOWN_BINARIES: Final = 20  # missing binaries that are named one by one

_files = click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=AnyPath())
_sources_in_them = click.option(
    "--sources",
    is_flag=True,
    help="Also capture the source files in them that the debuginfo names.",
)


def _statuses(inputs: str, more: str = "") -> dict[int, str]:
    """Return the exit statuses of a scan, with ``inputs`` as the name of its inputs."""
    return {
        3: f"finished, but some {inputs} could not be read{more}",
        10: "store error; 14 disk full",
    }


@click.group(
    cls=LazyGroup,
    short_help="Capture binaries in one pass.",
    epilog=exit_status(
        ["buildidfs scan proc", "buildidfs scan tree /usr/lib/debug"],
        {3: "finished, but some inputs could not be read"},
    ),
)
def scan() -> None:
    """Capture binaries in one pass over processes, files or archives."""


@scan.command(
    "proc",
    short_help="Capture the files that running processes map.",
    epilog=exit_status(
        [
            "buildidfs scan proc",
            "buildidfs scan proc --pid 4711",
        ],
        _statuses("processes or files"),
    ),
)
@click.option("--pid", "pids", metavar="PID", type=int, multiple=True, help="Only this process.")
@container_option(
    "Only this container: its name, pod, label, or the beginning of its ID.", multiple=True
)
@click.option("--containers-only", is_flag=True, help="Leave out the processes of the host.")
@json_option("Print the summary as one JSON object.")
@click.pass_obj
def scan_proc(
    session: Session,
    pids: tuple[int, ...],
    containers: tuple[str, ...],
    containers_only: bool,
    json_: bool,
) -> int:
    """Capture each binary that a running process has mapped, in all mount namespaces.

    The scan also captures the debuginfo of a binary from the binary's own root. It does not read an
    unchanged file a second time. An ordinary user can scan only their own processes.
    """
    from buildidfs.ingest import scans

    with session.capturing() as (store, show):
        summary = scans.scan_processes(
            store,
            session.settings,
            pids=pids or None,
            containers=containers or None,
            containers_only=containers_only,
            progress=show,
        )
    return report_scan(summary, json_=json_, quiet=session.is_quiet)


@scan.command(
    "tree",
    short_help="Capture the ELF files below directories.",
    epilog=exit_status(
        ["buildidfs scan tree /usr/lib/debug /opt", "buildidfs scan tree --dry-run --json ./a.out"],
        _statuses("files"),
    ),
)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=AnyPath())
@click.option("--dry-run", is_flag=True, help="List the files; change nothing.")
@click.option(
    "--sources", is_flag=True, help="Also capture the source files that the debuginfo names."
)
@click.option(
    "--source-dir",
    "source_dirs",
    metavar="[PATH=]DIR",
    multiple=True,
    help="A directory with sources, called PATH in the debuginfo. Implies --sources.",
)
@json_option("Print the summary as JSON, or an object per file.")
@click.pass_obj
def scan_tree(
    session: Session,
    paths: tuple[str, ...],
    dry_run: bool,
    sources: bool,
    source_dirs: tuple[str, ...],
    json_: bool,
) -> int:
    """Capture the ELF files below directories, recursively, or single files.

    The scan follows no symbolic links below a PATH, and opens no devices, FIFOs or sockets. With
    --dry-run it prints the build ID and path of each file.
    """
    from buildidfs.ingest import scans

    wanted = [os.fsencode(path) for path in paths]
    if dry_run:
        return _identify(session, wanted, json_)
    with session.capturing() as (store, show):
        summary = scans.scan_tree(store, session.settings, wanted, progress=show)
        more = {}
        if sources or source_dirs:
            from buildidfs.catalog.source_files import capture_tree_sources

            dirs = [os.fsencode(each) for each in source_dirs]
            counts = capture_tree_sources(store, session.settings, wanted, dirs)
            elsewhere = "in no directory that was given: name it with --source-dir"
            more = _print_sources(session, counts, elsewhere, json_=json_)
    return report_scan(summary, json_=json_, quiet=session.is_quiet, more=more)


def _print_sources(
    session: Session, counts: SourceCounts, elsewhere: str, *, json_: bool
) -> dict[str, object]:
    """Print counts of source files, with a hint for ``elsewhere``; return the fields for JSON."""
    import msgspec

    if json_:
        return {"sources": msgspec.structs.asdict(counts)}
    if not session.is_quiet:
        click.echo(
            f"{counted(counts.files, 'source file')} of {counted(counts.build_ids, 'build ID')}"
        )
    for count, why in (
        (counts.elsewhere, elsewhere),
        (counts.absent, "absent, or not readable for all users"),
        (counts.different, "not captured: the MD5 is not that of the debuginfo"),
        (counts.large, "too large"),
        (counts.relative, "with a name in a directory that the debuginfo does not have"),
    ):
        if count:
            terminal.complain(f"{counted(count, 'source file')} {why}")
    if counts.no_debuginfo:
        terminal.complain(
            f"{counted(counts.no_debuginfo, 'build ID')} without debuginfo that names sources"
        )
    if counts.kept:
        terminal.complain(f"{counted(counts.kept, 'build ID')} with sources already: these stay")
    return {}


def _identify(session: Session, paths: list[bytes], json_: bool) -> int:
    """Print build ID and path of every file that a scan would capture; count the rest."""
    import sys
    from collections import Counter

    from buildidfs.capture.base import Unreadable
    from buildidfs.capture.scan.tree import identify_tree
    from buildidfs.cli.output import json_line, printable
    from buildidfs.model import Absence, BuildId

    absent: Counter[Absence] = Counter()
    unreadable = found = 0
    verbose = session.verbosity > 0
    write = sys.stdout.write
    for path, answer in identify_tree(paths):
        if isinstance(answer, BuildId):
            found += 1
            if json_:
                json_line({"build_id": answer.hex(), **path_fields(path)})
            else:
                write(f"{answer.hex()} {printable(path)}\n")
        elif isinstance(answer, Unreadable):
            unreadable += 1
            terminal.complain(f"{printable(path)}: {answer.reason}")
        else:
            absent[answer] += 1
            if verbose and answer not in (Absence.NOT_ELF, Absence.EMPTY):
                terminal.complain(f"{printable(path)}: {answer}")
    sys.stdout.flush()
    for reason, count in absent.most_common():
        click.echo(f"{count} skipped: {reason}", err=True)
    if not found and not unreadable and not absent:
        session.explain_empty("there is no regular file below the given paths")
    return IncompleteError.exit_code if unreadable else 0


@scan.command(
    "kernel",
    short_help="Capture the running kernel and its modules.",
    epilog=exit_status(
        [
            "buildidfs scan kernel",
            "buildidfs scan kernel --all",
        ],
        _statuses("files"),
    ),
)
@click.option("--all", "all_", is_flag=True, help="Also capture all installed kernels and modules.")
@click.option(
    "--root", metavar="DIR", type=AnyPath(), help="Capture only those installed below DIR."
)
@json_option("Print the summary as one JSON object.")
@click.pass_obj
def scan_kernel(session: Session, all_: bool, root: str | None, json_: bool) -> int:
    """Capture the running kernel: its symbols, its files, and the loaded modules.

    The scan also captures debug files at the places where distributions install them. It captures
    modules decompressed, and the vmlinux inside a vmlinuz. Only root can read the symbols.
    """
    from buildidfs.ingest import scans

    where = None if root is None else os.fsencode(root)
    with session.capturing() as (store, show):
        summary = scans.scan_kernel(
            store, session.settings, everything=all_, root=where, progress=show
        )
    return report_scan(summary, json_=json_, quiet=session.is_quiet)


@scan.command(
    "perf-data",
    short_help="Capture the binaries that profiles name.",
    epilog=exit_status(
        [
            "buildidfs scan perf-data perf.data",
            "buildidfs scan perf-data --json perf.data | jq '.binaries[] | select(.why)'",
        ],
        _statuses("files"),
    ),
)
@_files
@click.option(
    "--all", "all_", is_flag=True, help="Also capture files that were mapped but never sampled."
)
@json_option()
@click.pass_obj
def scan_perf_data(session: Session, paths: tuple[str, ...], all_: bool, json_: bool) -> int:
    """Capture the binaries of the samples in perf.data files, callers included.

    The scan looks for them in running processes, at their paths on this host, and at their paths in
    the mount namespaces where they were seen. It lists the files that stay missing, with the
    reason.
    """
    from buildidfs.profile import scan as profile_scan

    with session.capturing() as (store, show):
        scan = profile_scan.scan_perf_data(
            store,
            session.settings,
            [os.fsencode(path) for path in paths],
            everything=all_,
            progress=show,
        )
    more = {"binaries": scan.binaries} if json_ else {}
    status = report_scan(scan.summary, json_=json_, quiet=session.is_quiet, more=more)
    if not json_ and not session.is_quiet:
        _perf_data_text(scan)
    return status


def _perf_data_text(scan: ProfileScan) -> None:
    missing = [missing_line(x.build_id, x.path, x.why) for x in scan.binaries if x.why]
    click.echo(f"{counted(len(scan.binaries), 'binary', 'binaries')} named, {len(missing)} missing")
    print_first(missing, _SHOWN_BINARIES, ", see --json", err=False)


@scan.command(
    "core",
    short_help="Capture the binaries that core files name.",
    epilog=exit_status(
        [
            "buildidfs scan core core.4711",
            "buildidfs scan core --json core.4711 | jq '.cores[].binaries[]'",
        ],
        _statuses("files", ", or not to their end"),
    ),
)
@_files
@json_option()
@click.pass_obj
def scan_core(session: Session, paths: tuple[str, ...], json_: bool) -> int:
    """Capture the program and the libraries of a core file.

    The memory in the core names these files, even if none of them is left. The scan looks for them
    in running processes, at their paths on this host, and at their paths in the mount namespaces of
    running processes. The vDSO is in the core itself. The scan lists the files that stay missing,
    with the reason.
    """
    from buildidfs.catalog.containers import Names
    from buildidfs.profile import cores

    with session.capturing() as (store, show):
        scan = cores.scan_cores(
            store, session.settings, [os.fsencode(path) for path in paths], progress=show
        )
        names = Names(store)
        called = {label: names.short(label) for dump in scan.dumps for label in dump.containers}
    more = {"cores": scan.dumps} if json_ else {}
    status = report_scan(scan.summary, json_=json_, quiet=session.is_quiet, more=more)
    if not json_ and not session.is_quiet:
        _core_text(scan, called)
    return status


def _core_text(scan: CoreScan, called: Mapping[str, str]) -> None:
    for dump in scan.dumps:
        missing = [missing_line(x.build_id, x.path, x.why) for x in dump.binaries if x.why]
        click.echo(
            f"{printable(dump.path)}: {_whose(dump, called)}:"
            f" {counted(len(dump.binaries), 'binary', 'binaries')}, {len(missing)} missing"
        )
        print_first(missing, len(missing), err=False)


def _whose(dump: CoreDump, called: Mapping[str, str]) -> str:
    """Describe the process of a core file; ``called`` has the names of containers by label."""
    if not dump.name and not dump.pid:
        return "of an unknown process"  # its notes were cut off
    words = f"{printable(dump.name)} (pid {dump.pid}"
    if dump.signal:
        try:
            words += f", {signal.Signals(dump.signal).name}"
        except ValueError:
            words += f", signal {dump.signal}"
    words += ")"
    labels = (called.get(label, label) for label in dump.containers)
    names = [printable(label) for label in labels]
    if any(names):
        words += f" of {', '.join(name or 'the host' for name in names)}"
    return words


@scan.command(
    "package",
    short_help="Capture packages: .deb, .rpm, .apk, Arch.",
    epilog=exit_status(
        [
            "buildidfs scan package libc6_2.36-9_amd64.deb libc6-dbg_2.36-9_amd64.deb",
            "buildidfs scan package /srv/mirror",
        ],
        _statuses("packages"),
    ),
)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=AnyPath())
@click.option("--again", "reread", is_flag=True, help="Read packages that were read before, too.")
@_sources_in_them
@json_option("Print the summary as one JSON object.")
@click.pass_obj
def scan_package(
    session: Session, files: tuple[str, ...], reread: bool, sources: bool, json_: bool
) -> int:
    """Capture each ELF file in packages of Debian, rpm, Alpine and Arch, without installing them.

    A FILE may be a directory: the scan reads all packages below it. The content decides the format
    of a package, not its name. The scan skips an unchanged package that was read within a month.
    """
    from buildidfs.ingest import scans

    wanted = [os.fsencode(path) for path in files]
    with session.capturing("Unpacking") as (store, show):
        scan = scans.scan_packages(store, wanted, reread=reread, progress=show)
        more: dict[str, object] = {}
        if sources:
            from buildidfs.catalog.source_files import capture_packaged_sources

            found = capture_packaged_sources(store, session.settings, wanted)
            more = _print_sources(session, found, "in no package that was given", json_=json_)
    counts = {"packages": scan.packages, "unchanged": scan.unchanged}
    return _report_archives(session, scan.summary, counts, json_=json_, **more)


@scan.command(
    "image",
    short_help="Capture images of containers.",
    epilog=exit_status(
        [
            "buildidfs scan image alpine:3.19 registry.example.org/app@sha256:0f5c3e8d1b2a",
            "buildidfs scan image ./layout saved.tar.gz /var/lib/docker",
        ],
        {
            2: "no such image, or no such platform",
            3: "finished, but some images or files could not be read",
            10: "store error; 14 disk full",
            20: "an image does not match its digests; none of its files was captured",
        },
    ),
)
@click.argument("images", metavar="REF|FILE...", nargs=-1, required=True, type=AnyPath())
@click.option(
    "--root",
    "roots",
    metavar="DIR",
    multiple=True,
    type=AnyPath(),
    help="Look for REF here instead of in the directories of engines.",
)
@click.option(
    "--platform",
    metavar="OS/ARCH",
    help="For images with several platforms: read this one, or all.",
)
@click.option("--again", "reread", is_flag=True, help="Read images that were read before, too.")
@_sources_in_them
@json_option("Print the summary as one JSON object.")
@click.pass_obj
def scan_image(
    session: Session,
    images: tuple[str, ...],
    roots: tuple[str, ...],
    platform: str | None,
    reread: bool,
    sources: bool,
    json_: bool,
) -> int:
    """Capture each ELF file that is visible in images of containers, without running or unpacking
    them.

    A FILE is an OCI layout, an archive of one, the output of docker save or podman save, or the
    directory of an engine. The scan reads all images in it, and from an engine also the files that
    its containers have written. Any other word is a REF: the name, ID or digest of an image that an
    engine has.
    """
    from buildidfs.ingest import scans

    meant = scans.images_meant(images, roots)
    with session.capturing("Unpacking") as (store, show):
        scan = scans.scan_images(store, *meant, platform=platform, reread=reread, progress=show)
        more: dict[str, object] = {}
        if sources:
            from buildidfs.catalog.source_files import capture_image_sources

            scanner = partial(scans.image_scanner, store, *meant, platform=platform)
            found = capture_image_sources(store, session.settings, scanner)
            more = _print_sources(session, found, "not in the image that names them", json_=json_)
    counts = {"images": scan.images, "unchanged": scan.unchanged}
    status = _report_archives(session, scan.summary, counts, json_=json_, **more)
    for error in scan.corrupt[1:]:
        terminal.complain(one_line(str(error)))
    if scan.corrupt:
        raise scan.corrupt[0]
    return status


def _report_archives(
    session: Session, summary: ScanSummary, counts: dict[str, int], *, json_: bool, **more: object
) -> int:
    """Print the number of archives and the summary; return the exit status."""
    (nouns, total), (_, unchanged) = counts.items()
    if not json_ and not session.is_quiet:
        known = f", {unchanged} of them unchanged" if unchanged else ""
        click.echo(f"{counted(total, nouns.removesuffix('s'))}{known}")
    return report_scan(summary, json_=json_, quiet=session.is_quiet, more={**counts, **more})
