# SPDX-License-Identifier: Apache-2.0
"""The program in the kernel: which touches it reports, and which it does not."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from buildidfs.capture.live.first_touch import FirstTouch, Touch, decode_touch
from buildidfs.formats.perf.records import Output, decode_ring
from buildidfs.linux import namespaces, perf_event, procfs
from buildidfs.linux.file_ops import closing_fd
from buildidfs.linux.perf_event import Ring

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Reports:
    """The program with its rings; reads the touches of one file."""

    def __init__(self) -> None:
        self.program = FirstTouch()
        self._rings = [
            Ring(cpu, 0, pages=64, watermark=1, has_output=True)
            for cpu in sorted(perf_event.online_cpus())
        ]
        for ring in self._rings:
            self.program.follow(ring.cpu, ring.fileno())

    def of(self, path: Path, use: Callable[[], object]) -> list[Touch]:
        """Return the touches of a file that a call makes."""
        use()
        inode = path.stat().st_ino
        return [touch for touch in self.all() if touch.inode == inode and not touch.is_limited]

    def all(self) -> list[Touch]:
        """Return the touches of all files since the last call."""
        records = [one for ring in self._rings for one in decode_ring(ring.take())]
        return [decode_touch(one.data) for one in records if isinstance(one, Output)]

    def close(self) -> None:
        self.program.close()
        for ring in self._rings:
            ring.close()


@pytest.fixture
def reports() -> Iterator[Reports]:
    made = Reports()
    yield made
    made.close()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program"
    shutil.copy("/usr/bin/true", path)
    return path


def _run(path: Path) -> Callable[[], object]:
    return lambda: subprocess.run([path], check=True)


def _touch_of(path: Path) -> None:
    """Map a file as data, and touch its first page."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert mapped[0] >= 0


def test_program_is_reported_until_it_is_known(reports: Reports, program: Path) -> None:
    found = reports.of(program, _run(program))
    assert found
    status = program.stat()
    numbers = os.major(status.st_dev), os.minor(status.st_dev)
    with closing_fd(procfs.open_pid(os.getpid())) as pid_fd:
        mounts = namespaces.mnt_ns_id(pid_fd)
    assert {(t.dev, t.ctime_ns, t.mnt_ns_id) for t in found} == {
        (numbers, status.st_ctime_ns, mounts)
    }
    for touch in found:
        reports.program.know(touch.key)
    for _ in range(3):
        assert reports.of(program, _run(program)) == []


def test_changed_program_is_reported_again(reports: Reports, program: Path) -> None:
    for touch in reports.of(program, _run(program)):
        reports.program.know(touch.key)
    program.chmod(0o700)
    found = reports.of(program, _run(program))
    assert {touch.ctime_ns for touch in found} == {program.stat().st_ctime_ns}


def test_known_program_is_reported_in_another_mount_namespace(
    reports: Reports, program: Path
) -> None:
    for touch in reports.of(program, _run(program)):
        reports.program.know(touch.key)
    inside = ["unshare", "--mount", program]
    assert reports.of(program, lambda: subprocess.run(inside, check=True))


def test_forgotten_program_is_reported(reports: Reports, program: Path) -> None:
    found = reports.of(program, _run(program))
    for touch in found:
        reports.program.know(touch.key)
        reports.program.forget(touch.key)
    assert reports.of(program, _run(program))


def test_data_is_reported_once_in_any_state_until_it_is_executed(
    reports: Reports, program: Path
) -> None:
    (first, *_) = reports.of(program, lambda: _touch_of(program))
    reports.program.know_data(first)
    time.sleep(0.01)  # until another touch of the same state is reported
    assert reports.of(program, lambda: _touch_of(program)) == []
    program.chmod(0o700)
    assert reports.of(program, lambda: _touch_of(program)) == []
    assert reports.of(program, _run(program))


def test_touch_is_reported_again_if_nothing_became_known(reports: Reports, program: Path) -> None:
    assert len(reports.of(program, lambda: _touch_of(program))) == 1
    time.sleep(0.01)
    assert len(reports.of(program, lambda: _touch_of(program))) == 1


_FLOOD = """
import mmap, os
os.setuid(65534)
for number in range(3000):
    fd = os.memfd_create("new")
    os.write(fd, b"x" * 4096)
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapped:
        mapped[0]
    os.close(fd)
"""


def test_user_cannot_wake_the_catcher_without_end(reports: Reports) -> None:
    begin = time.monotonic()
    subprocess.run([sys.executable, "-I", "-c", _FLOOD], check=True)
    windows = (time.monotonic() - begin) / 0.1 + 1
    counted = reports.all()
    assert len(counted) <= 600 * windows
    if windows < 4:
        assert any(touch.is_limited for touch in counted)


def test_output_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="not a touch"):
        decode_touch(b"short")
