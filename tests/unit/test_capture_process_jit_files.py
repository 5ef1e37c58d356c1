# SPDX-License-Identifier: Apache-2.0
"""Real processes, each in a mount namespace with a /tmp of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.process.jit_files import JitFinder, JitOwner
from buildidfs.capture.process.process import PinnedProcess, Ways
from buildidfs.capture.unresponsive.file_helper import FileHelper
from buildidfs.capture.unresponsive.filesystems import SlowMounts
from buildidfs.model import JitProcess
from buildidfs.store import Store
from buildidfs.store.jit_maps import JitMaps
from buildidfs.watch import jit
from buildidfs.watch.jit import JitFollower
from buildidfs.watch.state import WatchLimits
from tests.support.clients.tools import tool
from tests.support.containers.imitating import USER, container_and_imitation, entering
from tests.support.elf.jit import dump, load
from tests.support.harness.waiting import lines, until

pytestmark = [pytest.mark.root]

#: Does as a JIT compiler does, and obeys: each line it reads is Python to be executed.
_COMPILER = """
import mmap, os, sys
every = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
code = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, every)
path = "/tmp/perf-%d.map" % os.getpid()
def write(text, mode="a"):
    with open(path, mode) as file:
        file.write(text)
def dumped(data):
    file = open("/tmp/jit-%d.dump" % os.getpid(), "w+b")
    file.write(data)
    file.flush()
    return mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)
print("up", flush=True)
for line in sys.stdin:
    exec(line)
    print("done", flush=True)
"""


class Compiler:
    """A process with generated code."""

    def __init__(self, process: subprocess.Popen[bytes], pid: int) -> None:
        self._process = process
        self.pid = pid

    def do(self, line: str) -> None:
        """Have it execute a line of Python."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line.encode() + b"\n")
        self._process.stdin.flush()
        lines(self._process.stdout, lambda got: got == ["done"])

    def end(self) -> None:
        """Have it end, and its mount namespace with it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(30) == 0


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    script = 'mount -t tmpfs none /tmp; exec "$0" -c "$1"'
    argv = [
        tool("unshare"), "-m", "-p", "-f", "--mount-proc", "--kill-child",
        "sh", "-c", script, os.path.realpath(sys.executable), _COMPILER,
    ]  # fmt: skip
    # From the root: whatever is below /tmp is hidden in there, also a checkout.
    process = subprocess.Popen(argv, cwd="/", stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        lines(process.stdout, lambda got: got == ["up"])
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        yield Compiler(process, int(children[0]))
    finally:
        process.kill()
        process.wait(30)
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()


@pytest.fixture
def finder() -> Iterator[JitFinder]:
    with FileHelper() as helper:
        yield JitFinder(("mnt",), SlowMounts(), helper)


@pytest.fixture
def maps(tmp_path: Path) -> JitMaps:
    return JitMaps(os.fsencode(tmp_path))


def test_process_with_generated_code_is_known_by_its_mappings(compiler: Compiler) -> None:
    for pid, generates in ((compiler.pid, True), (os.getppid(), None)):
        with (
            PinnedProcess(pid, Ways()) as process,
            PinnedProcess(pid, Ways(query=False)) as by_text,
        ):
            process.executable_mappings()
            by_text.executable_mappings()
            assert process.has_generated_code == by_text.has_generated_code
            assert generates is None or process.has_generated_code


def test_ordinary_process_has_no_generated_code() -> None:
    with subprocess.Popen([tool("sleep"), "60"]) as child:
        try:
            with PinnedProcess(child.pid, Ways()) as process:
                until(process.executable_mappings, "the exec")
                assert not process.has_generated_code
        finally:
            child.kill()


def test_map_is_kept(compiler: Compiler, finder: JitFinder, maps: JitMaps) -> None:
    compiler.do(r'write("1 1 a\n2 1 b\n3 1 half a li")')
    finder.keep(maps, [compiler.pid])
    (kept,) = maps.of(compiler.pid)
    assert kept.text() == b"1 1 a\n2 1 b\n"
    process = kept.process
    assert (process.pid, process.comm) == (compiler.pid, Path(sys.executable).resolve().name)
    assert process.origin.path == b"/tmp/perf-%d.map" % process.ns_pid
    assert process.ns_pid != process.pid
    assert process.origin.container.startswith("mnt:")
    compiler.do(r'write("ne\n")')
    finder.keep(maps, [compiler.pid])
    assert maps.of(compiler.pid)[0].text() == b"1 1 a\n2 1 b\n3 1 half a line\n"
    compiler.do(r'write("4 1 c\n", "w")')  # another program in the same process
    finder.keep(maps, [compiler.pid])
    assert maps.of(compiler.pid)[0].text().endswith(b"line\n4 1 c\n")


def test_dump_is_found_by_its_mapping(compiler: Compiler, finder: JitFinder, maps: JitMaps) -> None:
    data = dump("<", load("<", 0x1000, b"f", b"\xc3" * 16, 0), load("<", 0x2000, b"g", b"", 1))
    compiler.do(f"kept = dumped({data!r})")
    compiler.do('import glob; os.unlink(glob.glob("/tmp/*.dump")[0])')  # it has no name any more
    finder.keep(maps, [compiler.pid])
    assert maps.of(compiler.pid)[0].text() == b"1000 10 f\n2000 10 g\n"


def test_map_that_is_full_is_not_read_any_more(
    compiler: Compiler, finder: JitFinder, maps: JitMaps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JitProcess, "MOST_BYTES", 12)
    compiler.do(r'write("1 1 a\n2 1 b\n")')
    (file,) = finder.find(compiler.pid)
    try:
        assert file.read(maps, 1000) == 12
        compiler.do(r'write("3 1 c\n" * 1000)')
        assert file.read(maps, 1000) == 0
    finally:
        file.close()


def test_large_dump_is_kept_to_its_end(
    compiler: Compiler, finder: JitFinder, maps: JitMaps
) -> None:
    """It takes several looks at the records of it, which are one look at the process."""
    compiler.do("from struct import pack")
    compiler.do('empty = pack("<IIQ", 3, 16, 0) * 100_000')
    compiler.do(f"kept = dumped({dump('<')!r} + empty + {load('<', 0x1000, b'f', b'', 1)!r})")
    finder.keep(maps, [compiler.pid])
    assert maps.of(compiler.pid)[0].text() == b"1000 10 f\n"


@pytest.mark.parametrize(
    "line",
    [
        'os.symlink("/etc/hostname", path)',
        "os.mkfifo(path)",
        "os.mkdir(path)",
        r'write("1 1 a\n"); os.chown(path, 12345, 0)',
    ],
)
def test_what_is_not_a_file_of_its_own_is_left_alone(
    compiler: Compiler, finder: JitFinder, maps: JitMaps, line: str
) -> None:
    compiler.do(line)
    finder.keep(maps, [compiler.pid])
    assert list(maps.all()) == []
    compiler.do("os.rename(path, path + '.old')")
    compiler.do(r'write("1 1 a\n")')
    finder.keep(maps, [compiler.pid])
    assert maps.of(compiler.pid)[0].text() == b"1 1 a\n"


def test_follower_keeps_the_rest_when_a_process_ends(
    compiler: Compiler, finder: JitFinder, tmp_path: Path
) -> None:
    with Store.create(tmp_path / "store") as store:
        follower = JitFollower(store, finder, WatchLimits())
        follower.start()
        try:
            compiler.do(r'write("1 1 a\n")')
            follower.report(compiler.pid)
            until(lambda: store.jit_maps.of(compiler.pid), "the map")
            compiler.do(r'write("2 1 b\n"); os.unlink(path)')
            compiler.end()
            until(
                lambda: store.jit_maps.of(compiler.pid)[0].text() == b"1 1 a\n2 1 b\n",
                "the end of the map",
            )
        finally:
            follower.close()


def test_follower_finds_a_map_that_is_written_later(
    compiler: Compiler, finder: JitFinder, tmp_path: Path
) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with Store.create(tmp_path / "store") as store:
        follower = JitFollower(store, finder, WatchLimits())
        follower.start()
        follower.report(compiler.pid)
        compiler.do(r'write("1 1 a\n")')
        until(lambda: store.jit_maps.of(compiler.pid), "the map")
        compiler.do(r'write("2 1 b\n")')
        follower.close()
        assert store.jit_maps.of(compiler.pid)[0].text() == b"1 1 a\n2 1 b\n"
    assert len(os.listdir("/proc/self/fd")) == before


def test_follower_reads_so_much_of_a_container_in_a_minute(
    compiler: Compiler, finder: JitFinder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "_MOST_BYTES_OF_A_SHARE", 3000)
    with Store.create(tmp_path / "store") as store:
        follower = JitFollower(store, finder, WatchLimits())
        follower.start()
        compiler.do('write("".join(f"{n:x} 1 function{n:04}\\n" for n in range(1000, 2000)))')
        follower.report(compiler.pid)
        until(lambda: store.jit_maps.of(compiler.pid), "the map")
        follower.close()
        assert 0 < store.jit_maps.of(compiler.pid)[0].size <= 3000


@contextlib.contextmanager
def namespaces_of_a_user(count: int) -> Iterator[list[int]]:
    """Idle processes of an ordinary user, each in a mount namespace of its own."""
    argv = [tool("unshare"), "-Urm", "sh", "-c", "echo; exec sleep 60"]
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(count):
            process = subprocess.Popen(argv, user=4242, group=4242, stdout=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        for process in processes:
            assert process.stdout is not None
            process.stdout.readline()
        yield [process.pid for process in processes]


def test_idle_processes_of_a_user_take_no_place_of_a_container(
    compiler: Compiler, finder: JitFinder, tmp_path: Path
) -> None:
    with Store.create(tmp_path / "store") as store, namespaces_of_a_user(10) as idle:
        refused: list[JitOwner] = []
        follower = JitFollower(store, finder, WatchLimits(jit_processes=8), refused=refused.append)
        follower.start()
        shares = [finder.whose(pid).share for pid in idle]
        assert {share.owner for share in shares} == {"uid 4242"}
        assert len(set(shares)) == 10
        for pid, share in zip(idle, shares, strict=True):
            follower.report(pid, share)
        until(lambda: len(refused) == 4, "two places for root, and ten for six")
        compiler.do(r'write("1 1 a\n")')
        follower.report(compiler.pid, finder.whose(compiler.pid).share)
        until(lambda: store.jit_maps.of(compiler.pid), "the map")
        assert len([pid for pid in idle if pid in follower._followed]) == 5
        follower.report(os.getpid())
        until(lambda: os.getpid() in follower._followed, "the place of root")
        # Namespaces with as many processes as others lose their place in any order.
        lost = {each.share for each in refused}
        assert len(lost) == len(refused) == 5
        assert lost <= set(shares)
        follower.close()


@pytest.mark.host
def test_imitation_of_a_container_has_another_share(finder: JitFinder) -> None:
    shares = []
    with container_and_imitation() as groups:
        for group in groups:
            argv = [*entering(group), "unshare", "-m", "sh", "-c", "echo; exec sleep 60"]
            with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                process.stdout.readline()
                shares.append(finder.whose(process.pid))
                process.kill()
    container, imitation = shares
    assert container.share.owner.startswith("/containers-")
    assert imitation.share.owner == f"uid {USER}"
    assert imitation.container == f"{container.container} (user {USER})"


def test_follower_pauses_after_an_error_that_lasts(
    finder: JitFinder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns: list[float] = []

    def fail(self: JitFollower) -> None:
        turns.append(time.monotonic())
        raise RuntimeError("a fault that lasts")

    monkeypatch.setattr(JitFollower, "_turn", fail)
    with Store.create(tmp_path / "store") as store:
        follower = JitFollower(store, finder, WatchLimits())
        follower.start()
        until(lambda: len(turns) >= 4, "some turns")
        follower.close()
    pauses = [later - earlier for earlier, later in itertools.pairwise(turns)]
    assert [pause >= least for pause, least in zip(pauses, (0.1, 0.2, 0.4), strict=False)] == [
        True
    ] * 3


def test_follower_leaves_out_what_is_not_wanted(
    compiler: Compiler, finder: JitFinder, tmp_path: Path
) -> None:
    asked = []
    with Store.create(tmp_path / "store") as store:
        limits = WatchLimits()
        follower = JitFollower(store, finder, limits, lambda at: bool(asked.append(at.path)))
        follower.start()
        compiler.do(r'write("1 1 a\n")')
        follower.report(compiler.pid)
        until(lambda: asked, "the question")
        follower.close()
        assert store.jit_maps.totals() == (0, 0)
