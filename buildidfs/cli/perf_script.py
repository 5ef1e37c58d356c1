# SPDX-License-Identifier: Apache-2.0
"""``buildidfs symbolize --perf-script``: the output of perf script with names in it."""

from __future__ import annotations

import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, BinaryIO

import click

from buildidfs.cli.frames import function_of
from buildidfs.cli.output import printable
from buildidfs.errors import UsageError
from buildidfs.formats.perf import script_output

if TYPE_CHECKING:
    from buildidfs.app.symbolize.symbolize import Answer, Symbolizer
    from buildidfs.formats.perf.script_output import Frame
    from buildidfs.model import BuildId

# What is left without a name before a symbolizer was asked. The remedy depends on all of the text.
_NO_MAPPING = "no mapping"
_NO_BUILD_ID = "no build ID"
_SHOWN = 10
_PERF_DATA = (b"PERFILE2", b"2ELIFREP")
_LISTED = re.compile(rb"^ *[0-9A-Fa-f]{4,} +\S", re.MULTILINE)


def filter_script(symbolizer: Symbolizer, buildid_list: str | None, *, with_lines: bool) -> None:
    """Copy standard input to standard output, with names where perf has found none.

    Says at the end on standard error what is left without, and why.
    """
    listed = _read_list(buildid_list)
    script = script_output.Script()
    output: BinaryIO = sys.stdout.buffer
    why: Counter[tuple[bytes, str]] = Counter()
    any_line = False
    for line in sys.stdin.buffer:
        if line.startswith(_PERF_DATA) and not any_line:
            raise UsageError(
                "standard input is a perf.data file: give what perf script --show-mmap-events"
                " --show-task-events prints of it"
            )
        any_line = True
        text = line.rstrip(b"\n")
        frame = script.line(text)
        if frame is None or not frame.unknown or frame.dso.startswith(b"[kernel"):
            output.write(line)
            continue
        location = script.locate(frame)
        if location is None:
            why[frame.dso, _NO_MAPPING] += 1
            output.write(line)
            continue
        build_id = location.build_id or listed.get(location.path)
        if build_id is None:
            why[location.path, _NO_BUILD_ID] += 1
            output.write(line)
            continue
        answer = symbolizer.at_offset(build_id, location.offset, called=frame.called)
        if answer.frames:
            address = symbolizer.address_of(build_id, location.offset)
            output.write(_named(frame, answer, address, with_lines=with_lines))
        else:
            why[location.path, answer.why] += 1
            output.write(line)
    output.flush()
    if not any_line:
        click.echo("buildidfs: standard input is empty: perf script printed nothing", err=True)
    _report(script, why)


def _named(frame: Frame, answer: Answer, address: int | None, *, with_lines: bool) -> bytes:
    """The lines of a frame: as perf prints them with ``--inline``, and with ``-F +srcline``."""
    digits = b"%16x" % frame.ip if frame.chain else b"%x" % frame.ip
    before = b"\t" if frame.chain else frame.before
    shown = []
    # A sample on one line has room for one function, the one that it is in after all.
    for found in answer.frames if frame.chain else answer.frames[-1:]:
        name = function_of(found) if found.function else "[unknown]"
        if found.inlined:
            shown.append(b"%s%s %s (inlined)" % (before, digits, name.encode()))
        else:
            offset = ""
            if found.function and found.start is not None and address is not None:
                offset = f"+0x{address - found.start:x}" if address >= found.start else ""
            function = f"{name}{offset}".encode()
            shown.append(b"%s%s %s (%s)" % (before, digits, function, frame.dso))
        if with_lines and found.file:
            file = printable(found.file.rpartition("/")[2].encode("utf-8", "surrogateescape"))
            shown.append(f"  {file}:{found.line}".encode())
    return b"\n".join(shown) + b"\n"


def _read_list(path: str | None) -> dict[bytes, BuildId]:
    if path is None:
        return {}
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if text and not _LISTED.search(text):
        raise UsageError(f"{path} is no output of perf buildid-list: it has no line ID PATH")
    return script_output.parse_build_ids(text)


def _remedy(script: script_output.Script, reason: str) -> str:
    """What is wrong, and what helps with this text: events that are in it are not asked for."""
    from buildidfs.app.symbolize.symbolize import NOT_MAPPED

    if reason == _NO_MAPPING:
        if not script.has_mappings:
            return "no mapping told of: give perf script --show-mmap-events --show-task-events"
        if not script.has_tasks:
            return "no mapping told of at that address: give perf script --show-task-events, too"
        return "no event tells of a mapping at that address: it was lost, or is older than perf"
    if reason == _NO_BUILD_ID:
        if not script.has_mappings:
            return (
                "no build ID: give perf script --show-mmap-events --show-task-events, or"
                " --buildid-list"
            )
        return (
            "no build ID in the profile: run perf script on what buildidfs repair makes of it, or"
            " give --buildid-list"
        )
    if reason == NOT_MAPPED and not script.has_mappings:
        return (
            "no such offset, or addresses of the process: give perf script --show-mmap-events"
            " --show-task-events, or -F +dsoff"
        )
    return reason


def _report(script: script_output.Script, why: Counter[tuple[bytes, str]]) -> None:
    for (path, key), count in why.most_common(_SHOWN):
        reason = _remedy(script, key)
        frames = f"{count} frame{'' if count == 1 else 's'}"
        click.echo(f"buildidfs: {printable(path)}: {frames} without a name: {reason}", err=True)
    if len(why) > _SHOWN:
        click.echo(f"buildidfs: and {len(why) - _SHOWN} more files", err=True)
