# SPDX-License-Identifier: Apache-2.0
"""``buildidfs symbolize``: functions and lines for addresses, and for the output of perf script."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

import click

from buildidfs.cli import terminal
from buildidfs.cli.common import NO_STORE, AnyPath, Session, exit_status, json_option
from buildidfs.cli.output import json_line, printable
from buildidfs.errors import ArtifactMissing, UsageError
from buildidfs.formats.perf import script_output
from buildidfs.linux import inodes
from buildidfs.wording import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from buildidfs.formats.symbolizer_output import Frame
    from buildidfs.model import BuildId
    from buildidfs.store import Store
    from buildidfs.symbolize.addresses import NamedFrames, Symbolizer


_PROGRAM: Final = re.compile(r"(?:llvm-symbolizer|eu-addr2line)(?:-[0-9]{1,3})?")
_REQUEST: Final = re.compile(r"(.+)\+0[xX]([0-9A-Fa-f]{1,16})")
_SHOWN = 10
_LIST_MAX: Final = 64 << 20
_LISTED = re.compile(rb"^ *[0-9A-Fa-f]{4,} +\S", re.MULTILINE)


class _Program(click.types.StringParamType):
    """The name of a program, perhaps with its version."""

    name = "program"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the value if it is the name of a program; else report wrong usage."""
        if _PROGRAM.fullmatch(value) is None:
            self.fail(
                f"{value!r} is neither llvm-symbolizer[-VERSION] nor eu-addr2line", param, ctx
            )
        return value


@click.command(
    "symbolize",
    short_help="Translate addresses to function, file and line.",
    epilog=exit_status(
        [
            "buildidfs symbolize 8e9f+0x1139",
            "perf script --show-mmap-events --show-task-events | buildidfs symbolize --perf-script",
        ],
        {
            2: "not ID+0xADDR, a prefix that several build IDs share, or no symbolizer installed",
            **NO_STORE,
            30: "nothing is known of a build ID, or none of the addresses has a name",
            60: "the symbolizer would have kept a privilege, and was not started",
        },
    ),
)
@click.argument("requests", metavar="ID+0xADDR...", nargs=-1)
@click.option("--file-offset", is_flag=True, help="ADDR is an offset in the file, as in perf.")
@click.option("--perf-script", is_flag=True, help="Name each [unknown] in perf script's output.")
@click.option(
    "--buildid-list",
    metavar="FILE",
    type=AnyPath(),
    help="With --perf-script: paths and build IDs, from perf buildid-list.",
)
@click.option("--lines", is_flag=True, help="With --perf-script: also print file and line.")
@click.option(
    "--with",
    "program",
    metavar="PROGRAM",
    type=_Program(),
    help="The program to run: llvm-symbolizer, eu-addr2line, or one with its version behind"
    " (llvm-symbolizer-19).  [default: the newest that is installed]",
)
@json_option("Print one JSON object for each address.")
@click.pass_obj
def symbolize(
    session: Session,
    requests: tuple[str, ...],
    file_offset: bool,
    perf_script: bool,
    buildid_list: str | None,
    lines: bool,
    program: str | None,
    json_: bool,
) -> int:
    """Print function, file and line of addresses, with inlined functions.

    ID is a build ID (a unique prefix is enough), and ADDR is an address of the ELF file, as nm(1)
    prints it and llvm-symbolizer takes it. Without arguments the command reads standard input, one
    address per line. The symbolizer runs without any privilege.
    """
    from buildidfs.symbolize.addresses import Symbolizer

    if perf_script and (requests or json_ or file_offset):
        raise UsageError("--perf-script filters text: without ID+0xADDR, --json, --file-offset")
    if not perf_script and (buildid_list or lines):
        raise UsageError("--buildid-list and --lines belong to --perf-script")
    with session.open_store() as store, Symbolizer(store, program) as symbolizer:
        if perf_script:
            _filter(store, symbolizer, _read_list(buildid_list), with_lines=lines)
            return 0
        texts = requests or _input()
        return _answer(session, store, symbolizer, texts, file_offset=file_offset, json_=json_)


class _Request(NamedTuple):
    text: str
    build_id: BuildId
    address: int


def _input() -> Iterator[str]:
    """Yield the requests on standard input."""
    for line in sys.stdin.buffer:
        text = line.decode("utf-8", "replace").strip()
        if text:
            yield text


def _answer(
    session: Session,
    store: Store,
    symbolizer: Symbolizer,
    texts: Iterable[str],
    *,
    file_offset: bool,
    json_: bool,
) -> int:
    """Print the names at each address; return the exit status."""
    asked = named = 0
    reasons: dict[tuple[BuildId, str], int] = {}
    known: dict[str, BuildId] = {}
    for text in texts:
        request = _parsed(store, text, known)
        ask = symbolizer.at_offset if file_offset else symbolizer.at_address
        answer = ask(request.build_id, request.address)
        asked += 1
        named += bool(answer.frames)
        if json_:
            json_line(_fields(request, answer))
        else:
            _text(request, answer)
        # The caller may wait for this answer before the next request.
        sys.stdout.flush()
        if answer.why:
            key = (request.build_id, answer.why)
            reasons[key] = reasons.get(key, 0) + 1
    for (build_id, why), count in reasons.items():
        times = f" ({count} addresses)" if count > 1 else ""
        terminal.complain(f"{build_id}: {why}{times}")
    if not asked:
        session.explain_empty("standard input has no address; one on a line, ID+0xADDR")
    return ArtifactMissing.exit_code if asked and not named else 0


def _parsed(store: Store, text: str, known: dict[str, BuildId]) -> _Request:
    found = _REQUEST.fullmatch(text)
    if found is None:
        shown = printable(text[:200])
        raise UsageError(f"not ID+0xADDR: {shown!r}; an example is 8e9f+0x1139")
    build_id = known.get(found[1])
    if build_id is None:
        from buildidfs.catalog import requested_id

        build_id = known[found[1]] = requested_id.build_id(store, found[1])
    return _Request(text, build_id, int(found[2], 16))


def _fields(request: _Request, answer: NamedFrames) -> dict[str, object]:
    return {
        "request": request.text,
        "build_id": request.build_id.hex(),
        "frames": answer.frames,
        "why": answer.why,
    }


def _text(request: _Request, answer: NamedFrames) -> None:
    for frame in answer.frames:
        inlined = " (inlined)" if frame.inlined else ""
        sys.stdout.write(f"{request.text} {_function(frame)} {_place(frame)}{inlined}\n")
    if not answer.frames:
        sys.stdout.write(f"{request.text} ?? ??:0\n")


def _function(frame: Frame) -> str:
    return printable(frame.function) or "??"


def _place(frame: Frame) -> str:
    """Return file, line and column, as far as they are known."""
    file = printable(frame.file) or "??"
    return f"{file}:{frame.line}" + (f":{frame.column}" if frame.column else "")


def _read_list(path: str | None) -> dict[bytes, BuildId]:
    if path is None:
        return {}
    try:
        with open(inodes.open_regular(path, pipe=True), "rb") as file:
            text = file.read(_LIST_MAX + 1)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    if len(text) > _LIST_MAX:
        raise UsageError(f"{path} has more than {_LIST_MAX >> 20} MiB")
    if text and not _LISTED.search(text):
        raise UsageError(f"{path} is no output of perf buildid-list: it has no line ID PATH")
    return script_output.parse_build_ids(text)


def _filter(
    store: Store, symbolizer: Symbolizer, listed: dict[bytes, BuildId], *, with_lines: bool
) -> None:
    """Copy standard input to standard output, and add names that perf has not found.

    At the end it prints the names that are still missing, with the reasons, on standard error.
    """
    from buildidfs.symbolize.script_filter import ScriptFilter

    script = ScriptFilter(store, symbolizer, listed, with_lines=with_lines)
    output: BinaryIO = sys.stdout.buffer
    for line in sys.stdin.buffer:
        output.write(script.line(line))
    output.flush()
    if script.is_empty:
        terminal.complain("standard input is empty: perf script printed nothing")
    for path, reason, count in script.unnamed(_SHOWN):
        frames = counted(count, "frame")
        terminal.complain(f"{printable(path)}: {frames} without a name: {reason}")
    if (more := script.files_without_names - _SHOWN) > 0:
        terminal.complain(f"and {counted(more, 'more file')}")
