# SPDX-License-Identifier: Apache-2.0
"""Processes in mount namespaces, roots and user namespaces of their own, scanned into a store."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from buildidfs.capture.process.process import Ways
from buildidfs.capture.process.scanner import ProcScanner
from buildidfs.capture.unresponsive.filesystems import Patience
from buildidfs.errors import StoreFull
from buildidfs.ingest import Ingest, ScanSummary, StoreMemo
from buildidfs.model import BuildId, Kind, Trust
from buildidfs.store import Store
from tests.support.clients.tools import run, tool, unmount
from tests.support.elf import echo
from tests.support.filesystems import silentfs
from tests.support.harness.captures import read_blob
from tests.support.harness.children import cat_program, running
from tests.support.harness.scans import Memory, Scan, open_descriptors, own_namespaces, scan

if TYPE_CHECKING:
    from subprocess import Popen

    from buildidfs.capture.base import Memo
    from buildidfs.model import Origin
    from tests.support.harness.mounts import BuildIdFs

pytestmark = pytest.mark.root

# $1 is where a new tmpfs goes, $2 what is copied there and run
_ON_TMPFS = 'set -eu; mount -t tmpfs none "$1"; cp "$2" "$1/app"; exec "$1/app"'


@pytest.fixture
def place(directory: Path) -> Path:
    """A directory of this test's own, below which it may mount."""
    return directory


@pytest.fixture
def store(place: Path) -> Iterator[Store]:
    """An empty store; at the end it has to be sound, and every descriptor closed."""
    with Store.open(place / "store", create=True) as opened:
        before = open_descriptors()
        yield opened
        assert open_descriptors() <= before
        assert list(opened.check()) == []


def capture(store: Store, children: Sequence[Popen[bytes]], **options: object) -> ScanSummary:
    pids = [child.pid for child in children]
    return Ingest(store).run(scanner(StoreMemo(store), pids, **options))


def scanner(memo: Memo, pids: Sequence[int], **options: object) -> ProcScanner:
    """One of these processes, which takes our own namespaces for the host's."""
    return ProcScanner(memo, pids=pids, initial=own_namespaces(), **options)  # type: ignore[arg-type]  # as the test says


def held(store: Store, build_id: str, kind: Kind = Kind.EXECUTABLE) -> list[bytes]:
    """The bytes of every variant of a build ID."""
    ordinal = store.index.ordinal(BuildId.from_hex(build_id))
    if ordinal is None:
        return []
    return [read_blob(store, variant.digest) for variant in store.index.variants(ordinal, kind)]


def origins(store: Store, build_id: str) -> list[Origin]:
    ordinal = store.index.ordinal(BuildId.from_hex(build_id))
    assert ordinal is not None
    return [record.origin for record in store.index.origins(ordinal)]


def on_tmpfs(directory: Path, program: Path) -> list[str | Path]:
    """The command that runs ``program`` as ``directory``/app in a mount namespace of its own."""
    return [tool("unshare"), "-m", "sh", "-c", _ON_TMPFS, "sh", directory, program]


# --- mount namespaces ---------------------------------------------------------------------------


@pytest.mark.parametrize("query", [True, False])
@pytest.mark.parametrize("map_files", [True, False])
def test_same_path_in_two_mount_namespaces(
    place: Path, store: Store, query: bool, map_files: bool
) -> None:
    ids = [echo.build(place / name) for name in ("one", "two")]
    target = place / "mnt"
    target.mkdir()
    ways = Ways(query=query, map_files=map_files)
    with running(on_tmpfs(target, place / "one")) as one, running(
        on_tmpfs(target, place / "two")
    ) as two:  # fmt: skip
        summary = capture(store, [one, two], ways=ways)
    assert summary.unreadable == []
    for build_id, name in zip(ids, ("one", "two"), strict=True):
        assert held(store, build_id) == [(place / name).read_bytes()]
        (origin,) = origins(store, build_id)
        assert origin.path == os.fsencode(target / "app")
        assert origin.trust is Trust.CONTAINER
        assert origin.container == f"mnt:{origin.namespaces.mnt}"
    assert len({origins(store, build_id)[0].mnt_ns_id for build_id in ids}) == 2


def test_twenty_containers_one_blob(place: Path, store: Store) -> None:
    build_id = echo.build(place / "program")
    target = place / "mnt"
    target.mkdir()
    with contextlib.ExitStack() as stack:
        children = [
            stack.enter_context(running(on_tmpfs(target, place / "program"))) for _ in range(20)
        ]
        first = capture(store, children)
        second = capture(store, children)
    assert held(store, build_id) == [(place / "program").read_bytes()]
    assert len({origin.container for origin in origins(store, build_id)}) == 20
    assert len({origin.mnt_ns_id for origin in origins(store, build_id)}) == 20
    assert first.copied_bytes == store.stats().blob_bytes
    assert (second.captured, second.copied_bytes) == (0, 0)
    assert len(origins(store, build_id)) == 20


def test_one_file_in_twenty_mount_namespaces(place: Path, store: Store) -> None:
    """A file of the host, in namespaces that systemd makes for its services."""
    build_id = echo.build(place / "program")
    with contextlib.ExitStack() as stack:
        unshare = [tool("unshare"), "-m", place / "program"]
        children = [stack.enter_context(running(unshare)) for _ in range(20)]
        summary = capture(store, children)
    assert held(store, build_id) == [(place / "program").read_bytes()]
    assert len({origin.mnt_ns_id for origin in origins(store, build_id)}) == 20
    assert summary.captured == store.stats().blobs


@pytest.mark.parametrize("fate", [("umount", "-l"), ("mount", "-t", "tmpfs", "none")])
def test_unmounted_or_mounted_over(place: Path, store: Store, fate: tuple[str, ...]) -> None:
    build_id = echo.build(place / "program")
    target = place / "mnt"
    target.mkdir()
    with running(on_tmpfs(target, place / "program")) as child:
        inside = [tool("nsenter"), "-t", str(child.pid), "-m"]
        run([*inside, *fate, target], check=True)
        assert run([*inside, tool("test"), "-e", target / "app"]).rc == 1
        summary = capture(store, [child])
    assert summary.unreadable == []
    assert held(store, build_id) == [(place / "program").read_bytes()]


def test_files_of_two_layers_with_one_inode_number(place: Path) -> None:
    """An overlay may show the same device and inode number for files of different filesystems."""
    target, layers = place / "mnt", place / "layers"
    target.mkdir()
    layers.mkdir()
    echo.build(place / "lower")
    echo.build_library(place / "upper.so")
    script = """
        set -eu
        mkdir "$2/a" "$2/b"
        mount -t tmpfs none "$2/a"; mount -t tmpfs none "$2/b"
        mkdir "$2/a/lower" "$2/b/upper" "$2/b/work"
        cp "$3/lower" "$2/a/lower/app"; cp "$3/upper.so" "$2/b/upper/lib.so"
        stat -c %i "$2/a/lower/app" "$2/b/upper/lib.so" >&2
        mount -t overlay -o "lowerdir=$2/a/lower,upperdir=$2/b/upper,workdir=$2/b/work" none "$1"
        cp "$4" "$1/cat"
        LD_PRELOAD="$1/lib.so" exec "$1/cat"
        """
    argv = [tool("unshare"), "-m", "sh", "-c", script, "sh", target, layers, place, cat_program()]
    with running(argv) as child:
        result = scan(scanner(Memory(), [child.pid]))
    assert result.data(target / "lib.so") == (place / "upper.so").read_bytes()
    assert result.data(target / "cat") == cat_program().read_bytes()


# --- other roots and users -----------------------------------------------------------------------


@pytest.mark.parametrize("map_files", [True, False])
def test_chroot(place: Path, store: Store, map_files: bool) -> None:
    root = place / "root"
    (root / "bin").mkdir(parents=True)
    build_id = echo.build(root / "bin/app")
    ways = Ways(map_files=map_files)
    with running([tool("chroot"), root, "/bin/app"]) as child:
        capture(store, [child], ways=ways)
    assert held(store, build_id) == [(root / "bin/app").read_bytes()]
    (origin,) = origins(store, build_id)
    assert origin.path == b"/bin/app"
    # It is root's, in the host's mount namespace, and yet not the host's own.
    assert origin.trust is Trust.UNKNOWN


def test_user_namespace(place: Path, store: Store) -> None:
    build_id = echo.build(place / "program")
    place.chmod(0o755)
    target = place / "mnt"
    target.mkdir()
    nobody = [tool("setpriv"), "--reuid=65534", "--regid=65534", "--clear-groups"]
    inside = [*nobody, tool("unshare"), "-U", "-r", "-m"]
    if run([*inside, tool("true")]).rc != 0:
        pytest.skip("this machine does not let users make user namespaces")
    argv = [*inside, "sh", "-c", _ON_TMPFS, "sh", target, place / "program"]
    with running(argv) as child:
        summary = capture(store, [child])
    assert summary.unreadable == []
    assert held(store, build_id) == [(place / "program").read_bytes()]
    assert origins(store, build_id)[0].trust is Trust.CONTAINER


def test_executable_in_memory(place: Path, store: Store) -> None:
    build_id = echo.build(place / "program")
    start = (
        "import os, sys\n"
        "fd = os.memfd_create('nowhere')\n"
        "os.write(fd, open(sys.argv[1], 'rb').read())\n"
        "os.execve(fd, ['app'], {})\n"
    )
    with running([sys.executable, "-c", start, place / "program"]) as child:
        summary = capture(store, [child])
    assert summary.unreadable == []
    assert held(store, build_id) == [(place / "program").read_bytes()]
    (origin,) = origins(store, build_id)
    assert origin.path == b"/memfd:nowhere"


def test_debug_file_in_the_containers_own_root(place: Path, store: Store) -> None:
    """The host has another file at the same path, which must not be taken."""
    root = place / "root"
    (root / "bin").mkdir(parents=True)
    build_id = echo.build(root / "bin/app", "-g")
    where = f"usr/lib/debug/.build-id/{build_id[:2]}/{build_id[2:]}.debug"
    (root / where).parent.mkdir(parents=True)
    run([tool("objcopy"), "--only-keep-debug", root / "bin/app", root / where], check=True)
    run([tool("strip"), root / "bin/app"], check=True)
    # From inside, this leads to a file that does not exist.
    outside = place / "outside.debug"
    shutil.copy(root / where, outside)
    with running([tool("chroot"), root, "/bin/app"]) as child:
        capture(store, [child])
        assert held(store, build_id, Kind.DEBUGINFO) == [(root / where).read_bytes()]
    assert {origin.path for origin in origins(store, build_id)} == {
        b"/bin/app",
        f"/{where}".encode(),
    }
    other = place / "other-store"
    (root / where).unlink()
    (root / where).symlink_to(outside)
    with Store.open(other, create=True) as second, running(
        [tool("chroot"), root, "/bin/app"]
    ) as child:  # fmt: skip
        capture(second, [child])
        assert held(second, build_id, Kind.DEBUGINFO) == []
        assert len(held(second, build_id)) == 1


# --- choosing -----------------------------------------------------------------------------------


def test_only_what_is_asked_for(place: Path) -> None:
    target = place / "mnt"
    target.mkdir()
    mine, other = place / "mine", place / "other"
    echo.build(mine)
    echo.build(other)
    with running(on_tmpfs(target, mine)) as inside, running([other]) as host:
        pids = [inside.pid, host.pid]
        everything = scan(scanner(Memory(), pids))
        label = f"mnt:{os.stat(f'/proc/{inside.pid}/ns/mnt').st_ino}"
        contained = scan(scanner(Memory(), pids, containers_only=True))
        named = scan(scanner(Memory(), pids, containers=[label]))
        # Of the namespaces named, the network is shared with the host.
        strict = scan(
            scanner(Memory(), pids, containers_only=True, container_namespaces=("mnt", "net"))
        )
    assert {os.fsencode(target / "app"), os.fsencode(other)} <= set(everything.paths())
    for result in (contained, named):
        assert result.paths() == [b"[vdso]", os.fsencode(target / "app")]
    assert strict.paths() == [b"[vdso]"]


# --- files that change ----------------------------------------------------------------------------


def test_overwritten_again_and_again(place: Path, store: Store) -> None:
    """Whatever is captured meanwhile is one version or the other, whole, under its own ID."""
    library = place / "lib.so"
    versions = {}
    for name in ("one.so", "two.so"):
        build_id = echo.build_library(place / name, size=4 << 20)
        versions[build_id] = (place / name).read_bytes()
    assert len({len(data) for data in versions.values()}) == 1
    shutil.copy(place / "one.so", library)
    stop = threading.Event()
    rounds = 0

    def overwrite() -> None:
        nonlocal rounds
        with library.open("r+b", buffering=0) as file:
            while not stop.is_set():
                for data in versions.values():
                    file.seek(0)
                    file.write(data)
                rounds += 1

    argv = [tool("env"), f"LD_PRELOAD={library}", cat_program()]
    with running(argv) as child:
        writer = threading.Thread(target=overwrite)
        writer.start()
        try:
            for _ in range(10):
                capture(store, [child])
        finally:
            stop.set()
            writer.join()
        # Once it rests, it is captured.
        final = capture(store, [child])
    assert rounds > 2
    assert final.unreadable == []
    for build_id, data in versions.items():
        assert held(store, build_id) in ([], [data])
    last = list(versions)[-1]
    assert held(store, last) == [versions[last]]


def test_device_number_used_again(place: Path, store: Store) -> None:
    """Consecutive tmpfs get the same device and inode numbers: they must not look alike."""
    target = place / "mnt"
    target.mkdir()
    ids = []
    for number in range(3):
        program = place / f"program{number}"
        ids.append(echo.build(program))
        with running(on_tmpfs(target, program)) as child:
            capture(store, [child])
    for number, build_id in enumerate(ids):
        assert held(store, build_id) == [(place / f"program{number}").read_bytes()]


# --- what is left alone ---------------------------------------------------------------------------


@pytest.mark.fuse
def test_own_mount_is_not_touched(buildidfs: BuildIdFs) -> None:
    """The mount does not answer now: a scan that asked it for anything would hang."""
    program = buildidfs.store.parent / "program"
    echo.build(program)
    buildidfs("scan", "tree", program)
    with buildidfs.mounted() as mount:
        (name,) = [name for name in os.listdir(mount) if len(name) == 40]
        served = mount / name / "elf"
        # Nothing runs from there unless somebody insists.
        run([tool("mount"), "-o", "remount,bind,exec", mount], check=True)
        with running([served]) as child:
            assert str(served) in Path(f"/proc/{child.pid}/maps").read_text()
            with silentfs.silenced(mount):
                result = _scan_within(20, [child.pid])
    assert os.fsencode(served) not in result.paths()
    assert result.unreadable == []


def _scan_within(seconds: float, pids: Sequence[int]) -> Scan:
    results: list[Scan] = []
    thread = threading.Thread(
        target=lambda: results.append(scan(scanner(Memory(), pids))), daemon=True
    )
    thread.start()
    thread.join(seconds)
    assert results, f"the scan did not end within {seconds} s"
    return results[0]


def test_full_filesystem_keeps_what_fitted(place: Path) -> None:
    small = place / "small"
    small.mkdir()
    run([tool("mount"), "-t", "tmpfs", "-o", "size=12m", "none", small], check=True)
    try:
        build_id = echo.build(place / "fits")
        echo.build_library(place / "large.so", size=32 << 20)
        argv = [tool("env"), f"LD_PRELOAD={place / 'large.so'}", cat_program()]
        with Store.open(small / "store", create=True) as store:
            with (
                running([place / "fits"]) as first,
                running(argv) as second,
                pytest.raises(StoreFull),
            ):
                capture(store, [first, second])
            assert held(store, build_id) == [(place / "fits").read_bytes()]
            assert list(store.check()) == []
    finally:
        unmount(small)


# --- the vDSO of the other word size -----------------------------------------------------------

_START_32 = """
.globl _start
_start: mov $3, %eax; xor %ebx, %ebx; mov $text, %ecx; mov $64, %edx; int $0x80
        test %eax, %eax; jle done
        mov %eax, %edx; mov $4, %eax; mov $1, %ebx; mov $text, %ecx; int $0x80
        jmp _start
done:   mov $1, %eax; xor %ebx, %ebx; int $0x80
.comm text, 64
"""


def test_vdso_of_32_bit_processes(place: Path, store: Store) -> None:
    source, program = place / "start.s", place / "start"
    source.write_text(_START_32)
    argv = [tool("gcc"), "-m32", "-nostdlib", "-static", "-o", program, source]
    if run(argv).rc != 0:
        pytest.skip("no assembler for 32-bit x86 here")
    try:
        child = running([program])
        with child as process:
            capture(store, [process])
    except OSError:
        pytest.skip("this kernel runs no 32-bit programs")
    vdsos = [
        artifact
        for ordinal, _ in store.index.build_ids_from()
        if (artifact := store.index.artifact(ordinal, Kind.VDSO))
    ]
    sizes = {read_blob(store, artifact.digest)[4] for artifact in vdsos}
    assert sizes == {1, 2}  # ELFCLASS32 and ELFCLASS64
    by_class = {read_blob(store, artifact.digest)[4]: artifact.trust for artifact in vdsos}
    # A process can write to its own copy; ours is the kernel's.
    assert by_class == {1: Trust.UNKNOWN, 2: Trust.HOST}


@pytest.mark.fuse
def test_filesystem_that_does_not_answer(place: Path, store: Store) -> None:
    build_id = echo.build(place / "program")
    target = place / "mnt"
    target.mkdir()
    with (
        silentfs.served(target, place / "program") as server,
        running([target / "app"]) as silent,
        running([place / "program"]) as other,
    ):
        answered = capture(store, [silent])
        server.send_signal(signal.SIGSTOP)
        with Store.open(place / "second", create=True) as second:
            summary = capture(second, [silent, other], patience=Patience(0.5))
            assert held(second, build_id) == [(place / "program").read_bytes()]
            assert {origin.path for origin in origins(second, build_id)} == {
                os.fsencode(place / "program")
            }
    assert answered.unreadable == []
    assert os.fsencode(target / "app") in {origin.path for origin in origins(store, build_id)}
    (item,) = summary.unreadable
    assert item.path == os.fsencode(target / "app")
    assert item.reason == "its filesystem does not answer"
