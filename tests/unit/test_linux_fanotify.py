# SPDX-License-Identifier: Apache-2.0
"""buildidfs.linux.fanotify on a filesystem that only the test has: nobody else is held up."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.formats.fanotifyevents import EVENT_SIZE, FanotifyEvent, decode
from buildidfs.linux import fanotify, mounts
from tests.support.children import cat_program, needs_root
from tests.support.clients import run, tool

pytestmark = [pytest.mark.root, needs_root("fanotify marks of filesystems")]


@pytest.fixture
def private(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of the test's own with a program on it."""
    path = tmp_path / "private"
    path.mkdir()
    run([tool("mount"), "-t", "tmpfs", "none", path], check=True)
    try:
        (path / "cat").write_bytes(cat_program().read_bytes())
        (path / "cat").chmod(0o755)
        yield path
    finally:
        mounts.umount2(os.fsencode(path), mounts.MNT_DETACH)


@contextlib.contextmanager
def group(flags: int) -> Iterator[int]:
    fd = fanotify.init(flags)
    try:
        yield fd
    finally:
        os.close(fd)


def events(fd: int, seconds: float = 0) -> list[FanotifyEvent]:
    select.select([fd], [], [], seconds)
    return decode(fanotify.read(fd, 16 * EVENT_SIZE))


def files(found: list[FanotifyEvent]) -> list[str]:
    """The names of the files in the events, which are closed."""
    names = []
    for event in found:
        names.append(os.path.basename(os.readlink(fanotify.path_of(event.fd).decode())))
        os.close(event.fd)
    return names


def test_opens_on_a_filesystem(private: Path) -> None:
    with group(fanotify.CLASS_NOTIF) as fd:
        assert fanotify.read(fd, EVENT_SIZE) == b""
        fanotify.mark(fd, fanotify.MARK_FILESYSTEM, fanotify.OPEN, os.fsencode(private))
        (private / "cat").open("rb").close()
        (event,) = events(fd)
        assert (event.mask, event.pid) == (fanotify.OPEN, os.getpid())
        # The very file, readable, and closed when something else is run.
        assert os.pread(event.fd, 4, 0) == b"\x7fELF"
        assert not os.get_inheritable(event.fd)
        assert files([event]) == ["cat"]
        fanotify.flush(fd, fanotify.MARK_FILESYSTEM)
        (private / "cat").open("rb").close()
        assert events(fd) == []


def test_a_file_is_ignored_until_it_is_modified(private: Path) -> None:
    with group(fanotify.CLASS_NOTIF) as fd:
        fanotify.mark(fd, fanotify.MARK_FILESYSTEM, fanotify.OPEN, os.fsencode(private))
        for name in ("one", "two"):
            (private / name).write_bytes(b"x")
        with (private / "one").open("rb") as file:
            try:
                fanotify.ignore(fd, fanotify.OPEN, file.fileno())
            except OSError as error:
                assert error.errno == errno.EINVAL  # noqa: PT017 - before Linux 5.19
                pytest.skip("this kernel has no evictable marks")
        files(events(fd))
        (private / "one").open("rb").close()
        (private / "two").open("rb").close()
        assert files(events(fd)) == ["two"]
        with (private / "one").open("r+b") as file:
            file.write(b"y")
        (private / "one").open("rb").close()
        assert files(events(fd)) == ["one"]


def test_who_runs_a_program_waits_for_the_answer(private: Path) -> None:
    with group(fanotify.CLASS_CONTENT | fanotify.UNLIMITED_MARKS) as fd:
        fanotify.mark(fd, fanotify.MARK_FILESYSTEM, fanotify.OPEN_EXEC_PERM, os.fsencode(private))
        # Popen itself waits for the result of the exec: that must happen in another process.
        argv = [tool("sh"), "-c", 'exec "$0" /dev/null', private / "cat"]
        for allow, status in ((True, 0), (False, 126)):
            with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as child:
                try:
                    (event,) = events(fd, 20)
                    assert (event.mask, event.pid) == (fanotify.OPEN_EXEC_PERM, child.pid)
                    assert child.poll() is None
                    fanotify.respond(fd, event.fd, allow=allow)
                    with pytest.raises(FileNotFoundError):
                        fanotify.respond(fd, event.fd, allow=allow)
                    assert files([event]) == ["cat"]
                    assert child.wait(20) == status
                finally:
                    child.kill()


def test_the_end_of_the_group_lets_everybody_go_on(private: Path) -> None:
    with group(fanotify.CLASS_CONTENT) as fd:
        fanotify.mark(fd, fanotify.MARK_FILESYSTEM, fanotify.OPEN_EXEC_PERM, os.fsencode(private))
        argv = [tool("sh"), "-c", '"$0" /dev/null', private / "cat"]
        child = subprocess.Popen(argv)
        assert select.select([fd], [], [], 20)[0], "no exec was asked about"
    with child:
        assert child.wait(20) == 0


def test_mistakes_raise(private: Path) -> None:
    path = os.fsencode(private)
    with group(fanotify.CLASS_NOTIF) as fd:
        with pytest.raises(OSError, match="Invalid argument"):
            fanotify.mark(fd, fanotify.MARK_FILESYSTEM, fanotify.OPEN_EXEC_PERM, path)
        with pytest.raises(FileNotFoundError) as caught:
            fanotify.mark(fd, fanotify.MARK_FILESYSTEM, fanotify.OPEN, path + b"/nothing")
        assert caught.value.filename == path + b"/nothing"
        with pytest.raises(OSError, match="NUL byte"):
            fanotify.mark(fd, fanotify.MARK_FILESYSTEM, fanotify.OPEN, b"/\0")
        fanotify.mark(fd, fanotify.MARK_FILESYSTEM, fanotify.OPEN, path)
        (private / "cat").open("rb").close()
        with pytest.raises(OSError, match="Invalid argument"):
            fanotify.read(fd, EVENT_SIZE - 1)
    with pytest.raises(OSError, match="Invalid argument"):
        fanotify.init(1 << 30)
