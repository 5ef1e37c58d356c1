# SPDX-License-Identifier: Apache-2.0
"""ELF files that contain only machine code, for disassemblers, and the parser of their output.

The file from which the code comes may be hostile, so a disassembler gets none of its tables.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

from buildidfs.formats.elf.header import (
    ET_DYN,
    EV_CURRENT,
    LAYOUTS,
    MAGIC,
    SHF_ALLOC,
    SHF_EXECINSTR,
    SHT_PROGBITS,
    parse_header,
)
from buildidfs.formats.elf.writer import NewSection, elf_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

MOST_INSTRUCTION: Final = 16
"""Bytes of the longest instruction of any machine."""

EM_386: Final = 3
EM_ARM: Final = 40
EM_X86_64: Final = 62
EM_AARCH64: Final = 183

_ARCHITECTURES: Final = {
    EM_386: "i686", 8: "mips", 20: "ppc", 21: "ppc64", 22: "s390x", EM_ARM: "arm",
    EM_X86_64: "x86_64", EM_AARCH64: "aarch64", 243: "riscv64", 258: "loongarch64",
}  # fmt: skip
_SYNTAXES: Final = {EM_386: "Intel", EM_X86_64: "Intel", EM_ARM: "ARM", EM_AARCH64: "ARM"}

_MOST_LINE: Final = 400
_LINE: Final = re.compile(rb"\s*([0-9a-f]{1,16}):\s+(\S.*)")
_TARGET: Final = re.compile(r"(?:call|j|loop|b|cbn?z|tbn?z)[^<#]* (0x[0-9a-f]{1,16})(?: <[^>]*>)?")
_WHERE: Final = re.compile(r" <[^>]*>\Z")


class Machine(NamedTuple):
    """The machine of an ELF file: class and byte order as in the file, e_machine and e_flags."""

    form: bytes
    number: int
    flags: int

    @property
    def architecture(self) -> str:
        """Return the name of the architecture in Linux."""
        return _ARCHITECTURES.get(self.number, f"machine {self.number}")

    @property
    def syntax(self) -> str:
        """Return the name of the assembler syntax of its instructions."""
        return _SYNTAXES.get(self.number, self.architecture)


class Instruction(NamedTuple):
    """An instruction at ``address``; ``target`` is the address it may jump to, 0 if
    none is known.
    """

    address: int
    text: str
    target: int = 0


def machine_of(head: bytes) -> Machine | None:
    """Return the machine of the ELF file that begins with ``head``; None for any other file."""
    parsed = parse_header(head)
    if parsed is None:
        return None
    return Machine(head[4:6], parsed[1][1], parsed[1][6])


def code_file(machine: Machine, address: int, code: bytes) -> bytes:
    """Return an ELF file with one section, of ``code`` that is loaded at ``address``."""
    layout = LAYOUTS[machine.form]
    fields = (ET_DYN, machine.number, EV_CURRENT, 0, 0, 0, machine.flags, *bytes(6))
    head = (MAGIC + machine.form).ljust(16, b"\0") + layout.ehdr.pack(*fields)
    text = NewSection(
        b".text", SHT_PROGBITS, [code], SHF_ALLOC | SHF_EXECINSTR, address, align=4
    )  # fmt: skip
    return elf_bytes(head, (), [text])


def instructions(lines: Iterable[bytes], address: int, size: int) -> list[Instruction]:
    """Return the instructions in the output of llvm-objdump that begin in ``size`` bytes.

    Stops when there are as many instructions as bytes.
    """
    found: list[Instruction] = []
    for line in lines:
        if len(found) >= size:
            break
        match = _LINE.fullmatch(line) if len(line) <= _MOST_LINE else None
        if match is None:
            continue
        at = int(match[1], 16)
        if not address <= at < address + size:
            continue
        text = " ".join(match[2].decode("utf-8", "replace").split())
        target = _TARGET.fullmatch(text)
        # llvm-objdump prints a target relative to the section, the only name that it knows.
        text = _WHERE.sub("", text)
        if not text:  # white space of Unicode only
            continue
        found.append(Instruction(at, text, int(target[1], 16) if target else 0))
    return found
