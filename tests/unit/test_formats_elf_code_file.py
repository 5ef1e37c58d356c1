# SPDX-License-Identifier: Apache-2.0
"""Code of any machine, as a file that llvm-objdump reads."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from buildidfs.formats.elf import code_file
from buildidfs.formats.elf.code_file import Instruction, Machine
from buildidfs.formats.elf.other_ids import beginnings
from buildidfs.model import BuildId
from tests.support.clients.tools import run, tool

X86_64 = Machine(b"\x02\x01", code_file.EM_X86_64, 0)


@pytest.mark.client
@pytest.mark.parametrize(
    ("machine", "code", "texts", "architecture"),
    [
        (X86_64, "c3 90", ["ret", "nop"], "x86_64"),
        (Machine(b"\x01\x01", code_file.EM_386, 0), "40 c3", ["inc eax", "ret"], "i686"),
        (Machine(b"\x02\x01", code_file.EM_AARCH64, 0), "c0 03 5f d6", ["ret"], "aarch64"),
        (Machine(b"\x02\x01", 243, 5), "82 80", ["ret"], "riscv64"),
        (Machine(b"\x02\x02", 22, 0), "07 fe", ["br %r14"], "s390x"),
        (Machine(b"\x01\x01", code_file.EM_ARM, 0x5000000), "70 47", ["bx lr"], "arm"),
    ],
    ids=["x86_64", "i686", "aarch64", "riscv64", "s390x", "arm"],
)
def test_llvm_objdump_reads_the_code_of_each_machine(
    tmp_path: Path, machine: Machine, code: str, texts: list[str], architecture: str
) -> None:
    path = tmp_path / "code"
    path.write_bytes(code_file.code_file(machine, 0x12340, bytes.fromhex(code)))
    argv = [tool("llvm-objdump"), "-D", "--no-show-raw-insn", "-j", ".text"]
    argv += ["--x86-asm-syntax=intel"] if architecture in ("x86_64", "i686") else []
    argv += ["--triple=thumbv7-linux-gnueabihf"] if architecture == "arm" else []
    lines = run([*argv, path], check=True).out.encode().splitlines()
    found = code_file.instructions(lines, 0x12340, len(bytes.fromhex(code)))
    assert [each.text for each in found] == texts
    assert found[0].address == 0x12340
    assert machine.architecture == architecture


def test_target_of_a_jump_is_told_without_the_section() -> None:
    lines = [
        b"a:\tfile format elf64-x86-64",
        b"0000000000001000 <.text>:",
        b"    1000:      \tcall\t0x1129 <.text+0x129>",
        b"    1005:      \tjne\t0x2000",
        b"    1007:      \tlea\trax, [rip + 0x10]  # 0x101e <.text+0x1e>",
        b"    100e:      \tmov\teax, 0x1129",
        b"    1013:      \tret",
    ]
    assert code_file.instructions(lines, 0x1000, 0x13) == [
        Instruction(0x1000, "call 0x1129", 0x1129),
        Instruction(0x1005, "jne 0x2000", 0x2000),
        Instruction(0x1007, "lea rax, [rip + 0x10] # 0x101e"),
        Instruction(0x100E, "mov eax, 0x1129"),
    ]


def test_lines_without_end_are_not_read_to_the_end() -> None:
    endless = itertools.repeat(b"1000: nop")
    assert code_file.instructions(endless, 0x1000, 3) == [Instruction(0x1000, "nop")] * 3


def test_line_of_white_space_is_no_instruction() -> None:
    lines = [b"    1000:      \x1c", "    1000:  \u3000".encode(), b" 1001: ret"]
    assert code_file.instructions(lines, 0x1000, 4) == [Instruction(0x1001, "ret")]


def test_debug_id_of_breakpad_is_the_beginning_of_a_build_id() -> None:
    # The example of rust-debugid for a little-endian file.
    build_id = BuildId.from_hex("f1c3bcc0279865fe3058404b2831d9e64135386c")
    assert beginnings("C0BCC3F19827FE653058404B2831D9E60") == [
        build_id[:16],
        bytes.fromhex("c0bcc3f19827fe653058404b2831d9e6"),
    ]
    for text in ("", "0" * 33, "C0BCC3F19827FE653058404B2831D9E6", "x" * 33, "0" * 200, "é" * 33):
        assert beginnings(text) == [], text
