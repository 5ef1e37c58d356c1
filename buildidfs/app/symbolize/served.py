# SPDX-License-Identifier: Apache-2.0
"""The engine of the symbol server: names and instructions from files that all users may read."""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from buildidfs.app.symbolize import programs
from buildidfs.app.symbolize.addresses import Symbolizer
from buildidfs.app.symbolize.programs import Failed, Slots, SymbolizerProcess
from buildidfs.errors import UsageError
from buildidfs.formats.elf import code_file
from buildidfs.linux import file_ops
from buildidfs.view.permissions import PUBLIC

if TYPE_CHECKING:
    from collections.abc import Iterator

    from buildidfs.formats.elf.code_file import Instruction, Machine
    from buildidfs.store import Store

_DISASSEMBLE_S = 20.0


class PublicSymbolizer(Symbolizer):
    """A symbolizer for callers without an account: it uses only files that all users may read.

    Raises `UsageError` if no program is installed.
    """

    def __init__(self, store: Store) -> None:
        super().__init__(store, viewer=PUBLIC)
        self._disassembler: str | None = None

    def disassemble(
        self, machine: Machine, address: int, code: bytes, size: int
    ) -> list[Instruction]:
        """Return the instructions that begin in the first ``size`` bytes of ``code``, at
        ``address``.

        Raises `UsageError` if llvm-objdump is missing or fails, and `CapabilityError`.
        """
        path = self._disassembler = self._disassembler or programs.find_disassembler()
        if path is None:
            raise UsageError("llvm-objdump is not installed; apt-get install llvm")
        data = code_file.code_file(machine, address, code)
        with Slots(1) as slots:
            slots.fill(len(data), functools.partial(file_ops.write_fully, data=data))
            try:
                lines = _output(path, slots, machine)
                return code_file.instructions(lines, address, size)
            except Failed as error:
                raise UsageError(f"llvm-objdump failed: {error}") from error


def _output(path: str, slots: Slots, machine: Machine) -> Iterator[bytes]:
    """Yield the lines that llvm-objdump prints about the only file. Raises `Failed`."""
    argv = [path, "--disassemble-all", "--no-show-raw-insn", "--disassemble-zeroes"]
    argv += ["--print-imm-hex", "--section=.text"]
    if machine.number in (code_file.EM_386, code_file.EM_X86_64):
        argv.append("--x86-asm-syntax=intel")
    elif machine.number == code_file.EM_ARM:
        # It is unknown which functions use the older instruction set; few do.
        argv.append("--triple=thumbv7-linux-gnueabihf")
    process = SymbolizerProcess([*argv, slots.path(0).decode()], slots)
    try:
        yield from process.lines(time.monotonic() + _DISASSEMBLE_S)
    finally:
        process.close()
