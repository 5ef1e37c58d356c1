# SPDX-License-Identifier: Apache-2.0
"""gdb, beyond what every container scenario asks of it (test_containers.py)."""

from __future__ import annotations

import re
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import tools
from tests.support.elf.programs import SOURCE_DIR, line_of

if TYPE_CHECKING:
    from tests.support.containers.vanished import Vanished
    from tests.support.elf.programs import Program
    from tests.support.harness.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]


def test_core_file_finds_its_executable_by_build_id(gone: Vanished) -> None:
    result = tools.gdb("info inferiors", debug=gone.debug, arguments=["-c", gone.core])
    assert f"{gone.exe}/elf" in result.out, str(result)


def test_the_mount_itself_serves_as_debug_file_directory(gone: Vanished) -> None:
    result = tools.gdb("bt", debug=gone.mount, arguments=["-c", gone.core])
    place = f"exe_static_stuck .* at {SOURCE_DIR}/hot.c:{line_of('exe_stuck')}"
    assert re.search(place, result.out), str(result)


def test_types_that_dwz_moved_to_the_common_file(dwz_gone: Vanished) -> None:
    result = tools.gdb("ptype struct work", debug=dwz_gone.debug, arguments=["-c", dwz_gone.core])
    assert re.search(r"type = struct work \{\s+unsigned long seed;", result.out), str(result)
    assert "gnu_debugaltlink" not in result.text, str(result)


def test_executable_in_the_mount_finds_its_debug_file(gone: Vanished) -> None:
    result = tools.gdb("info line lib_static_hot", debug=gone.debug, arguments=[gone.lib / "elf"])
    assert re.search(r'Line \d+ of "/build/hot-1\.0/libhot\.c" starts at address', result.out), str(
        result
    )


def test_debug_file_alone_serves_an_executable_that_is_elsewhere(
    buildidfs: BuildIdFs, program: Program
) -> None:
    alone = buildidfs.store.parent / "alone"
    alone.mkdir()
    shutil.copy2(program.exe.debug, alone)
    buildidfs("scan", "tree", alone)
    with buildidfs.mounted() as mount:
        stripped = [program.exe.shipped]
        result = tools.gdb("info line main", debug=mount / "debug", arguments=stripped)
    assert re.search(r'Line \d+ of "/build/hot-1\.0/hot\.c" starts at address', result.out), str(
        result
    )
