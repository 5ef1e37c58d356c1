# SPDX-License-Identifier: Apache-2.0
"""Files of containers that claim a name of the host's program never name its functions.

Sixty arrangements of trust, privacy, digests and order are made from a seed. In each of them a
program of the host and files of others claim one name: the same build ID, the same beginning of a
build ID, or the same htlhash. Then every reader is asked for the names, as root and over HTTP.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs import names
from buildidfs.capture.base import PinnedFile
from buildidfs.formats.elf.writer import symbol_file
from buildidfs.formats.perf.jit import JitFunction
from buildidfs.ingest import Ingest
from buildidfs.linux import inodes
from buildidfs.model import BuildId, Kind, Origin, Quality, Sighting, Standing, Trust
from buildidfs.profile.perf_data import Profile
from buildidfs.profile.reading import build_ids_of, coverage
from buildidfs.profile.repair import repair
from buildidfs.profile.why import Explainer
from buildidfs.store import Store
from buildidfs.symbolize.addresses import Symbolizer
from tests.support.elf.perfwriter import PerfWriter
from tests.support.harness.captures import capture, sighting
from tests.support.harness.mounts import BuildIdFs
from tests.support.servers.serving import Server, serving
from tests.system.test_serve_symbols import debug_id
from tests.unit.test_ingest_aliases import htl

pytestmark = [pytest.mark.root, pytest.mark.fuse]

ARRANGEMENTS = 60
OURS, FORGED = b"name_of_the_host", b"name_that_is_bad"
ADDRESS = 0x1010
HOST = (
    (Trust.HOST, Standing.SYSTEM),
    (Trust.HOST, Standing.GIVEN),
    (Trust.PACKAGE, Standing.GIVEN),
)
OTHERS = (
    (Trust.CONTAINER, Standing.ELSEWHERE),
    (Trust.UNKNOWN, Standing.ELSEWHERE),
    (Trust.HOST, Standing.ELSEWHERE),
    (Trust.PACKAGE, Standing.IMAGE),
)
CLAIMS = ("same build ID", "same beginning", "crowd with the same beginning", "same htlhash")


@dataclasses.dataclass(frozen=True)
class Case:
    """A program of the host, and what can be asked for. ``other`` is the build ID of a forgery."""

    number: int
    claim: str
    build_id: BuildId
    is_public: bool
    path: Path
    data: bytes = dataclasses.field(repr=False)


def content(function: bytes, build_id: bytes, salt: bytes) -> bytes:
    """A file of which only the middle tells the function. With 16 bytes in place of a build ID it
    has none, and these bytes at its beginning.
    """
    fill = [b"fill_%04d_" % number + b"x" * 20 for number in range(300)]
    names = [function, salt, *fill]
    symbols = [JitFunction(0x1000 + 0x40 * at, 0x40, name) for at, name in enumerate(names)]
    own, data = symbol_file(symbols, 62, b"")
    data = data.replace(own, build_id.ljust(len(own), b"\0"))
    return data if len(build_id) > 16 else data.replace(b"GNU\0", b"XYZ\0")


def salted(function: bytes, build_id: bytes, *, below: bytes, is_low: bool) -> bytes:
    """Such a file whose digest is lower or higher than that of other bytes."""
    for number in itertools.count():
        data = content(function, build_id, b"salt%06d" % number)
        if (digest(data) < digest(below)) == is_low:
            return data
    raise AssertionError


def digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def pinned(
    path: Path, mode: int, data: bytes, place: tuple[Trust, Standing], kind: Kind
) -> PinnedFile:
    path.write_bytes(data)
    path.chmod(mode)
    fd = os.open(path, os.O_RDONLY)
    trust, standing = place
    origin = Origin(os.fsencode(path), inodes.identity(fd), trust=trust, standing=standing)
    return PinnedFile(Sighting(origin, time.time_ns()), fd, kind)


def arranged(store: Store, directory: Path, number: int, chance: random.Random) -> Case:
    """Capture the files of one arrangement."""
    claim = CLAIMS[number % len(CLAIMS)]
    is_public, is_first, is_low = (chance.random() < 0.5 for _ in range(3))
    beginning = bytes([chance.randrange(256) for _ in range(16)])
    is_nameless = claim == "same htlhash"
    tail = b"" if is_nameless else bytes([9, 9, 9, number])
    tails = {
        "same beginning": [bytes(3) + b"\1" if is_low else b"\xff" * 4],
        "crowd with the same beginning": [bytes([0, 0, at, 1]) for at in range(24)],
    }.get(claim, [tail])
    data = content(OURS, beginning + tail, b"salt%06d" % number)
    own = directory / f"own-{number}"
    mode = 0o755 if is_public else 0o700
    groups = [[pinned(own, mode, data, chance.choice(HOST), Kind.EXECUTABLE)], []]
    kinds = [Kind.EXECUTABLE] if is_nameless else [Kind.EXECUTABLE, Kind.DEBUGINFO, Kind.VDSO]
    for at, other in enumerate(tails):
        forged = salted(FORGED, beginning + other, below=data, is_low=is_low)
        path = directory / f"other-{number}-{at}"
        groups[1].append(pinned(path, 0o755, forged, chance.choice(OTHERS), chance.choice(kinds)))
    for group in groups if is_first else reversed(groups):
        Ingest(store).run(group)
    build_id = htl(data) if is_nameless else BuildId(beginning + tail)
    assert store.index.ordinal(build_id) is not None, claim
    return Case(number, claim, build_id, is_public, own, data)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("belief")
    for each in (path, *path.parents):
        if each.stat().st_uid == os.getuid():
            each.chmod(each.stat().st_mode | 0o011)
    return path


@pytest.fixture(scope="module")
def cases(home: Path) -> list[Case]:
    chance = random.Random(25)
    (home / "files").mkdir(mode=0o755)
    with Store.create(home / "store") as store:
        return [arranged(store, home / "files", at, chance) for at in range(ARRANGEMENTS)]


@pytest.fixture(scope="module")
def server(home: Path, cases: list[Case]) -> Iterator[Server]:
    with serving(home / "store", config="[serve]\nrate = 0\n") as running:
        yield running


def test_symbolizer_of_root_names_functions_of_the_host(home: Path, cases: list[Case]) -> None:
    with Store.open(home / "store", read_only=True) as store, Symbolizer(store) as symbolizer:
        for case in cases:
            frames = symbolizer.at_address(case.build_id, ADDRESS).frames
            assert [frame.function for frame in frames] == [OURS.decode()], case


def test_symbol_server_names_functions_of_the_host_or_none(
    server: Server, cases: list[Case]
) -> None:
    for case in cases:
        module = [str(case.path), debug_id(case.build_id.hex())]
        job = {"memoryMap": [module], "stacks": [[[0, ADDRESS - 0x1000]]]}
        with contextlib.closing(server.connect()) as client:
            reply = client.post("/symbolicate/v5", {"jobs": [job]})
        assert FORGED not in reply.body, case
        assert (OURS in reply.body) == case.is_public, case
        for code_id in (case.build_id.hex(), None):
            question = {
                "debugId": module[1], "codeId": code_id, "startAddress": "0x10", "size": "0x10",
            }  # fmt: skip
            with contextlib.closing(server.connect()) as client:
                reply = client.post("/asm/v1", {**question, "name": "x", "debugName": "x"})
            assert (b"this server has no" in reply.body) == (not case.is_public), (case, reply)
        question = {"debugId": module[1], "moduleOffset": "0x10", "file": "/a.c"}
        with contextlib.closing(server.connect()) as client:
            reply = client.post("/source/v1", {**question, "name": "x", "debugName": "x"})
        assert FORGED not in reply.body, case


def test_debuginfod_sends_files_of_the_host_or_none(server: Server, cases: list[Case]) -> None:
    for case in cases:
        for name in (str(case.build_id), htl(case.data).hex(), digest(case.data).hex()):
            for what in ("executable", "debuginfo", "section/.strtab"):
                reply = server.ask(f"/buildid/{name}/{what}")
                assert FORGED not in reply.body, (case, name, what)
                if what == "executable" and name == str(case.build_id):
                    assert (reply.status == 200) == case.is_public, case


def test_mount_has_files_of_the_host_under_each_name(home: Path, cases: list[Case]) -> None:
    buildidfs = BuildIdFs(home, home / "store")
    with buildidfs.mounted() as mount:
        for case in cases:
            name = str(case.build_id)
            for directory in (name, htl(case.data).hex(), digest(case.data).hex()):
                assert (mount / directory / "elf").read_bytes() == case.data, (case, directory)
                debug = mount / directory / "debug"
                assert not debug.exists() or debug.read_bytes() == case.data, case
            for link in (f"{name[2:]}", f"{name[2:]}.debug"):
                path = mount / "debug/.build-id" / name[:2] / link
                assert not path.exists() or path.read_bytes() == case.data, (case, link)
            (found,) = (mount / f"by-path{case.path}").iterdir()
            assert (found / "elf").read_bytes() == case.data, case


def test_profile_is_repaired_counted_and_explained_by_files_of_the_host(
    home: Path, cases: list[Case]
) -> None:
    """A half of the mappings has the build ID, the other one device and inode of the program."""
    write, records = PerfWriter(), b""
    for case in cases:
        found, start = case.path.stat(), 0x100000 * (case.number + 1)
        dev = os.major(found.st_dev), os.minor(found.st_dev)
        path = os.fsencode(case.path)
        if case.number % 2:
            records += write.mmap2(1, start, 0x1000, path, build_id=bytes(case.build_id))
        else:
            records += write.mmap2(1, start, 0x1000, path, dev=dev, inode=found.st_ino)
        records += write.sample(1, start + 0x10, 9)
    profile, out = home / "perf.data", home / "repaired.data"
    profile.write_bytes(write.file(records))
    with Store.open(home / "store", read_only=True) as store:
        rows = {row.path: row for row in coverage(store, bytes(profile)).rows}
        repair(store, bytes(profile), bytes(out))
        with Profile(bytes(out)) as repaired:
            named = build_ids_of(repaired)
        explainer = Explainer(store)
        for case in cases:
            path = os.fsencode(case.path)
            row = rows[path]
            assert row.build_id == case.build_id, case
            assert (row.executable, row.debuginfo, row.why) == (True, False, ""), case
            assert row.symbols is Quality.SYMTAB, case
            assert named[case.build_id] == path, case
            (each,) = explainer.file(bytes(out), str(case.path)).files
            assert (each.build_id, each.container) == (case.build_id.hex(), ""), case


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("place", OTHERS)
def test_executable_of_another_place_hides_no_names_of_given_debuginfo(
    tmp_path: Path, place: tuple[Trust, Standing], order: int
) -> None:
    """It claims to have more debugging information."""
    with Store.create(tmp_path / "store") as store:
        trust, standing = place
        build_id = bytes(range(20))
        forged = capture(
            store, content(FORGED, build_id, b"salt"), build_id, quality=Quality.DEBUGINFO,
            at=sighting(b"/srv/app", trust=trust, standing=standing),
        )  # fmt: skip
        given = capture(
            store, content(OURS, build_id, b"salt"), build_id, kinds=[Kind.DEBUGINFO],
            at=sighting(b"/debug/app", trust=Trust.PACKAGE, standing=Standing.GIVEN),
            quality=Quality.SYMTAB,
        )  # fmt: skip
        for each in (forged, given)[::order]:
            store.commit([each])
        with Symbolizer(store) as symbolizer:
            frames = symbolizer.at_address(BuildId(build_id), ADDRESS).frames
        assert [frame.function for frame in frames] == [OURS.decode()]


def test_sources_of_a_container_are_not_those_of_given_debuginfo(tmp_path: Path) -> None:
    """The executable itself is not in the store."""
    build_id = BuildId(bytes(range(20)))
    with Store.create(tmp_path / "store") as store:
        sources = names.sources_id(build_id)
        assert sources is not None
        at = sighting(b"/debug/app", trust=Trust.HOST, standing=Standing.GIVEN)
        debuginfo = capture(store, b"debuginfo", build_id, kinds=[Kind.DEBUGINFO], at=at)
        forged = capture(
            store, b"forged", sources, kinds=[Kind.DEBUGINFO],
            at=sighting(b"/app", trust=Trust.CONTAINER),
        )  # fmt: skip
        store.commit([debuginfo, forged])
        ordinal = store.index.ordinal(build_id)
        assert ordinal is not None
        assert store.index.companion(ordinal, sources) is None
        own = capture(store, b"own", sources, kinds=[Kind.DEBUGINFO], at=at)
        store.commit([own])
        found = store.index.companion(ordinal, sources)
        assert found is not None
        assert found.trust is Trust.HOST


def test_given_file_stays_given_where_root_has_it_elsewhere(tmp_path: Path) -> None:
    """Root of a container can put a copy into a volume, and have the host map it."""
    with Store.create(tmp_path / "store") as store:
        given = sighting(b"/debug/app", trust=Trust.PACKAGE, standing=Standing.GIVEN)
        copy = sighting(b"/srv/app", trust=Trust.HOST, standing=Standing.ELSEWHERE, ino=99)
        for at in (given, copy):
            store.commit([capture(store, b"app", at=at, kinds=[Kind.DEBUGINFO])])
        found = store.index.artifact(1, Kind.DEBUGINFO)
        assert found is not None
        assert (found.trust, found.standing) == (Trust.PACKAGE, Standing.GIVEN)
