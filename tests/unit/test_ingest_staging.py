# SPDX-License-Identifier: Apache-2.0
"""What one file may cost, whatever whoever made it wants it to."""

from __future__ import annotations

import errno
import itertools
import lzma
import mmap
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from buildidfs.capture.archive.elf_members import MemberSpool
from buildidfs.capture.base import Found, PinnedFile, Resighting
from buildidfs.capture.scan.tree import TreeScanner
from buildidfs.formats.elf.minidebug import completed, dynamic_symbols
from buildidfs.ingest import Ingest, ScanSummary, StoreMemo, staging
from buildidfs.ingest.staging import StabilityLimits
from buildidfs.linux import file_ops, inodes
from buildidfs.model import Absence, Artifact, BuildId, Kind, Origin, Quality, Sighting, Trust
from buildidfs.store import NewAbsence, Store
from buildidfs.store.write import transaction
from tests.support.clients.tools import run, tool
from tests.support.elf import debugforms
from tests.support.elf.elfwriter import SYMTAB, TEXT, TEXT_SPLIT, Section, elf_file, gdb_scripts
from tests.support.elf.programs import build_id_of
from tests.support.filesystems.filereader import FileReader
from tests.support.filesystems.mapped import SharedMapping
from tests.support.harness.captures import read_blob
from tests.support.harness.scans import open_descriptors

if TYPE_CHECKING:
    from buildidfs.model import Digest
    from buildidfs.store import Staged


ID = b"\x66" * 20


def tree(store: Store, path: Path) -> ScanSummary:
    return Ingest(store).run(TreeScanner(StoreMemo(store), [os.fsencode(path)]))


def test_file_that_is_open_for_writing_is_taken_while_it_rests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "held"
    path.write_bytes(elf_file(build_id=ID))
    with Store.create(tmp_path / "store") as store, path.open("r+b"):
        monkeypatch.setattr(staging, "limits", StabilityLimits(rest=3600, patience=0.1))
        (unreadable,) = tree(store, path).unreadable
        assert unreadable.errno == errno.ETXTBSY, "its last write may not have ended"
        monkeypatch.setattr(staging, "limits", StabilityLimits(rest=0))
        assert tree(store, path).captured == 1


def test_file_with_a_writer_is_tried_when_it_rests_while_others_are_taken(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    held, other = tmp_path / "tree" / "held", tmp_path / "tree" / "other"
    held.write_bytes(elf_file(build_id=ID))
    other.write_bytes(elf_file(build_id=b"\x67" * 20))
    began = time.monotonic()
    with Store.create(tmp_path / "store") as store, held.open("r+b"):
        summary = tree(store, tmp_path / "tree")
        assert (summary.captured, summary.unreadable) == (2, [])
        assert time.monotonic() - began >= 0.9, "its last write may have taken this long"
        ordinals = [store.index.ordinal(BuildId(each)) for each in (b"\x67" * 20, ID)]
        assert ordinals == [1, 2]
        assert store.index.recall(inodes.identity_at(-1, os.fsencode(held))) is None


def test_fresh_files_wait_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 files that change a moment before the scan take no 100 waits."""
    monkeypatch.setattr(staging, "limits", StabilityLimits(tick=0.3))
    (tmp_path / "tree").mkdir()
    for number in range(100):
        (tmp_path / "tree" / str(number)).write_bytes(elf_file(build_id=bytes([number]) * 20))
    with Store.create(tmp_path / "store") as store:
        before = time.monotonic()
        assert tree(store, tmp_path / "tree").captured == 100
        assert time.monotonic() - before < 10


@pytest.mark.parametrize("leases", [True, False])
def test_stores_that_no_time_tells_of_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leases: bool
) -> None:
    """A page that is dirty already is written to through a mapping without a trace."""
    path = tmp_path / "mapped"
    path.write_bytes(elf_file(build_id=ID) + bytes(4096))
    with path.open("r+b") as file:
        shared = mmap.mmap(file.fileno(), 0)
    number = itertools.count(1)

    def write() -> None:
        shared[-1] = next(number)

    class Watched(Store):
        def stage(self, fd: int, limit: int | None = None, origin: Origin | None = None) -> Staged:
            staged = super().stage(fd, limit)
            write()
            return staged

    if not leases:
        monkeypatch.setattr(file_ops, "has_writer", lambda fd: None)
    write()
    with shared, Watched.create(tmp_path / "store") as store:
        (unreadable,) = tree(store, path).unreadable
        assert unreadable.errno == errno.ETXTBSY
        assert store.index.ordinal(ID) is None
    assert next(number) > 3, "it was tried again"


def test_without_leases_old_files_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "old"
    path.write_bytes(elf_file(build_id=ID))
    monkeypatch.setattr(file_ops, "has_writer", lambda fd: None)
    monkeypatch.setattr(staging, "limits", StabilityLimits(writing=0))

    class Watched(Store):
        def digest_of(self, fd: int) -> Digest:
            raise AssertionError

    with Watched.create(tmp_path / "store") as store:
        assert tree(store, path).captured == 1


def test_huge_file_of_holes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    path.write_bytes(elf_file(build_id=ID))
    os.truncate(path, (8 << 30) + 1)  # which would take seconds to hash; others have 8 EiB
    with Store.create(tmp_path / "store") as store:
        summary = tree(store, path)
        (unreadable,) = summary.unreadable
        assert (unreadable.errno, unreadable.path) == (errno.EFBIG, os.fsencode(path))
        assert store.index.ordinal(ID) is None


def test_holes_of_moderate_size_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_HOLES_BYTES", 1 << 20)
    hollow, written = tmp_path / "hollow", tmp_path / "written"
    hollow.write_bytes(elf_file(build_id=ID))
    os.truncate(hollow, 1 << 20)
    written.write_bytes(elf_file(build_id=b"\x67" * 20) + os.urandom(2 << 20))
    with Store.create(tmp_path / "store") as store:
        for path in (hollow, written):
            assert (tree(store, path).captured, path.name) == (1, path.name)


def test_one_of_many_variants_is_copied_not_searched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To compare each new file with all before would take the square of their number."""
    monkeypatch.setattr(staging, "_MANY_VARIANTS", 2)
    asked = []

    with Store.create(tmp_path / "store") as store:
        variants = store.index.variants

        def watched(ordinal: int, kind: int) -> list[Artifact]:
            asked.append(kind)
            return variants(ordinal, kind)

        monkeypatch.setattr(store.index, "variants", watched)
        for number in range(4):
            path = tmp_path / str(number)
            path.write_bytes(elf_file(build_id=ID) + bytes(number))
            asked.clear()
            assert tree(store, path).captured == 1
            assert (1 in asked) == (0 < number < 3), number
        again = tmp_path / "again"
        again.write_bytes((tmp_path / "3").read_bytes())
        summary = tree(store, again)
        assert (summary.captured, summary.held) == (0, 1), "the store has these bytes"


def test_a_copy_of_our_own_has_no_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However new the file is that it was made from."""
    path = tmp_path / "packed"
    path.write_bytes(b"what it was unpacked from")
    identity = inodes.identity_at(-1, os.fsencode(path))
    sighting = Sighting(Origin(os.fsencode(path), identity), time.time_ns())
    data = elf_file(build_id=ID)
    monkeypatch.setattr(staging, "limits", StabilityLimits(pause=3600))
    with Store.create(tmp_path / "store") as store:
        pinned = MemberSpool().pin(sighting, len(data), [data])
        assert Ingest(store).run([pinned]).captured == 1


@pytest.mark.parametrize("build_id", [ID, None])
def test_file_with_a_writer_is_captured_and_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build_id: bytes | None
) -> None:
    """A store through an older mapping leaves no trace in the identity of the file."""
    path = tmp_path / "mapped"
    path.write_bytes(elf_file(build_id=build_id).ljust(4096, b"\0"))
    monkeypatch.setattr(staging, "limits", StabilityLimits(rest=0))
    monkeypatch.setattr(transaction, "_RACY_NS", 0)
    with Store.create(tmp_path / "store") as store:
        with SharedMapping(path) as shared:
            first = tree(store, path)
            before = inodes.identity_at(-1, os.fsencode(path))
            assert (first.captured, first.absent.total()) == (1, 0)
            assert store.index.recall(before) is None
            other = elf_file(build_id=b"\x67" * 20).ljust(4096, b"\0")
            shared.write(other)
            assert inodes.identity_at(-1, os.fsencode(path)) == before, "no trace, on this kernel"
            again = tree(store, path)
            assert again.captured == 1
            assert store.index.ordinal(BuildId(b"\x67" * 20)) is not None
        assert tree(store, path).held == 1
        assert store.index.recall(inodes.identity_at(-1, os.fsencode(path))) is not None


def test_row_of_a_file_that_has_a_writer_now_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(elf_file(build_id=ID))
    identity = msgspec.structs.replace(inodes.identity_at(-1, os.fsencode(path)), ctime_ns=1)
    with Store.create(tmp_path / "store") as store:
        for remember in (True, False):
            absence = NewAbsence(identity, time.time_ns(), Absence.NOT_ELF, remember=remember)
            store.commit([], [absence])
            assert (store.index.recall(identity) is not None) is remember


MINI_ID = BuildId(b"\x77" * 20)
_A_WHILE_NS = 10_000_000_000
STRTAB = Section(b".strtab", b"\0one\0", 3)
MINI = elf_file([TEXT_SPLIT, SYMTAB, STRTAB], build_id=MINI_ID)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """An empty store; at the end it has to be sound, and every descriptor closed."""
    with Store.create(tmp_path / "store") as opened:
        before = open_descriptors()
        yield opened
        assert open_descriptors() <= before
        assert list(opened.check()) == []


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library with all debug information."""
    return debugforms.library(tmp_path_factory.mktemp("library"))


@pytest.fixture(scope="module")
def mini(library: Path) -> debugforms.Mini:
    """The same as it ships: with mini debuginfo."""
    return debugforms.with_mini_debuginfo(library, library.parent / "shipped")


def seen(path: Path, trust: Trust) -> list[Found]:
    """A file as a scanner pins it, at a place believed that much, a while after it was made."""
    fd = os.open(path, os.O_RDONLY)
    origin = Origin(os.fsencode(path), inodes.identity(fd), trust=trust, scanner="test")
    return [PinnedFile(Sighting(origin, time.time_ns() + _A_WHILE_NS), fd)]


def ingest(store: Store, path: Path, trust: Trust = Trust.UNKNOWN) -> ScanSummary:
    return Ingest(store).run(seen(path, trust))


def debuginfo(store: Store, build_id: str | bytes) -> list[Artifact]:
    raw = bytes.fromhex(build_id) if isinstance(build_id, str) else build_id
    return store.index.variants(store.index.ordinal(raw) or 0, Kind.DEBUGINFO)


def test_symbols_are_served_as_debuginfo(store: Store, mini: debugforms.Mini) -> None:
    summary = ingest(store, mini.shipped, Trust.HOST)
    assert (summary.files, summary.captured, summary.new_ids) == (1, 1, 1)
    build_id = build_id_of(mini.shipped)
    (artifact,) = debuginfo(store, build_id)
    data = mini.shipped.read_bytes()
    dynamic = dynamic_symbols(FileReader(data), len(data))
    assert dynamic is not None
    assert read_blob(store, artifact.digest) == completed(mini.plain.read_bytes(), dynamic)
    assert (artifact.quality, artifact.trust) == (Quality.DYNSYM, Trust.PACKAGE)
    assert artifact.mode == 0o444
    executable = store.index.artifact(artifact.ordinal, Kind.EXECUTABLE)
    assert executable is not None
    assert executable.segments == artifact.segments != 0
    origins = {record.digest: record.origin for record in store.index.origins(artifact.ordinal)}
    assert origins[artifact.digest].path == os.fsencode(mini.shipped)
    assert artifact.made_of == ".gnu_debugdata"
    assert list(store.check(digests=True)) == []


def test_whoever_meets_the_file_again_knows_it_as_executable(
    store: Store, mini: debugforms.Mini, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "_RACY_NS", 0)
    ingest(store, mini.shipped, Trust.HOST)
    scanner = TreeScanner(StoreMemo(store), [os.fsencode(mini.shipped)])
    (again,) = scanner
    assert isinstance(again, Resighting)
    assert str(again.known.build_id) == build_id_of(mini.shipped)


@pytest.mark.parametrize("first", ["mini", "debug"])
@pytest.mark.parametrize("keep", ["dwarf", "symbols"])
def test_any_other_debuginfo_comes_first(
    store: Store, library: Path, mini: debugforms.Mini, tmp_path: Path, first: str, keep: str
) -> None:
    debug = tmp_path / "lib.debug"
    run([tool("objcopy"), "--only-keep-debug", library, debug], check=True)
    if keep == "symbols":
        run([tool("objcopy"), "--strip-debug", debug], check=True)
    order = [(mini.shipped, Trust.HOST), (debug, Trust.PACKAGE)]
    for path, trust in order if first == "mini" else reversed(order):
        ingest(store, path, trust)
    best, last = debuginfo(store, build_id_of(library))
    assert read_blob(store, best.digest) == debug.read_bytes()
    assert last.quality is Quality.DYNSYM


def test_what_a_container_says_is_not_put_before_it(
    store: Store, library: Path, mini: debugforms.Mini
) -> None:
    ingest(store, mini.shipped, Trust.HOST)
    ingest(store, library, Trust.CONTAINER)
    best, other = debuginfo(store, build_id_of(library))
    assert (best.trust, other.trust) == (Trust.PACKAGE, Trust.CONTAINER)


def test_the_same_file_at_two_places(store: Store, mini: debugforms.Mini, tmp_path: Path) -> None:
    other = tmp_path / "link.so"
    os.link(mini.shipped, other)
    found = itertools.chain(seen(mini.shipped, Trust.HOST), seen(other, Trust.HOST))
    summary = Ingest(store).run(found)
    other.unlink()
    assert (summary.files, summary.captured, summary.held) == (2, 1, 1)
    assert len(debuginfo(store, build_id_of(mini.shipped))) == 1


def shipped(packed: bytes, *more: Section, build_id: bytes = MINI_ID) -> bytes:
    return elf_file([TEXT, *more, Section(b".gnu_debugdata", packed)], build_id=build_id)


def test_a_debug_file_without_a_build_id_of_its_own(store: Store, tmp_path: Path) -> None:
    plain = elf_file([TEXT_SPLIT, SYMTAB, STRTAB])
    (tmp_path / "app").write_bytes(shipped(lzma.compress(plain)))
    ingest(store, tmp_path / "app")
    (artifact,) = debuginfo(store, MINI_ID)
    assert read_blob(store, artifact.digest) == plain


def test_scripts_in_it_are_known(store: Store, tmp_path: Path) -> None:
    plain = elf_file([TEXT_SPLIT, SYMTAB, STRTAB, gdb_scripts("print(1)")], build_id=MINI_ID)
    (tmp_path / "app").write_bytes(shipped(lzma.compress(plain)))
    ingest(store, tmp_path / "app")
    (artifact,) = debuginfo(store, MINI_ID)
    assert artifact.scripts


def bomb() -> bytes:
    packer = lzma.LZMACompressor(preset=0)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(70)) + packer.flush()


def greedy() -> bytes:
    """A stream that wants a dictionary of 1.5 GiB to be read."""
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 20}]
    data = bytearray(lzma.compress(MINI, filters=filters))
    at = data.index(b"\x21\x01", 12) + 2
    data[at] = 40 - 1
    header = data[12 : 12 + (data[12] + 1) * 4 - 4]
    data[12 + len(header) : 16 + len(header)] = zlib.crc32(header).to_bytes(4, "little")
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        b"text",
        b"\xfd7zXZ\0" + bytes(60),
        lzma.compress(MINI)[:-20],
        lzma.compress(b"text"),
        lzma.compress(elf_file([TEXT, SYMTAB, STRTAB], build_id=MINI_ID)),  # has code of its own
        lzma.compress(elf_file([TEXT_SPLIT], build_id=MINI_ID)),
        lzma.compress(elf_file([TEXT_SPLIT, SYMTAB, STRTAB], build_id=b"\x99" * 20)),
        lzma.compress(elf_file([TEXT_SPLIT, SYMTAB, STRTAB], build_id=MINI_ID, machine=3)),
        lzma.compress(elf_file([TEXT_SPLIT, SYMTAB, STRTAB], build_id=MINI_ID, bits=32)),
        bomb,
        greedy,
    ],
)
def test_what_is_not_its_symbols_is_left_where_it_is(
    store: Store, tmp_path: Path, data: bytes | Callable[[], bytes]
) -> None:
    (tmp_path / "app").write_bytes(shipped(data if isinstance(data, bytes) else data()))
    assert ingest(store, tmp_path / "app").captured == 1
    assert debuginfo(store, MINI_ID) == []


def test_good_ones_are_taken(store: Store, tmp_path: Path) -> None:
    """The file that those above differ from."""
    (tmp_path / "app").write_bytes(shipped(lzma.compress(MINI)))
    ingest(store, tmp_path / "app")
    assert len(debuginfo(store, MINI_ID)) == 1


def test_program_headers_must_not_contradict(store: Store, tmp_path: Path) -> None:
    other = elf_file(
        [TEXT_SPLIT._replace(segment=1, data=b"", size=0x5000), SYMTAB, STRTAB], build_id=MINI_ID
    )
    (tmp_path / "app").write_bytes(shipped(lzma.compress(other)))
    ingest(store, tmp_path / "app")
    assert debuginfo(store, MINI_ID) == []


def test_a_file_with_symbols_needs_none(store: Store, tmp_path: Path) -> None:
    (tmp_path / "app").write_bytes(shipped(lzma.compress(MINI), SYMTAB, STRTAB))
    ingest(store, tmp_path / "app")
    (artifact,) = debuginfo(store, MINI_ID)
    assert read_blob(store, artifact.digest) == (tmp_path / "app").read_bytes()


def test_nothing_is_lost_when_a_file_is_written_to_meanwhile(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Staged and dropped again, with what came out of it: the fixture counts descriptors."""
    path = tmp_path / "app"
    path.write_bytes(shipped(lzma.compress(MINI)))
    (item,) = seen(path, Trust.UNKNOWN)
    assert isinstance(item, PinnedFile)
    original = store.stage

    def stage(fd: int, limit: int | None = None, origin: object = None) -> object:
        with path.open("ab") as file:
            file.write(b"x")
        return original(fd, limit)

    monkeypatch.setattr(store, "stage", stage)
    summary = Ingest(store).run([item])
    assert len(summary.unreadable) == 1
    assert store.index.ordinal(MINI_ID) is None
