# SPDX-License-Identifier: Apache-2.0
"""Tables of Go functions (``.gopclntab``) in each layout, made to order.

No compiler that can be installed writes those of Go 1.2 to 1.17. The layouts are those of
debug/gosym/pclntab.go and runtime/symtab.go, written down again here.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from tests.support.elf.elfwriter import PT_LOAD, SHF_ALLOC, SHF_EXECINSTR, Section, elf_file

GO_1_2, GO_1_16, GO_1_18, GO_1_20 = 0xFFFFFFFB, 0xFFFFFFFA, 0xFFFFFFF0, 0xFFFFFFF1
MAGICS = (GO_1_2, GO_1_16, GO_1_18, GO_1_20)

CODE = 0x400000
"""The address of the code of `program`, but for its offset in the file."""


class Row(NamedTuple):
    """``size`` bytes of code that belong to a line."""

    size: int
    file: str
    line: int


class Function(NamedTuple):
    """A function; ``padding`` is what follows it. Without rows it has no tables.

    Functions with the same object as rows share their tables. ``bare`` is a size that differs from
    that of the rows.
    """

    name: str
    rows: Sequence[Row]
    padding: int = 0
    bare: int = 0

    @property
    def size(self) -> int:
        return self.bare or sum(row.size for row in self.rows)


class Form(NamedTuple):
    """A layout, byte order and sizes of words and instructions."""

    magic: int = GO_1_20
    bits: Literal[32, 64] = 64
    little_endian: bool = True
    quantum: int = 1

    @property
    def order(self) -> str:
        return "<" if self.little_endian else ">"

    @property
    def is_relative(self) -> bool:
        """True if addresses count from the start of the code."""
        return self.magic in (GO_1_18, GO_1_20)


def table(functions: Sequence[Function], text: int, form: Form, *, header_text: int = 0) -> bytes:
    """The table of functions that follow one another from the address ``text`` on.

    ``header_text`` is the start of the code that the header tells.
    """
    return (_Old if form.magic == GO_1_2 else _New)(functions, text, form).table(header_text)


def program(
    functions: Sequence[Function],
    form: Form | None = None,
    *,
    build_id: bytes | None = b"\x0b" * 20,
    section: bytes = b".gopclntab",
    alter: Callable[[bytes], bytes] = lambda data: data,
    headers: bool = True,
    more: Sequence[Section] = (),
) -> bytes:
    """A stripped program with these functions: an ELF file with code and the table of it."""
    form = form or Form()
    size = sum(function.size + function.padding for function in functions)
    code = Section(
        b".text", b"\x90" * size, flags=SHF_ALLOC | SHF_EXECINSTR, segment=PT_LOAD, align=16
    )

    def made(data: bytes) -> bytes:
        return elf_file(
            [code, Section(section, data, flags=SHF_ALLOC, segment=PT_LOAD, align=32), *more],
            build_id=build_id,
            bits=form.bits,
            little_endian=form.little_endian,
            section_headers=headers,
        )

    # Addresses are those of the writer of ELF files: the offset in the file, and a constant. The
    # code comes first, wherever the table ends.
    text = CODE + made(b"").index(code.data[:16])
    return made(alter(table(functions, text, form, header_text=text)))


class _Tables:
    """What the layouts have in common: the differences of values along the code."""

    def __init__(self, functions: Sequence[Function], text: int, form: Form) -> None:
        self._functions = functions
        self._text = text
        self._form = form
        self._word = "I" if form.bits == 32 else "Q"
        rows = {id(each.rows): each.rows for each in functions}.values()
        self._files = list(dict.fromkeys(row.file for each in rows for row in each))

    def _pack(self, form: str, *values: int) -> bytes:
        return struct.pack(self._form.order + form, *values)

    def _start(self) -> bytes:
        form = self._form
        return self._pack("IBBBB", form.magic, 0, 0, form.quantum, form.bits // 8)

    def _entries(self) -> list[int]:
        """Addresses of the functions, and of their end; from the start of the code if that is so.

        The last function ends where its code does, without the padding.
        """
        at = 0 if self._form.is_relative else self._text
        found = []
        for function in self._functions:
            found.append(at)
            at += function.size + function.padding
        return [*found, at - self._functions[-1].padding]

    def _values(self, pairs: Iterable[tuple[int, int]]) -> bytes:
        """A table of (size of the code, value)."""
        return _differences(tuple(pairs), self._form.quantum)

    def table(self, header_text: int) -> bytes:
        raise NotImplementedError


class _Old(_Tables):
    """Go 1.2: all offsets are from the start of the table."""

    def table(self, header_text: int) -> bytes:
        count, word = len(self._functions), self._form.bits // 8
        head = self._start() + self._pack(self._word, count)
        rows_at = len(head)
        body = bytearray(head + bytes((2 * count + 1) * word + 4))
        rows: list[int] = []
        shared: dict[int, tuple[int, int]] = {}
        for entry, function in zip(self._entries(), self._functions, strict=False):
            name_at = len(body)
            body += function.name.encode() + b"\0"
            files_at = lines_at = 0
            if id(function.rows) in shared:
                files_at, lines_at = shared[id(function.rows)]
            elif function.rows:
                files_at = len(body)
                # Numbers of files begin at 1.
                body += self._values(
                    [(row.size, 1 + self._files.index(row.file)) for row in function.rows]
                )
                lines_at = len(body)
                body += self._values([(row.size, row.line) for row in function.rows])
                shared[id(function.rows)] = files_at, lines_at
            rows += (entry, len(body))
            body += self._pack(self._word + "8I", entry, name_at, 0, 0, 0, files_at, lines_at, 0, 0)
        rows.append(self._entries()[-1])
        names = []
        for file in self._files:
            names.append(len(body))
            body += file.encode() + b"\0"
        body[rows_at : rows_at + len(rows) * word] = self._pack(self._word * len(rows), *rows)
        end = rows_at + len(rows) * word
        body[end : end + 4] = self._pack("I", len(body))
        return bytes(body) + self._pack(f"{1 + len(names)}I", 1 + len(names), *names)


class _New(_Tables):
    """Go 1.16 and later: parts of their own, whose offsets are in the header."""

    def table(self, header_text: int) -> bytes:
        form = self._form
        names, files, values, units = bytearray(), b"", bytearray(1), []
        for file in self._files:
            units.append(len(files))
            files += file.encode() + b"\0"
        # A unit of other files comes first: the numbers count from that of the function.
        units = [0xFFFFFFFF, *units]
        places = []
        shared: dict[int, tuple[int, int]] = {}
        for function in self._functions:
            files_at = lines_at = 0
            if id(function.rows) in shared:
                files_at, lines_at = shared[id(function.rows)]
            elif function.rows:
                files_at = len(values)
                values += self._values(
                    [(row.size, self._files.index(row.file)) for row in function.rows]
                )
                lines_at = len(values)
                values += self._values([(row.size, row.line) for row in function.rows])
                shared[id(function.rows)] = files_at, lines_at
            places.append((len(names), files_at, lines_at))
            names += function.name.encode() + b"\0"
        field = "I" if form.is_relative else self._word
        size = struct.calcsize(form.order + field)
        records, rows = bytearray(), list[int]()
        base = (2 * len(places) + 1) * size
        for entry, (name, files_at, lines_at) in zip(self._entries(), places, strict=False):
            rows += (entry, base + len(records))
            records += self._pack(field + "8I", entry, name, 0, 0, 0, files_at, lines_at, 0, 1)
            records += bytes(-len(records) % 4)
        rows.append(self._entries()[-1])
        functab = self._pack(field * len(rows), *rows) + bytes(records)
        parts = [bytes(names), self._pack(f"{len(units)}I", *units), files, bytes(values), functab]
        words = [len(places), len(self._files)] + ([header_text] if form.is_relative else [])
        at = 8 + (len(words) + len(parts)) * form.bits // 8
        starts = []
        body = b""
        for part in parts:
            body += bytes(-(at + len(body)) % 4)
            starts.append(at + len(body))
            body += part
        words += starts
        return self._start() + self._pack(self._word * len(words), *words) + body


@functools.lru_cache(16)  # layouts that follow one another have the same
def _differences(pairs: tuple[tuple[int, int], ...], quantum: int) -> bytes:
    out, before, left = bytearray(), -1, 0
    joined: list[list[int]] = []
    for size, value in pairs:
        if joined and joined[-1][1] == value:
            joined[-1][0] += size
        else:
            joined.append([size, value])
    for size, value in joined:
        change = value - before
        left = change << 1 if change >= 0 else ~change << 1 | 1
        out += _number(left & 0xFFFFFFFF) + _number(size // quantum)
        before = value
    return bytes(out) + b"\0"


@functools.lru_cache(1 << 17)
def _number(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(out) + bytes((value,))
