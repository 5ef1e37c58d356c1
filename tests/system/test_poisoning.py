# SPDX-License-Identifier: Apache-2.0
"""Nothing done to a file before, while or after it is captured puts other bytes under an ID.

Each test ends with the same question to the mount: has every file the SHA-256 that was recorded
for that build ID, and do its bytes carry that build ID?
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from buildidfs.capture.process.process import Ways
from buildidfs.capture.process.scanner import ProcScanner
from buildidfs.formats.elf.identify import ElfFile, describe
from buildidfs.formats.elf.other_ids import htlhash
from buildidfs.ingest import Ingest, StoreMemo
from buildidfs.model import Absence, BuildId, Kind
from buildidfs.store import Store
from tests.support.clients.tools import run, tool
from tests.support.elf import echo
from tests.support.filesystems.filereader import FileReader
from tests.support.harness.catches import Program as Probe
from tests.support.harness.children import cat_program, running
from tests.support.harness.mounts import BuildIdFs
from tests.support.harness.scans import own_namespaces
from tests.support.harness.waiting import until
from tests.support.harness.watching import Watcher, watching

if TYPE_CHECKING:
    from tests.support.clients.tools import Argument

pytestmark = [pytest.mark.root, pytest.mark.fuse]

PATIENCE = 60.0
VIA = ["scan", pytest.param("watch", marks=[pytest.mark.host])]


class Version(NamedTuple):
    """One content that a file has at some time."""

    build_id: str
    content: bytes


class Libraries:
    """Shared libraries of one size, each with a build ID and bytes of its own."""

    def __init__(self, directory: Path, size: int = 1 << 16) -> None:
        template = directory / "template.so"
        self._build_id = bytes.fromhex(echo.build_library(template, size=size))
        self._content = template.read_bytes()
        self._payload = len(self._content) // 2
        template.unlink()

    def version(self, build_id: bytes | None = None) -> Version:
        """A new one; with a build ID that another has, if it is given."""
        own = os.urandom(20) if build_id is None else build_id
        content = bytearray(self._content.replace(self._build_id, own))
        content[self._payload : self._payload + 32] = os.urandom(32)
        return Version(own.hex(), bytes(content))


class Capturing:
    """Has files captured that are mapped, by a scan of a process or by a watch."""

    def __init__(
        self, buildidfs: BuildIdFs, watcher: Watcher | None, probe: Probe, scratch: Path
    ) -> None:
        self.buildidfs = buildidfs
        self.store = buildidfs.store
        self._scratch = scratch
        self._watcher = watcher
        self._probe = probe

    @property
    def is_watch(self) -> bool:
        """True if a watch captures."""
        return self._watcher is not None

    def map(self, library: Path) -> None:
        """Let a process map a library; what a scan finds is captured when this returns."""
        if self._watcher is not None:
            run([self._probe.exe, library], check=True)
            return
        with mapped(library) as pid:
            scan(self.store, pid)

    def run(self, argv: Sequence[Argument]) -> None:
        """Run a program that answers as `tests.support.harness.children.running` expects."""
        with running(argv) as process:
            if self._watcher is None:
                self.buildidfs.scan(process.pid)

    def expect(self, version: Version) -> None:
        """Wait until the store has it."""
        digest = hashlib.sha256(version.content).hexdigest()
        until(lambda: digest in held(self.store, version.build_id), "a capture", PATIENCE)

    def rest(self) -> None:
        """Wait until the watch has no file of this module open, besides its store.

        The watch as a whole may never rest, because other tests run on the host.
        """
        if self._watcher is not None:
            watcher, since = self._watcher, time.monotonic()
            until(
                lambda: time.monotonic() > since + 2.5 and not self._open_files(watcher),
                "rest", PATIENCE,
            )  # fmt: skip

    def _open_files(self, watcher: Watcher) -> list[str]:
        found = []
        for pid in watcher.processes():
            # Files are closed meanwhile, and processes end.
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for fd in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(FileNotFoundError):
                        found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        scratch, store = str(self._scratch), str(self.store)
        return [each for each in found if each.startswith(scratch) and store not in each]


@contextlib.contextmanager
def mapped(library: Path) -> Iterator[int]:
    """A process that has mapped it, and does nothing."""
    with running([tool("env"), f"LD_PRELOAD={library}", cat_program()]) as child:
        yield child.pid


def scan(store: Path, pid: int, ways: Ways | None = None) -> None:
    """Scan one process, with our own namespaces taken for the host's."""
    with Store.open(store, create=True) as opened:
        found = ProcScanner(StoreMemo(opened), pids=[pid], initial=own_namespaces(), ways=ways)
        Ingest(opened).run(found)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    """What maps a library under the eyes of a watch."""
    return Probe(tmp_path_factory.mktemp("probe"))


@pytest.fixture(scope="module")
def libraries(scratch: Path) -> Libraries:
    """Small ones, without number."""
    return Libraries(scratch)


@pytest.fixture(scope="module")
def large_libraries(scratch: Path) -> Libraries:
    """Of several megabytes, which take a while to be read and written."""
    return Libraries(scratch, 3 << 20)


@pytest.fixture(scope="module")
def watched(scratch: Path, probe: Probe) -> Iterator[Capturing]:
    """One watch for all tests, with a store of their own; at the end every file in it is right."""
    home = scratch / "poisoning-watched"
    home.mkdir()
    buildidfs = BuildIdFs(home)
    with watching(buildidfs.store, "--no-scan") as watcher:
        capturing = Capturing(buildidfs, watcher, probe, scratch)
        yield capturing
        capturing.rest()
    assert_right(buildidfs)


@pytest.fixture(params=VIA)
def capturing(
    request: pytest.FixtureRequest, buildidfs: BuildIdFs, probe: Probe, scratch: Path
) -> Iterator[Capturing]:
    """Either way; at the end every file of the mount is what it is said to be."""
    if request.param == "watch":
        yield request.getfixturevalue("watched")
        return
    yield Capturing(buildidfs, None, probe, scratch)
    assert_right(buildidfs)


def held(store: Path, build_id: str) -> set[str]:
    """The digests of all variants of a build ID."""
    with Store.open(store, read_only=True) as opened:
        ordinal = opened.index.ordinal(BuildId.from_hex(build_id))
        if ordinal is None:
            return set()
        return {each.digest.hex() for kind in Kind for each in opened.index.variants(ordinal, kind)}


def digests(*versions: Version) -> set[str]:
    return {hashlib.sha256(version.content).hexdigest() for version in versions}


def assert_right(buildidfs: BuildIdFs) -> None:
    """Wrong bytes served: 0; nor any that are kept, and may be served one day."""
    served = {}
    with Store.open(buildidfs.store, read_only=True) as store:
        assert list(store.check()) == []
        for ordinal, build_id in store.index.build_ids_from():
            for kind, name in ((Kind.EXECUTABLE, "elf"), (Kind.DEBUGINFO, "debug")):
                for number, variant in enumerate(store.index.variants(ordinal, kind)):
                    if not number:
                        served[build_id.hex(), name] = variant.digest.hex()
                        continue
                    with store.open_blob(variant.digest) as blob:
                        assert_is(blob.pread(blob.size, 0), build_id.hex(), variant.digest.hex())
    assert served
    with buildidfs.mounted("--gdb-scripts=keep") as mount:
        for (build_id, name), digest in served.items():
            assert_is((mount / build_id / name).read_bytes(), build_id, digest)


def assert_is(data: bytes, build_id: str, digest: str) -> None:
    """These are the bytes that were recorded, and they carry that build ID.

    A debug file without one may be there by its name and checksum, and a rewritten program by its
    hash. No test here makes such files; a watch sees those of the tests that run beside it.
    """
    assert hashlib.sha256(data).hexdigest() == digest
    described = describe(FileReader(data), len(data))
    if described is Absence.NO_BUILD_ID:
        return
    assert isinstance(described, ElfFile)
    hashed = htlhash(FileReader(data), len(data))
    assert build_id in (described.build_id.hex(), hashed.hex())


# --- overwritten ---------------------------------------------------------------------------------


def test_overwritten_and_its_times_put_back(
    capturing: Capturing, directory: Path, libraries: Libraries
) -> None:
    """The same inode, size and modification time, within one second: and yet another file."""
    library = directory / "lib.so"
    versions = [libraries.version() for _ in range(4)]
    library.write_bytes(versions[0].content)
    before = library.stat()
    for version in versions:
        with library.open("r+b") as file:
            file.write(version.content)
        os.utime(library, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert library.stat().st_mtime_ns == before.st_mtime_ns
        assert (library.stat().st_ino, library.stat().st_size) == (before.st_ino, before.st_size)
        capturing.map(library)
        capturing.expect(version)
    for version in versions:
        assert held(capturing.store, version.build_id) == digests(version)


@pytest.mark.parametrize("filesystem", ["disk", "tmpfs"])
def test_written_through_a_mapping(
    capturing: Capturing, directory: Path, libraries: Libraries, filesystem: str
) -> None:
    """Stores to a page that is dirty already leave no trace in any time of the file."""
    place = directory / "place"
    place.mkdir()
    if filesystem == "tmpfs":
        run([tool("mount"), "-t", "tmpfs", "none", place], check=True)
    try:
        library = place / "lib.so"
        versions = [libraries.version() for _ in range(3)]
        library.write_bytes(versions[0].content)
        capturing.map(library)
        capturing.expect(versions[0])
        for version in versions[1:]:
            with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
                memory[0:1] = memory[0:1]
                capturing.map(library)
                memory[:] = version.content
            capturing.map(library)
            capturing.expect(version)
        for version in versions:
            assert held(capturing.store, version.build_id) == digests(version)
    finally:
        if filesystem == "tmpfs":
            run([tool("umount"), "-l", place], check=True)


@pytest.mark.parametrize("how", ["write", "map"])
def test_overwritten_while_it_is_captured(
    capturing: Capturing, directory: Path, large_libraries: Libraries, how: str
) -> None:
    """Half of one version and half of another is neither."""
    library = directory / "lib.so"
    versions = [large_libraries.version() for _ in range(3)]
    library.write_bytes(versions[0].content)
    with _meanwhile(_Overwriting(library, versions, how)) as rounds:

        def is_overwritten() -> bool:
            capturing.map(library)
            return rounds[0] > 3

        until(is_overwritten, "some versions", 60)
    capturing.map(library)
    last = next(each for each in versions if each.content == library.read_bytes())
    capturing.expect(last)
    for version in versions:
        assert held(capturing.store, version.build_id) <= digests(version)


class _Overwriting:
    """Writes a version over the one before, again and again; whole ones, in pieces."""

    def __init__(self, path: Path, versions: list[Version], how: str) -> None:
        self._path, self._versions, self._how = path, versions, how

    def __call__(self) -> None:
        version = random.choice(self._versions).content
        with self._path.open("r+b", buffering=0) as file:
            if self._how == "write":
                for at in range(0, len(version), 1 << 16):
                    os.pwrite(file.fileno(), version[at : at + (1 << 16)], at)
                return
            with mmap.mmap(file.fileno(), 0) as memory:
                for at in range(0, len(version), 1 << 16):
                    memory[at : at + (1 << 16)] = version[at : at + (1 << 16)]


@contextlib.contextmanager
def _meanwhile(work: Callable[[], None]) -> Iterator[list[int]]:
    """Do ``work`` again and again in a thread while the block runs; yields how often, in a list."""
    over, rounds = threading.Event(), [0]

    def loop() -> None:
        while not over.is_set():
            work()
            rounds[0] += 1

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield rounds
    finally:
        over.set()
        thread.join(30)
        assert not thread.is_alive()


# --- swapped -------------------------------------------------------------------------------------


@pytest.mark.parametrize("map_files", [True, False])
@pytest.mark.parametrize("kept", [True, False], ids=["same-id", "other-id"])
def test_swapped_after_it_was_mapped(
    buildidfs: BuildIdFs, directory: Path, libraries: Libraries, map_files: bool, kept: bool
) -> None:
    """Where only the path is left to go by, what it leads to is captured as what it is, or not."""
    library, other = directory / "lib.so", directory / "other.so"
    mapped_version = libraries.version()
    swapped = libraries.version(bytes.fromhex(mapped_version.build_id) if kept else None)
    library.write_bytes(mapped_version.content)
    other.write_bytes(swapped.content)
    with mapped(library) as pid:
        other.rename(library)
        scan(buildidfs.store, pid, Ways(map_files=map_files))
    found = held(buildidfs.store, mapped_version.build_id)
    if map_files:
        assert found == digests(mapped_version)
    else:
        assert found <= digests(swapped) if kept else not found
    assert kept or not held(buildidfs.store, swapped.build_id)
    assert_right(buildidfs)


def test_swapped_all_the_time(capturing: Capturing, directory: Path, libraries: Libraries) -> None:
    """By renames, some of them of a file with the same build ID and other bytes."""
    library, aside = directory / "lib.so", directory / "aside.so"
    versions = [libraries.version() for _ in range(3)]
    versions.append(libraries.version(bytes.fromhex(versions[0].build_id)))
    library.write_bytes(versions[0].content)

    def swap() -> None:
        aside.write_bytes(random.choice(versions).content)
        aside.rename(library)

    with _meanwhile(swap) as rounds:
        maps = 0
        # On a busy machine there are fewer swaps than maps.
        while maps < 12 or rounds[0] < 12:
            capturing.map(library)
            maps += 1
    ids = {version.build_id for version in versions}
    # A library that is deleted when its process has ended can be missed; this one cannot.
    with mapped(library) as pid:
        if not capturing.is_watch:
            scan(capturing.store, pid)
        until(lambda: any(held(capturing.store, each) for each in ids), "a capture", PATIENCE)
    capturing.rest()
    for build_id in ids:
        same = [each for each in versions if each.build_id == build_id]
        assert held(capturing.store, build_id) <= digests(*same)


# --- claimed -------------------------------------------------------------------------------------


@pytest.mark.host
@pytest.mark.parametrize("first", ["host", "container"])
def test_build_id_of_the_hosts_claimed_by_a_container(
    capturing: Capturing, directory: Path, first: str
) -> None:
    """Whoever comes first: the host's is served as executable and debuginfo, and both are shown."""
    trusted, inside, forged = (directory / name for name in ("trusted", "inside", "forged"))
    trusted.mkdir()
    inside.mkdir()
    # /tmp may be mounted nosuid, and then says nothing of who put a file there
    run([tool("mount"), "-t", "tmpfs", "-o", "mode=0755", "none", trusted], check=True)
    try:
        build_id = echo.build(trusted / "app", "-g")
        genuine = Version(build_id, (trusted / "app").read_bytes())
        forgery = Version(build_id, genuine.content + b"forged")
        shutil.copy(trusted / "app", forged)
        forged.write_bytes(forgery.content)
        script = 'mount -t tmpfs none "$1" && cp -a "$2" "$1/app" && exec "$1/app"'
        contained = [tool("unshare"), "-m", "sh", "-c", script, "sh", inside, forged]
        order: list[tuple[Sequence[Argument], Version]] = [
            ([trusted / "app"], genuine),
            (contained, forgery),
        ]
        for argv, version in order if first == "host" else reversed(order):
            capturing.run(argv)
            capturing.expect(version)
    finally:
        run([tool("umount"), "-l", trusted], check=True)
    with capturing.buildidfs.mounted() as mount:
        for name in ("elf", "executable", "debug", "debuginfo"):
            assert (mount / build_id / name).read_bytes() == genuine.content
    shown = json.loads(capturing.buildidfs("show", "--json", build_id).out)
    for kind in ("executable", "debuginfo"):
        variants = [each for each in shown["variants"] if each["kind"] == kind]
        assert [each["trust"] for each in variants] == ["host", "container"]
        assert [each["served"] for each in variants] == [True, False]
        assert [{each["sha256"]} for each in variants] == [digests(genuine), digests(forgery)]
