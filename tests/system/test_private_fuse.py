# SPDX-License-Identifier: Apache-2.0
"""Programs on FUSE filesystems that root may not read are losses with a build ID and a reason."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.capture.process.scanner import ProcScanner
from buildidfs.model import BuildId
from tests.support.elf import echo
from tests.support.filesystems import userfs
from tests.support.harness.children import running
from tests.support.harness.scans import Memory, Scan, open_descriptors, own_namespaces, scan
from tests.support.harness.waiting import until
from tests.support.harness.watching import watching

if TYPE_CHECKING:
    import subprocess

    from tests.support.harness.mounts import BuildIdFs

pytestmark = [pytest.mark.root, pytest.mark.fuse]

REASON = "a FUSE filesystem that its user mounted without allow_other"


@pytest.fixture(autouse=True)
def _descriptors_are_closed() -> Iterator[None]:
    before = open_descriptors()
    yield
    until(lambda: open_descriptors() <= before, "every descriptor closed")


@pytest.fixture
def program(directory: Path) -> Path:
    """A program that only the filesystem shows to others."""
    echo.build(directory / "program")
    return directory / "program"


@contextlib.contextmanager
def from_userfs(
    directory: Path, program: Path, where: str = "host"
) -> Iterator[tuple[subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """Run ``program`` as directory/mnt/app, from a filesystem of a user; server and process."""
    directory.chmod(0o755)
    target = directory / "mnt"
    target.mkdir()
    with userfs.served(target, program, where) as server:
        argv = [*userfs.entering(server, where), target / "app"]
        with running(argv) as child:
            yield server, child


def scanned(pid: int) -> Scan:
    return scan(ProcScanner(Memory(), pids=[pid], initial=own_namespaces()))


@pytest.mark.parametrize("where", ["host", "namespace", "shared"])
def test_scan_names_the_file_with_its_build_id_and_reason(
    directory: Path, program: Path, where: str
) -> None:
    with from_userfs(directory, program, where) as (_, child):
        place = directory / "mnt/app" if where == "host" else Path(f"/proc/{child.pid}/exe")
        with pytest.raises(PermissionError):
            place.read_bytes()
        (item,) = scanned(child.pid).unreadable
    assert item.path == os.fsencode(directory / "mnt/app")
    assert item.errno == errno.EACCES
    assert item.reason == f"Permission denied: {REASON}"
    assert item.build_id == BuildId.from_hex(echo.build_id_of(program))


def test_scan_ends_if_the_server_of_the_filesystem_is_stopped(
    directory: Path, program: Path
) -> None:
    with from_userfs(directory, program) as (server, child):
        server.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        (item,) = scanned(child.pid).unreadable
        seconds = time.monotonic() - began
    assert REASON in item.reason
    assert seconds < 60


def test_scan_proc_prints_the_loss(buildidfs: BuildIdFs, directory: Path, program: Path) -> None:
    with from_userfs(directory, program) as (_, child):
        result = buildidfs("scan", "proc", "--pid", str(child.pid), check=False)
    assert result.rc == 3
    assert REASON in result.err
    assert f"(build ID {echo.build_id_of(program)})" in result.err


def test_watch_names_the_loss(directory: Path, program: Path) -> None:
    with watching(directory / "store") as watch, from_userfs(directory, program):
        path = str(directory / "mnt/app")

        def is_named() -> bool:
            unreadable = watch.facts.get("unreadable_last", ())
            return any(item["path"] == path and REASON in item["reason"] for item in unreadable)

        until(is_named, f"{path} in the status of watch", 30)
        assert [item["reason"] for item in watch.facts["losses"]] == ["Permission denied"]
