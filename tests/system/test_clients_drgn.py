# SPDX-License-Identifier: Apache-2.0
"""drgn, which trusts a path under .build-id without comparing build IDs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.clients import tools
from tests.support.elf.programs import SOURCE_DIR, line_of

if TYPE_CHECKING:
    from tests.support.containers.vanished import Vanished

pytestmark = [pytest.mark.root, pytest.mark.fuse, pytest.mark.client]

SCRIPT = """
import sys, drgn
core, directory = sys.argv[1:]
program = drgn.Program()
program.debug_info_options.directories = (directory,)
program.set_core_dump(core)
try:
    program.load_default_debug_info()
except drgn.MissingDebugInfoError as error:
    print("missing:", error, file=sys.stderr)  # the vDSO has none
for module in program.modules():
    print(module.name, module.loaded_file_path, module.debug_file_path,
          module.supplementary_debug_file_path)
print(program.type("struct work"))
print(program.main_thread().stack_trace())
"""


def test_stack_and_types_of_a_core_file(gone: Vanished) -> None:
    result = tools.drgn(SCRIPT, gone.core, gone.debug)
    assert result.rc == 0, str(result)
    assert "struct work {\n\tunsigned long seed;" in result.out, str(result)
    for name, file, marker in (
        ("exe_static_stuck", "hot.c", "exe_stuck"),
        ("lib_static_stuck", "libhot.c", "lib_stuck"),
        ("main", "hot.c", "main_stuck"),
    ):
        assert f"{name} ({SOURCE_DIR}/{file}:{line_of(marker)}:" in result.out, str(result)


def test_types_that_dwz_moved_to_the_common_file(dwz_gone: Vanished) -> None:
    supplement = dwz_gone.program.supplement
    assert supplement is not None
    result = tools.drgn(SCRIPT, dwz_gone.core, dwz_gone.debug)
    assert result.rc == 0, str(result)
    assert "struct work {\n\tunsigned long seed;" in result.out, str(result)
    assert f"{supplement.build_id}/debug" in result.out, str(result)
