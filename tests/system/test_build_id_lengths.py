# SPDX-License-Identifier: Apache-2.0
"""Build IDs are not always 20 bytes: lld and Go write 8 and more, and anybody may choose."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import tools
from tests.support.containers.vanished import Vanished, vanished
from tests.support.elf import programs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]

LONGEST_OF_THE_KERNEL = 20


@pytest.fixture(scope="module", params=[8, 32])
def odd(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Vanished]:
    """A container whose program has build IDs of an unusual length, and is gone."""
    directory = scratch / f"length-{request.param}"
    program = programs.build(directory / "program", id_bytes=request.param)
    assert len(program.exe.build_id) == 2 * request.param
    with vanished("tmpfs", program, directory / "gone") as result:
        yield result


def test_debuggers(odd: Vanished) -> None:
    result = tools.gdb("bt", debug=odd.debug, arguments=["-c", odd.core])
    assert re.search(r"exe_static_stuck .* at .*/hot\.c:\d+", result.out), str(result)
    stack = tools.eu_stack(odd.core, odd.debug)
    assert "lib_static_stuck" in stack.out, str(stack)
    assert "/libhot.c:" in stack.out, str(stack)


def test_debuginfod(odd: Vanished) -> None:
    for binary in odd.program.binaries:
        result = tools.debuginfod_find(odd.url, "debuginfo", binary.build_id)
        assert result.rc == 0, str(result)


def test_perf(odd: Vanished) -> None:
    result = tools.perf_report(odd.mount, odd.profile)
    assert result.rc == 0, str(result)
    # of longer IDs the kernel tells perf nothing, so no cache can help
    if len(odd.program.exe.build_id) <= 2 * LONGEST_OF_THE_KERNEL:
        assert "exe_static_hot" in result.out, str(result)
        assert "lib_static_hot" in result.out, str(result)
