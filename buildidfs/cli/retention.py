# SPDX-License-Identifier: Apache-2.0
"""Keep and remove files of the store: ``buildidfs pin``, ``unpin``, ``remove``, ``prune``, ``gc``
and ``compress``.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from typing import TYPE_CHECKING, Final

import click

from buildidfs.answers import PinOf
from buildidfs.cli import table, terminal
from buildidfs.cli.common import (
    NO_STORE,
    AnyPath,
    BuildIdArgument,
    Session,
    container_option,
    exit_status,
    json_option,
)
from buildidfs.cli.output import json_line, limits, one_line, path_fields, printable
from buildidfs.cli.table import Cell, Column
from buildidfs.errors import UsageError
from buildidfs.located import Located
from buildidfs.wording import age, counted, size

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.catalog.artifacts import Chosen
    from buildidfs.config import RetentionSettings
    from buildidfs.model import BuildId, Digest, Kind
    from buildidfs.store import Store
    from buildidfs.store.retention.plan import Choice


class _ListedPin(PinOf, frozen=True, kw_only=True):
    """A pin of a build ID; ``held`` is True if the store knows it."""

    build_id: BuildId
    held: bool


_COLUMNS: Final[tuple[Column[_ListedPin], ...]] = (
    Column("build_id", "BUILD ID", table.BUILD_ID),
    Column("held", "BYTES", table.TEXT, value=lambda row: "held" if row.held else "missing"),
    Column("pinned", "PINNED", table.AGE),
    Column("name", "NAME", table.PATH, value=lambda row: row.raw_name),
)


@click.command(
    "pin",
    short_help="Exempt build IDs from all limits.",
    epilog=exit_status(
        [
            "buildidfs pin perf.data core.4711",
            "buildidfs pin --name incident-42 8e9f perf.data",
        ],
        {
            2: "neither a build ID nor a file that names one",
            3: "pinned, but some files of a FILE have no build ID, or a core file is unreadable",
            **NO_STORE,
            30: "nothing is known of that build ID",
        },
    ),
)
@click.argument("what", metavar="ID|FILE...", nargs=-1, type=BuildIdArgument())
@container_option("Keep all files captured of this container so far.", multiple=True)
@click.option(
    "--cores",
    metavar="DIR",
    type=AnyPath(),
    help="Keep what the core files in DIR name, for as long as they are there.",
)
@click.option(
    "--name", metavar="NAME", help="The name of the pins; unpin --name removes all of them."
)
@click.option("--list", "list_", is_flag=True, help="List the pins.")
@table.options(_COLUMNS, json="With --list: print one JSON object per line.")
@click.pass_obj
def pin(
    session: Session,
    what: tuple[str, ...],
    containers: tuple[str, ...],
    cores: str | None,
    name: str | None,
    list_: bool,
    layout: table.TableOptions,
) -> int:
    """Exempt build IDs from all limits, with all their captured files.

    FILE is a profile of perf(1), a core file, or a binary. The command pins each build ID that a
    profile or core file names, under the path of FILE, or the build ID of the binary. Files of a
    profile without build IDs are looked up as by `buildidfs repair`. A build ID that the store
    lacks is kept when it arrives; give it in full. A word of hexadecimal digits is a build ID, not
    a file. If there is no file at a path, the path means the build ID that was seen there last.
    With --container the pins get the given name of the container, and `unpin --name` removes them.
    With --cores, each core file in DIR is pinned once, and pins of those that are gone are removed;
    `buildidfs setup coredump` lets systemd run it.
    """
    from buildidfs.errors import IncompleteError

    if list_:
        if what or containers or cores is not None:
            raise click.UsageError("--list takes no build IDs and no files, only --name")
        with session.open_store() as store:
            label = None if name is None else os.fsencode(name)
            if not _list(store, label, layout):
                session.explain_empty(_why_empty(store, label))
        return 0
    if layout != table.TableOptions():
        raise click.UsageError("--json and the options of tables belong to --list")
    if cores is not None and name is not None:
        raise click.UsageError("pins of --cores have the paths of the core files as names")
    if not what and not containers and cores is None:
        raise click.UsageError(
            "nothing to pin: give build IDs, files, --container or --cores, or --list"
        )
    with session.open_store() as store:
        for each in containers:
            _pin_container(session, store, each, name)
        lacking = [_pin(session, store, each, name) for each in what]
        if cores is not None:
            lacking.append(_pin_cores(session, store, cores))
    return IncompleteError.exit_code if any(lacking) else 0


@click.command(
    "unpin",
    short_help="Remove pins, so that the limits apply again.",
    epilog=exit_status(
        [
            "buildidfs unpin 8e9fd827446c24067541ac5390e6f527fb5947bb",
            "buildidfs unpin --name incident-42",
        ],
        {**NO_STORE, 30: "nothing is known of it, or it was not pinned"},
    ),
)
@click.argument("what", metavar="ID|FILE|CONTAINER...", nargs=-1, type=BuildIdArgument())
@click.option("--name", metavar="NAME", multiple=True, help="Remove all pins of this name.")
@click.pass_obj
def unpin(session: Session, what: tuple[str, ...], name: tuple[str, ...]) -> int:
    """Remove pins: of a build ID, of a FILE, which need not exist any more, of a container, or by
    name.

    A build ID stays exempt while another pin keeps it.
    """
    from buildidfs.errors import ArtifactMissing
    from buildidfs.profile import inputs

    if not what and not name:
        raise click.UsageError("nothing to unpin: give build IDs, files or --name")
    missed = 0
    with session.open_store() as store:
        for each in what:
            count, others = inputs.unpin(store, each)
            for other in others:
                click.echo(f"{other.build_id} stays pinned for {printable(other.name)}", err=True)
            missed += _unpinned(session, each, count)
        for each in name:
            missed += _unpinned(session, each, store.unpin_name(os.fsencode(each)))
    return ArtifactMissing.exit_code if missed else 0


def _unpinned(session: Session, what: str, count: int) -> bool:
    """Print the result of unpinning; return True if there was no pin."""
    shown = printable(what)
    if not count:
        terminal.complain(f"{shown} was not pinned")
    elif not session.is_quiet:
        click.echo(f"unpinned {counted(count, 'build ID')}: {shown}")
    return not count


def _pin(session: Session, store: Store, what: str, name: str | None) -> bool:
    """Pin the build IDs of one argument; return True if a file has unknown build IDs."""
    from buildidfs.cli.output import report_nameless
    from buildidfs.errors import UsageError
    from buildidfs.profile import inputs

    path, label = os.fsencode(what), None if name is None else os.fsencode(name)
    looking = partial(session.progress, "Looking up", "record")
    named, new = inputs.pin(store, what, label, looking)
    if not named.paths:
        report_nameless(path, named)
        raise UsageError(f"{printable(path)} names no build ID: nothing is pinned for it")
    absent = sum(store.index.ordinal(each) is None for each in named.paths)
    _report(session, what, len(named.paths), new, absent)
    return named.is_file and report_nameless(path, named)


def _pin_cores(session: Session, store: Store, directory: str) -> bool:
    """Pin for the core files of a directory; return True if one of them cannot be read."""
    from buildidfs.profile import inputs

    done = inputs.pin_cores(store, os.fsencode(directory))
    for path in () if session.is_quiet else (*done.pinned, *done.gone):
        is_new = path in done.pinned
        click.echo(f"{'pinned for' if is_new else 'unpinned, gone:'} {printable(path)}")
    for why in done.unread.values():
        terminal.complain(one_line(why))
    return bool(done.unread)


def _pin_container(session: Session, store: Store, text: str, name: str | None) -> None:
    """Pin all build IDs of the containers that a user means."""
    from buildidfs.catalog import containers

    build_ids = sorted(containers.build_ids(store, text))
    _report(session, text, len(build_ids), store.pin(build_ids, os.fsencode(name or text)))


def _report(session: Session, what: str, count: int, new: int, absent: int = 0) -> None:
    if not session.is_quiet:
        before = f", {count - new} of them before" if new < count else ""
        later = f", {absent} of them not in the store yet" if absent else ""
        shown = printable(what)
        click.echo(f"pinned {counted(count, 'build ID')}{before}{later}: {shown}")


def _why_empty(store: Store, name: bytes | None) -> str:
    """Return the reason why no pin was listed."""
    if name is not None and next(store.pins.every(), None) is not None:
        return f"nothing is pinned for {printable(name)}; --list alone shows all pins"
    return "nothing is pinned in this store: buildidfs pin keeps build IDs, profiles, core files"


def _list(store: Store, name: bytes | None, layout: table.TableOptions) -> int:
    """Print the pins; return their number."""
    rows = (
        _ListedPin(
            build_id=each.build_id,
            **path_fields(each.name, "name"),
            pinned=each.created_ns / 1e9,
            held=store.index.ordinal(each.build_id) is not None,
        )
        for each in store.pins.every(name)
    )
    return layout.print(_COLUMNS, rows)


_SHOWN: Final = 20
_DEFAULT = "30d"

_IDS: Final = Cell(
    lambda ids: table.BUILD_ID.person(ids[0]) + (f" and {len(ids) - 1}" if len(ids) > 1 else ""),
    lambda ids: " ".join(each.hex() for each in ids),
)
_FATE: Final = Cell(str, str, colour=lambda fate: "red" if fate == "remove" else None)


class _Choice(Located, frozen=True, kw_only=True, rename={"is_removed": "goes"}):
    """A blob that a plan removes or keeps, and the reason; ``last_used`` is Unix time."""

    build_ids: tuple[BuildId, ...]
    kinds: tuple[Kind, ...]
    sha256: Digest
    stored_bytes: int
    last_used: int
    is_removed: bool
    why: str


_CHOICES: Final[tuple[Column[_Choice], ...]] = (
    Column("fate", "FATE", _FATE, value=lambda row: "remove" if row.is_removed else "keep"),
    Column("build_ids", "BUILD ID", _IDS),
    Column("kinds", "KINDS", table.KINDS, 100),
    Column("size", "SIZE", table.SIZE, value=lambda row: row.stored_bytes),
    Column("last_used", "USED", table.AGE, 100),
    table.LOCATION,
    Column("why", "WHY", table.ANSWER),
)
_REMOVED: Final[tuple[Column[Chosen], ...]] = (
    Column("build_id", "BUILD ID", table.BUILD_ID),
    Column("kinds", "KIND", table.KINDS, value=lambda row: (row.kind,)),
    Column("size", "SIZE", table.SIZE),
    Column("pinned", "PINNED", table.TEXT, value=lambda row: "pinned" if row.pinned else None),
    Column("path", "PATH", table.PATH),
)


@click.command(
    "remove",
    short_help="Remove files from the store.",
    epilog=exit_status(
        [
            "buildidfs remove 8e9fd827446c24067541ac5390e6f527fb5947bb",
            "buildidfs remove --dry-run '*/a.out' '/home/*/build/*'",
        ],
        {
            2: "a prefix that several build IDs share, or something is pinned",
            **NO_STORE,
            30: "nothing is known of that build ID, or was seen at such a path",
        },
    ),
)
@click.argument("wanted", metavar="ID|GLOB...", nargs=-1, required=True, type=BuildIdArgument())
@click.option(
    "--dry-run", is_flag=True, help="Print the files that would be removed; change nothing."
)
@click.option("--force", is_flag=True, help="Remove pinned files, too.")
@table.options(_REMOVED)
@click.pass_obj
def remove(
    session: Session,
    wanted: tuple[str, ...],
    dry_run: bool,
    force: bool,
    layout: table.TableOptions,
) -> None:
    """Remove all files of a build ID, or the files that were seen at a path.

    A unique prefix of an ID is enough; a GLOB must match the whole path. A reader that has such a
    file open in a mount can read it to its end. The next scan captures files again that are still
    in use.
    """
    from buildidfs.catalog import artifacts

    with session.open_store() as store:
        chosen = artifacts.choose(store, wanted)
        pinned = next((each for each in chosen if each.pinned), None)
        if pinned is not None and not dry_run and not force:
            raise UsageError(
                f"build ID {pinned.build_id} is pinned: unpin it, or remove it with --force"
            )
        if not dry_run:
            store.remove((each.sha256 for each in chosen), forget=True)
    layout.print(_REMOVED, chosen)
    if not session.is_quiet and not layout.is_json:
        total = size(sum(each.size for each in chosen))
        sys.stdout.write(f"{len(chosen)} {'to remove' if dry_run else 'removed'} ({total})\n")
    sys.stdout.flush()


@click.command(
    "prune",
    short_help="Remove the files that exceed the limits.",
    epilog=exit_status(
        [
            "buildidfs prune --dry-run",
            "buildidfs prune --max-size 20G --max-age 90d",
        ],
        {
            2: "not a size, or not an age",
            **NO_STORE,
            14: "the limits cannot be met: no other file may be removed",
        },
    ),
)
@click.option(
    "--dry-run", "-n", is_flag=True, help="Print the files that would be removed; change nothing."
)
@click.option("--max-size", metavar="SIZE", help="The limit of blobs and index: 50G, 80%.")
@click.option(
    "--keep-free", metavar="SIZE", help="The space to keep free on the filesystem: 10G, 5%."
)
@click.option(
    "--max-age", metavar="AGE", help="Remove files that were unused for this time: 30d, 12h."
)
@click.option("--min-age", metavar="AGE", help="Keep files that were used within this time.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Also list the files that stay, with the reason."
)
@table.options(_CHOICES)
@click.pass_obj
def prune(
    session: Session,
    dry_run: bool,
    max_size: str | None,
    keep_free: str | None,
    max_age: str | None,
    min_age: str | None,
    verbose: bool,
    layout: table.TableOptions,
) -> int:
    """Remove files until the store is within its limits, and print them with the reason.

    Files that this host can give back go first, the longest unused first. Then go the others, from
    the container or user with the most bytes, the longest unused first. Pinned files stay. The
    default limits are those of buildidfs.toml(5), which scans and watches apply by themselves.
    """
    from msgspec.structs import replace

    given = {"max_size": max_size, "keep_free": keep_free, "max_age": max_age, "min_age": min_age}
    wanted = {name: value for name, value in given.items() if value is not None}
    settings = replace(session.settings.retention, **wanted)
    with session.open_store() as store:
        return _prune(session, store, settings, dry_run, verbose, layout)


def _prune(
    session: Session,
    store: Store,
    settings: RetentionSettings,
    dry_run: bool,
    verbose: bool,
    layout: table.TableOptions,
) -> int:
    from buildidfs.errors import StoreFull
    from buildidfs.ingest import upkeep

    policy = upkeep.policy(settings, store.path)
    pruning = upkeep.Pruning(store, policy, dry_run=dry_run, with_kept=verbose)
    reasons: dict[str, list[int]] = {}
    choices = _tallied(pruning.choices(), reasons)
    if layout.is_json or not session.is_quiet:
        layout.print(_CHOICES, map(_choice, choices), most=_SHOWN)
    for _ in choices:  # --limit limits the output, not the removal
        pass
    left = pruning.exceeded()
    if layout.is_json and not pruning.blobs:
        session.explain_empty("nothing has to go: the store is within its limits")
    if not session.is_quiet and not layout.is_json:
        gone = counted(pruning.blobs, "blob")
        verb = "would go" if dry_run else "removed"
        is_within = not pruning.blobs and not left
        why = f": the store is within its limits ({limits(policy)})" if is_within else ""
        terminal.print_text(f"{gone}, {size(pruning.freed)}, {verb}{why}")
        largest = sorted(reasons.items(), key=lambda reason: -reason[1][1])
        for why, (blobs, freed) in largest[:_SHOWN]:
            terminal.print_text(f"  {counted(blobs, 'blob')}, {size(freed)}: {why}", indent=2)
        if len(largest) > _SHOWN:
            terminal.print_text(f"  and {len(largest) - _SHOWN} further reasons", indent=2)
    if not left:
        return 0
    what = ", ".join(f"{name} by {size(lack)}" for name, lack in left.items())
    verb = "would still be" if dry_run else "still"
    terminal.complain(f"{verb} exceeded: {what}: no other file may be removed")
    return StoreFull.exit_code


def _tallied(choices: Iterator[Choice], reasons: dict[str, list[int]]) -> Iterator[Choice]:
    """Yield the same choices, and count the removed blobs and bytes by reason."""
    for choice in choices:
        if choice.is_evicted:
            tally = reasons.setdefault(choice.why, [0, 0])
            tally[0] += 1
            tally[1] += choice.candidate.size
        yield choice


def _choice(choice: Choice) -> _Choice:
    what = choice.candidate
    return _Choice(
        build_ids=what.build_ids,
        kinds=what.kinds,
        sha256=what.digest,
        stored_bytes=what.size,
        last_used=what.used,
        is_removed=choice.is_evicted,
        why=choice.why.encode(errors="surrogateescape").decode(errors="replace"),
        **path_fields(choice.path),
    )


@click.command(
    "gc",
    short_help="Remove the remains of killed processes.",
    epilog=exit_status(["buildidfs gc", "buildidfs gc --json"], NO_STORE),
)
@json_option()
@click.pass_obj
def gc(session: Session, json_: bool) -> None:
    """Remove the remains of killed processes: blobs without a row in the index, unfinished
    removals, and drafts.

    Remains younger than an hour stay, and captures and readers continue. The watch does this once a
    day. The command counts the files in quarantine, and keeps them for inspection.
    """
    with session.open_store() as store:
        found = store.collect()
    if json_:
        json_line(found)
        return
    if not session.is_quiet:
        click.echo(
            f"removed {counted(found.blobs, 'blob')} without a row ({size(found.bytes)}),"
            f" the rest of {counted(found.ids, 'build ID')}, {counted(found.drafts, 'draft')}"
        )
    if found.quarantined:
        click.echo(
            f"kept {counted(found.quarantined, 'file')} in quarantine"
            f" ({size(found.quarantine_bytes)})"
        )


@click.command(
    "compress",
    short_help="Compress files that were not used for a long time.",
    epilog=exit_status(
        ["buildidfs compress", "buildidfs compress --unused-for 7d"],
        {10: "the Python package zstandard is missing", **NO_STORE},
    ),
)
@click.option(
    "--unused-for",
    metavar="AGE",
    help="Compress files unused for this time: 30d, 12h.  [default: compress-after, or 30d]",
)
@json_option()
@click.pass_obj
def compress(session: Session, unused_for: str | None, json_: bool) -> None:
    """Compress files that were not used for a long time. All readers read them as before.

    The watch does this once a day if [retention] compress-after is set.
    """
    from buildidfs import config
    from buildidfs.ingest import upkeep

    after = upkeep.compress_after(session.settings)
    if unused_for is not None or after is None:
        after = config.seconds(unused_for or _DEFAULT)
    with session.open_store() as store, session.progress("Compressing", "blob") as show:
        blobs, before, now = upkeep.compress(store, after, progress=show)
    if json_:
        json_line({"blobs": blobs, "before": before, "after": now})
    elif blobs and not session.is_quiet:
        what = f"{counted(blobs, 'blob')} unused for {age(after)}"
        click.echo(f"compressed {what}, from {size(before)} to {size(now)}")
    elif not blobs:
        session.explain_empty(f"no uncompressed blob was unused for {age(after)}")
