# SPDX-License-Identifier: Apache-2.0
"""Symbolizers that turn one address into a line: binutils and LLVM."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.clients import tools
from tests.support.clients.tools import run, tool
from tests.support.elf.programs import SOURCE_DIR, line_of

if TYPE_CHECKING:
    from tests.support.containers.vanished import Vanished

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]

ANSWER = f"exe_static_hot\n{SOURCE_DIR}/hot.c:{line_of('exe_entry')}"


def test_addr2line_inside_the_mount(gone: Vanished) -> None:
    # binutils look for .build-id below the working directory only
    address = f"0x{gone.program.exe.address('exe_static_hot'):x}"
    argv = [tool("addr2line"), "-f", "-e", f"{gone.program.exe.build_id}/elf", address]
    result = run(argv, cwd=gone.mount)
    assert result.out.startswith(ANSWER), str(result)
    elsewhere = run([*argv[:3], gone.program.exe.shipped, address])
    assert SOURCE_DIR not in elsewhere.out, str(elsewhere)


@pytest.mark.parametrize("names", [("llvm-symbolizer",), tools.RECENT_LLVM_SYMBOLIZER])
def test_llvm_symbolizer_with_the_executable(gone: Vanished, names: tuple[str, ...]) -> None:
    address = f"0x{gone.program.exe.address('exe_static_hot'):x}"
    executable = f"--obj={gone.program.exe.shipped}"
    result = tools.llvm_symbolizer(gone.debug, executable, address, names=names)
    assert result.out.startswith(ANSWER), str(result)
    nothing = gone.debug / "nothing"
    without = tools.llvm_symbolizer(nothing, executable, address, names=names)
    assert SOURCE_DIR not in without.out, str(without)


def test_llvm_symbolizer_with_the_build_id_alone(gone: Vanished) -> None:
    # since LLVM 15
    names = tools.RECENT_LLVM_SYMBOLIZER
    address = f"0x{gone.program.exe.address('exe_static_hot'):x}"
    build_id = f"--build-id={gone.program.exe.build_id}"
    result = tools.llvm_symbolizer(gone.debug, build_id, address, names=names)
    assert result.out.startswith(ANSWER), str(result)
    without = tools.llvm_symbolizer(gone.debug / "nothing", build_id, address, names=names)
    assert SOURCE_DIR not in without.out, str(without)
