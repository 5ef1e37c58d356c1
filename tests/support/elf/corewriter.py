# SPDX-License-Identifier: Apache-2.0
"""Core files made to order: any class and byte order, and as wrong as a test wants them.

`core_file` lays out as the kernel does: ELF header, program headers, notes, memory, and where the
number of program headers does not fit, section header 0.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Literal, NamedTuple

from tests.support.elf.elfwriter import ET_CORE, PT_LOAD, PT_NOTE, note

NT_PRSTATUS, NT_PRPSINFO, NT_AUXV, NT_FILE = 1, 3, 6, 0x46494C45
AT_PHDR, AT_ENTRY, AT_SYSINFO_EHDR = 3, 9, 33
PAGE = 4096

_Bits = Literal[32, 64]


class Mapped(NamedTuple):
    """A mapping: ``size`` bytes at ``start``, of which ``data`` was dumped; of a file, if any."""

    start: int
    data: bytes
    path: bytes = b""
    offset: int = 0
    size: int = PAGE
    executable: bool = False


def core_file(
    mappings: Sequence[Mapped],
    *,
    bits: _Bits = 64,
    little_endian: bool = True,
    name: bytes = b"hot",
    arguments: bytes = b"hot stuck ",
    pid: int = 4711,
    signal: int = 11,
    threads: int = 1,
    auxiliary: Sequence[tuple[int, int]] = (),
    file_note: bool = True,
    extra_notes: bytes = b"",
    many: bool = False,
    machine: int = 62,
) -> bytes:
    """The bytes of a core file; ``many`` numbers program headers as if they were too many."""
    order, word = "<" if little_endian else ">", "Q" if bits == 64 else "I"

    def core_note(kind: int, desc: bytes) -> bytes:
        return note(b"CORE\0", kind, desc, little_endian=little_endian)

    registers = struct.pack(f"{order}12xh2x", signal)
    registers += struct.pack(f"{order}{word}{word}i", 0, 0, pid + 1) + bytes(64)
    notes = core_note(NT_PRSTATUS, registers)
    users = 8 if bits == 64 else 4
    head = bytes(16 if bits == 64 else 8) + bytes(users)
    info = head + struct.pack(f"{order}4i16s80s", pid, 1, 1, 1, name, arguments)
    notes += core_note(NT_PRPSINFO, info)
    pairs = b"".join(struct.pack(order + word * 2, *pair) for pair in auxiliary)
    notes += core_note(NT_AUXV, pairs + struct.pack(order + word * 2, 0, 0))
    if file_note:
        notes += core_note(NT_FILE, file_table(mappings, bits=bits, little_endian=little_endian))
    notes += extra_notes + core_note(NT_PRSTATUS, registers) * (threads - 1)

    ehdr = struct.Struct(f"{order}4sBBB9xHHI{word * 3}I6H")
    phdr = struct.Struct(order + ("IIQQQQQQ" if bits == 64 else "IIIIIIII"))
    shdr = struct.Struct(f"{order}II{word * 4}II{word * 2}")
    count = len(mappings) + 1
    notes_at = ehdr.size + count * phdr.size
    at = notes_at + len(notes)
    at += -at % PAGE
    table = bytearray(_segment(phdr, bits, PT_NOTE, notes_at, 0, len(notes), 0, 0, 4))
    body = bytearray()
    for each in mappings:
        where = at + len(body)
        flags = 5 if each.executable else 4
        table += _segment(
            phdr, bits, PT_LOAD, where, each.start, len(each.data), each.size, flags, PAGE
        )
        body += each.data
    header = ehdr.pack(
        b"\x7fELF", bits // 32, 1 if little_endian else 2, 1, ET_CORE, machine, 1, 0, ehdr.size,
        at + len(body) if many else 0, 0, ehdr.size, phdr.size, 0xFFFF if many else count,
        shdr.size if many else 0, 1 if many else 0, 0,
    )  # fmt: skip
    data = header + table + notes
    data += bytes(at - len(data)) + body
    return data + shdr.pack(0, 0, 0, 0, 0, 1, 0, count, 0, 0) if many else data


def file_table(
    mappings: Sequence[Mapped], *, bits: _Bits = 64, little_endian: bool = True
) -> bytes:
    """The descriptor of NT_FILE for those mappings that have a path."""
    order, word = "<" if little_endian else ">", "Q" if bits == 64 else "I"
    files = [each for each in mappings if each.path]
    table = bytearray(struct.pack(order + word * 2, len(files), PAGE))
    for each in files:
        places = (each.start, each.start + each.size, each.offset // PAGE)
        table += struct.pack(order + word * 3, *places)
    return bytes(table) + b"".join(each.path + b"\0" for each in files)


def _segment(
    form: struct.Struct, bits: _Bits, kind: int, offset: int, address: int, size: int,
    memory: int, flags: int, align: int,
) -> bytes:  # fmt: skip
    place = (offset, address, 0, size, memory)
    if bits == 64:
        return form.pack(kind, flags, *place, align)
    return form.pack(kind, *place, flags, align)
