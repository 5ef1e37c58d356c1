# SPDX-License-Identifier: Apache-2.0
"""Programs to look for, and containers that have gone, shared by all client tests of a run."""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from tests.support.clients.commands import ROOT
from tests.support.containers.vanished import Vanished, vanished
from tests.support.elf import programs
from tests.support.harness import mounts
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.warm import Warm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.elf.programs import Program


@pytest.fixture(scope="session", autouse=True)
def _warm() -> Iterator[None]:
    """Run the commands of `BuildIdFs` without starting Python for each of them."""
    with contextlib.closing(Warm(ROOT)) as warm, pytest.MonkeyPatch.context() as patch:
        patch.setattr(BuildIdFs, "warm", warm)
        yield


@pytest.fixture(scope="session", autouse=True)
def _temporary_files() -> Iterator[None]:
    """Keep the temporary files of all programs in memory.

    Each symbolizer gets dozens of empty ones, and to make them on a disk takes longer than to ask
    the symbolizer.
    """
    if not os.access(mounts.MEMORY, os.W_OK):
        yield
        return
    directory = mounts.scratch_directory(mounts.MEMORY)
    directory.chmod(0o1777)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", str(directory))
            yield
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def program(scratch: Path) -> Program:
    """A program with its own executable and library, stripped, debug files beside them."""
    return programs.build(scratch / "program")


@pytest.fixture(scope="session")
def dwz_program(scratch: Path) -> Program:
    """The same, its debug files deduplicated into a third one by dwz."""
    return programs.build(scratch / "dwz-program", dwz="beside")


@pytest.fixture(scope="session")
def stripped(scratch: Path, program: Program) -> Path:
    """The executable of ``program``, installed on the host without debug files."""
    program.install(scratch / "stripped", debug="none")
    return scratch / "stripped/app/bin/hot"


@pytest.fixture(scope="session")
def gone(scratch: Path, program: Program) -> Iterator[Vanished]:
    """A container that ran ``program`` on a tmpfs, and is gone."""
    with vanished("tmpfs", program, scratch / "gone") as result:
        yield result


@pytest.fixture(scope="session")
def dwz_gone(scratch: Path, dwz_program: Program) -> Iterator[Vanished]:
    """A container that ran ``dwz_program`` on a tmpfs, and is gone."""
    with vanished("tmpfs", dwz_program, scratch / "dwz-gone") as result:
        yield result


@pytest.fixture
def buildidfs(directory: Path) -> BuildIdFs:
    """The program under test on a store of this test's own, which does not exist yet."""
    return BuildIdFs(directory)
