# SPDX-License-Identifier: Apache-2.0
"""Core files: the process, its mapped files, and their build IDs.

The dump of a process lists its mapped files (the note NT_FILE), and the kernel dumps the first page
of each ELF file among them (bit 4 of /proc/PID/coredump_filter, on by default), where the build ID
is. So a core names its binaries even if none of them is left. A core is decoded as by gdb(1) and
elfutils; if the file was cut off, the part that exists is used.

Sources: core(5), elf(5), and vma_dump_size of the kernel's fs/coredump.c; gcore(1) follows them,
too. The notes are those of fill_files_note, fill_prstatus and fill_psinfo (fs/binfmt_elf.c), whose
structures are in linux/elfcore.h.

The crashed process wrote everything in a core. Every size, count, offset and address is a claim;
the bytes read are bounded by the size of the file, and no input raises, except for errors of
``read_at``.
"""

from __future__ import annotations

import bisect
import enum
import struct
from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from buildidfs.formats.elf import identify
from buildidfs.formats.elf.header import (
    ET_CORE,
    HEADER_BIG,
    HEADER_LITTLE,
    LAYOUTS,
    MAGIC,
    PF_W,
    PF_X,
    PN_XNUM,
    PT_LOAD,
    PT_NOTE,
    TABLE_MAX,
    ElfLayout,
    FileBytes,
    ReadAt,
    Segment,
    parse_header,
    segments,
)
from buildidfs.model import BuildId, ByteRange

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

VDSO: Final = b"[vdso]"
"""The path of the vDSO in a list of modules."""

# Mappings of one file that are searched for its headers and notes, which are in the first ones.
_MOST_PARTS: Final = 16
_VDSO_MAX: Final = 1 << 20
_PAGE_MAX: Final = 1 << 18
_ADDRESS_MAX: Final = 1 << 64
_DELETED: Final = b" (deleted)"


class Unknown(enum.StrEnum):
    """The reason why the build ID of a module is unknown."""

    NOT_DUMPED = "its first page is not in the core"
    CUT_OFF = "the core was cut off before its first page"
    NO_BUILD_ID = "no build ID in what the core has of it"


class MappedBytes(NamedTuple):
    """Bytes of a mapped file from ``offset``, and their place in the core."""

    offset: int
    place: ByteRange


class Module(msgspec.Struct, frozen=True):
    """A binary that was mapped, from its first address to its last.

    ``path`` is the path in the root of the process; it is `VDSO` for the vDSO, and empty if the
    core lists no files. ``deleted`` is True if the file had lost that name by then, ``main`` if it
    is the program itself. Either ``build_id`` or ``unknown`` is set. ``pages`` are the parts that
    the core has of a file without a build ID, and that the process cannot have changed.
    """

    path: bytes
    start: int
    end: int
    build_id: BuildId | None = None
    unknown: Unknown | None = None
    deleted: bool = False
    main: bool = False
    pages: tuple[MappedBytes, ...] = ()


class Core(msgspec.Struct, frozen=True):
    """The contents of a core file.

    ``pid`` is that of the process in its own PID namespace, ``name`` its first 15 bytes,
    ``arguments`` the first 79 of its command line; ``signal`` is the one that ended it, 0 if none
    did (gcore). ``claimed`` is the size according to the headers, which is more than the real size
    if the file was cut off. ``vdso`` is the extent of the vDSO in the core, if it is complete.
    """

    bits: int
    little_endian: bool
    machine: int
    pid: int
    name: bytes
    arguments: bytes
    signal: int
    threads: int
    modules: tuple[Module, ...]
    claimed: int
    vdso: ByteRange | None = None


def is_core(head: bytes) -> bool:
    """Return True if ``head``, 32 bytes or more, begins an ELF core file."""
    layout = LAYOUTS.get(head[4:6])
    if head[:4] != MAGIC or layout is None or len(head) < 18:
        return False
    return int.from_bytes(head[16:18], "little" if layout.little_endian else "big") == ET_CORE


def parse(read_at: ReadAt, size: int) -> Core | None:
    """Parse a core file of ``size`` bytes; None for any other file.

    Reads its notes, and one or two pages for each module.
    """
    head = read_at(0, min(size, identify.HEAD_SIZE))
    parsed = parse_header(head)
    if parsed is None or parsed[1][0] != ET_CORE:
        return None
    layout, header = parsed
    note, memory = _segments(layout, header, FileBytes(head, read_at, size), read_at, size)
    notes_read = _Notes(layout) if note is None else _read_notes(layout, note, read_at, size)
    files = notes_read.files()
    finder = _Modules(memory, notes_read.auxiliary())
    modules = finder.of_files(files) if files else finder.of_memory()
    return Core(
        layout.bits,
        layout.little_endian,
        header[1],
        notes_read.pid(),
        notes_read.name(),
        notes_read.arguments(),
        notes_read.signal(),
        notes_read.threads,
        tuple(modules),
        max(memory.claimed, note.offset + note.size if note is not None else 0),
        finder.vdso_range,
    )


# --- program headers -----------------------------------------------------------------------------


class _Memory:
    """The dumped memory of the process; reads at most a bounded number of bytes."""

    def __init__(self, read_at: ReadAt, size: int, loads: Iterable[Segment]) -> None:
        self._read_at = read_at
        self._size = size
        self._starts, self._offsets, self._sizes = array("Q"), array("Q"), array("Q")
        self._ends = array("Q")
        self._flags = bytearray()
        self.claimed = 0
        # Pages of one core do not overlap, so a genuine core needs at most its size.
        self._budget = 2 * size + (64 << 10)
        for load in sorted(loads, key=lambda load: load.address):
            end = load.address + load.memory
            if not load.memory or end > _ADDRESS_MAX - 1:
                continue
            self._starts.append(load.address)
            self._ends.append(end)
            self._offsets.append(load.offset)
            self._sizes.append(min(load.size, load.memory))
            self._flags.append(load.flags & (PF_W | PF_X))
            self.claimed = max(self.claimed, load.offset + load.size)

    def starts(self) -> Iterable[int]:
        """Return the first addresses of the mappings."""
        return self._starts

    def _at(self, address: int) -> int:
        """Return the number of the mapping that contains an address, -1 if there is none."""
        index = bisect.bisect_right(self._starts, address) - 1
        return index if index >= 0 and address < self._ends[index] else -1

    def is_executable(self, address: int) -> bool:
        """Return True if code is mapped at ``address``."""
        index = self._at(address)
        return index >= 0 and bool(self._flags[index] & PF_X)

    def page(self, file: MappedFile) -> MappedBytes | None:
        """Return the beginning of a mapping as far as it was dumped; None if the process may have
        changed it: if it could write there, or the dynamic linker may have (RELRO).
        """
        index = self._at(file.start)
        if index < 0 or self._flags[index] & PF_W:
            return None
        if file.offset and not self._flags[index] & PF_X:
            return None
        skip = file.start - self._starts[index]
        offset, size = self._offsets[index] + skip, self._sizes[index] - skip
        size = min(size, file.end - file.start, self._size - offset, _PAGE_MAX)
        return MappedBytes(file.offset, ByteRange(offset, size)) if size > 0 else None

    def is_cut_off(self, address: int) -> bool:
        """Return True if the byte at an address was dumped, and the file was cut off before it."""
        index = self._at(address)
        if index < 0:
            return False
        skip = address - self._starts[index]
        return skip < self._sizes[index] and self._offsets[index] + skip >= self._size

    def whole(self, address: int) -> tuple[int, ByteRange | None]:
        """Return the end of the mapping that begins at an address (0 for none).

        The place of its bytes is returned, too, if all of them are in the file.
        """
        index = self._at(address)
        if index < 0:
            return 0, None
        size, offset, end = self._sizes[index], self._offsets[index], self._ends[index]
        if self._starts[index] != address or size != end - address or offset + size > self._size:
            return end, None
        return end, ByteRange(offset, size)

    def read(self, address: int, size: int) -> bytes:
        """Return up to ``size`` bytes from an address; fewer if no more were dumped."""
        index = self._at(address)
        if index < 0:
            return b""
        skip = address - self._starts[index]
        offset = self._offsets[index] + skip
        size = min(size, self._sizes[index] - skip, self._size - offset, self._budget)
        if size <= 0:
            return b""
        self._budget -= size
        return self._read_at(offset, size)


def _segments(
    layout: ElfLayout, header: tuple[int, ...], source: FileBytes, read_at: ReadAt, size: int
) -> tuple[Segment | None, _Memory]:
    """Return the segment of notes, and the dumped memory."""
    phoff, shoff, phnum = header[4], header[5], header[9]
    if phnum == PN_XNUM:
        phnum = _many(layout, source, phoff, shoff)
    table = source.read(phoff, min(phnum * layout.phdr.size, TABLE_MAX)) if phoff else b""
    note: Segment | None = None
    loads = []
    for segment in segments(layout, table):
        if segment.kind == PT_LOAD:
            loads.append(segment)
        elif segment.kind == PT_NOTE and note is None:
            note = segment
    return note, _Memory(read_at, size, loads)


def _many(layout: ElfLayout, source: FileBytes, phoff: int, shoff: int) -> int:
    """Return the number of program headers if it is too large for the ELF header.

    It is in section header 0, which the kernel puts at the very end. If that header is lost, the
    number is computed from the start of the notes, because they begin where the program headers
    end.
    """
    first = source.read(shoff, layout.shdr.size) if shoff else b""
    if len(first) == layout.shdr.size:
        return int(layout.shdr.unpack(first)[6])
    for segment in segments(layout, source.read(phoff, layout.phdr.size)):
        if segment.kind == PT_NOTE and segment.offset > phoff:
            return (segment.offset - phoff) // layout.phdr.size
    return PN_XNUM


# --- modules -------------------------------------------------------------------------------------


class _Modules:
    """Finds the binaries in the memory of a process, with the help of its auxiliary vector."""

    def __init__(self, memory: _Memory, auxiliary: dict[int, int]) -> None:
        self._memory = memory
        self._vdso = auxiliary.get(_AT_SYSINFO_EHDR, 0)
        self._main = auxiliary.get(_AT_PHDR) or auxiliary.get(_AT_ENTRY, 0)
        self.vdso_range: ByteRange | None = None

    def of_files(self, files: list[MappedFile]) -> Iterator[Module]:
        """Yield the binaries among mapped files, and the vDSO, by address."""
        found = []
        group: list[MappedFile] = []
        for file in files:
            if group and not self._continues(group, file):
                found += self._module(group)
                group = []
            group.append(file)
        found += self._module(group)
        found += self._vdso_at(self._vdso)
        return iter(sorted(found, key=lambda module: module.start))

    def of_memory(self) -> Iterator[Module]:
        """Yield the ELF files at the start of mappings, for a core without a list of files."""
        for start in self._memory.starts():
            if start == self._vdso:
                yield from self._vdso_at(start)
            elif self._memory.read(start, 4) == MAGIC:
                end, _ = self._memory.whole(start)
                yield self._described(b"", [MappedFile(start, end, 0, b"")])

    def _continues(self, group: list[MappedFile], file: MappedFile) -> bool:
        """Return True if a mapping belongs to the same file as the mapping before it."""
        if file.path != group[0].path:
            return False
        if file.offset or self._memory.read(file.start, 4) != MAGIC:
            return True
        # The beginning of a file may be mapped twice. Or another file had that name then.
        return self._identify([file]) == self._identify(group)

    def _module(self, group: list[MappedFile]) -> list[Module]:
        """Return the module of the mappings of a file; empty if the file is not a binary."""
        if not group:
            return []
        if self._memory.read(group[0].start, 4) != MAGIC and not any(
            self._memory.is_executable(file.start) for file in group
        ):
            return []  # data, or unknown
        return [self._described(group[0].path, group)]

    def _vdso_at(self, address: int) -> list[Module]:
        if not address:
            return []
        end, self.vdso_range = self._memory.whole(address)
        if not end:
            return []
        if self.vdso_range is not None and self.vdso_range.size > _VDSO_MAX:
            self.vdso_range = None
        return [self._described(VDSO, [MappedFile(address, end, 0, VDSO)])]

    def _described(self, path: bytes, group: list[MappedFile]) -> Module:
        answer = self._identify(group)
        pages = map(self._memory.page, group[:_MOST_PARTS])
        return Module(
            path.removesuffix(_DELETED),
            group[0].start,
            group[-1].end,
            answer if isinstance(answer, BuildId) else None,
            None if isinstance(answer, BuildId) else answer,
            path.endswith(_DELETED),
            bool(self._main) and any(file.start <= self._main < file.end for file in group),
            () if isinstance(answer, BuildId) else tuple(filter(None, pages)),
        )

    def _identify(self, group: list[MappedFile]) -> BuildId | Unknown:
        """Return the build ID of a file with these mappings."""
        first = group[0]

        def read_at(offset: int, size: int) -> bytes:
            offset += first.offset
            for file in group[:_MOST_PARTS]:
                skip = offset - file.offset
                if 0 <= skip < (length := file.end - file.start):
                    return self._memory.read(file.start + skip, min(size, length - skip))
            return b""

        head = read_at(0, identify.HEAD_SIZE)
        if not head:
            cut_off = self._memory.is_cut_off(first.start)
            return Unknown.CUT_OFF if cut_off else Unknown.NOT_DUMPED
        answer = identify.identify(head, read_at)
        return answer if isinstance(answer, BuildId) else Unknown.NO_BUILD_ID


# --- notes ---------------------------------------------------------------------------------------

_AT_PHDR: Final = 3
_AT_ENTRY: Final = 9
_AT_SYSINFO_EHDR: Final = 33
"""Keys of `_Notes.auxiliary`, see getauxval(3)."""

_NT_PRSTATUS: Final = 1
_NT_PRPSINFO: Final = 3
_NT_AUXV: Final = 6
_NT_FILE: Final = 0x46494C45

# Bytes of notes that are read at once, and the most notes: there are about six for each thread.
_WINDOW: Final = 1 << 16
_MOST_NOTES: Final = 1 << 20
# The most bytes of one note that are read. A kernel may be set to write 16 MiB for that of files.
_MOST_OF: Final = {_NT_PRSTATUS: 64, _NT_PRPSINFO: 256, _NT_AUXV: 8192, _NT_FILE: 32 << 20}


class MappedFile(NamedTuple):
    """A line of NT_FILE: the memory from ``start`` to ``end`` maps the file from ``offset``."""

    start: int
    end: int
    offset: int
    path: bytes


class _Notes:
    """The notes that `parse` needs, the first one of each kind; ``threads`` counts the notes of
    threads.
    """

    def __init__(self, layout: ElfLayout) -> None:
        self._layout = layout
        self._order = "<" if layout.little_endian else ">"
        self._word = "Q" if layout.bits == 64 else "I"
        self.notes: dict[int, bytes] = {}
        self.threads = 0

    def _field(self, kind: int, form: str, offset: int) -> int:
        field = struct.Struct(self._order + form)
        desc = self.notes.get(kind, b"")
        return int(field.unpack_from(desc, offset)[0]) if len(desc) >= offset + field.size else 0

    def signal(self) -> int:
        """Return pr_cursig of struct elf_prstatus of the first thread."""
        return self._field(_NT_PRSTATUS, "h", 12)

    def pid(self) -> int:
        """Return pr_pid of struct elf_prpsinfo, else pr_pid of struct elf_prstatus, which is the ID
        of a thread.
        """
        if _NT_PRPSINFO in self.notes:
            return self._field(_NT_PRPSINFO, "i", self._name_at() - 16)
        return self._field(_NT_PRSTATUS, "i", 32 if self._layout.bits == 64 else 24)

    def _name_at(self) -> int:
        """Return the offset of pr_fname, which depends on the size of user IDs: 16 bits on i386,
        for example, and 32 on others.
        """
        if self._layout.bits == 64:
            return 40
        return 28 if len(self.notes.get(_NT_PRPSINFO, b"")) <= 124 else 32

    def name(self) -> bytes:
        at = self._name_at()
        return self.notes.get(_NT_PRPSINFO, b"")[at : at + 16].partition(b"\0")[0]

    def arguments(self) -> bytes:
        """Return the beginning of its command line."""
        at = self._name_at() + 16
        return self.notes.get(_NT_PRPSINFO, b"")[at : at + 80].partition(b"\0")[0].rstrip()

    def auxiliary(self) -> dict[int, int]:
        pair = struct.Struct(self._order + self._word * 2)
        desc = self.notes.get(_NT_AUXV, b"")
        return dict(pair.iter_unpack(desc[: len(desc) - len(desc) % pair.size]))

    def files(self) -> list[MappedFile]:
        """Return the mapped files by address; only complete entries."""
        desc = self.notes.get(_NT_FILE, b"")
        numbers = struct.Struct(self._order + self._word * 2)
        line = struct.Struct(self._order + self._word * 3)
        if len(desc) < numbers.size:
            return []
        count, page = numbers.unpack_from(desc)
        names_at = numbers.size + count * line.size
        if names_at >= len(desc):
            return []  # the addresses, without the names of the files
        names = desc[names_at:].split(b"\0", count)[:-1]
        lines = line.iter_unpack(desc[numbers.size : names_at])
        files = [
            MappedFile(start, end, offset * page, path)
            for (start, end, offset), path in zip(lines, names, strict=False)
            if start < end
        ]
        files.sort(key=lambda file: file.start)
        return files


def _read_notes(layout: ElfLayout, area: Segment, read_at: ReadAt, size: int) -> _Notes:
    """Walk over the notes; read the needed ones."""
    notes_read = _Notes(layout)
    for kind, offset, length in _walk(layout, area, read_at, size):
        notes_read.threads += kind == _NT_PRSTATUS
        if kind in _MOST_OF and kind not in notes_read.notes:
            notes_read.notes[kind] = read_at(offset, min(length, _MOST_OF[kind], size - offset))
    return notes_read


def _walk(
    layout: ElfLayout, area: Segment, read_at: ReadAt, size: int
) -> Iterator[tuple[int, int, int]]:
    """Yield type, offset and length of each note of the kernel in a segment of the file.

    Contents are not read: the registers of ten thousand threads take a hundred megabytes.
    """
    header = HEADER_LITTLE if layout.little_endian else HEADER_BIG
    mask = 7 if area.align == 8 else 3
    end = min(area.offset + area.size, size)
    at, window_at, window = area.offset, 0, b""
    for _ in range(_MOST_NOTES):
        if at + header.size > end:
            return
        if not window_at <= at <= window_at + len(window) - header.size - 8:
            window_at, window = at, read_at(at, min(_WINDOW, end - at))
            if len(window) < header.size:
                return
        name_size, length, kind = header.unpack_from(window, at - window_at)
        name_at = at + header.size
        name = window[name_at - window_at :][: min(name_size, 8)].rstrip(b"\0")
        desc_at = area.offset + ((name_at - area.offset + name_size + mask) & ~mask)
        if desc_at > end:
            return
        if name == b"CORE":
            yield kind, desc_at, min(length, end - desc_at)
        at = area.offset + ((desc_at - area.offset + length + mask) & ~mask)
