# SPDX-License-Identifier: Apache-2.0
"""One watch of this host at a time: locks that all test runs of a machine share.

A watch opens each file that is executed anywhere, so a mount that another test has made is busy
for a moment, and a namespace lives longer than its processes. A test marked ``watch`` runs while no
other such test runs, nor one marked ``unwatched``; those run beside each other and beside all
others. A test that fails beside a watch says so first. A watch that follows only the control group
of its test needs no marker.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.support.harness.waiting import until

#: the longest that a test waits for those of other workers and runs
PATIENCE_S = 300.0
_OPERATIONS = {"watch": fcntl.LOCK_EX, "unwatched": fcntl.LOCK_SH}


class Quiet:
    """The share of one test process in the lock. Tests of a module in a row keep it."""

    def __init__(self, path: Path | None = None) -> None:
        """``path`` is the file that is locked; the default is the same for all runs."""
        self._path = path or Path(tempfile.gettempdir()) / "buildidfs-watch.lock"
        self._fd = -1
        self._holder: tuple[Path, str] | None = None

    def enter(self, item: pytest.Item, patience: float = PATIENCE_S) -> None:
        """Take the lock that the marker of a test asks for; fail the test if it is not had."""
        holder = _holder(item)
        if holder is None or holder == self._holder:
            return
        self._release()
        fd = _open(self._path)
        operation = _OPERATIONS[holder[1]] | fcntl.LOCK_NB
        try:
            until(lambda: _locked(fd, operation), "the lock", patience)
        except TimeoutError:
            os.close(fd)
            pytest.fail(
                f"another test run has held {self._path} for {patience:.0f} s,"
                " and this test needs a host that nothing else watches",
                pytrace=False,
            )
        self._fd, self._holder = fd, holder

    def leave(self, following: pytest.Item | None) -> None:
        """Give the lock back unless the next test of this process keeps it."""
        if following is None or _holder(following) != self._holder:
            self._release()

    @property
    def is_alone(self) -> bool:
        """True if this process may watch the host."""
        return self._holder is not None and self._holder[1] == "watch"

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._holder = -1, None


HOST: Final = Quiet()
"""The share of this process."""

RECORDINGS: Final = Path(tempfile.gettempdir()) / "buildidfs-perf.lock"
"""Locked by each recording of perf: alone by one with build IDs, together by the others.

On Linux 6.18 an event with build IDs corrupts the records of other recordings, and perf 6.1 aborts
("assertion failed at util/build-id.c").
"""


@contextlib.contextmanager
def recording_turn(options: Sequence[object]) -> Iterator[None]:
    """Wait until perf may record with these options."""
    fd = _open(RECORDINGS)
    try:
        has_build_ids = "--buildid-mmap" in options
        fcntl.flock(fd, fcntl.LOCK_EX if has_build_ids else fcntl.LOCK_SH)
        yield
    finally:
        os.close(fd)


def has_host() -> bool:
    """Return True if this process may watch the whole host: no test runs, or one marked ``watch``.

    Watches of other tests follow only the control group of `tests.support.harness.own_group`.
    """
    return "PYTEST_CURRENT_TEST" not in os.environ or HOST.is_alone


def watches() -> dict[int, str]:
    """The command lines of processes that watch this host and are not ours, by process ID."""
    found = {}
    for entry in os.listdir("/proc"):
        # Processes come and go.
        with contextlib.suppress(OSError):
            if entry.isdecimal() and _is_python(entry):
                words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
                if _is_watch(words) and os.getpid() not in _ancestors(int(entry)):
                    found[int(entry)] = b" ".join(words).decode(errors="replace").strip()
    return found


def explain(report: pytest.TestReport) -> None:
    """Begin the message of a failed test with the watches that it ran beside, not its own."""
    crash = getattr(report.longrepr, "reprcrash", None)
    if report.failed and crash is not None and (found := watches()):
        named = "; ".join(f"process {pid}: {line}" for pid, line in found.items())
        crash.message = f"a watch runs on this host ({named}): {crash.message}"


def _is_python(entry: str) -> bool:
    """Return False for a program whose command line may be locked, as that of a silent process is.

    The command line is in memory of the process; its name is in the kernel.
    """
    return Path(f"/proc/{entry}/comm").read_text().startswith(("python", "buildidfs"))


def _is_watch(words: list[bytes]) -> bool:
    command = [place for place, word in enumerate(words[:4]) if word.endswith(b"buildidfs")]
    own = words[command[0] + 1 :] if command else []
    return b"watch" in own and b"--cgroup" not in own


def _ancestors(pid: int) -> list[int]:
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def _holder(item: pytest.Item) -> tuple[Path, str] | None:
    for name in _OPERATIONS:
        if item.get_closest_marker(name):
            return item.path, name
    return None


def _open(path: Path) -> int:
    """Open a file to lock; one of another user in a sticky directory can only be opened so."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _locked(fd: int, operation: int) -> bool:
    try:
        fcntl.flock(fd, operation)
    except BlockingIOError:
        return False
    return True
