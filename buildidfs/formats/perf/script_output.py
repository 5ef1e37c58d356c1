# SPDX-License-Identifier: Apache-2.0
"""The text that ``perf script`` prints: its events, and the frames of its samples.

Lines of events show mapped files (``--show-mmap-events``) and forks (``--show-task-events``). A
sample is one line, with the frame at its end or with a call chain on the following lines. From
Linux 5.12 to 6.3, addresses in a chain are offsets in the file (tools/perf/util/evsel_fprintf.c,
sample__fprintf_callchain); in other versions, and in a sample without a chain, they are addresses
of the process. Since 6.4 ``-F +dsoff`` prints offset and path.

The name of a process (comm) and a path may contain any text, so a line may imitate a line of
another kind. The worst result is a wrong name.
"""

from __future__ import annotations

import bisect
import re
from typing import Final

import msgspec

from buildidfs.errors import InvalidBuildId
from buildidfs.model import BuildId

_MMAP: Final = re.compile(
    rb": PERF_RECORD_MMAP2? (-?\d{1,10})/(-?\d{1,10}): \[0x([0-9a-f]{1,16})\(0x([0-9a-f]{1,16})\)"
    rb" @ (?:0x)?([0-9a-f]{1,16})(?: (?:<([0-9a-f]*)>|[0-9a-f]+:[0-9a-f]+ \d+ \d+))?\]:"
    rb" (\S{1,4}) (.+)"
)
_FORK: Final = re.compile(
    rb": PERF_RECORD_FORK\((-?\d{1,10}):(-?\d{1,10})\):\((-?\d{1,10}):(-?\d{1,10})\)"
)
_EXIT: Final = re.compile(rb": PERF_RECORD_EXIT\((-?\d{1,10}):(-?\d{1,10})\):")
_COMM: Final = re.compile(rb": PERF_RECORD_COMM( exec)?: ")
_THREAD: Final = re.compile(rb"(-?\d{1,10})/(-?\d{1,10})")
_SAMPLE: Final = re.compile(
    rb"\s(-?\d{1,10})(?:/(-?\d{1,10}))?\s+(?:\[\d+\]\s+)?(?:[A-Z.]+\s+)?\d+\.\d+:\s"
)
_CHAIN: Final = re.compile(rb"(\t\s*)([0-9a-f]{1,16}) (.*?) \((.*)\)$")
_AT_END: Final = re.compile(rb"(.*\s)([0-9a-f]{1,16}) (\[unknown\]) \((.*)\)$")
_OFFSET: Final = re.compile(rb"(.+)\+0x([0-9a-f]{1,16})$")

KALLSYMS: Final = b"[kernel.kallsyms]"
_MODULE: Final = re.compile(rb"(?:\A\[|/)([^/\]]+?)(?:\]|\.ko(?:\.xz|\.zst|\.gz)?)\Z")
_KERNEL_PROCESS: Final = -1
_EVENT: Final = b": PERF_RECORD_"
_KERNEL: Final = 1 << 63
_MOST_MAPPINGS: Final = 1 << 14  # of one process
_MOST_PROCESSES: Final = 1 << 16
_MOST_LOCATED: Final = 1 << 16


class PrintedFrame(msgspec.Struct, frozen=True):
    """A frame with an address and a file: the text ``before`` it on its line, ``ip``, ``dso``.

    ``unknown`` is True if perf found no name for it. ``chain`` is True for a line of a call chain,
    and ``called`` for a return address: the call precedes it. ``offset`` is the offset in the file,
    if perf printed it with the path.
    """

    before: bytes
    ip: int
    dso: bytes
    unknown: bool
    chain: bool
    called: bool
    offset: int | None


class ScriptLocation(msgspec.Struct, frozen=True):
    """A place in a file: its path, its build ID if an event had it, and the offset.

    ``mapping`` is start, end and offset of the mapping, if an event had it.
    """

    path: bytes
    build_id: BuildId | None
    offset: int
    mapping: tuple[int, int, int] | None = None


class KernelMapping(msgspec.Struct, frozen=True):
    """Code of the kernel or of a module, from ``start`` to ``end``.

    ``symbol`` is the symbol that had the address ``reference`` when the profile was made; it is
    empty for a module. ``build_id`` is that of the kernel, if the event had it.
    """

    start: int
    end: int
    symbol: bytes = b""
    reference: int = 0
    build_id: BuildId | None = None


class _Mapping(msgspec.Struct, frozen=True):
    start: int
    end: int
    offset: int
    path: bytes
    build_id: BuildId | None

    def at(self, offset: int) -> ScriptLocation:
        mapping = self.start, self.end, self.offset
        return ScriptLocation(self.path, self.build_id, offset, mapping)


class Script:
    """Follows a text line by line: the process of each sample, and its mappings at that time.

    ``has_mappings`` and ``has_tasks`` are True if events of either sort were in the text so far.
    ``kernel`` has the mappings of the kernel and its modules, by the names that frames show.
    """

    def __init__(self) -> None:
        self.has_mappings = self.has_tasks = False
        self.kernel: dict[bytes, KernelMapping] = {}
        self._processes: dict[int, list[_Mapping]] = {}
        self._process_of: dict[int, int] = {}
        self._located: dict[tuple[int, int, bytes, bool], ScriptLocation | None] = {}
        self._current = -1
        self._called = False

    def line(self, line: bytes) -> PrintedFrame | None:
        """Process one line, without its end; return the frame in it, if any."""
        if line.startswith(b"\t"):
            return self._in_chain(line)
        event = line.find(_EVENT)
        if event >= 0 and self._event(line, event):
            return None
        sample = _SAMPLE.search(line)
        if sample is None:
            return None
        number = int(sample[1])
        self._current = number if sample[2] else self._process_of.get(number, number)
        self._called = False
        frame = _AT_END.match(line) if line.endswith(b")") else None
        if frame is None:
            return None
        dso, offset = _split(frame[4])
        return PrintedFrame(frame[1], int(frame[2], 16), dso, True, False, False, offset)

    def locate(self, frame: PrintedFrame) -> ScriptLocation | None:
        """Find the file and offset of a frame; None if no event had a mapping there.

        Even without such an event there is a result if perf printed the offset, or may have printed
        it.
        """
        if frame.offset is not None:
            return self._locate(frame)
        key = (self._current, frame.ip, frame.dso, frame.chain)
        try:
            return self._located[key]
        except KeyError:
            if len(self._located) >= _MOST_LOCATED:
                self._located.clear()
            found = self._located[key] = self._locate(frame)
            return found

    def _locate(self, frame: PrintedFrame) -> ScriptLocation | None:
        mappings = self._processes.get(self._current, [])
        same = [mapping for mapping in mappings if mapping.path == frame.dso]
        offset = frame.offset
        if offset is None and frame.chain:
            offset = frame.ip
        if offset is not None:
            for mapping in reversed(same):
                if 0 <= offset - mapping.offset < mapping.end - mapping.start:
                    return mapping.at(offset)
            if frame.offset is not None or not same:
                return ScriptLocation(frame.dso, None, offset)
        index = bisect.bisect_right(mappings, frame.ip, key=lambda mapping: mapping.start) - 1
        if index < 0 or frame.ip >= (mapping := mappings[index]).end:
            return None
        return mapping.at(frame.ip - mapping.start + mapping.offset)

    def _in_chain(self, line: bytes) -> PrintedFrame | None:
        found = _CHAIN.match(line) if line.endswith(b")") else None
        if found is None:
            return None
        ip = int(found[2], 16)
        called = self._called
        # The frame that the kernel interrupted is not a call, and begins a chain of its own.
        self._called = ip < _KERNEL and not found[4].startswith((b"[kernel", b"[guest.kernel"))
        dso, offset = _split(found[4])
        return PrintedFrame(found[1], ip, dso, found[3] == b"[unknown]", True, called, offset)

    def _event(self, line: bytes, at: int) -> bool:
        if found := _MMAP.match(line, at):
            self.has_mappings = True
            self._map(found)
        elif found := _FORK.match(line, at):
            self.has_tasks = True
            child, thread, parent = int(found[1]), int(found[2]), int(found[3])
            self._process_of[thread] = child
            if child != parent and parent in self._processes:
                self._keep(child, self._processes[parent])  # `_map` makes a new list
        elif found := _COMM.match(line, at):
            thread_of = _THREAD.fullmatch(line.rpartition(b":")[2])
            if thread_of is None:
                return False
            self.has_tasks = True
            self._process_of[int(thread_of[2])] = int(thread_of[1])
            if found[1]:
                self._keep(int(thread_of[1]), [])
        elif found := _EXIT.match(line, at):
            if found[1] == found[2]:
                self._keep(int(found[1]), [])
            self._process_of.pop(int(found[2]), None)
        else:
            return False
        return True

    def _map(self, found: re.Match[bytes]) -> None:
        process, path = int(found[1]), found[8]
        if process == _KERNEL_PROCESS:
            self._map_kernel(found)
            return
        self._process_of[int(found[2])] = process
        if not path.startswith((b"/", b"[vdso]")) or path.startswith(b"//") or process < 0:
            return
        start, size = int(found[3], 16), int(found[4], 16)
        new = _Mapping(start, start + size, int(found[5], 16), path, _build_id(found[6]))
        mappings = self._processes.get(process, [])[: _MOST_MAPPINGS - 1]
        first = bisect.bisect_left(mappings, new.start, key=lambda mapping: mapping.start)
        if first and mappings[first - 1].end > new.start:
            first -= 1
        last = first
        while last < len(mappings) and mappings[last].start < new.end:
            last += 1
        mappings[first:last] = [new]
        self._keep(process, mappings)

    def _map_kernel(self, found: re.Match[bytes]) -> None:
        start, path = int(found[3], 16), found[8]
        end = start + int(found[4], 16)
        if path.startswith(KALLSYMS):
            symbol, reference = path.removeprefix(KALLSYMS), int(found[5], 16)
            kernel = KernelMapping(start, end, symbol, reference, _build_id(found[6]))
            self.kernel[KALLSYMS] = kernel
        elif (module := _MODULE.search(path)) and len(self.kernel) < _MOST_MAPPINGS:
            # Frames show its name with underscores, in brackets.
            self.kernel[b"[%b]" % module[1].replace(b"-", b"_")] = KernelMapping(start, end)

    def _keep(self, process: int, mappings: list[_Mapping]) -> None:
        self._located.clear()
        self._processes.pop(process, None)
        if mappings:
            self._processes[process] = mappings
        if len(self._processes) > _MOST_PROCESSES:
            del self._processes[next(iter(self._processes))]
        if len(self._process_of) > 16 * _MOST_PROCESSES:
            self._process_of.clear()


def parse_build_ids(text: bytes) -> dict[bytes, BuildId]:
    """Return build IDs by path from the output of ``perf buildid-list``; ambiguous paths are left
    out.
    """
    found: dict[bytes, BuildId] = {}
    several = set()
    for line in text.split(b"\n"):
        digits, _, path = line.strip(b" ").partition(b" ")
        build_id = _build_id(digits)
        if build_id is not None and path and found.setdefault(path, build_id) != build_id:
            several.add(path)
    return {path: build_id for path, build_id in found.items() if path not in several}


def _split(dso: bytes) -> tuple[bytes, int | None]:
    """Split a path from the offset that ``-F +dsoff`` appends."""
    found = _OFFSET.match(dso)
    return (dso, None) if found is None else (found[1], int(found[2], 16))


def _build_id(digits: bytes | None) -> BuildId | None:
    if not digits:
        return None
    try:
        return BuildId.from_hex(digits.decode("ascii", "replace"))
    except InvalidBuildId:
        return None
