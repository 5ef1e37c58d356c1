# SPDX-License-Identifier: Apache-2.0
"""Single sections of files: found by name, bounded by the file, read like the file."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from typing import TYPE_CHECKING

import pytest

from buildidfs.model import ByteRange, Kind, Quality, Trust
from buildidfs.view import NeedsReading, View, nodes
from tests.support.elf.elfwriter import SHT_NOBITS, TEXT, TEXT_SPLIT, Section, elf_file, gdb_scripts
from tests.support.harness.captures import capture, commit

if TYPE_CHECKING:
    from buildidfs.store import Store

ID = b"\xab\xcd" * 10
INFO = Section(b".debug_info", b"what is to be known" * 1000)
LINE = Section(b".debug_line", b"", type=SHT_NOBITS, size=500)


@pytest.fixture
def view(store: Store) -> View:
    return View(store)


def directory(view: View) -> int:
    return view.child(view.child(View.ROOT, ID.hex().encode()), b"section")


def content(view: View, name: bytes, offset: int = 0, size: int = 1 << 20) -> bytes | None:
    """Bytes of a section, as a front door reads them; None if there is none."""
    node = view.lookup_slowly(directory(view), name)
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
        view.child(directory(view), b".debug_info")
    assert content(view, b".debug_info") == INFO.data
    assert content(view, b".debug_info", 7, 5) == INFO.data[7:12]
    assert content(view, b".debug_info", len(INFO.data) - 3) == INFO.data[-3:]
    assert content(view, b".debug_info", 1 << 40) == b""
    assert content(view, b".text") == TEXT.data, "there is none in the debug file"
    assert content(view, b".only") == b"here"
    for name in (b".debug_line", b".nothing", b"", b"x" * 255):
        assert content(view, name) is None
    node = view.lookup_slowly(directory(view), b".debug_info")
    assert View(store).attributes(node) == view.attributes(node)
    assert view.attributes(node).size == len(INFO.data)
    assert list(view.children(directory(view))) == []
    listed = {name for name, _, _ in view.children(view.child(View.ROOT, ID.hex().encode()))}
    assert b"section" not in listed, "what copies a tree copies each file once"


def test_scripts_read_as_zeros(store: Store, view: View) -> None:
    data = elf_file([TEXT, gdb_scripts("evil()")], build_id=ID)
    scripts = (ByteRange(data.index(b"\x04gdb.inlined"), 20),)
    new = capture(store, data, ID, trust=Trust.CONTAINER)
    commit(store, type(new)(**{f: getattr(new, f) for f in new.__struct_fields__} | {
        "scripts": scripts
    }))  # fmt: skip
    node = view.lookup_slowly(directory(view), b".debug_gdb_scripts")
    with contextlib.closing(view.open(node)) as opened:
        assert opened.zeros == (ByteRange(0, 20),)
    text = view.lookup_slowly(directory(view), b".text")
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
    node = view.lookup_slowly(directory(view), b".debug_info")
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
