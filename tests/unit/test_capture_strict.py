# SPDX-License-Identifier: Apache-2.0
"""Execs wait until what is mounted around them is watched, and what they open is kept.

Only who runs programs of a filesystem that the test alone has is held up.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from buildidfs.capture.closer import Closer
from buildidfs.capture.guard import Heartbeat
from buildidfs.capture.marks import Marks, open_exec_group
from buildidfs.capture.overload import Overload
from buildidfs.capture.strict import Strict
from buildidfs.capture.superblocks import HostMounts
from buildidfs.errors import CapabilityError
from buildidfs.linux import fanotify, mounts, namespaces, procfs
from tests.support.children import cat_program, needs_root
from tests.support.clients import run, tool
from tests.support.scans import without_privileges
from tests.support.waiting import until

if TYPE_CHECKING:
    from buildidfs.model import FileIdentity

pytestmark = [pytest.mark.root, needs_root("fanotify marks of filesystems")]

LIBRARY = b"\x7fELF and so on"

# $1 is the filesystem with the programs, $2 where to mount another one. Each exec of $1/cat waits.
_PRELUDE = """
set -eu
mount --make-rprivate /
"$1/cat" /dev/null
mount -t tmpfs none "$2"
printf '\\177ELF and so on' >"$2/libx.so.1"
printf 'text' >"$2/text"
"""
READS_LIBRARY = _PRELUDE + 'echo $$; exec "$1/cat" "$2/libx.so.1" "$2/text"'

# Each exec of $1/cat is a visit: without private mounts, with one, the same, with two, the same.
MOUNTS_LATER = """
set -eu
"$1/cat" /dev/null
mount -t tmpfs none "$2"
"$1/cat" /dev/null
"$1/cat" /dev/null
mkdir "$2/inner"
mount -t tmpfs none "$2/inner"
printf '\\177ELF and so on' >"$2/inner/libx.so.1"
"$1/cat" /dev/null
"$1/cat" /dev/null
echo $$
exec "$1/cat" "$2/inner/libx.so.1"
"""


@pytest.fixture
def programs(tmp_path: Path) -> Iterator[Path]:
    """A filesystem with programs that the host has, and nobody else uses."""
    path = tmp_path / "programs"
    path.mkdir()
    (tmp_path / "private").mkdir()
    run([tool("mount"), "-t", "tmpfs", "none", path], check=True)
    try:
        shutil.copy(cat_program(), path / "cat")
        shutil.copy(cat_program(), path / "ld-like.so.2")
        yield path
    finally:
        mounts.umount2(os.fsencode(path), mounts.MNT_DETACH)


@pytest.fixture
def closer() -> Iterator[Closer]:
    it = Closer()
    yield it
    assert it.finish(20)


class Watching:
    """A `Strict` for one filesystem, and what it takes to run something meanwhile."""

    def __init__(self, programs: Path, strict: Strict, heartbeat: Heartbeat) -> None:
        self.programs = programs
        self.strict = strict
        self.heartbeat = heartbeat

    def pump(self, finished: Callable[[], object]) -> None:
        """Do its work until then."""
        calls = self.strict.filenos()

        def step() -> object:
            ready, _, _ = select.select(list(calls), [], [], 0.01)
            for fd in ready:
                calls[fd]()
            return not ready and finished()

        until(step, "the end of a program")

    def run(self, script: str) -> bytes:
        """What a shell says that runs the script in a mount namespace of its own."""
        argv = [tool("unshare"), "-m", "sh", "-c", script, "sh", self.programs, self.private]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE)
        with child:
            try:
                self.pump(lambda: child.poll() is not None)
                assert child.stdout is not None
                assert child.returncode == 0
                return child.stdout.read()
            finally:
                child.kill()

    @property
    def private(self) -> Path:
        """Where scripts mount something of their own."""
        return self.programs.with_name("private")

    def cat(self, program: str = "cat") -> int:
        """Run a program here, in our own namespace; its process ID."""
        script = 'echo $$; exec "$1" /dev/null'
        child = subprocess.Popen(
            [tool("sh"), "-c", script, "sh", self.programs / program], stdout=subprocess.PIPE
        )
        with child:
            try:
                self.pump(lambda: child.poll() is not None)
                assert child.stdout is not None
                assert child.returncode == 0
                return int(child.stdout.read())
            finally:
                child.kill()


@contextlib.contextmanager
def watching(
    programs: Path,
    closer: Closer,
    known: Callable[[FileIdentity], bool] = lambda _: False,
    *,
    store_dev: int | None = None,
    overload: Overload | None = None,
) -> Iterator[Watching]:
    heartbeat = Heartbeat()
    strict = Strict(
        open_exec_group(),
        known,
        closer,
        heartbeat=heartbeat,
        store_dev=store_dev,
        only_at=[os.fsencode(programs)],
        overload=overload,
    )
    try:
        strict.start()
        yield Watching(programs, strict, heartbeat)
    finally:
        strict.close()


def test_who_runs_a_program_is_asked_about_and_it_is_kept(programs: Path, closer: Closer) -> None:
    with watching(programs, closer) as it:
        pid = it.cat()
        assert (it.strict.counts.execs, it.heartbeat.count) == (1, 1)
        assert not it.heartbeat.busy
        expected = (programs / "cat").stat()
        assert it.strict.take(pid + 1, expected.st_ino, b"/cat") is None
        fd = it.strict.take(pid, expected.st_ino, b"/cat")
        assert fd is not None
        with open(fd, "rb") as file:
            assert file.read() == cat_program().read_bytes()
        # Opens are nothing to it on a filesystem that the host has.
        assert it.strict.counts.opens == 0
        assert it.strict.take(pid, expected.st_ino, b"/cat") is None


def test_a_library_of_a_new_namespace_is_kept(programs: Path, closer: Closer) -> None:
    with watching(programs, closer) as it:
        if it.strict.degraded:
            pytest.skip(it.strict.degraded[0])
        for _ in range(5):
            said = it.run(READS_LIBRARY)
            pid, content = said.split(b"\n", 1)
            assert content == LIBRARY + b"text"
            fd = it.strict.take(int(pid), 0, os.fsencode(it.private / "libx.so.1"))
            assert fd is not None
            with open(fd, "rb") as file:
                assert file.read() == LIBRARY
            # What is not ELF is of no interest.
            assert it.strict.take(int(pid), 0, os.fsencode(it.private / "text")) is None
        assert it.strict.degraded == []


def test_what_is_mounted_later_is_marked_at_the_next_exec_and_once(
    programs: Path, closer: Closer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not mount_namespaces_have_numbers():
        pytest.skip("this kernel does not tell mount namespaces apart: all is marked each time")
    for _ in range(20):
        host = HostMounts()
        try:
            marks = marks_at_each_visit(programs, closer, monkeypatch)
            if host.refresh():
                continue  # with new mounts of the host everything is marked again
        finally:
            host.close()
        # Two groups each. What is marked already is marked again with what is new.
        assert marks == [0, 2, 0, 4, 0, 0]
        return
    pytest.skip("others keep mounting filesystems on this host")


def mount_namespaces_have_numbers() -> bool:
    pid_fd = procfs.open_pid(os.getpid())
    try:
        return namespaces.mnt_ns_id(pid_fd) != 0
    finally:
        os.close(pid_fd)


def marks_at_each_visit(
    programs: Path, closer: Closer, monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """How many superblocks were marked while each exec of MOUNTS_LATER waited."""
    placed = 0
    visits: list[int] = []
    with watching(programs, closer) as it, monkeypatch.context() as patch:
        if it.strict.degraded:
            pytest.skip(it.strict.degraded[0])
        mark, before_exec = fanotify.mark, it.strict._before_exec

        def counted(*args: Any, **more: Any) -> None:
            nonlocal placed
            mark(*args, **more)
            placed += 1

        def visit(pid: int) -> None:
            before = placed
            before_exec(pid)
            visits.append(placed - before)

        patch.setattr(fanotify, "mark", counted)
        patch.setattr(it.strict, "_before_exec", visit)
        pid, content = it.run(MOUNTS_LATER).split(b"\n", 1)
        assert content == LIBRARY
        fd = it.strict.take(int(pid), 0, os.fsencode(it.private / "inner" / "libx.so.1"))
        assert fd is not None
        with open(fd, "rb") as file:
            assert file.read() == LIBRARY
    return visits


@pytest.mark.parametrize("is_store", [False, True])
def test_a_namespace_can_be_told_of(programs: Path, closer: Closer, is_store: bool) -> None:
    """As by perf, when it runs nothing that is held up before it opens its library.

    Opens on the superblock of the store are never told of, wherever that is mounted.
    """
    script = 'mount -t tmpfs none "$2"; echo up; read _; cat "$2/libx.so.1"'
    argv = [tool("unshare"), "-m", "sh", "-c", script, "sh", programs, programs.parent / "private"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdin is not None
            assert child.stdout.readline() == b"up\n"
            private = Path(f"/proc/{child.pid}/root{programs.parent}/private")
            store_dev = private.stat().st_dev if is_store else None
            with watching(programs, closer, store_dev=store_dev) as it:
                it.strict.namespace_seen(child.pid)
                # What we open ourselves is told of, and not kept.
                (private / "libx.so.1").write_bytes(LIBRARY)
                it.pump(lambda: True)
                assert it.strict.counts.opens == (0 if is_store else 1)
                assert it.strict.counts.stashed == 0
                child.stdin.close()
                it.pump(lambda: child.poll() is not None)
                assert child.stdout.read() == LIBRARY
                assert it.strict.counts.stashed == (0 if is_store else 1)
        finally:
            child.kill()


def test_what_is_known_is_asked_about_once_until_it_changes(programs: Path, closer: Closer) -> None:
    captured: set[int] = set()
    with watching(programs, closer, lambda identity: identity.ino in captured) as it:
        it.cat()
        it.cat()
        assert it.strict.counts.execs == 2, "not known yet"
        captured |= {(programs / name).stat().st_ino for name in ("cat", "ld-like.so.2")}
        it.cat()
        if it.strict.degraded:
            pytest.skip(it.strict.degraded[0])
        for _ in range(3):
            it.cat()
        assert it.strict.counts.execs == 3
        with (programs / "cat").open("ab") as file:
            file.write(b"changed")
        captured.clear()
        it.cat()
        assert it.strict.counts.execs == 4


def test_an_interpreter_is_asked_about_always(programs: Path, closer: Closer) -> None:
    with watching(programs, closer, lambda _: True) as it:
        for _ in range(3):
            it.cat("ld-like.so.2")
        assert (it.strict.counts.execs, it.strict.counts.ignored) == (3, 0)


def test_the_superblock_of_the_store_on_the_host(programs: Path, closer: Closer) -> None:
    with watching(programs, closer, store_dev=programs.stat().st_dev) as it:
        it.cat()
        assert it.strict.counts.execs == 0
    for path, wanted in (("/", True), (str(programs), False)):
        marks = Marks(open_exec_group(), os.stat(path).st_dev)
        try:
            places = {mount.mount_point: mount for mount in marks.host.visible}
            assert marks.is_wanted(places[os.fsencode(path)]) is wanted
        finally:
            marks.close()


def test_opens_are_left_alone_for_a_while_when_there_are_too_many(
    programs: Path, closer: Closer
) -> None:
    many = '"$1/cat" /dev/null; for i in 1 2 3 4 5 6 7 8; do printf x >"$2/$i"; done; '
    script = _PRELUDE + many + 'exec "$1/cat" "$2/libx.so.1"'
    with watching(programs, closer, overload=Overload(most=3, seconds=1)) as it:
        it.run(script)
        it.run(script)
        assert it.strict.counts.overloads == 1
        assert len(it.strict.degraded) == 1
        opens, execs = it.strict.counts.opens, it.strict.counts.execs
        it.run(script)
        assert it.strict.counts.opens == opens
        assert it.strict.counts.execs > execs
        it.strict._resume_at = 0
        it.strict.tick()
        it.run(script)
        assert it.strict.counts.opens > opens


def test_a_fault_of_ours_holds_up_nobody(
    programs: Path, closer: Closer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watching(programs, closer) as it:

        def fault(_: int) -> None:
            raise RuntimeError("a fault")

        monkeypatch.setattr(it.strict, "_before_exec", fault)
        with pytest.raises(RuntimeError, match="a fault"):
            it.cat()
        monkeypatch.undo()
        assert it.heartbeat.count == 1
        assert not it.heartbeat.busy
        it.cat()


def test_without_privileges_it_says_what_is_missing() -> None:
    with without_privileges(), pytest.raises(CapabilityError, match="CAP_SYS_ADMIN"):
        open_exec_group()
