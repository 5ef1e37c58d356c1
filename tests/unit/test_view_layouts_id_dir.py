# SPDX-License-Identifier: Apache-2.0
"""Packages of split DWARF, in the directory of their owner."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from buildidfs import names
from buildidfs.model import BuildId, ByteRange, Kind, Quality, Trust
from buildidfs.store import Store
from buildidfs.view import NeedsReading, View, nodes
from tests.support.captures import capture, commit, sighting
from tests.support.elfwriter import SHT_NOBITS, TEXT, TEXT_SPLIT, Section, elf_file, gdb_scripts

OWNER = BuildId(bytes.fromhex("abcdef0123"))
NAMES = {b"elf.dwp", b"executable.dwp", b"debug.dwp", b"debuginfo.dwp", b"hot.dwp"}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with a binary, seen as hot."""
    with Store.create(tmp_path / "store") as made:
        made.commit([capture(made, b"binary", OWNER, at=sighting(b"/app/bin/hot"))])
        yield made


def package(store: Store, content: bytes = b"package", owner: BuildId = OWNER) -> int:
    """Commit the package of a binary."""
    kept_under = names.package_id(owner)
    assert kept_under is not None
    at = sighting(b"/app/bin/hot.dwp")
    store.commit([capture(store, content, kept_under, at=at, kinds=[Kind.DEBUGINFO])])
    return store.index.ordinal(kept_under) or 0


def directory(store: Store) -> int:
    return nodes.of_id(store.index.ordinal(OWNER) or 0)


def test_without_a_package_there_are_no_names(store: Store) -> None:
    view = View(store)
    assert [view.lookup(directory(store), name) for name in NAMES] == [nodes.ABSENT] * 5
    assert not [name for name, _, _ in view.children(directory(store)) if b"dwp" in name]


def test_names(store: Store) -> None:
    ordinal = package(store)
    view = View(store)
    own = view.lookup(nodes.of_id(ordinal), b"debug")
    assert own
    assert {view.lookup(directory(store), name) for name in NAMES} == {own}
    for other in (b"other.dwp", b".dwp", b"hot", b"bin/hot.dwp"):
        assert view.lookup(directory(store), other) == nodes.ABSENT
    listed = {name: node for name, node, _ in view.children(directory(store)) if b"dwp" in name}
    assert listed == {b"elf.dwp": own, b"debug.dwp": own}


def test_names_that_a_commit_brings(store: Store) -> None:
    view = View(store)
    before = {(parent, name) for parent, name, _ in view.spellings(store.index.ordinal(OWNER) or 0)}
    assert not [name for _, name in before if name.endswith(b".dwp")]
    ordinal = package(store)
    brought = {(parent, name) for parent, name, _ in view.spellings(ordinal)}
    assert brought >= {(directory(store), name) for name in NAMES}
    # seen at one more place, the binary has one more name
    other = capture(store, b"binary", OWNER, at=sighting(b"/app/bin/cold"))
    store.commit([other])
    brought = {
        (parent, name) for parent, name, _ in view.spellings(store.index.ordinal(OWNER) or 0)
    }
    assert (directory(store), b"cold.dwp") in brought
    assert view.lookup(directory(store), b"cold.dwp")


def test_a_better_package_is_another_node(store: Store) -> None:
    package(store)
    view = View(store)
    first = view.lookup(directory(store), b"elf.dwp")
    better = capture(
        store,
        b"better",
        names.package_id(OWNER) or b"",
        kinds=[Kind.DEBUGINFO],
        trust=Trust.HOST,
    )
    store.commit([better])
    assert view.lookup(directory(store), b"elf.dwp") not in (first, nodes.ABSENT)


def test_package_whose_owner_was_never_seen(store: Store) -> None:
    stranger = BuildId(b"\x77" * 20)
    ordinal = package(store, owner=stranger)
    spelled = View(store).spellings(ordinal)
    assert not [
        name
        for parent, name, _ in spelled
        if parent >> nodes.TAG_SHIFT == nodes.TAG_ID and name.endswith(b".dwp")
    ]


def test_a_build_id_too_long_for_a_package(tmp_path: Path) -> None:
    long_one = BuildId(bytes(range(120)))
    with Store.create(tmp_path / "store") as store:
        store.commit([capture(store, b"binary", long_one)])
        node = nodes.of_id(store.index.ordinal(long_one) or 0)
        assert View(store).lookup(node, b"elf.dwp") == nodes.ABSENT


ID = b"\xab\xcd" * 10
INFO = Section(b".debug_info", b"what is to be known" * 1000)
LINE = Section(b".debug_line", b"", type=SHT_NOBITS, size=500)


@pytest.fixture
def view(store: Store) -> View:
    return View(store)


def sections_directory(view: View) -> int:
    return view.lookup(view.lookup(View.ROOT, ID.hex().encode()), b"section")


def content(view: View, name: bytes, offset: int = 0, size: int = 1 << 20) -> bytes | None:
    """Bytes of a section, as a front door reads them; None if there is none."""
    node = view.lookup_slowly(sections_directory(view), name)
    if not node:
        return None
    assert view.open_now(node) is None, "it takes a thread"
    with contextlib.closing(view.open(node)) as opened:
        assert opened.blob is not None
        return opened.blob.pread(size, offset)


def test_sections_of_debuginfo_and_else_of_the_executable(store: Store, view: View) -> None:
    executable = elf_file([TEXT, Section(b".only", b"here")], build_id=ID)
    debug = elf_file([TEXT_SPLIT, INFO, LINE], build_id=ID)
    commit(
        store,
        capture(store, executable, ID),
        capture(store, debug, ID, kinds=[Kind.DEBUGINFO], quality=Quality.DEBUGINFO),
    )
    with pytest.raises(NeedsReading):
        view.lookup(sections_directory(view), b".debug_info")
    assert content(view, b".debug_info") == INFO.data
    assert content(view, b".debug_info", 7, 5) == INFO.data[7:12]
    assert content(view, b".debug_info", len(INFO.data) - 3) == INFO.data[-3:]
    assert content(view, b".debug_info", 1 << 40) == b""
    assert content(view, b".text") == TEXT.data, "there is none in the debug file"
    assert content(view, b".only") == b"here"
    for name in (b".debug_line", b".nothing", b"", b"x" * 255):
        assert content(view, name) is None
    node = view.lookup_slowly(sections_directory(view), b".debug_info")
    assert View(store).attributes(node) == view.attributes(node)
    assert view.attributes(node).size == len(INFO.data)
    assert list(view.children(sections_directory(view))) == []
    listed = {name for name, _, _ in view.children(view.lookup(View.ROOT, ID.hex().encode()))}
    assert b"section" not in listed, "what copies a tree copies each file once"


def test_scripts_read_as_zeros(store: Store, view: View) -> None:
    data = elf_file([TEXT, gdb_scripts("evil()")], build_id=ID)
    scripts = (ByteRange(data.index(b"\x04gdb.inlined"), 20),)
    new = capture(store, data, ID, trust=Trust.CONTAINER)
    commit(store, type(new)(**{f: getattr(new, f) for f in new.__struct_fields__} | {
        "scripts": scripts
    }))  # fmt: skip
    node = view.lookup_slowly(sections_directory(view), b".debug_gdb_scripts")
    with contextlib.closing(view.open(node)) as opened:
        assert opened.zeros == (ByteRange(0, 20),)
    text = view.lookup_slowly(sections_directory(view), b".text")
    with contextlib.closing(view.open(text)) as opened:
        assert opened.zeros == ()
    with contextlib.closing(View(store, zero_scripts=False).open(node)) as opened:
        assert opened.zeros == ()


def test_sections_that_lie_about_where_they_are(store: Store, view: View) -> None:
    sections = [
        TEXT,
        Section(b".beyond", b"x", offset=1 << 40),
        Section(b".larger", b"x", size=1 << 40),
    ]
    commit(store, capture(store, elf_file(sections, build_id=ID), ID))
    assert content(view, b".text") == TEXT.data
    for name in (b".beyond", b".larger"):
        assert content(view, name) is None


def test_no_elf_file(store: Store, view: View) -> None:
    commit(store, capture(store, b"ffffffff81000000 T _stext\n", ID, kinds=[Kind.KALLSYMS]))
    assert content(view, b".text") is None


def test_numbers_that_were_made_up(store: Store, view: View) -> None:
    commit(store, capture(store, elf_file([TEXT, INFO], build_id=ID), ID))
    chosen = random.Random(1)
    good, refusals = 0, set()
    for _ in range(500):
        node = nodes.of_id(chosen.choice([1, 1, 2]), nodes.SLOT_SECTION, chosen.getrandbits(22))
        node &= ~nodes.DETAIL_MASK | (1 << 21 | 7 << 14 | chosen.getrandbits(1))
        try:
            size = view.attributes(node).size
            with contextlib.closing(view.open(node)) as opened:
                assert opened.blob is not None
                assert len(opened.blob.pread(1 << 20, 0)) == size
            good += 1
        except OSError as error:
            refusals.add(error.errno)
    assert good > 0
    assert refusals == {errno.ESTALE}


def test_a_file_that_was_written_to(store: Store, view: View) -> None:
    commit(store, capture(store, elf_file([TEXT, INFO], build_id=ID), ID))
    node = view.lookup_slowly(sections_directory(view), b".debug_info")
    with contextlib.closing(view.open(node)) as opened:
        assert opened.blob is not None
        artifact = store.index.artifact(1, Kind.EXECUTABLE)
        assert artifact is not None
        path = store.blobs.path(artifact.digest)
        os.chmod(path, 0o600)
        with open(path, "r+b") as blob:
            blob.write(b"x")
        with pytest.raises(OSError, match="Stale"):
            opened.blob.pread(10, 0)
