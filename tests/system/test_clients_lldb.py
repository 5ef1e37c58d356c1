# SPDX-License-Identifier: Apache-2.0
"""lldb, beyond what every container scenario asks of it (test_containers.py)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.support.clients import tools
from tests.support.elf.programs import line_of

if TYPE_CHECKING:
    from tests.support.containers.vanished import Vanished

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]


def test_whole_stack_when_the_library_is_named(gone: Vanished) -> None:
    # lldb looks for libraries by base name only, so they are given one
    libraries = gone.core.parent / "libraries"
    libraries.mkdir()
    (libraries / "libhot.so").symlink_to(gone.lib / "elf")
    result = tools.lldb(
        f"settings set target.debug-file-search-paths {gone.debug}",
        f"settings set target.exec-search-paths {libraries}",
        f"target create {gone.exe}/elf --core {gone.core}",
        "bt",
    )
    for place in (
        rf"exe_static_stuck.* at hot\.c:{line_of('exe_stuck')}",
        rf"lib_static_stuck.* at libhot\.c:{line_of('lib_stuck')}",
        rf"main.* at hot\.c:{line_of('main_stuck')}",
    ):
        assert re.search(place, result.out), str(result)


def test_debug_file_is_found_by_build_id(gone: Vanished) -> None:
    result = tools.lldb(
        f"settings set target.debug-file-search-paths {gone.debug}",
        f"target create {gone.lib}/elf",
        "image list",
        "image lookup -v -n lib_static_hot",
    )
    assert f"{gone.program.lib.build_id[2:]}.debug" in result.out, str(result)
    assert re.search(r"LineEntry: .*libhot\.c:\d+", result.out), str(result)
