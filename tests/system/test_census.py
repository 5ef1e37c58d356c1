# SPDX-License-Identifier: Apache-2.0
"""The build IDs in use on a host on which a filesystem has fallen silent."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from buildidfs.model import BuildId
from buildidfs.watch.running import IdsInUse, ids_in_use
from tests.support.elf import echo
from tests.support.filesystems import silentfs
from tests.support.harness.children import running

pytestmark = [pytest.mark.root, pytest.mark.fuse]


def test_filesystem_that_does_not_answer(scratch: Path) -> None:
    place = scratch / "census"
    target = place / "mnt"
    target.mkdir(parents=True)
    build_id = echo.build(place / "program")
    results: list[IdsInUse] = []
    with (
        silentfs.served(target, place / "program") as server,
        running([target / "app"]),
        running([place / "program"]),
    ):
        server.send_signal(signal.SIGSTOP)
        thread = threading.Thread(target=lambda: results.append(ids_in_use()), daemon=True)
        thread.start()
        thread.join(20)
    assert results, "it waits for a filesystem that does not answer"
    assert BuildId.from_hex(build_id) in results[0].build_ids
