# SPDX-License-Identifier: Apache-2.0
"""The census counts each file once, and knows which are ELF."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from buildidfs.capture import census, files
from buildidfs.model import Absence, BuildId
from tests.support.elfwriter import elf_file


def test_an_open_elf_file_is_found(tmp_path: Path) -> None:
    build_id = BuildId(os.urandom(20))
    path = tmp_path / "file"
    path.write_bytes(elf_file(build_id=build_id))
    assert build_id not in census.take().build_ids
    with open(path, "rb"), open(path, "rb"):
        found = census.take()
    assert build_id in found.build_ids
    assert found.references >= found.files >= found.elf >= len(found.build_ids)


def test_our_own_interpreter_is_mapped() -> None:
    with open(sys.executable, "rb") as file:
        answer = files.identify(file.fileno())
    found = census.take()
    assert found.processes > 0
    if isinstance(answer, BuildId):
        assert answer in found.build_ids
    else:
        assert found.absent[answer] > 0


def test_files_without_a_build_id_are_counted_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(elf_file())
    with open(path, "rb"):
        assert census.take().absent[Absence.NO_BUILD_ID] > 0
