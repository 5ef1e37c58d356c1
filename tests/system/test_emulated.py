# SPDX-License-Identifier: Apache-2.0
"""Guests of a user-mode emulator, captured while they run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.clients.tools import tool
from tests.support.elf import moved
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.waiting import until
from tests.support.harness.watching import watching

pytestmark = [pytest.mark.root, pytest.mark.host]


def test_a_guest_of_an_emulator_is_captured_while_it_runs(directory: Path) -> None:
    """The program stands for an emulator: it maps the guest without the right to execute it."""
    emulator = moved.build(directory / "emulator")
    guest = moved.build(directory / "guest")
    with watching(directory / "store", "--no-scan") as watch:
        with moved.running(emulator, "guest", guest):
            until(
                lambda: os.fsencode(guest) in paths(directory, watch.store),
                "the guest",
            )
        assert os.fsencode(emulator) in paths(directory, watch.store)


def paths(directory: Path, store: Path) -> set[bytes]:
    """The paths of all captured files."""
    listed = BuildIdFs(directory, store)("list", "--format", "{path}", check=False).out
    return {os.fsencode(line) for line in listed.splitlines()}


def test_a_guest_of_qemu_is_scanned(directory: Path) -> None:
    guest = moved.build(directory / "guest")
    with moved.running(tool("qemu-x86_64"), guest) as child:
        program = BuildIdFs(directory, directory / "store")
        program("scan", "proc", "--pid", str(child.pid))
    assert os.fsencode(guest) in paths(directory, directory / "store")
