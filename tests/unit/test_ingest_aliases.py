# SPDX-License-Identifier: Apache-2.0
"""Files without a build ID, with one that is shared, and the other names of all files."""

from __future__ import annotations

import hashlib
import itertools
import os
import struct
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs.capture.base import PinnedFile
from buildidfs.ingest import Ingest
from buildidfs.linux import inodes
from buildidfs.model import AliasType, Artifact, BuildId, Digest, Kind, Origin, Sighting, Trust
from buildidfs.store import Store
from buildidfs.store.fsck import rebuild
from tests.support.elf.elfwriter import (
    DWARF,
    PT_LOAD,
    SHF_ALLOC,
    SHF_EXECINSTR,
    SHT_NOBITS,
    SYMTAB,
    TEXT_SPLIT,
    Section,
    debuglink,
    elf_file,
)
from tests.support.harness.damages import with_new_index

_BAZEL = BuildId.from_hex("498919aff001d8366249403a2544fba2d833084f")
_ID = BuildId(b"\x42" * 20)
_EXECUTABLE, _DEBUGINFO = Kind.EXECUTABLE, Kind.DEBUGINFO


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as opened:
        yield opened
        assert list(opened.check(digests=True)) == []


_numbers = itertools.count()


def program(code: bytes, *more: Section, build_id: bytes | None = None) -> bytes:
    """A program with these bytes as its code."""
    flags = SHF_ALLOC | SHF_EXECINSTR
    text = Section(b".text", code.ljust(64, b"\x90"), flags=flags, segment=PT_LOAD)
    return elf_file([text, *more], build_id=build_id)


def captured(
    store: Store, directory: Path, data: bytes, name: str = "", trust: Trust = Trust.CONTAINER
) -> None:
    """Capture bytes as a file of its own."""
    path = directory / (name or f"file{next(_numbers)}")
    path.write_bytes(data)
    fd = os.open(path, os.O_RDONLY)
    origin = Origin(os.fsencode(path), inodes.identity(fd), trust=trust)
    summary = Ingest(store).run([PinnedFile(Sighting(origin, time.time_ns()), fd)])
    assert (summary.captured, summary.absent.total()) == (1, 0), summary


def htl(data: bytes) -> BuildId:
    """The htlhash, by its definition."""
    text = data[:4096] + data[-4096:] + struct.pack(">Q", len(data))
    return BuildId(hashlib.sha256(text).digest()[:16])


def served(store: Store, build_id: bytes, kind: Kind = _EXECUTABLE) -> Artifact | None:
    ordinal = store.index.ordinal(build_id)
    return None if ordinal is None else store.index.artifact(ordinal, kind)


def digest(data: bytes) -> Digest:
    return Digest(hashlib.sha256(data).digest())


def is_served(store: Store, build_id: bytes, data: bytes, kind: Kind = _EXECUTABLE) -> bool:
    found = served(store, build_id, kind)
    return found is not None and found.digest == digest(data)


def ordinal_of(store: Store, build_id: bytes) -> int:
    ordinal = store.index.ordinal(build_id)
    assert ordinal is not None
    return ordinal


# --- adopted IDs ---------------------------------------------------------------------------------


def test_file_without_a_build_id_is_kept_under_its_htlhash(store: Store, tmp_path: Path) -> None:
    data = program(b"nameless")
    captured(store, tmp_path, data)
    found = served(store, htl(data))
    assert found is not None
    assert (found.digest, found.adopted) == (digest(data), True)
    assert store.aliases.is_adopted(found.ordinal)
    assert store.stats().adopted == 1


def test_file_with_a_build_id_is_not_adopted(store: Store, tmp_path: Path) -> None:
    data = program(b"named", build_id=_ID)
    captured(store, tmp_path, data)
    found = served(store, _ID)
    assert found is not None
    assert not found.adopted
    assert not store.aliases.is_adopted(found.ordinal)
    assert served(store, htl(data)) is None
    assert store.aliases.blobs(AliasType.HTL, htl(data)) == [digest(data)]
    assert store.aliases.ordinals(digest(data)) == [found.ordinal]


def test_forged_file_with_the_htlhash_of_the_host_is_a_variant(
    store: Store, tmp_path: Path
) -> None:
    """Head, tail and size say nothing of what is in between."""
    padding = Section(b".pad", bytes(20_000))
    data = program(b"host", padding)
    forged = bytearray(data)
    forged[10_000] = 1
    captured(store, tmp_path, data, trust=Trust.HOST)
    captured(store, tmp_path, bytes(forged))
    assert htl(bytes(forged)) == htl(data)
    assert is_served(store, htl(data), data)
    ordinal = ordinal_of(store, htl(data))
    assert len(store.index.variants(ordinal, _EXECUTABLE)) == 2


def test_build_id_of_a_file_comes_before_an_equal_adopted_one(store: Store, tmp_path: Path) -> None:
    data = program(b"nameless")
    named = program(b"names itself so", build_id=htl(data))
    captured(store, tmp_path, data)
    captured(store, tmp_path, named)
    assert is_served(store, htl(data), named)
    kept = store.index.variants(ordinal_of(store, htl(data)), _EXECUTABLE)
    assert [each.adopted for each in kept] == [False, True]


# --- shared build IDs ----------------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[BuildId]:
    """The build IDs of which the log says that programs share them."""
    records = [each for each in caplog.records if "share build ID" in each.message]
    return [each.args[0] for each in records if isinstance(each.args, tuple)]  # type: ignore[misc]


@pytest.mark.parametrize("shared", [_BAZEL, BuildId(bytes(20)), BuildId(bytes(8))])
def test_build_id_that_is_known_to_be_shared_is_never_served(
    store: Store, tmp_path: Path, shared: BuildId, caplog: pytest.LogCaptureFixture
) -> None:
    programs = [program(b"%d" % number, build_id=shared) for number in range(2)]
    for data in programs:
        captured(store, tmp_path, data)
    assert warnings(caplog) == [shared]
    ordinal = ordinal_of(store, shared)
    assert store.aliases.is_ambiguous(ordinal)
    assert served(store, shared) is None
    kept = store.index.variants(ordinal, _EXECUTABLE)
    assert {each.digest for each in kept} == {digest(data) for data in programs}
    for data in programs:
        assert is_served(store, htl(data), data)
    assert store.stats().ambiguous == 1


def test_build_id_of_three_programs_is_learned_to_be_shared(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    programs = [program(b"%d" % number, build_id=_ID) for number in range(4)]
    for number, data in enumerate(programs):
        assert (served(store, _ID) is not None) == (number in (1, 2))
        assert not warnings(caplog) or number > 2
        captured(store, tmp_path, data)
    assert warnings(caplog) == [_ID]
    ordinal = ordinal_of(store, _ID)
    assert store.aliases.is_ambiguous(ordinal)
    assert served(store, _ID) is None
    assert len(store.index.variants(ordinal, _EXECUTABLE)) == len(programs)
    for data in programs:
        assert is_served(store, htl(data), data)
        places = store.index.origins(ordinal_of(store, htl(data)))
        assert [record.digest for record in places] == [digest(data)]


def test_stripped_and_signed_copies_do_not_make_a_build_id_ambiguous(
    store: Store, tmp_path: Path
) -> None:
    for number in range(5):
        more = Section(b".signature", b"%d" % number)
        captured(store, tmp_path, program(b"same", more, build_id=_ID))
    assert served(store, _ID) is not None
    assert not store.aliases.is_ambiguous(ordinal_of(store, _ID))


def test_container_cannot_take_a_program_of_the_host_out_of_service(
    store: Store, tmp_path: Path
) -> None:
    mine = program(b"the host's", build_id=_ID)
    captured(store, tmp_path, mine, trust=Trust.HOST)
    for number in range(5):
        captured(store, tmp_path, program(b"%d" % number, build_id=_ID))
    assert is_served(store, _ID, mine)


# --- debug files ---------------------------------------------------------------------------------


@pytest.mark.parametrize("debug_first", [True, False])
@pytest.mark.parametrize("build_id", [None, _ID])
def test_debug_file_without_a_build_id_belongs_to_its_binary(
    store: Store, tmp_path: Path, build_id: BuildId | None, debug_first: bool
) -> None:
    debug = elf_file([TEXT_SPLIT, DWARF, SYMTAB])
    link = debuglink(b"app.debug", zlib.crc32(debug))
    binary = program(b"app", link, build_id=build_id)
    files = [("app", binary), ("app.debug", debug)]
    for name, data in reversed(files) if debug_first else files:
        captured(store, tmp_path, data, name)
    assert is_served(store, build_id or htl(binary), debug, _DEBUGINFO)
    assert is_served(store, build_id or htl(binary), binary)


def test_debug_file_of_another_name_or_checksum_does_not_belong(
    store: Store, tmp_path: Path
) -> None:
    debug = elf_file([TEXT_SPLIT, DWARF, SYMTAB])
    right, wrong = zlib.crc32(debug), zlib.crc32(debug) ^ 1
    for name, crc in ((b"other.debug", right), (b"app.debug", wrong)):
        binary = program(b"app " + name, debuglink(name, crc))
        captured(store, tmp_path, binary)
        captured(store, tmp_path, debug + b"", "app.debug") if name == b"other.debug" else None
        assert served(store, htl(binary), _DEBUGINFO) is None


def test_debug_file_of_a_container_does_not_name_functions_of_the_host(
    store: Store, tmp_path: Path
) -> None:
    debug = elf_file([TEXT_SPLIT, DWARF, SYMTAB])
    binary = program(b"app", debuglink(b"app.debug", zlib.crc32(debug)))
    captured(store, tmp_path, binary, "app", trust=Trust.HOST)
    captured(store, tmp_path, debug, "app.debug", trust=Trust.CONTAINER)
    ordinal = ordinal_of(store, htl(binary))
    assert [each.digest for each in store.index.variants(ordinal, _DEBUGINFO)] == [digest(debug)]
    assert store.index.artifact(ordinal, _DEBUGINFO) is None


@pytest.mark.parametrize("order", list(itertools.permutations(("crowd", "binary", "debug"))))
def test_crowd_with_the_same_debuglink_keeps_no_debug_file_from_a_binary_of_the_host(
    store: Store, tmp_path: Path, order: tuple[str, ...]
) -> None:
    debug = elf_file([TEXT_SPLIT, DWARF, SYMTAB])
    link = debuglink(b"app.debug", zlib.crc32(debug))
    binary = program(b"app", link)
    for what in order:
        if what == "crowd":
            for number in range(24):
                captured(store, tmp_path, program(b"tiny %d" % number, link))
        elif what == "binary":
            captured(store, tmp_path, binary, "app", trust=Trust.HOST)
        else:
            captured(store, tmp_path, debug, "app.debug", trust=Trust.HOST)
    assert is_served(store, htl(binary), debug, _DEBUGINFO)


def test_crowd_with_the_same_htlhash_does_not_hide_a_file_of_the_host(
    store: Store, tmp_path: Path
) -> None:
    data = program(b"app", Section(b".pad", bytes(20_000)))
    bodies = [data[:10_000] + b"%04d" % number + data[10_004:] for number in range(100)]
    highest = max(bodies, key=digest)
    for body in bodies:
        captured(store, tmp_path, body, trust=Trust.HOST if body == highest else Trust.CONTAINER)
    found = store.aliases.named(f"htl:{htl(data).hex()}")
    assert found is not None
    assert found[0] == digest(highest)


def test_alias_of_a_file_that_the_host_has_after_a_crowd_leads_to_it(
    store: Store, tmp_path: Path
) -> None:
    """It is one of the crowd first; later the same bytes are seen at a place of the host."""
    link = debuglink(b"app.debug", 7)
    for number in range(12):
        captured(store, tmp_path, program(b"tiny %d" % number, link), f"tiny{number}")
    known = store.aliases.blobs(AliasType.LINK, (7).to_bytes(4, "big") + b"app.debug")
    assert len(known) == 8
    last = program(b"tiny 11", link)
    assert digest(last) not in known
    fd = os.open(tmp_path / "tiny11", os.O_RDONLY)
    origin = Origin(b"/usr/bin/tiny", inodes.identity(fd), trust=Trust.HOST)
    Ingest(store).run([PinnedFile(Sighting(origin, time.time_ns()), fd)])
    assert digest(last) in store.aliases.blobs(
        AliasType.LINK, (7).to_bytes(4, "big") + b"app.debug"
    )


@pytest.mark.parametrize("stripped_first", [True, False])
def test_unstripped_twin_has_the_names_of_a_stripped_program(
    store: Store, tmp_path: Path, stripped_first: bool
) -> None:
    whole = elf_file([_TEXT, SYMTAB, DWARF], section_headers=True)
    stripped = bytearray(elf_file([_TEXT], section_headers=True))
    for data in (bytes(stripped), whole) if stripped_first else (whole, bytes(stripped)):
        captured(store, tmp_path, data)
    assert is_served(store, htl(bytes(stripped)), whole, _DEBUGINFO)
    assert is_served(store, htl(bytes(stripped)), bytes(stripped))


def test_debug_file_alone_has_no_names_but_its_own(store: Store, tmp_path: Path) -> None:
    whole = elf_file([_TEXT, SYMTAB, DWARF], section_headers=True)
    debug = bytearray(elf_file([_TEXT, SYMTAB], section_headers=True))
    (table,) = struct.unpack_from("<Q", debug, 40)
    struct.pack_into("<I", debug, table + 64 + 4, SHT_NOBITS)  # the first, .text, has its segment
    for data in (whole, bytes(debug)):
        captured(store, tmp_path, data)
    assert served(store, htl(bytes(debug))) is None
    assert is_served(store, htl(bytes(debug)), bytes(debug), _DEBUGINFO)


_TEXT = Section(
    b".text", b"\x90" * 64, flags=SHF_ALLOC | SHF_EXECINSTR, segment=PT_LOAD, align=4096
)


# --- upkeep --------------------------------------------------------------------------------------


def _everything(store: Store, directory: Path) -> list[bytes]:
    debug = elf_file([TEXT_SPLIT, DWARF, SYMTAB])
    files = [
        program(b"nameless", debuglink(b"app.debug", zlib.crc32(debug))),
        *(program(b"%d" % number, build_id=_BAZEL) for number in range(2)),
        *(program(b"learned %d" % number, build_id=_ID) for number in range(3)),
        program(b"named", build_id=b"\x01" * 20),
    ]
    for data in files:
        captured(store, directory, data)
    captured(store, directory, debug, "app.debug")
    return [*files, debug]


def _shown(store: Store) -> dict[str, object]:
    found: dict[str, object] = {}
    for ordinal, build_id in store.index.build_ids_from():
        marks = store.aliases.is_adopted(ordinal), store.aliases.is_ambiguous(ordinal)
        best = [store.index.artifact(ordinal, kind) for kind in Kind]
        kept = {each.digest for kind in Kind for each in store.index.variants(ordinal, kind)}
        found[str(build_id)] = marks, [each and each.digest for each in best], kept
    return found


def test_rebuilt_index_has_the_same_names(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with Store.create(path) as store:
        files = _everything(store, tmp_path)
        before = _shown(store)
        aliases = {each: set(store.aliases.of(digest(each))) for each in files}
    (path / "index" / "data.mdb").unlink()
    rebuild.rebuild(path)
    with Store.open(path) as store:
        assert list(store.check(digests=True)) == []
        assert _shown(store) == before
        assert {each: set(store.aliases.of(digest(each))) for each in files} == aliases


def test_aliases_go_with_their_blobs(store: Store, tmp_path: Path) -> None:
    files = _everything(store, tmp_path)
    store.remove([digest(data) for data in files], forget=True)
    assert store.stats().blobs == 0
    env = store.checker().env
    counts = env.entries()
    assert [counts[name] for name in ("identities", "aliases", "adopted", "ambiguous")] == [0] * 4


def test_store_of_an_earlier_version_gets_its_aliases(tmp_path: Path) -> None:
    path = tmp_path / "store"
    with Store.create(path) as store:
        files = _everything(store, tmp_path)
        env = store.checker().env
        env.write(lambda txn: [txn.drop(env.tables[name]) for name in ("identities", "aliases")])
    with Store.open(path, read_only=True) as store:
        assert list(store.check()) == []
        assert store.aliases.blobs(AliasType.HTL, htl(files[-2])) == []
    with Store.open(path) as store:
        assert rebuild.name_blobs(store.checker()) == len(files)
        assert list(store.check(digests=True)) == []
        assert store.aliases.blobs(AliasType.HTL, htl(files[-2])) == [digest(files[-2])]
        assert rebuild.name_blobs(store.checker()) == 0


@pytest.mark.parametrize("table", ["identities", "aliases", "adopted", "ambiguous"])
def test_lost_and_made_up_rows_are_found_and_mended(tmp_path: Path, table: str) -> None:
    with Store.create(tmp_path / "store") as store:
        _everything(store, tmp_path)
        env = store.checker().env
        key = bytes(7) + b"\x99" if table in ("adopted", "ambiguous") else b"\x01\x02ab" + b"7" * 32
        key = b"7" * 32 if table == "identities" else key
        env.write(lambda txn: txn.put(key, b"", db=env.tables[table]))
        assert list(store.check()) != []
        with with_new_index(store) as again:
            assert list(again.check()) == []
