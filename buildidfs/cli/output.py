# SPDX-License-Identifier: Apache-2.0
"""Values in the forms that people and programs get, and the reports of several commands.

`progress` is the one line on a terminal with the progress of a command.

    Capturing   42%  1204 files  1.3 GiB  310/s  0:07 left  /usr/lib/libexample.so.6

Unknown values are left out. The line fits the terminal, is plain ASCII unless the locale has more
characters, and disappears when the command prints its answer.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import functools
import os
import sys
import time
from collections import Counter
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import click
import msgspec

from buildidfs import names
from buildidfs.answers import Removed
from buildidfs.cli import terminal
from buildidfs.errors import IncompleteError, StoreFull
from buildidfs.located import path_fields as path_fields
from buildidfs.names import one_line as one_line
from buildidfs.names import printable as printable
from buildidfs.wording import age, counted, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from buildidfs.answers import EvictedFile
    from buildidfs.ingest import ScanSummary
    from buildidfs.model import BuildId
    from buildidfs.profile.inputs import NamedIds
    from buildidfs.reports import Limits
    from buildidfs.store.retention.eviction import Policy
    from buildidfs.store.values import Tally


_encode = msgspec.json.Encoder().encode
_SECOND: Final = 1e9
_SHOWN_RECAPTURABLE = 3  # recapturable blobs that were evicted
_SHOWN_UNREADABLE = 10  # unreadable files that are named one by one
_SHOWN_NAMELESS: Final = 20  # files that are named one by one


def json_line(value: object) -> None:
    """Print one JSON object on a line of its own, without characters that a terminal interprets."""
    sys.stdout.buffer.write(names.json_escaped(_encode(_plain(value))) + b"\n")


_DIRECT: Final = frozenset((str, int, float, bool, type(None)))


@functools.cache
def _printed(kind: type[msgspec.Struct]) -> list[tuple[str, str]]:
    """Return the fields of a struct and their names in JSON."""
    pairs = zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
    return [pair for pair in pairs if not pair[1].startswith("_")]


def _plain(value: object) -> object:
    """Return a value in the forms of buildidfs-json(5).

    A struct is an object; a field whose encoded name begins with ``_`` is left out. Bytes of a path
    or a name are text, with base64 beside it if they are not UTF-8; IDs and digests are
    hexadecimal; times in nanoseconds (``NAME_ns``) are seconds.
    """
    if isinstance(value, msgspec.Struct):
        fields: dict[str, object] = {}
        for field, name in _printed(type(value)):
            each = getattr(value, field)
            if type(each) is bytes:
                fields |= path_fields(each, name)
            elif name.endswith("_ns"):
                fields[name.removesuffix("_ns")] = each / _SECOND
            elif each is not msgspec.UNSET:
                fields[name] = each if type(each) in _DIRECT else _plain(each)
        return fields
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    return value.name.lower() if isinstance(value, enum.IntEnum) else value


def print_first(lines: Sequence[str], most: int, hint: str = "", *, err: bool = True) -> None:
    """Print the first ``most`` lines, indented, and the number of the others with a hint."""
    for line in lines[:most]:
        click.echo(f"    {line}", err=err)
    if len(lines) > most:
        click.echo(f"    and {len(lines) - most} more{hint}", err=err)


def missing_line(build_id: BuildId | None, path: bytes, why: str) -> str:
    """Return a line about a binary that a scan has not found."""
    name = build_id.hex() if build_id is not None else "-"
    return f"{name:40}  {printable(path) or '-'}: {why}"


def eviction(what: Removed) -> str:
    """Describe the blobs that were removed to make room; empty if there are none."""
    clauses = []
    if what.recapturable:
        recapturable = f"{what.recapturable} that can be captured again"
        clauses.append(f"{recapturable} ({size(what.recapturable_bytes)})")
    if what.lost:
        clauses.append(f"{what.lost} that cannot be captured again ({size(what.lost_bytes)})")
    return ", ".join(clauses)


def evicted_line(each: EvictedFile) -> str:
    """Return a line about one blob that was removed to make room."""
    what = f": {each.copy_at}" if each.copy_at else ": it was damaged" if each.damaged else ""
    return f"{each.build_id} {printable(each.raw_path) or '-'} ({size(each.stored_bytes)}){what}"


def limits(policy: Policy | Limits) -> str:
    """Describe the limits of a store in a sentence."""
    clauses = [] if policy.max_size is None else [f"{size(policy.max_size)} at most"]
    if policy.keep_free:
        clauses.append(f"{size(policy.keep_free)} free")
    if policy.max_age is not None:
        clauses.append(f"what was used within {age(policy.max_age)}")
    if policy.min_age:
        clauses.append(f"in any case what was used within {age(policy.min_age)}")
    return ", ".join(clauses) or "everything"


def report_scan(
    summary: ScanSummary,
    *,
    quiet: bool,
    json_: bool = False,
    more: Mapping[str, object] = MappingProxyType({}),
) -> int:
    """Print the result of a scan, and return the exit status.

    The status is not 0 if a file could not be read, or if the store has no room for one. ``more``
    are further fields of the JSON object. ``quiet`` leaves out successes.
    """
    if json_:
        _summary_json(summary, more)
    else:
        _summary_text(summary, quiet=quiet)
    if summary.unreadable:
        return IncompleteError.exit_code
    if not summary.omitted:
        return 0
    terminal.complain(
        f"{counted(summary.omitted, 'file')} not stored, because files that are gone need the room:"
        " set a larger limit ([retention] max-size), or remove files (buildidfs prune)"
    )
    return StoreFull.exit_code


def _summary_json(summary: ScanSummary, more: Mapping[str, object]) -> None:
    json_line(
        {
            **more,
            "files": summary.files,
            "captured": summary.captured,
            "held": summary.held,
            "new_build_ids": summary.new_ids,
            "copied_bytes": summary.copied_bytes,
            "omitted": summary.omitted,
            "omitted_bytes": summary.omitted_bytes,
            "evicted": Removed.of(summary.removed, summary.removed.named),
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


def _summary_text(summary: ScanSummary, *, quiet: bool) -> None:
    if not quiet:
        click.echo(
            f"{summary.captured} captured ({size(summary.copied_bytes)},"
            f" {counted(summary.new_ids, 'new build ID')}), {summary.held} already held"
        )
        for reason, count in summary.absent.most_common():
            click.echo(f"{count} skipped: {reason}")
        if summary.omitted:
            terminal.print_text(
                f"{summary.omitted} omitted ({size(summary.omitted_bytes)}) for lack of"
                " room, and can be captured again: buildidfs journal has them"
            )
        if summary.removed.aged:
            click.echo(f"{summary.removed.aged} removed that were older than max-age")
    report_evictions(summary.removed, quiet=quiet)
    if not summary.unreadable:
        return
    reasons = Counter(item.reason for item in summary.unreadable)
    for why, count in reasons.most_common():
        terminal.complain(f"{count} not readable: {why}")
        lines = [
            printable(item.path) + (f" (build ID {item.build_id})" if item.build_id else "")
            for item in summary.unreadable
            if item.reason == why
        ]
        print_first(lines, _SHOWN_UNREADABLE)


def report_evictions(removed: Tally, *, quiet: bool = False) -> None:
    """Print the blobs removed to make room, losses first; if ``quiet``, only losses."""
    if not removed.losses and (quiet or not removed.recapturable):
        return
    what = Removed.of(removed, removed.named)
    click.echo(f"removed to make room: {eviction(what)}", err=bool(what.lost))
    losses = [each for each in what.named if not each.copy_at]
    for each in losses or what.named[:_SHOWN_RECAPTURABLE]:
        click.echo(f"    {evicted_line(each)}", err=bool(what.lost))
    if what.lost > len(losses):
        click.echo(f"    and {what.lost - len(losses)} more, see buildidfs journal", err=True)


def report_nameless(path: bytes, named: NamedIds) -> bool:
    """Print on standard error the unknown mappings of ``path``; return True if there are any.

    Each file is printed with its share of the samples: those in the file, and those called from
    there.
    """
    if named.incomplete:
        terminal.complain(one_line(named.incomplete))
    count = len(named.nameless)
    if count:
        files = f"{counted(count, 'file')} without a build ID"
        terminal.complain(f"{printable(path)}: {files}")
    elif not named.paths:
        terminal.complain(f"{printable(path)} is about no file with a build ID")
    lines = []
    for each in named.nameless:
        weight = "" if each.share is None else f"{each.share:.1f} % of the samples  "
        label = printable(each.called)
        where = f" in {label}" if label else ""
        lines.append(f"{weight}{printable(each.path)}{where}: {each.why}")
    print_first(lines, _SHOWN_NAMELESS)
    return bool(count or named.incomplete or not named.paths)


_EVERY_S: Final = 0.1
_SETTLED_S: Final = 2.0  # before that, rate and remaining time are unreliable
_SETTLED: Final = 0.01
_LEAST_PATH: Final = 8  # columns; a path is left out if it would have fewer


class ProgressLine:
    """The line; it implements `capture.base.Progress`. ``noun`` is the singular of the items."""

    def __init__(self, description: str, noun: str) -> None:
        self._description = description
        self._noun = noun
        self._began = time.monotonic()
        self._drawn_at = -_EVERY_S
        self._is_drawn = False

    def __call__(self, done: int, what: str, *, size: int = 0, share: float | None = None) -> None:
        """Draw the line again, unless it was drawn a moment ago."""
        now = time.monotonic()
        if now - self._drawn_at < _EVERY_S:
            return
        self._drawn_at = now
        text = self.text(done, what, size, share, terminal.width(sys.stderr) - 1)
        if not terminal.has_unicode():
            text = text.encode("ascii", "backslashreplace").decode()[: terminal.width(sys.stderr)]
        self._write(f"\r{text}\x1b[K")
        self._is_drawn = True

    def restart(self) -> None:
        """Start another step of the command; rate and remaining time are those of the step."""
        self._began = time.monotonic()
        self._drawn_at = -_EVERY_S

    def clear(self) -> None:
        """Remove the line, so that other text can be printed; the next call draws it again."""
        if self._is_drawn:
            self._write("\r\x1b[K")
            self._is_drawn = False
            self._drawn_at = -_EVERY_S

    def text(self, done: int, what: str, bytes_: int, share: float | None, columns: int) -> str:
        """Return the line, cut to a number of columns."""
        elapsed = time.monotonic() - self._began
        parts = [self._description]
        if share is not None:
            share = min(max(share, 0.0), 1.0)
            parts.append(f"{int(100 * share):3}%")
        if self._noun:
            parts.append(counted(done, self._noun))
        if bytes_:
            parts.append(size(bytes_))
        if self._noun and elapsed >= _SETTLED_S:
            parts.append(f"{done / elapsed:.0f}/s")
        if share is not None and share >= _SETTLED and elapsed >= _SETTLED_S:
            parts.append(f"{_clock_time(elapsed * (1 - share) / share)} left")
        line = "  ".join(parts)[:columns]
        room = columns - len(line) - 2
        if what and room >= _LEAST_PATH:
            line += "  " + terminal.cut(printable(what), room)
        return line

    def _write(self, text: str) -> None:
        # the terminal is gone, which does not matter for the work
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()


def _clock_time(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


@contextlib.contextmanager
def progress(
    description: str, noun: str = "file", *, quiet: bool = False
) -> Iterator[ProgressLine | None]:
    """Yield a line while the block runs; None if standard error is not a terminal, or ``quiet``."""
    if quiet or not sys.stderr.isatty() or os.environ.get("TERM", "dumb") == "dumb":
        yield None
        return
    line = ProgressLine(description, noun)
    try:
        yield line
    finally:
        line.clear()
