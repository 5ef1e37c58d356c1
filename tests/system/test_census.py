# SPDX-License-Identifier: Apache-2.0
"""The census of a host on which a filesystem has fallen silent."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import pytest

from buildidfs.capture.process import inventory
from buildidfs.capture.unresponsive.filesystems import Patience
from buildidfs.model import BuildId
from tests.support.elf import echo
from tests.support.filesystems import silentfs
from tests.support.harness.children import running

pytestmark = [pytest.mark.root, pytest.mark.fuse]


def test_filesystem_that_does_not_answer(scratch: Path) -> None:
    place = scratch / "census"
    target = place / "mnt"
    target.mkdir(parents=True)
    build_id = echo.build(place / "program")
    results: list[inventory.Census] = []
    with (
        silentfs.served(target, place / "program") as server,
        running([target / "app"]),
        running([place / "program"]),
    ):
        server.send_signal(signal.SIGSTOP)
        thread = threading.Thread(
            target=lambda: results.append(inventory.take(patience=Patience(0.5))), daemon=True
        )
        thread.start()
        thread.join(20)
    assert results, "it waits for a filesystem that does not answer"
    assert BuildId.from_hex(build_id) in results[0].build_ids
    assert results[0].refused > 0
