# SPDX-License-Identifier: Apache-2.0
"""buildidfs.watch.running: the build IDs whose code this host runs."""

from __future__ import annotations

import ctypes
import os
import sys

import pytest

from buildidfs.capture import base
from buildidfs.model import BuildId
from buildidfs.watch.running import ids_in_use


def _id_at(path: str) -> BuildId:
    with open(path, "rb") as file:
        found = base.identify(file.fileno())
    assert isinstance(found, BuildId)
    return found


def test_our_own_interpreter_is_in_use() -> None:
    steps: list[tuple[int, str]] = []
    found = ids_in_use(lambda done, what, **_: steps.append((done, what)))
    assert _id_at(sys.executable) in found.build_ids
    assert 0 <= found.unseen < found.processes
    assert f"/proc/{os.getpid()}" in [what for _, what in steps]


@pytest.mark.root
def test_mapped_files_are_found_without_privilege() -> None:
    with open("/proc/self/maps") as maps:
        libc = next(line.split()[-1] for line in maps if line.rstrip().endswith("libc.so.6"))
    build_id = _id_at(libc)
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
            found = ids_in_use()
            code = 0 if build_id in found.build_ids and found.unseen else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
