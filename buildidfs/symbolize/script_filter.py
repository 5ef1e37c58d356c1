# SPDX-License-Identifier: Apache-2.0
"""The text that perf script prints, with the names that perf has not found."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from buildidfs.errors import UsageError
from buildidfs.formats.perf import script_output
from buildidfs.names import printable
from buildidfs.store.placement import Extent
from buildidfs.symbolize.addresses import NOT_MAPPED
from buildidfs.symbolize.kernel_symbols import NO_MAPPING, KernelSymbols

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from buildidfs.formats.perf.script_output import PrintedFrame
    from buildidfs.model import BuildId
    from buildidfs.store import Store
    from buildidfs.symbolize.addresses import NamedFrames, Symbolizer

# Addresses without a name before a symbolizer was asked. The remedy depends on all of the text.
_NO_BUILD_ID: Final = "no build ID"
_PERF_DATA: Final = (b"PERFILE2", b"2ELIFREP")


class ScriptFilter:
    """Puts names into the lines of perf script, one after the other.

    ``listed`` has build IDs by path, of perf buildid-list. ``with_lines`` adds files and lines.
    """

    def __init__(
        self,
        store: Store,
        symbolizer: Symbolizer,
        listed: Mapping[bytes, BuildId],
        *,
        with_lines: bool,
    ) -> None:
        self._symbolizer = symbolizer
        self._kernel = KernelSymbols(store, listed.get(script_output.KALLSYMS))
        self._listed = listed
        self._with_lines = with_lines
        self._script = script_output.Script()
        self._why: Counter[tuple[bytes, str]] = Counter()
        self.is_empty = True

    def line(self, line: bytes) -> bytes:
        """Return the replacement for a line. Raises `UsageError` for a perf.data file."""
        if line.startswith(_PERF_DATA) and self.is_empty:
            raise UsageError(
                "standard input is a perf.data file: give what perf script --show-mmap-events"
                " --show-task-events prints of it"
            )
        self.is_empty = False
        frame = self._script.line(line.rstrip(b"\n"))
        if frame is None or not frame.unknown:
            return line
        if frame.dso == script_output.KALLSYMS or frame.dso in self._script.kernel:
            return self._kernel_frame(frame, line)
        location = self._script.locate(frame)
        if location is None:
            self._why[frame.dso, NO_MAPPING] += 1
            return line
        build_id = location.build_id or self._listed.get(location.path)
        if build_id is None:
            self._why[location.path, _NO_BUILD_ID] += 1
            return line
        extents = [] if location.mapping is None else [Extent(*location.mapping)]
        build_id, why = self._symbolizer.placement.choose(build_id, extents)
        if why:
            self._why[location.path, why] += 1
            return line
        answer = self._symbolizer.at_offset(build_id, location.offset, called=frame.called)
        if not answer.frames:
            self._why[location.path, answer.why] += 1
            return line
        address = self._symbolizer.address_of(build_id, location.offset)
        return _named(frame, answer, address, with_lines=self._with_lines)

    def _kernel_frame(self, frame: PrintedFrame, line: bytes) -> bytes:
        """Return the replacement for a line of a frame in the kernel or one of its modules."""
        answer = self._kernel.at(self._script.kernel, frame.dso, frame.ip)
        if not answer.frames:
            self._why[frame.dso, answer.why] += 1
            return line
        return _named(frame, answer, frame.ip, with_lines=False)

    @property
    def files_without_names(self) -> int:
        """The number of rows of `unnamed`."""
        return len(self._why)

    def unnamed(self, most: int) -> Iterator[tuple[bytes, str, int]]:
        """Yield files, the reasons why frames in them have no name, and how many have none."""
        for (path, reason), count in self._why.most_common(most):
            yield path, _remedy(self._script, reason), count


def _named(
    frame: PrintedFrame, answer: NamedFrames, address: int | None, *, with_lines: bool
) -> bytes:
    """The lines of a frame: as perf prints them with ``--inline``, and with ``-F +srcline``."""
    digits = b"%16x" % frame.ip if frame.chain else b"%x" % frame.ip
    before = b"\t" if frame.chain else frame.before
    shown = []
    # A sample on one line has room for one function, the one that it is in after all.
    for found in answer.frames if frame.chain else answer.frames[-1:]:
        name = printable(found.function) or "[unknown]"
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


def _remedy(script: script_output.Script, reason: str) -> str:
    """Return the fault and its remedy. The remedy asks only for events that the text
    lacks so far.
    """
    if reason == NO_MAPPING:
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
