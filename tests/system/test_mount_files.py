# SPDX-License-Identifier: Apache-2.0
"""The mounted store as the kernel shows it: names, attributes, bytes, caches. With both loops."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import random
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from buildidfs.model import ByteRange, Kind, Quality, Trust
from buildidfs.store import Store, coordination
from tests.support.clients.tools import tool
from tests.support.harness.captures import NOW, SECOND, capture, sighting

if TYPE_CHECKING:
    from tests.support.harness.mounts import BuildIdFs

pytestmark = pytest.mark.fuse

BOTH = (Kind.EXECUTABLE, Kind.DEBUGINFO)
ID = bytes.fromhex("abcdef0123")
HEX = "abcdef0123"
LARGE = random.Random(1).randbytes(3 << 20) + b"the end"


@pytest.fixture
def store(buildidfs: BuildIdFs) -> Iterator[Store]:
    with Store.create(buildidfs.store) as made:
        yield made


@pytest.fixture(params=["fast", "plain"])
def loop(request: pytest.FixtureRequest) -> str:
    return f"loop={request.param}"


def _requests(mount: Path) -> int:
    """How many requests of the kernel the server has read so far."""
    server = _server(mount)
    for line in Path(f"/proc/{server}/io").read_text().splitlines():
        if line.startswith("syscr:"):
            return int(line.split()[1])
    raise AssertionError("no syscr in /proc/PID/io")


def _server(mount: Path) -> str:
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes().split(b"\0")
                if b"mount" in words and os.fsencode(mount) in words:
                    return process.name
    raise AssertionError(f"nobody serves {mount}")


# --- names, attributes ---------------------------------------------------------------------------


def test_the_mount_and_its_files(store: Store, buildidfs: BuildIdFs, loop: str) -> None:
    seen = sighting(mode=0o104755, mtime_ns=NOW - 5 * SECOND - 1)
    store.commit([capture(store, LARGE, ID, kinds=BOTH, at=seen)])
    with buildidfs.mounted("-o", loop) as mount:
        elf = os.stat(mount / HEX / "elf")
        assert stat.S_IMODE(elf.st_mode) == 0o555
        assert (elf.st_size, elf.st_mtime_ns) == (len(LARGE), NOW - 5 * SECOND - 1)
        assert elf.st_ino == os.stat(mount / HEX / "executable").st_ino
        assert elf.st_ino == os.stat(mount / f"perf/usr/bin/app/{HEX}/elf").st_ino
        assert elf.st_ino == os.stat(mount / f".build-id/ab/{HEX[2:]}").st_ino
        debug = os.stat(mount / HEX / "debug")
        assert debug.st_ino == os.stat(mount / f"buildid/{HEX}/debuginfo").st_ino
        assert (mount / HEX / "elf").read_bytes() == LARGE
        assert (mount / HEX / "debug").read_bytes() == LARGE
        assert (mount / HEX / "path").read_bytes() == b"/usr/bin/app\n"
        assert os.readlink(mount / f"perf/.build-id/ab/{HEX[2:]}") == f"../../usr/bin/app/{HEX}"
        assert sorted(os.listdir(mount)) == sorted(
            [
                HEX,
                "buildid",
                "debug",
                "perf",
                ".build-id",
                ".dwz",
                ".debug",
                "usr",
                "README",
                "by-path",
                "by-name",
                "containers",
                "missing",
            ]
        )


#: Directories that may have nothing in them.
_EMPTY = (".dwz", "containers", "missing")


def test_directory_entries_have_types_and_numbers(store: Store, buildidfs: BuildIdFs) -> None:
    store.commit([capture(store, b"x", ID, kinds=BOTH)])
    with buildidfs.mounted() as mount:
        for directory, subdirectories, files in os.walk(mount):
            with os.scandir(directory) as entries:
                for entry in entries:
                    status = os.lstat(entry.path)
                    assert entry.inode() == status.st_ino
                    assert entry.is_dir(follow_symlinks=False) == stat.S_ISDIR(status.st_mode)
                    assert entry.is_symlink() == stat.S_ISLNK(status.st_mode)
            assert subdirectories or files or directory.endswith(_EMPTY), directory


def test_many_ids_are_listed_once_each(store: Store, buildidfs: BuildIdFs, loop: str) -> None:
    ids = [bytes([7]) + number.to_bytes(3, "big") for number in range(700)]
    first = store.commit([capture(store, b"x", ids[0])])
    assert first.outcomes
    artifact = store.index.artifact(1, Kind.EXECUTABLE)
    assert artifact
    store.commit([capture(store, artifact.digest, build_id) for build_id in ids[1:]])
    with buildidfs.mounted("-o", loop) as mount:
        names = [name for name in os.listdir(mount) if name.startswith("07")]
        assert sorted(names) == [build_id.hex() for build_id in ids]
        links = os.listdir(mount / "debug/.build-id/07")
        assert sorted(links) == [build_id.hex()[2:] for build_id in ids]
        assert sorted(os.listdir(mount / "perf/usr/bin/app")) == sorted(names)
        assert sorted(os.listdir(mount / "perf/.build-id/07")) == sorted(links)
        for directory in (mount, mount / "perf/usr/bin/app", mount / "debug/.build-id/07"):
            with os.scandir(directory) as entries:
                for entry in entries:
                    status = os.lstat(entry.path)
                    assert entry.inode() == status.st_ino
                    assert entry.is_dir(follow_symlinks=False) == stat.S_ISDIR(status.st_mode)
                    assert entry.is_symlink() == stat.S_ISLNK(status.st_mode)


def test_it_is_read_only_and_nothing_else(store: Store, buildidfs: BuildIdFs) -> None:
    store.commit([capture(store, b"x", ID)])
    with buildidfs.mounted() as mount:
        options = _mount_options(mount)
        assert {"ro", "nosuid", "nodev", "noexec", "default_permissions"} <= options
        for attempt in (
            lambda: os.open(mount / HEX / "elf", os.O_WRONLY),
            lambda: os.open(mount / "new", os.O_WRONLY | os.O_CREAT),
            lambda: os.mkdir(mount / "new"),
            lambda: os.unlink(mount / HEX / "elf"),
            lambda: os.rename(mount / HEX, mount / "x"),
            lambda: os.chmod(mount / HEX / "elf", 0o777),
            lambda: os.utime(mount / HEX / "elf"),
            lambda: os.setxattr(mount / HEX / "elf", "user.x", b""),
        ):
            with pytest.raises(OSError, match=r".") as caught:
                attempt()
            assert caught.value.errno == errno.EROFS
        with pytest.raises(FileExistsError):
            os.mkdir(mount / "perf")
        with pytest.raises(OSError, match=r".") as caught:
            os.getxattr(mount / HEX / "elf", "user.x")
        assert caught.value.errno == errno.ENODATA
        with pytest.raises(OSError, match=r".") as caught:
            os.getxattr(mount / HEX / "elf", "system.posix_acl_access")
        assert caught.value.errno == errno.ENOTSUP
        assert os.statvfs(mount).f_namemax == 255
        assert os.access(mount / HEX / "elf", os.R_OK)


def _mount_options(mount: Path) -> set[str]:
    with open("/proc/self/mounts", encoding="utf-8") as table:
        for line in table:
            source, point, fstype, options, *_ = line.split()
            if point == str(mount):
                assert (source, fstype) == ("buildidfs", "fuse.buildidfs")
                return set(options.split(","))
    raise AssertionError(f"{mount} is not mounted")


# --- bytes ---------------------------------------------------------------------------------------


def test_reading_in_every_way(store: Store, buildidfs: BuildIdFs, loop: str) -> None:
    store.commit([capture(store, LARGE, ID)])
    chosen = random.Random(2)
    with buildidfs.mounted("-o", loop) as mount:
        path = mount / HEX / "elf"
        fd = os.open(path, os.O_RDONLY)
        try:
            for _ in range(300):
                offset = chosen.randrange(len(LARGE) + 10)
                size = chosen.choice([1, 17, 4096, 70000, 1 << 20])
                assert os.pread(fd, size, offset) == LARGE[offset : offset + size]
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as mapped:
                assert mapped[:] == LARGE
        finally:
            os.close(fd)
        compared = subprocess.run([tool("cmp"), path, "-"], input=LARGE, check=False)
        assert compared.returncode == 0


def test_reading_from_a_cold_disk(store: Store, buildidfs: BuildIdFs, loop: str) -> None:
    """Then a thread reads, and must bring as much."""
    store.commit([capture(store, LARGE, ID)])
    artifact = store.index.artifact(1, Kind.EXECUTABLE)
    assert artifact
    with buildidfs.mounted("-o", loop) as mount:
        for start in (0, 1 << 20, (1 << 20) + 5, len(LARGE) - 3):
            with store.open_blob(artifact.digest) as blob:
                os.posix_fadvise(blob.fileno(), start, 0, os.POSIX_FADV_DONTNEED)
            _drop(mount)
            assert (mount / HEX / "elf").read_bytes() == LARGE


def _drop(mount: Path) -> None:
    """Make the kernel forget the pages of a file of the mount."""
    fd = os.open(mount / HEX / "elf", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def test_many_readers_at_once(store: Store, buildidfs: BuildIdFs, loop: str) -> None:
    ids = [bytes([9, number]) for number in range(16)]
    contents = [bytes([number]) * (100_000 + number) for number in range(16)]
    store.commit([capture(store, content, i) for i, content in zip(ids, contents, strict=True)])
    wrong: list[str] = []

    def read_all(mount: Path, seed: int) -> None:
        order = list(range(16)) * 5
        random.Random(seed).shuffle(order)
        for number in order:
            if (mount / ids[number].hex() / "elf").read_bytes() != contents[number]:
                wrong.append(ids[number].hex())
            if os.path.exists(mount / f"ffff{seed:02x}{number:02x}"):
                wrong.append("absent")

    with buildidfs.mounted("-o", loop) as mount:
        readers = [threading.Thread(target=read_all, args=(mount, seed)) for seed in range(8)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join(60)
            assert not reader.is_alive()
    assert not wrong


def test_scripts_of_strangers_read_as_zeros(store: Store, buildidfs: BuildIdFs, loop: str) -> None:
    """At any offset and length, and in a mapping; so does everything that shares the bytes."""
    extents = (ByteRange(5000, 3000), ByteRange(1 << 20, 10), ByteRange(len(LARGE) - 4, 4))
    new = capture(store, LARGE, ID, kinds=BOTH, trust=Trust.CONTAINER)
    store.commit([msgspec.structs.replace(new, scripts=extents)])
    zeroed = bytearray(LARGE)
    for extent in extents:
        zeroed[extent.offset : extent.offset + extent.size] = bytes(extent.size)
    with buildidfs.mounted("-o", loop) as mount:
        for name in (f"{HEX}/elf", f"debug/.build-id/ab/{HEX[2:]}.debug"):
            assert (mount / name).read_bytes() == zeroed
        fd = os.open(mount / HEX / "elf", os.O_RDONLY | os.O_DIRECT)
        try:
            for offset, size in ((4096, 4096), (8192 - 4096, 512), (1 << 20, 4096)):
                buffer = mmap.mmap(-1, size)
                assert os.preadv(fd, [buffer], offset) == size
                assert buffer[:] == zeroed[offset : offset + size]
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE) as mapped:
                assert mapped[:] == zeroed
        finally:
            os.close(fd)
    with buildidfs.mounted("-o", loop, "--gdb-scripts=keep") as mount:
        assert (mount / HEX / "elf").read_bytes() == LARGE


# --- caches and commits --------------------------------------------------------------------------


def test_what_cannot_change_is_not_asked_for_again(
    store: Store, buildidfs: BuildIdFs, loop: str
) -> None:
    store.commit([capture(store, LARGE, ID, kinds=BOTH)])
    present = [f"{HEX}/elf", f"{HEX}/debug", f"perf/usr/bin/app/{HEX}/debug", "debug/.dwz"]
    absent = ["ffff", f"{HEX}/vdso", "debug/.build-id/ff/ff.debug", "perf/nothing"]
    with buildidfs.mounted("-o", loop) as mount:
        everything = [*present, *absent]
        _look(mount, everything)
        assert _read(mount / HEX / "elf") == LARGE
        before = _requests(mount)
        for _ in range(100):
            _look(mount, everything)
        assert _requests(mount) - before < 10, "an idle loop makes a few reads of its own"
        before = _requests(mount)
        for _ in range(50):
            assert _read(mount / HEX / "elf") == LARGE
        # open and release; with requests for the bytes as well it would be more than 150
        assert 50 <= _requests(mount) - before < 130, "pages are kept from one open to the next"


def _read(path: Path) -> bytes:
    """The bytes of a file with as few system calls as there can be: Python also asks ioctls."""
    fd = os.open(path, os.O_RDONLY)
    try:
        return os.read(fd, len(LARGE) + 1)
    finally:
        os.close(fd)


def _look(mount: Path, names: list[str]) -> list[bool]:
    return [os.path.lexists(mount / name) for name in names]


def test_captures_appear_at_once(store: Store, buildidfs: BuildIdFs, loop: str) -> None:
    names = [HEX, f"{HEX}/elf", f"{HEX}/debuginfo", f"{HEX}/path", f"buildid/{HEX}/executable"]
    names += [f"debug/.build-id/ab/{HEX[2:]}", f".build-id/ab/{HEX[2:]}.debug"]
    names += [f"perf/.build-id/ab/{HEX[2:]}", f"perf/opt/app/{HEX}/elf", "perf/opt"]
    names += ["debug/.dwz/x/y"]
    at = sighting(b"/opt/app")
    with buildidfs.mounted("-o", loop) as mount:
        assert _look(mount, names) == [False] * len(names)
        assert HEX not in os.listdir(mount)
        store.commit([capture(store, b"elf", ID, at=at)])
        there = [name for name in names if not name.endswith(("debuginfo", ".debug", "y"))]
        assert [name for name, found in zip(names, _look(mount, names), strict=True) if found] == (
            there
        )
        assert HEX in os.listdir(mount)
        at = sighting(b"/lib/.dwz/x/y")
        store.commit([capture(store, b"debug", ID, kinds=[Kind.DEBUGINFO], at=at)])
        assert _look(mount, names) == [True] * len(names)
        assert (mount / "debug/.dwz/x/y").read_bytes() == b"debug"
        assert (mount / f"perf/opt/app/{HEX}/debug").read_bytes() == b"debug"


def test_captures_in_a_row_are_each_seen(store: Store, buildidfs: BuildIdFs, loop: str) -> None:
    with buildidfs.mounted("-o", loop) as mount:
        for number in range(60):
            build_id = bytes([1, 2, number])
            path = mount / build_id.hex() / "elf"
            assert not path.exists()
            assert not path.exists()
            store.commit([capture(store, b"%d" % number, build_id)])
            assert path.read_bytes() == b"%d" % number


def test_a_better_variant_takes_over(store: Store, buildidfs: BuildIdFs, loop: str) -> None:
    store.commit([capture(store, b"poor", ID, trust=Trust.CONTAINER)])
    places = [f"{HEX}/elf", f"{HEX}/executable", f"debug/.build-id/ab/{HEX[2:]}",
              f"perf/usr/bin/app/{HEX}/elf", f"perf/.build-id/ab/{HEX[2:]}/elf"]  # fmt: skip
    with buildidfs.mounted("-o", loop) as mount:
        assert {(mount / place).read_bytes() for place in places} == {b"poor"}
        old = open(mount / HEX / "elf", "rb")  # noqa: SIM115 (closed below, after the change)
        with old:
            store.commit([capture(store, b"better!", ID, trust=Trust.HOST)])
            assert [(mount / place).read_bytes() for place in places] == [b"better!"] * 5
            assert [(mount / place).stat().st_size for place in places] == [7] * 5
            assert old.read() == b"poor", "who has it open keeps what he has"


def test_mode_and_scripts_follow_where_it_was_seen(store: Store, buildidfs: BuildIdFs) -> None:
    """Bytes that a stranger had are seen on the host: the same blob, another file."""

    def seen(path: bytes, mode: int, trust: Trust) -> None:
        at = sighting(path, mode=mode, uid=os.getuid(), trust=trust)
        new = capture(store, b"0123456789", ID, at=at)
        store.commit([msgspec.structs.replace(new, scripts=(ByteRange(2, 3),))])

    seen(b"/stranger", 0o100700, Trust.CONTAINER)
    with buildidfs.mounted() as mount:
        path = mount / HEX / "elf"
        assert path.read_bytes() == b"01\0\0\x0056789"
        assert stat.S_IMODE(path.stat().st_mode) == 0o500
        seen(b"/bin/app", 0o100755, Trust.HOST)
        assert path.read_bytes() == b"0123456789"
        assert stat.S_IMODE(path.stat().st_mode) == 0o555


def test_path_is_never_old(store: Store, buildidfs: BuildIdFs) -> None:
    with buildidfs.mounted() as mount:
        for number in range(20):
            at = sighting(b"/seen/%d" % number, seen_ns=NOW + number * SECOND, ino=number + 1)
            store.commit([capture(store, b"x", ID, at=at)])
            text = (mount / HEX / "path").read_text()
            assert text.splitlines() == [f"/seen/{n}" for n in range(number, -1, -1)]


def test_a_commit_that_does_not_say_what_changed(
    store: Store, buildidfs: BuildIdFs, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it is when too much did."""
    store.commit([capture(store, b"old", b"\x01\x01", trust=Trust.CONTAINER)])
    names = [f"{HEX}/elf", HEX, f"debug/.build-id/ab/{HEX[2:]}", "0101/debug"]
    with buildidfs.mounted("-o", loop) as mount:
        assert not any(_look(mount, names))
        assert (mount / "0101/elf").read_bytes() == b"old"
        monkeypatch.setattr(coordination, "_MOST_ORDINALS", 0)
        store.commit(
            [
                capture(store, b"x", ID),
                capture(store, b"new", b"\x01\x01", kinds=BOTH, trust=Trust.HOST),
            ]
        )
        assert all(_look(mount, names))
        assert (mount / "0101/elf").read_bytes() == b"new"


def test_attributes_and_caches_after_quality_improves(store: Store, buildidfs: BuildIdFs) -> None:
    store.commit([capture(store, b"dynsym", ID, quality=Quality.DYNSYM)])
    with buildidfs.mounted() as mount:
        listed = {entry.name: entry.inode() for entry in os.scandir(mount / HEX)}
        store.commit([capture(store, b"symtab", ID, quality=Quality.SYMTAB)])
        now = {entry.name: entry.inode() for entry in os.scandir(mount / HEX)}
        assert now.keys() == listed.keys()
        assert now["elf"] != listed["elf"]
        assert (mount / HEX / "elf").read_bytes() == b"symtab"


def test_commits_while_everybody_looks(store: Store, buildidfs: BuildIdFs, loop: str) -> None:
    """Nobody is ever told that something is absent after its commit has returned."""
    ids = [bytes([5, number]) for number in range(40)]
    over = threading.Event()
    failures: list[str] = []

    def look(mount: Path, seed: int) -> None:
        chosen = random.Random(seed)
        while not over.is_set():
            name = chosen.choice(ids).hex()
            place = chosen.choice(
                ["", f"{name}/elf", f"{name}/debug", f"debug/.build-id/05/{name[2:]}.debug",
                 f"perf/usr/bin/app/{name}/debug", f"perf/.build-id/05/{name[2:]}/elf"]
            )  # fmt: skip
            try:
                if not place:
                    os.listdir(mount)
                elif (mount / place).exists():
                    (mount / place).read_bytes()
            except OSError as error:
                failures.append(f"{place}: {error}")

    with buildidfs.mounted("-o", loop) as mount:
        lookers = [threading.Thread(target=look, args=(mount, seed)) for seed in range(4)]
        for looker in lookers:
            looker.start()
        try:
            for build_id in ids:
                name = build_id.hex()
                store.commit([capture(store, b"elf" + build_id, build_id)])
                assert (mount / name / "elf").read_bytes() == b"elf" + build_id
                assert not (mount / name / "debug").exists()
                debug = capture(store, b"dbg" + build_id, build_id, kinds=[Kind.DEBUGINFO])
                store.commit([debug])
                place = mount / f"debug/.build-id/05/{name[2:]}.debug"
                assert place.read_bytes() == b"dbg" + build_id
        finally:
            over.set()
            for looker in lookers:
                looker.join(20)
    assert not failures
