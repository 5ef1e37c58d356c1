# SPDX-License-Identifier: Apache-2.0
"""Whoever owns a root can put anything anywhere in it, and swap it at any moment.

What is outside is never captured as if it were inside, what is no regular file is never opened,
and nothing found so is taken for the host's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.process.scanner import ProcScanner
from buildidfs.capture.scan.tree import TreeScanner, identify_tree
from buildidfs.capture.unresponsive.file_helper import FileHelper
from buildidfs.model import Trust
from tests.support.clients.tools import run, tool
from tests.support.elf import echo
from tests.support.elf.elfwriter import DWARF, elf_file
from tests.support.filesystems import opens
from tests.support.filesystems.swapping import Swapper
from tests.support.harness.children import running
from tests.support.harness.mounts import mount_points
from tests.support.harness.scans import Memory, Scan, own_namespaces, scan

pytestmark = pytest.mark.root

ID = b"\x1d" * 20
INSIDE = elf_file([DWARF], build_id=ID) + b"inside"
OUTSIDE = elf_file([DWARF], build_id=ID) + b"outside"
BY_ID = f"usr/lib/debug/.build-id/1d/{'1d' * 19}.debug"


@pytest.fixture
def place(directory: Path) -> Iterator[Path]:
    """A filesystem on which devices are devices and set-user-ID programs are trusted."""
    run([tool("mount"), "-t", "tmpfs", "-o", "mode=0755", "none", directory], check=True)
    try:
        yield directory
    finally:
        run([tool("umount"), "-l", directory], check=True)


@pytest.fixture(scope="module")
def swapper(scratch: Path) -> Swapper:
    """What swaps names while a test looks at them."""
    directory = scratch / "hostile-roots-swapper"
    directory.mkdir()
    return Swapper(directory)


def special_files(directory: Path) -> list[Path]:
    """One of each kind that must not be opened."""
    fifo, character, block = (directory / name for name in ("fifo", "char", "block"))
    os.mkfifo(fifo)
    os.mknod(character, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(block, stat.S_IFBLK | 0o600, os.makedev(7, 0))
    return [fifo, character, block]


# --- scan tree -----------------------------------------------------------------------------------


def test_what_is_opened_would_be_noticed(place: Path) -> None:
    for path in special_files(place):
        with opens.watched(path) as noticed:
            os.close(os.open(path, os.O_PATH))
            assert not noticed.any()
            with contextlib.suppress(OSError):  # a loop device without a file
                os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
                assert noticed.any()


def test_names_that_become_devices_between_a_look_and_an_open(
    place: Path, swapper: Swapper
) -> None:
    """The directory says "regular file", and then somebody swaps the name."""
    tree, aside = place / "tree", place / "aside"
    tree.mkdir()
    aside.mkdir()
    special = special_files(aside)
    outside = aside / "outside"
    outside.write_bytes(OUTSIDE)
    link, directory = aside / "link", aside / "directory"
    link.symlink_to(outside)
    directory.mkdir()
    for number in range(40):
        (tree / f"f{number:02}").write_bytes(INSIDE)
    swapped = [tree / f"f{number:02}" for number in range(20, 25)]
    pairs = list(zip(swapped, [*special, link, directory], strict=True))

    # the swaps go on with the same inodes, which are those that are watched
    with opens.watched(*special, outside) as noticed, swapper.swapping(pairs) as rounds:
        for _ in range(60):
            for _, answer in identify_tree([os.fsencode(tree)]):
                assert not isinstance(answer, Exception)
            found = scan(TreeScanner(Memory(), [os.fsencode(tree)]))
            assert {seen.data for seen in found.pinned} == {INSIDE}
            assert not noticed.any()
    assert rounds[0] > 50


def test_proc_of_a_container_is_left_alone(place: Path) -> None:
    """Its device number is in no mount table of ours; a file of it may be mounted over another."""
    (place / "root").mkdir()
    script = """
        set -eu
        mount --make-rprivate /
        echo over > "$1/over"; mkdir "$1/proc"; touch "$1/file"
        mount -t proc proc "$1/proc"
        mount --bind "$1/proc/version" "$1/over"
        exec cat
        """
    argv = [tool("unshare"), "-m", "-p", "-f", "--kill-child"]
    with running([*argv, "sh", "-c", script, "sh", place / "root"]) as process:
        (inside,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        path = f"/proc/{inside}/root{place}/root".encode()
        answers = {os.path.basename(name): str(what) for name, what in identify_tree([path])}
        seen = scan(TreeScanner(Memory(), [path]))
    assert answers == {b"file": "empty file"}
    assert (seen.pinned, len(seen.again), seen.unreadable) == ([], 1, [])


# --- scan proc -----------------------------------------------------------------------------------


class Root:
    """A root directory with a program in it whose build ID is `ID`, and files outside of it."""

    def __init__(self, place: Path, app: Path) -> None:
        self.path = place / "root"
        self.outside = place / "outside"
        self.debug = self.path / BY_ID
        (self.path / "bin").mkdir(parents=True)
        (self.path / "proc").mkdir()
        self.debug.parent.mkdir(parents=True)
        self.outside.write_bytes(OUTSIDE)
        shutil.copy(app, self.path / "bin/app")
        run([tool("mount"), "-t", "proc", "none", self.path / "proc"], check=True)

    def link(self, section: str, content: bytes) -> None:
        """Give the program a section that says where its debug file is."""
        part = self.path / "section"
        part.write_bytes(content)
        argv = [tool("objcopy"), "--add-section", f".{section}={part}", self.path / "bin/app"]
        run(argv, check=True)
        part.unlink()

    @contextlib.contextmanager
    def running(self, *namespace: str) -> Iterator[int]:
        """Run the program in it."""
        with running([*namespace, tool("chroot"), self.path, "/bin/app"]) as process:
            yield process.pid


@pytest.fixture(scope="module")
def app(scratch: Path) -> Path:
    """A program that says that its build ID is `ID`."""
    path = scratch / "hostile-roots-app"
    echo.build(path, f"-Wl,--build-id=0x{ID.hex()}")
    return path


@pytest.fixture
def root(place: Path, app: Path) -> Root:
    """A root of its own, that is gone after the test."""
    return Root(place, app)


def scanned(pid: int, helper: FileHelper | None = None) -> Scan:
    """What one scan finds of a process, with our own namespaces taken for the host's.

    Many scans in a row share a ``helper``, whose start takes longer than a scan.
    """
    return scan(ProcScanner(Memory(), pids=[pid], initial=own_namespaces(), helper=helper))


def assert_nothing_of_outside(found: Scan) -> None:
    for seen in found.pinned:
        assert not seen.data.endswith(b"outside"), seen.path
        # the vDSO is the kernel's own, and not of that root
        assert seen.pinned.sighting.origin.trust < Trust.HOST or seen.path == b"[vdso]"


def _fill(debug: Path, way: str, outside: Path) -> Path | None:
    """Put something other than a file where the debug file belongs; what must not be opened."""
    up = "../" * 20
    targets = {
        "absolute": str(outside),
        "upwards": f"{up}{outside}",
        "own root": f"/proc/self/root{outside}",
        "root of the first": f"/proc/1/root{outside}",
        "root of the scanner": f"/proc/{os.getpid()}/root{outside}",
        "its own descriptor": "/proc/self/fd/0",
        "working directory": f"/proc/{os.getpid()}/cwd/{up}{outside}",
        "itself": debug.name,
        "nothing": "/does/not/exist",
        "memory": "/proc/self/mem",
    }
    if way in targets:
        debug.symlink_to(targets[way])
    elif way == "linked directory":
        debug.parent.rmdir()
        debug.parent.symlink_to(f"/proc/{os.getpid()}/root{outside.parent}")
        (outside.parent / debug.name).write_bytes(OUTSIDE)
    elif way == "directory":
        debug.mkdir()
    elif way == "socket":
        with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(debug.parent):
            bound.bind(debug.name)
    else:
        kind = {"fifo": stat.S_IFIFO, "char": stat.S_IFCHR, "block": stat.S_IFBLK}[way]
        os.mknod(debug, kind | 0o666, os.makedev(7, 0) if way == "block" else os.makedev(1, 3))
        return debug
    return None


WAYS = ("absolute", "upwards", "own root", "root of the first", "root of the scanner",
        "its own descriptor", "working directory", "itself", "nothing", "memory",
        "linked directory", "directory", "socket", "fifo", "char", "block")  # fmt: skip


@pytest.mark.parametrize("namespace", [(), ("unshare", "-m")], ids=["chroot", "namespace"])
@pytest.mark.parametrize("way", WAYS)
def test_what_stands_where_a_debug_file_belongs(
    root: Root, way: str, namespace: tuple[str, ...]
) -> None:
    special = _fill(root.debug, way, root.outside)
    with root.running(*namespace) as pid, contextlib.ExitStack() as stack:
        noticed = stack.enter_context(opens.watched(*filter(None, [special, root.outside])))
        found = scanned(pid)
        assert not noticed.any()
    assert_nothing_of_outside(found)
    assert {seen.path for seen in found.pinned} == {b"/bin/app", b"[vdso]"}


def test_a_debug_file_that_is_one_is_found(root: Root) -> None:
    """So that the above did not fail to look."""
    root.debug.write_bytes(INSIDE)
    (root.path / "bin/.debug").mkdir()
    (root.path / "bin/.debug/name").write_bytes(INSIDE + b"2")
    checksum = zlib.crc32(INSIDE + b"2").to_bytes(4, "little")
    root.link("gnu_debuglink", b"name".ljust(8, b"\0") + checksum)
    with root.running() as pid:
        assert scanned(pid).data(f"/{BY_ID}") == INSIDE
        root.debug.unlink()
        assert scanned(pid).data("/bin/.debug/name") == INSIDE + b"2"


LINKS = {
    "parent": b"../outside",
    "far up": b"../" * 30 + b"%s",
    "absolute": b"%s",
    "own root": b"/proc/self/root%s",
    "hidden in a directory": b"x/../../outside",
    "below .dwz": b"/x/.dwz/../../../../../../..%s",
    "long": b"x" * 10_000,
    "long with slashes": b"x/" * 5_000,
    "dot": b".",
    "dots": b"..",
    "slash": b"/",
    "not UTF-8": b"\xff\xfe\n\x1b[31m",
}


@pytest.mark.parametrize("name", LINKS.values(), ids=LINKS)
def test_names_of_debug_files_lead_nowhere(root: Root, name: bytes) -> None:
    name = name.replace(b"%s", os.fsencode(root.outside))
    padded = name + b"\0" * (4 - len(name) % 4)
    root.link("gnu_debuglink", padded + zlib.crc32(OUTSIDE).to_bytes(4, "little"))
    root.link("gnu_debugaltlink", name + b"\0" + ID)
    with root.running() as pid, opens.watched(root.outside) as noticed:
        found = scanned(pid)
        assert not noticed.any()
    assert_nothing_of_outside(found)
    assert {seen.path for seen in found.pinned} == {b"/bin/app", b"[vdso]"}
    assert all(str(item.reason) for item in found.unreadable)


def test_names_swapped_while_they_are_followed(root: Root, swapper: Swapper) -> None:
    """Files for links, FIFOs and devices, and directories for links, between any two steps."""
    aside = root.path / "aside"
    aside.mkdir()
    root.debug.write_bytes(INSIDE)
    special = special_files(aside)
    link = aside / "link"
    link.symlink_to(f"/proc/{os.getpid()}/root{root.outside}")
    directory = aside / "directory"
    directory.symlink_to("/../.." + str(root.outside.parent))
    (root.outside.parent / root.debug.name).write_bytes(OUTSIDE)

    pairs = [(root.debug, other) for other in (*special, link) for _ in range(2)]
    pairs += [(root.debug.parent, directory)] * 2
    found_inside = 0
    with root.running() as pid, opens.watched(
        *special, root.outside
    ) as noticed, swapper.swapping(pairs) as rounds, FileHelper() as helper:  # fmt: skip
        for _ in range(100):
            found = scanned(pid, helper)
            assert_nothing_of_outside(found)
            assert not noticed.any()
            found_inside += any(seen.data == INSIDE for seen in found.pinned)
    assert rounds[0] > 100
    assert found_inside, "sometimes it is there"


_MOUNTS = """
import ctypes, sys, threading
libc = ctypes.CDLL(None, use_errno=True)
libc.mount(b"none", b"/", None, 0x44000, None)  # MS_REC | MS_PRIVATE
points = [name.encode() for name in sys.argv[1:]]
def work():
    while True:
        for point in points:
            libc.mount(b"none", point, b"tmpfs", 0, None)
        for point in points:
            libc.mount(point, point, None, 0x1000, None)  # MS_BIND
        for point in points * 2:
            libc.umount2(point, 2)
threading.Thread(target=work, daemon=True).start()
for line in sys.stdin.buffer:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
"""


def test_mounts_that_come_and_go_while_they_are_crossed(place: Path) -> None:
    """The process mounts over where its debug files would be, and takes it away again."""
    points = [place / name for name in ("a", "a/b", "c")]
    for point in points:
        point.mkdir()
    argv = [tool("unshare"), "-m", sys.executable, "-c", _MOUNTS, *points]
    mine = os.stat(place).st_dev
    before = _mounted_below(place)
    with running(argv) as process:
        path = f"/proc/{process.pid}/root{place}".encode()
        for _ in range(300):
            assert not scan(TreeScanner(Memory(), [path])).pinned
    assert os.stat(place).st_dev == mine
    assert _mounted_below(place) == before


def _mounted_below(place: Path) -> list[str]:
    return [point for point in mount_points() if point.startswith(str(place))]


_COVERS = """
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>
static char **paths;
static void *cover(void *unused)
{
    for (;;) {
        mount(paths[2], paths[3], 0, MS_BIND, 0);
        mount("none", paths[3], "tmpfs", 0, 0);
        umount2(paths[3], MNT_DETACH);
        umount2(paths[3], MNT_DETACH);
    }
    return unused;
}
int main(int argc, char **argv)
{
    char text[256];
    long size;
    pthread_t thread;
    paths = argv;
    if (unshare(CLONE_NEWNS) || mount("none", "/", 0, MS_REC | MS_PRIVATE, 0)
        || chroot(argv[1]) || chdir("/") || pthread_create(&thread, 0, cover, 0))
        return 1;
    while ((size = read(0, text, sizeof text)) > 0)
        if (write(1, text, size) != size)
            return 1;
    return 0;
}
"""


def test_mounts_over_debug_files_while_they_are_looked_for(place: Path) -> None:
    """What is found is what was there, in one layer or another, and never from outside."""
    root, source, program = place / "root", place / "covers.c", place / "root/app"
    first, other = root / BY_ID, root / "aside" / Path(BY_ID).name
    for debug, data in ((first, INSIDE), (other, INSIDE + b"aside")):
        debug.parent.mkdir(parents=True)
        debug.write_bytes(data)
    (place / first.name).write_bytes(OUTSIDE)
    source.write_text(_COVERS)
    build_id = f"-Wl,--build-id=0x{ID.hex()}"
    run([tool("gcc"), "-static", build_id, "-o", program, source, "-pthread"], check=True)
    found = set()
    argv = [program, root, "/aside", f"/{Path(BY_ID).parent}"]
    with running(argv) as process, FileHelper() as helper:
        for _ in range(300):
            seen = scanned(process.pid, helper)
            assert_nothing_of_outside(seen)
            found |= {each.data for each in seen.pinned if each.path.endswith(b".debug")}
    assert found == {INSIDE, INSIDE + b"aside"}


_ROOTS = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>
static int roots[2];
static void *swap(void *unused)
{
    for (int number = 0;; number = !number)
        if (fchdir(roots[number]) || chroot("."))
            _exit(1);
    return unused;
}
int main(int argc, char **argv)
{
    char text[256];
    long size;
    pthread_t thread;
    roots[0] = open(argv[1], O_RDONLY);
    roots[1] = open("/", O_RDONLY);
    if (pthread_create(&thread, 0, swap, 0))
        return 1;
    while ((size = read(0, text, sizeof text)) > 0)
        if (write(1, text, size) != size)
            return 1;
    return 0;
}
"""


@pytest.mark.host
def test_root_that_is_another_one_a_moment_later(place: Path) -> None:
    """What is root's in a directory that a process made its root is not the host's."""
    program, other, part = place / "app", place / "other", place / "section"
    hidden = Path(f"{other}{place}/name.debug")
    hidden.parent.mkdir(parents=True)
    hidden.write_bytes(INSIDE)
    part.write_bytes(b"name.debug\0\0" + zlib.crc32(INSIDE).to_bytes(4, "little"))
    source = place / "app.c"
    source.write_text(_ROOTS)
    build_id = f"-Wl,--build-id=0x{ID.hex()}"
    run([tool("gcc"), "-static", build_id, "-o", program, source, "-pthread"], check=True)
    run([tool("objcopy"), "--add-section", f".gnu_debuglink={part}", program], check=True)
    trusts = set()
    with running([program, other]) as process, FileHelper() as helper:
        for _ in range(200):
            for seen in scanned(process.pid, helper).pinned:
                if seen.data == INSIDE:
                    trusts.add(seen.pinned.sighting.origin.trust)
    assert trusts == {Trust.UNKNOWN}, "it is found when that is the root, and not believed"
