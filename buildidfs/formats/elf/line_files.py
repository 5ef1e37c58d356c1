# SPDX-License-Identifier: Apache-2.0
"""The source files that the line tables of DWARF name.

Only the headers of ``.debug_line`` are read: versions 2 to 5, with the MD5 that version 5 may have
for a file. A relative path is joined to its directory. Before version 5, no table contains the
directory of the compilation; it is that of the unit to which the table belongs. If it is unknown,
the path stays relative. DWARF 5, sections 3.1.1, 6.2.4 and 6.2.4.1.

The numbers of units, files and bytes are bounded; no input raises. `SourceNames.is_partial` tells
whether a bound or damage cost a name.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.formats.budget import Budget
from buildidfs.formats.elf.sections import Sections
from buildidfs.formats.elf.units import (
    AT_COMP_DIR,
    AT_STMT_LIST,
    Cursor,
    DebugSection,
    Malformed,
    Units,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.formats.elf.header import ReadAt
    from buildidfs.formats.elf.units import Alternate

_UNITS_MAX: Final = 1 << 16
_FILES_MAX: Final = 1 << 18
_DIRECTORIES_MAX: Final = 1 << 14
_HEADER_MAX: Final = 1 << 20
_WORK_MAX: Final = 1 << 20  # declarations of attributes in all units
_PATH_MAX: Final = 4096
_FORMATS_MAX: Final = 16
_BYTES_MAX: Final = 16 << 20  # for the paths of all files
_ENTRIES_MAX: Final = 1 << 25  # in all tables
_ENTRY_MIN: Final = 6  # the least number of bytes that a compiler writes for a file

_PATH: Final = 1
_DIRECTORY: Final = 2
_MD5: Final = 5

# Forms of the entries, by size; 0 is an LEB128 number.
_SIZES: Final = {0x0B: 1, 0x05: 2, 0x06: 4, 0x07: 8, 0x1E: 16, 0x0F: 0, 0x0D: 0}
_STRING: Final = 0x08
_BLOCK: Final = 0x09
_STRP: Final = 0x0E
_LINE_STRP: Final = 0x1F


class LineFile(NamedTuple):
    """A source file by its path, which is relative if the directory of the compilation is unknown;
    ``md5`` is empty if the compiler did not record it.
    """

    path: bytes
    md5: bytes = b""


class SourceNames:
    """The source files and compilation directories in an ELF file of ``size`` bytes.

    ``alternate`` is as for `Units`. ``is_partial`` is True once an iterator has left out a name,
    because a part is damaged, cannot be decompressed, or exceeds a limit.
    """

    def __init__(self, read_at: ReadAt, size: int, alternate: Alternate = lambda: None) -> None:
        sections = Sections(read_at, size)
        self.is_partial = False
        self._little = sections.little_endian
        self._units = partial(Units, sections, read_at, size, _WORK_MAX, alternate)

        def section(name: bytes) -> DebugSection:
            return DebugSection(sections, name, read_at, size)

        self._lines = section(b".debug_line")
        for read in (self._lines, section(b".debug_info")):
            header = sections.debug(read.name)
            self.is_partial |= header is not None and header.size > 0 and not read.size
        self._strings = {
            _STRP: section(b".debug_str"), _LINE_STRP: section(b".debug_line_str"),
        }  # fmt: skip
        # Limits of the entries, and of the bytes of text, for all units.
        lines = min(self._lines.size, size)
        self._entries_left = Budget(min(lines // _ENTRY_MIN + 1000, _ENTRIES_MAX), Malformed)
        self._text_left = Budget(8 * lines + _BYTES_MAX, Malformed)

    def files(self) -> Iterator[LineFile]:
        """Yield the source files in the line tables, each once."""
        known: set[LineFile] = set()
        left = _BYTES_MAX
        for found in self._in_tables():
            if found not in known:
                left -= len(found.path)
                if left < 0 or len(known) >= _FILES_MAX:
                    self.is_partial = True
                    return
                known.add(found)
                yield found

    def directories(self) -> Iterator[bytes]:
        """Yield the directories of compilation of all units, each once."""
        known: set[bytes] = {b""}
        for entry in self._units().entries(_UNITS_MAX, lambda *_: True):
            found = entry.text(AT_COMP_DIR)
            if found not in known:
                if len(known) > _DIRECTORIES_MAX:
                    self.is_partial = True
                    return
                known.add(found)
                yield found

    def _in_tables(self) -> Iterator[LineFile]:
        at = 0
        for _ in range(_UNITS_MAX):
            if at >= self._lines.size:
                return
            cursor = Cursor(self._lines.read(at, 12), self._little)
            try:
                length, offsets = cursor.unit_length()
            except Malformed:
                break
            table, start = at, at + cursor.at
            at = start + length
            unit = Cursor(self._lines.read(start, min(length, _HEADER_MAX)), self._little)
            try:
                for file in self._unit(unit, offsets):
                    yield self._completed(table, file)
            except Malformed:
                self.is_partial |= length > 0  # zeros are padding
        self.is_partial = True

    def _completed(self, table: int, file: LineFile) -> LineFile:
        """Return a file with the directory of the compilation, if its path is relative and that
        directory is known.
        """
        if file.path.startswith(b"/"):
            return file
        directory = self._directories.get(table, b"")
        path = _below(directory, file.path) if directory.startswith(b"/") else b""
        return file._replace(path=path) if path else file

    @cached_property
    def _directories(self) -> dict[int, bytes]:
        """The directories of compilation before version 5, by the offset of the line table."""
        found: dict[int, bytes] = {}
        left = _BYTES_MAX
        for entry in self._units().entries(_UNITS_MAX, lambda version, _: version < 5):
            table = entry.number(AT_STMT_LIST)
            if table is not None and table not in found:
                found[table] = entry.text(AT_COMP_DIR)
                left -= len(found[table])
                if left < 0:
                    break
        return found

    def _unit(self, cursor: Cursor, offsets: int) -> Iterator[LineFile]:
        version = cursor.number(2)
        if not 2 <= version <= 5:
            raise Malformed
        cursor.number(2 if version == 5 else 0)
        cursor.number(offsets)
        # From minimum_instruction_length to line_range; version 4 added one.
        cursor.number(5 if version >= 4 else 4)
        cursor.number(cursor.number(1) - 1 & 0xFF)
        yield from self._new_form(cursor, offsets) if version == 5 else self._old_form(cursor)

    def _old_form(self, cursor: Cursor) -> Iterator[LineFile]:
        directories = [b""]
        while directory := cursor.string():
            self._count(directory)
            directories.append(directory)
        while name := cursor.string():
            self._count(name)
            number = cursor.uleb()
            cursor.uleb(), cursor.uleb()
            yield from _joined(directories, number, name, b"")

    def _new_form(self, cursor: Cursor, offsets: int) -> Iterator[LineFile]:
        directories: list[bytes] = []
        for entry in self._entries(cursor, offsets):
            recorded = entry.get(_PATH)
            directory = recorded if isinstance(recorded, bytes) else b""
            if directories:
                directory = _below(directories[0], directory)
                self._count(directory)
            directories.append(directory)
        for entry in self._entries(cursor, offsets):
            name, number, md5 = (entry.get(key) for key in (_PATH, _DIRECTORY, _MD5))
            if isinstance(name, bytes):
                at = number if isinstance(number, int) else 0
                yield from _joined(directories, at, name, md5 if isinstance(md5, bytes) else b"")

    def _entries(self, cursor: Cursor, offsets: int) -> Iterator[dict[int, bytes | int]]:
        formats = [
            (cursor.uleb(), cursor.uleb()) for _ in range(min(cursor.number(1), _FORMATS_MAX))
        ]
        for _ in range(cursor.uleb()):
            if not formats:
                raise Malformed
            entry = {kind: self._value(cursor, kind, form, offsets) for kind, form in formats}
            recorded = entry.get(_PATH)
            self._count(recorded if isinstance(recorded, bytes) else b"")
            yield entry

    def _value(self, cursor: Cursor, kind: int, form: int, offsets: int) -> bytes | int:
        if form == _STRING:
            return cursor.string()
        if form in self._strings:
            return self._strings[form].text(cursor.number(offsets))
        if form == _BLOCK:
            return self._skip(cursor, cursor.uleb())
        size = _SIZES.get(form)
        if size is None:
            raise Malformed
        if kind == _MD5 and size == 16:
            return self._skip(cursor, 16)
        return cursor.number(size) if size else cursor.uleb()

    def _skip(self, cursor: Cursor, size: int) -> bytes:
        start = cursor.at
        cursor.number(size)
        return cursor.data[start : start + size]

    def _count(self, text: bytes) -> None:
        self._entries_left.charge(1)
        self._text_left.charge(len(text))


def _joined(directories: list[bytes], number: int, name: bytes, md5: bytes) -> Iterator[LineFile]:
    """Yield the file with that name in its directory."""
    if not name.startswith(b"/") and number < len(directories) and directories[number]:
        name = _below(directories[number], name)
    if 0 < len(name) < _PATH_MAX:
        yield LineFile(name, md5)


def _below(directory: bytes, name: bytes) -> bytes:
    """Return a name in a directory; empty if that is no path, because it is too long."""
    if name.startswith(b"/"):
        return name
    return directory + b"/" + name if len(directory) + len(name) < _PATH_MAX else b""
