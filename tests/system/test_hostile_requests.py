# SPDX-License-Identifier: Apache-2.0
"""Whatever its readers ask of the mount, and however they go away: it goes on to answer rightly.

One mount for each loop bears all of it. At the end every file in it is read again, its process has
no more memory than before, and found no fault in itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
import re
import resource
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from buildidfs.linux import syscalls
from buildidfs.model import Kind
from buildidfs.store import Store
from tests.support.clients.tools import run, tool
from tests.support.harness.captures import capture, sighting
from tests.support.harness.mounts import COMMAND, BuildIdFs, is_mountpoint
from tests.support.harness.waiting import until

pytestmark = [pytest.mark.root, pytest.mark.fuse]

BOTH = (Kind.EXECUTABLE, Kind.DEBUGINFO)
IDS = [bytes([0xAB, number >> 8, number & 255]) * 4 for number in range(300)]
SYS_GETDENTS64 = {"x86_64": 217}.get(os.uname().machine, 61)
SYS_RENAMEAT2 = {"x86_64": 316}.get(os.uname().machine, 276)
OFFSETS = (0, 1, 2, 7, 8, 63, 64, 65, 255, 256, 257, 364, 1 << 16, (1 << 31) - 1, 1 << 31,
           (1 << 32) - 1, 1 << 32, (1 << 32) + 1, (1 << 33) - 1, 1 << 33, (1 << 33) + 5, 1 << 48,
           (1 << 62), (1 << 63) - 4096, (1 << 63) - 1)  # fmt: skip
MEMORY = 24 << 20  # may come with a first use of things


def content(build_id: bytes) -> bytes:
    """What an ID has; some of it more than one read."""
    return build_id * (40_000 if build_id[1:3] == b"\0\1" else 7)


class Mount(NamedTuple):
    """A mount that all tests share, and the process behind it."""

    path: Path
    server: int
    log: Callable[[], str]

    def directories(self) -> list[Path]:
        """One of each kind."""
        first = IDS[0].hex()
        return [
            self.path / name
            for name in ("", first, "debug", "debug/.build-id", f"debug/.build-id/{first[:2]}",
                         "debug/.build-id/ff", "debug/.dwz", "debug/.dwz/x", "perf", "perf/usr",
                         "perf/usr/bin", "perf/usr/bin/app", f"perf/usr/bin/app/{first}",
                         "perf/.build-id", f"perf/.build-id/{first[:2]}", "usr", "usr/lib")
        ]  # fmt: skip

    def memory(self) -> int:
        """What the server has of its own, in bytes."""
        text = Path(f"/proc/{self.server}/status").read_text()
        found = re.search(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
        assert found is not None
        return int(found[1]) << 10

    def assert_right(self) -> None:
        """Every file is there and has its bytes."""
        for build_id in IDS:
            wanted = content(build_id)
            name = build_id.hex()
            assert (self.path / name / "elf").read_bytes() == wanted
            assert (self.path / f"debug/.build-id/{name[:2]}/{name[2:]}.debug").stat().st_size == (
                len(wanted)
            )
        names = {name for name in os.listdir(self.path) if name.startswith("ab")}
        assert names == {build_id.hex() for build_id in IDS}


@pytest.fixture(scope="module", params=["fast", "plain"])
def mount(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Mount]:
    home = scratch / f"hostile-requests-{request.param}"
    home.mkdir()
    buildidfs = BuildIdFs(home)
    with Store.create(buildidfs.store) as store:
        store.commit([capture(store, content(each), each, kinds=BOTH) for each in IDS])
        dwz = sighting(b"/usr/lib/.dwz/x/y")
        store.commit([capture(store, b"dwz", b"\x01\x02", kinds=BOTH[1:], at=dwz)])
    with buildidfs.mounted("-o", f"loop={request.param}") as path:
        made = Mount(path, _server(path), buildidfs.log)
        made.assert_right()
        for directory in made.directories():
            os.listdir(directory)
        before = made.memory()
        yield made
        made.assert_right()
        assert made.memory() < before + MEMORY
        assert "fault" not in made.log()


def _server(path: Path) -> int:
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if b"mount" in words and os.fsencode(path) in words:
                    return int(process.name)
    raise AssertionError(f"nobody serves {path}")


def errno_of(attempt: Callable[..., object], *arguments: object) -> int:
    """The errno of what is refused, 0 for what is not."""
    try:
        attempt(*arguments)
    except OSError as error:
        return error.errno or -1
    return 0


@contextlib.contextmanager
def opened(path: Path, flags: int = 0) -> Iterator[int]:
    """A descriptor for reading, until the end of the block."""
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        yield fd
    finally:
        os.close(fd)


# --- directories ---------------------------------------------------------------------------------


class Entry(NamedTuple):
    """struct linux_dirent64 of getdents64(2)."""

    inode: int
    offset: int
    type: int
    name: bytes


def getdents(fd: int, size: int = 1 << 15) -> list[Entry]:
    """The next entries that fit so many bytes. Raises OSError."""
    buffer = ctypes.create_string_buffer(max(size, 1))
    length = syscalls.syscall(SYS_GETDENTS64, fd, ctypes.addressof(buffer), size)
    data, entries, at = buffer.raw[:length], [], 0
    while at < len(data):
        inode, offset, record, kind = struct.unpack_from("=QqHB", data, at)
        name = data[at + 19 : at + record].split(b"\0", 1)[0]
        entries.append(Entry(inode, offset, kind, name))
        at += record
    return entries


def rest(fd: int, size: int = 1 << 15) -> list[Entry]:
    """All that is left."""
    found = []
    while more := getdents(fd, size):
        found += more
    return found


@pytest.mark.parametrize("which", range(17))
def test_listings_from_any_offset(mount: Mount, which: int) -> None:
    """From one that was given out, what follows; from any other, something of the directory."""
    chosen = random.Random(which)
    with opened(mount.directories()[which], os.O_DIRECTORY) as fd:
        whole = rest(fd, 600)
        names = [entry.name for entry in whole]
        assert len(set(names)) == len(names)
        for number in chosen.sample(range(len(whole)), min(8, len(whole))):
            os.lseek(fd, whole[number].offset, os.SEEK_SET)
            assert [entry.name for entry in rest(fd)] == names[number + 1 :]
        for offset in (*OFFSETS, *(chosen.randrange(1 << 63) for _ in range(20))):
            os.lseek(fd, offset, os.SEEK_SET)
            assert {entry.name for entry in getdents(fd)} <= {*names}, offset
            # a page that holds few, from there on
            os.lseek(fd, offset, os.SEEK_SET)
            with contextlib.suppress(OSError):
                getdents(fd, 64)
        for offset in (-1, -(1 << 63)):
            assert errno_of(os.lseek, fd, offset, os.SEEK_SET) == errno.EINVAL
        os.lseek(fd, 0, os.SEEK_SET)
        for size in (0, 1, 23) if whole else ():
            assert errno_of(getdents, fd, size) == errno.EINVAL
        assert [entry.name for entry in rest(fd)] == names


def test_names_of_all_sorts_are_absent(mount: Mount) -> None:
    one = IDS[0].hex()
    wrong = [one[:-1], one.upper(), one + "0", one[:2].upper() + one[2:], "a", "ab" * 121, "AB",
             f"{one}.debug", f" {one}", f"{one}\n", "abcg", "ab" * 120 + ".debug"]  # fmt: skip
    every = [bytes([byte]) for byte in range(1, 256) if byte not in b"/."]
    every += [b"ab" + byte for byte in every] + [byte + os.fsencode(one) for byte in every[:60]]
    for path in mount.directories():
        there = set(os.listdir(os.fsencode(path)))
        buckets = path.name == ".build-id"
        for name in [*map(os.fsencode, wrong), *every, b"x" * 255, b"\xff" * 255, b"\x01" * 254]:
            if name in there or (buckets and re.fullmatch(rb"[0-9a-f]{2}", name)):
                continue
            found = errno_of(os.lstat, os.fsencode(path) + b"/" + name)
            assert found == errno.ENOENT, (path, name)
        for size in (256, 1000):
            too_long = os.fsencode(path) + b"/" + b"x" * size
            assert errno_of(os.lstat, too_long) == errno.ENAMETOOLONG
        assert os.path.samefile(path / "..", path.parent)


def test_handles_that_are_made_up(mount: Mount) -> None:
    """open_by_handle_at(2) asks for inode numbers without a name."""
    chosen = random.Random(7)
    fd = os.open(mount.path, os.O_RDONLY)
    try:
        for _ in range(200):
            node = chosen.choice((chosen.randrange(1 << 64), 1 << 60 | chosen.randrange(1 << 40)))
            body = struct.pack("=QI", node, chosen.randrange(2))
            handle = ctypes.create_string_buffer(struct.pack("=Ii", len(body), 0x81) + body)
            opened = syscalls.libc.open_by_handle_at(fd, handle, os.O_RDONLY)
            assert opened < 0
            assert ctypes.get_errno() in (errno.ESTALE, errno.EOPNOTSUPP)
    finally:
        os.close(fd)


# --- bytes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("build_id", IDS[:2], ids=["short", "long"])
def test_reads_at_and_beyond_the_end(mount: Mount, build_id: bytes) -> None:
    wanted = content(build_id)
    end = len(wanted)
    with opened(mount.path / build_id.hex() / "elf") as fd:
        for offset in (end - 1, end, end + 1, end + 4096, 1 << 31, 1 << 40, (1 << 62) + 1,
                       (1 << 63) - (1 << 21), (1 << 63) - 1):  # fmt: skip
            for size in (0, 1, 4096, 1 << 20):
                found = b""
                with contextlib.suppress(OSError):  # EINVAL where offset and size overflow
                    found = os.pread(fd, size, offset)
                assert found == wanted[offset : offset + size]
        assert errno_of(os.pread, fd, 1, -1) == errno.EINVAL
        assert os.pread(fd, 0, 0) == b""
        assert os.lseek(fd, 0, os.SEEK_DATA) == 0
        assert os.lseek(fd, 0, os.SEEK_HOLE) == end
        assert errno_of(os.lseek, fd, end, os.SEEK_DATA) == errno.ENXIO
        assert errno_of(os.write, fd, b"x") == errno.EBADF
        assert errno_of(os.pwrite, fd, b"x", 0) == errno.EBADF
        assert errno_of(os.posix_fallocate, fd, 0, 10) == errno.EBADF
        assert errno_of(os.ftruncate, fd, 0) in (errno.EINVAL, errno.EROFS)
        refused = errno_of(mmap.mmap, fd, 0, mmap.MAP_SHARED, mmap.PROT_WRITE)
        assert refused in (errno.EACCES, errno.EPERM)


def test_a_thousand_open_files(mount: Mount) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    fds: list[tuple[int, bytes]] = []
    try:
        for number in range(1000):
            build_id = IDS[number % len(IDS)]
            name = ("elf", "debug", "executable", "path")[number // len(IDS)]
            path = mount.path / build_id.hex() / name
            wanted = b"/usr/bin/app\n" if name == "path" else content(build_id)[:100]
            fds.append((os.open(path, os.O_RDONLY), wanted))
        for fd, wanted in fds:
            assert os.pread(fd, 100, 0) == wanted
    finally:
        for fd, _ in fds:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# Becomes a user, opens as many of the files given as it can, says how many, and holds them.
_HOLDER = """
import os, sys
os.setgroups([])
os.setresgid(*[int(sys.argv[1])] * 3)
os.setresuid(*[int(sys.argv[1])] * 3)
held = 0
for path in sys.argv[2:]:
    try:
        os.open(path, os.O_RDONLY)
        held += 1
    except OSError as error:
        failure = error
print(held, failure.errno, flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def holding(paths: Sequence[Path], uid: int) -> Iterator[tuple[int, int]]:
    """A user's process with many open files; yields their number and the errno of the rest."""
    with subprocess.Popen(
        [sys.executable, "-I", "-c", _HOLDER, str(uid), *paths],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        held, number = process.stdout.readline().split()
        yield int(held), int(number)


def test_user_with_many_open_files_leaves_others_theirs(directory: Path) -> None:
    buildidfs = BuildIdFs(directory)
    with Store.create(buildidfs.store) as store:
        store.commit([capture(store, content(each), each, kinds=BOTH) for each in IDS])
    few = 200
    limited = (tool("prlimit"), f"--nofile={few}")
    with buildidfs.mounted(under=limited) as path, contextlib.ExitStack() as stack:
        paths = [path / build_id.hex() / "elf" for build_id in IDS]
        held, number = stack.enter_context(holding(paths, 65534))
        assert number == errno.ENFILE
        assert few // 8 < held < few // 2
        fewer, _ = stack.enter_context(holding(paths, 65533))
        assert few // 16 < fewer < held, "another user has half of what is left"
        for build_id in IDS[-40:]:
            stack.enter_context((path / build_id.hex() / "elf").open("rb"))
        assert "user 65534 has as many files" in buildidfs.log()


# --- writes --------------------------------------------------------------------------------------


def test_every_call_that_writes_is_refused(mount: Mount, tmp_path: Path) -> None:
    directory, new = mount.path / IDS[0].hex(), mount.path / "new"
    file, link = directory / "elf", mount.path / "buildid"
    exchange = [os.fsencode(directory), os.fsencode(mount.path / "perf")]
    pointers = [ctypes.create_string_buffer(name) for name in exchange]
    attempts: dict[str, Callable[[], object]] = {
        "write": lambda: os.open(file, os.O_WRONLY),
        "read and write": lambda: os.open(file, os.O_RDWR),
        "append": lambda: os.open(file, os.O_WRONLY | os.O_APPEND),
        "truncating open": lambda: os.open(file, os.O_RDONLY | os.O_TRUNC),
        "creat": lambda: os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL),
        "creat below": lambda: os.open(directory / "new", os.O_RDONLY | os.O_CREAT),
        "nameless": lambda: os.open(directory, os.O_RDWR | os.O_TMPFILE),
        "truncate": lambda: os.truncate(file, 0),
        "mkdir": lambda: os.mkdir(new),
        "fifo": lambda: os.mkfifo(new),
        "device": lambda: os.mknod(new, 0o020666, os.makedev(1, 3)),
        "symlink": lambda: os.symlink("x", new),
        "link": lambda: os.link(file, new),
        "rename": lambda: os.rename(directory, new),
        "exchange": lambda: syscalls.syscall(
            SYS_RENAMEAT2, syscalls.AT_FDCWD, ctypes.addressof(pointers[0]), syscalls.AT_FDCWD,
            ctypes.addressof(pointers[1]), 2,
        ),
        "unlink": lambda: os.unlink(file),
        "unlink a link": lambda: os.unlink(link),
        "rmdir": lambda: os.rmdir(directory),
        "chmod": lambda: os.chmod(file, 0o777),
        "chown": lambda: os.chown(file, 1, 1),
        "lchown": lambda: os.lchown(link, 1, 1),
        "utime": lambda: os.utime(file, (0, 0)),
        "utime of a link": lambda: os.utime(link, (0, 0), follow_symlinks=False),
        "setxattr": lambda: os.setxattr(file, "user.x", b"y"),
        "set an ACL": lambda: os.setxattr(file, "system.posix_acl_access", bytes(4)),
        "removexattr": lambda: os.removexattr(file, "user.x"),
    }  # fmt: skip
    for what, attempt in attempts.items():
        assert errno_of(attempt) == errno.EROFS, what
    assert errno_of(lambda: os.link(file, tmp_path / "x")) == errno.EXDEV
    assert errno_of(lambda: os.rename(file, tmp_path / "x")) == errno.EXDEV


# --- storms --------------------------------------------------------------------------------------


def test_lookups_and_forgets_by_the_thousand(mount: Mount) -> None:
    """While the kernel throws away what it knows, and has to ask for all of it again."""
    over, failures = threading.Event(), []

    def walk(seed: int) -> None:
        chosen = random.Random(seed)
        while not over.is_set():
            build_id = chosen.choice(IDS)
            name = build_id.hex()
            places = (f"{name}/elf", f"perf/usr/bin/app/{name}/elf", f".build-id/ab/{name[2:]}")
            try:
                if (mount.path / chosen.choice(places)).read_bytes() != content(build_id):
                    failures.append(name)
                os.listdir(mount.path / name)
                if os.path.lexists(mount.path / chosen.randbytes(20).hex()):
                    failures.append("made up")
            except OSError as error:
                failures.append(str(error))

    walkers = [threading.Thread(target=walk, args=(seed,)) for seed in range(3)]
    for walker in walkers:
        walker.start()
    try:
        for _ in range(3):
            Path("/proc/sys/vm/drop_caches").write_text("2")
            for number in range(700):
                os.path.lexists(mount.path / f"{number:08x}{'0' * 32}")
    finally:
        over.set()
        for walker in walkers:
            walker.join(60)
    assert failures == []


_READER = """
import os, signal, sys
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, True)
path = sys.argv[2]
print("up", flush=True)
while True:
    try:
        if sys.argv[1] == "read":
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.pread(fd, 100000, 0)
            os.close(fd)
        elif sys.argv[1] == "list":
            os.listdir(path)
        else:
            os.path.lexists(path + os.urandom(8).hex())
    except OSError:
        pass
"""


def test_readers_that_are_interrupted_or_killed(mount: Mount) -> None:
    """In the middle of a request that is not answered yet, or has been sent and is forgotten."""
    elf = mount.path / IDS[1].hex() / "elf"
    wanted = {"read": elf, "list": mount.path, "lookup": mount.path / "abab"}
    readers = [
        subprocess.Popen([sys.executable, "-c", _READER, what, path], stdout=subprocess.PIPE)
        for what, path in wanted.items()
        for _ in range(3)
    ]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"up\n"
        for _ in range(8):
            os.kill(mount.server, signal.SIGSTOP)
            try:
                until(lambda: any(_waits_for_fuse(reader.pid) for reader in readers), "a request")
                for reader in readers:
                    reader.send_signal(signal.SIGALRM)
            finally:
                os.kill(mount.server, signal.SIGCONT)
            assert (mount.path / IDS[0].hex() / "elf").read_bytes() == content(IDS[0])
        os.kill(mount.server, signal.SIGSTOP)
        try:
            until(lambda: any(_waits_for_fuse(reader.pid) for reader in readers), "a request")
            for reader in readers:
                reader.kill()
        finally:
            os.kill(mount.server, signal.SIGCONT)
    finally:
        for reader in readers:
            reader.kill()
            assert reader.stdout is not None
            reader.stdout.close()
            reader.wait(30)
    mount.assert_right()


def _waits_for_fuse(pid: int) -> bool:
    try:
        return (
            "fuse" in Path(f"/proc/{pid}/wchan").read_text()
            or "request_wait" in Path(f"/proc/{pid}/stack").read_text()
        )
    except OSError:
        return False


# --- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [("umount", "-l"), ("umount", "-f"), ("fusermount3", "-u", "-z")])
def test_unmounted_while_everybody_reads(buildidfs: BuildIdFs, how: tuple[str, ...]) -> None:
    """Readers get their bytes or an errno, nobody hangs, and the process ends."""
    with Store.create(buildidfs.store) as store:
        store.commit([capture(store, content(each), each) for each in IDS[:20]])
    buildidfs.mountpoint.mkdir()
    argv = [*COMMAND, "--store", buildidfs.store, "mount", buildidfs.mountpoint, "--foreground"]
    log = buildidfs.store.parent / "log"
    over, wrong, reads = threading.Event(), [], [0]

    def read(seed: int) -> None:
        chosen = random.Random(seed)
        while not over.is_set():
            build_id = chosen.choice(IDS[:20])
            with contextlib.suppress(OSError):
                os.listdir(buildidfs.mountpoint)
                data = (buildidfs.mountpoint / build_id.hex() / "elf").read_bytes()
                reads[0] += 1
                if data != content(build_id):
                    wrong.append(build_id)

    with log.open("wb") as output:
        server = subprocess.Popen([os.fspath(word) for word in argv], stdout=output, stderr=output)
    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    try:
        until(lambda: is_mountpoint(buildidfs.mountpoint), "the mount")
        for reader in readers:
            reader.start()
        until(lambda: reads[0] > 50, "reads")
        # -f is refused while somebody is in there, and aborts what waits
        run([tool(how[0]), *how[1:], buildidfs.mountpoint])
        if is_mountpoint(buildidfs.mountpoint):
            run([tool("umount"), "-l", buildidfs.mountpoint])
        until(lambda: server.poll() is not None, "the end of the server", 60)
    finally:
        over.set()
        for reader in readers:
            reader.join(30)
            assert not reader.is_alive()
        server.kill()
        server.wait(30)
    assert wrong == []
    assert "Traceback" not in log.read_text()
