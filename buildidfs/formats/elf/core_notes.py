# SPDX-License-Identifier: Apache-2.0
"""The notes of a core file: what the kernel and gcore(1) say of the process.

Sources: fill_files_note, fill_prstatus and fill_psinfo of the kernel's fs/binfmt_elf.c; the
structures are those of linux/elfcore.h.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.formats.elf import notes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.formats.elf.header import Layout, ReadAt
    from buildidfs.formats.elf.segments import Segment

AT_PHDR: Final = 3
AT_ENTRY: Final = 9
AT_SYSINFO_EHDR: Final = 33
"""Keys of `Notes.auxiliary`, see getauxval(3)."""

_NT_PRSTATUS: Final = 1
_NT_PRPSINFO: Final = 3
_NT_AUXV: Final = 6
_NT_FILE: Final = 0x46494C45

# What is read of the notes at once, and how many there may be: some six for each thread.
_WINDOW: Final = 1 << 16
_MOST_NOTES: Final = 1 << 20
# The most that is taken of one note. That of files has 16 MiB in a kernel that was told to.
_MOST_OF: Final = {_NT_PRSTATUS: 64, _NT_PRPSINFO: 256, _NT_AUXV: 8192, _NT_FILE: 32 << 20}


class MappedFile(NamedTuple):
    """A line of NT_FILE: what is mapped from ``start`` to ``end`` is at ``offset`` of a file."""

    start: int
    end: int
    offset: int
    path: bytes


class Notes:
    """The notes that matter, each as it came first; ``threads`` counts those of threads."""

    def __init__(self, layout: Layout) -> None:
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
        """pr_cursig of struct elf_prstatus: that of the thread that comes first."""
        return self._field(_NT_PRSTATUS, "h", 12)

    def pid(self) -> int:
        """pr_pid of struct elf_prpsinfo, else that of struct elf_prstatus, which is a thread's."""
        if _NT_PRPSINFO in self.notes:
            return self._field(_NT_PRPSINFO, "i", self._name_at() - 16)
        return self._field(_NT_PRSTATUS, "i", 32 if self._layout.bits == 64 else 24)

    def _name_at(self) -> int:
        """Offset of pr_fname: user IDs have 16 bits on i386, for one, and 32 on others."""
        if self._layout.bits == 64:
            return 40
        return 28 if len(self.notes.get(_NT_PRPSINFO, b"")) <= 124 else 32

    def name(self) -> bytes:
        """The name of the process."""
        at = self._name_at()
        return self.notes.get(_NT_PRPSINFO, b"")[at : at + 16].partition(b"\0")[0]

    def arguments(self) -> bytes:
        """The beginning of its command line."""
        at = self._name_at() + 16
        return self.notes.get(_NT_PRPSINFO, b"")[at : at + 80].partition(b"\0")[0].rstrip()

    def auxiliary(self) -> dict[int, int]:
        """The auxiliary vector."""
        pair = struct.Struct(self._order + self._word * 2)
        desc = self.notes.get(_NT_AUXV, b"")
        return dict(pair.iter_unpack(desc[: len(desc) - len(desc) % pair.size]))

    def files(self) -> list[MappedFile]:
        """The mapped files, by address; as many as are there in full."""
        desc = self.notes.get(_NT_FILE, b"")
        numbers = struct.Struct(self._order + self._word * 2)
        line = struct.Struct(self._order + self._word * 3)
        if len(desc) < numbers.size:
            return []
        count, page = numbers.unpack_from(desc)
        names_at = numbers.size + count * line.size
        if names_at >= len(desc):
            return []  # what is where, and nothing of what it is
        names = desc[names_at:].split(b"\0", count)[:-1]
        lines = line.iter_unpack(desc[numbers.size : names_at])
        files = [
            MappedFile(start, end, offset * page, path)
            for (start, end, offset), path in zip(lines, names, strict=False)
            if start < end
        ]
        files.sort(key=lambda file: file.start)
        return files


def read(layout: Layout, area: Segment, read_at: ReadAt, size: int) -> Notes:
    """Walk over the notes, reading those that matter."""
    said = Notes(layout)
    for kind, offset, length in _walk(layout, area, read_at, size):
        said.threads += kind == _NT_PRSTATUS
        if kind in _MOST_OF and kind not in said.notes:
            said.notes[kind] = read_at(offset, min(length, _MOST_OF[kind], size - offset))
    return said


def _walk(
    layout: Layout, area: Segment, read_at: ReadAt, size: int
) -> Iterator[tuple[int, int, int]]:
    """Type, offset and length of each note of the kernel's in a segment of the file.

    With ten thousand threads there are a hundred megabytes of registers in between, which are not
    read.
    """
    header = notes.HEADER_LITTLE if layout.little_endian else notes.HEADER_BIG
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
