# SPDX-License-Identifier: Apache-2.0
"""The census counts each file once, and knows which are ELF."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import pytest

from buildidfs.capture import base as capture_elf_file
from buildidfs.capture.process import inventory
from buildidfs.model import Absence, BuildId
from tests.support.elf.elfwriter import ET_REL, elf_file


def test_an_open_elf_file_is_found(tmp_path: Path) -> None:
    build_id = BuildId(os.urandom(20))
    path = tmp_path / "file"
    path.write_bytes(elf_file(build_id=build_id))
    assert build_id not in inventory.take().build_ids
    with open(path, "rb"), open(path, "rb"):
        found = inventory.take()
    assert build_id in found.build_ids
    assert found.references >= found.files >= found.elf >= len(found.build_ids)


def test_our_own_interpreter_is_mapped() -> None:
    with open(sys.executable, "rb") as file:
        answer = capture_elf_file.identify(file.fileno())
    found = inventory.take()
    assert found.processes > 0
    if isinstance(answer, BuildId):
        assert answer in found.build_ids
    else:
        assert found.absent[answer] > 0


def test_files_without_a_build_id_are_counted_by_reason(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(elf_file(etype=ET_REL))
    with open(path, "rb"):
        assert inventory.take().absent[Absence.NO_BUILD_ID] > 0


@pytest.mark.root
def test_mapped_files_are_found_without_privilege() -> None:
    with open("/proc/self/maps") as maps:
        libc = next(line.split()[-1] for line in maps if line.rstrip().endswith("libc.so.6"))
    with open(libc, "rb") as file:
        build_id = capture_elf_file.identify(file.fileno())
    child = os.fork()
    if child == 0:
        # No user may follow map_files, not even of an own process.
        code = 1
        try:
            os.setgroups([])
            os.setresgid(65534, 65534, 65534)
            os.setresuid(65534, 65534, 65534)
            prctl = ctypes.CDLL(None).prctl
            prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE, lost with the user ID
            with pytest.raises(PermissionError):
                os.stat("/proc/self/map_files/" + os.listdir("/proc/self/map_files")[0])
            code = 0 if build_id in inventory.take().build_ids else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
