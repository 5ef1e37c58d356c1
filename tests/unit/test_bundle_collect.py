# SPDX-License-Identifier: Apache-2.0
"""What a bundle says is believed only as far as it was found to be true."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import pytest

from buildidfs.bundle import collect
from buildidfs.formats import bundle_archive
from buildidfs.model import BuildId, Digest, Kind, Quality
from buildidfs.store import NewSeen, Store
from buildidfs.store.blobs.zstd import FrameWriter
from tests.support.elf.elfwriter import DWARF, TEXT, altlink, elf_file
from tests.support.harness.captures import NOW, capture, sighting

_BUILD_ID = b"\x01" * 20
_CONTENT = b"what only root may read" * 100


def _hollow(path: Path, digest: Digest) -> None:
    """Write a bundle that says that everybody could read a file, which it does not have."""
    item = bundle_archive.Item(
        _BUILD_ID.hex(), "executable", digest.hex(), len(_CONTENT), 0, 0o555, 0, 0, "0"
    )
    text = bundle_archive.encode(
        bundle_archive.Manifest(bundle_archive.VERSION, "elsewhere", (), (item,), ())
    )
    with path.open("wb") as file:
        writer = FrameWriter(file.fileno())
        writer.write(bundle_archive.header(bundle_archive.MANIFEST, len(text)))
        writer.write(text.ljust(bundle_archive.padded(len(text)), b"\0"))
        writer.write(bundle_archive.header(b"blobs/" + digest.hex().encode(), len(_CONTENT)))
        writer.write(bytes(bundle_archive.padded(len(_CONTENT))) + bundle_archive.end())
        writer.finish()


@pytest.mark.parametrize("mode", [0o100500, 0o100555])
def test_who_may_read_is_not_for_a_bundle_to_say(tmp_path: Path, mode: int) -> None:
    with Store.create(tmp_path / "store") as store:
        new = capture(store, _CONTENT, _BUILD_ID, at=sighting(mode=mode))
        assert not isinstance(new.content, bytes)
        digest = new.content.digest
        ordinal = store.commit([new]).outcomes[0].ordinal
        _hollow(tmp_path / "bundle", digest)
        collect.import_(store, os.fspath(tmp_path / "bundle"))
        artifact = store.index.artifact(ordinal, Kind.EXECUTABLE)
        assert artifact is not None
        assert artifact.mode == mode & 0o777
        assert len(store.index.origins(ordinal)) == 2


def test_bundles_made_before_there_were_source_lists() -> None:
    manifest = bundle_archive.Manifest(
        bundle_archive.VERSION, "elsewhere", (bundle_archive.Input("a", 7),), (), ()
    )
    older = json.loads(bundle_archive.encode(manifest))
    del older["sources"]
    assert bundle_archive.decode(json.dumps(older).encode()) == manifest
    assert bundle_archive.members(manifest, 100).sources is None


def test_where_the_list_stands() -> None:
    """Behind all else: who does not know of it finds everything where it was."""
    before = bundle_archive.Manifest(
        bundle_archive.VERSION, "elsewhere", (bundle_archive.Input("a", 7),), (), ()
    )
    sources = bundle_archive.SourceList(900, "00" * 32, 9)
    after = msgspec.structs.replace(before, sources=sources)
    found = bundle_archive.members(after, 100)
    assert found[:2] == bundle_archive.members(before, 100)[:2]
    assert found.sources is not None
    (last,) = found.inputs
    assert found.sources.offset == last.offset + bundle_archive.padded(7) + bundle_archive.BLOCK


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    plain, link, fifo = tmp_path / "plain", tmp_path / "link", tmp_path / "fifo"
    link.symlink_to("target")
    os.mkfifo(fifo)
    with Store.create(tmp_path / "store") as store:
        for output in (plain, link):
            collect.create(store, {}, [], os.fspath(output))
        with open(os.open(fifo, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0) as reader:
            collect.create(store, {}, [], os.fspath(fifo))
            assert reader.read(1 << 16) == plain.read_bytes()
    assert os.readlink(link) == "target"
    assert (tmp_path / "target").read_bytes() == plain.read_bytes()
    assert fifo.is_fifo()


def test_a_dwz_file_lacks_no_executable(tmp_path: Path) -> None:
    mine, its = b"\x02" * 20, b"\x03" * 20
    program = elf_file([TEXT, DWARF, altlink(b"/usr/lib/debug/.dwz/common", its)], build_id=mine)
    with Store.create(tmp_path / "store") as store:
        both_kinds = [Kind.EXECUTABLE, Kind.DEBUGINFO]
        store.commit([capture(store, program, mine, kinds=both_kinds, quality=Quality.DEBUGINFO)])
        common = elf_file([DWARF], build_id=its)
        store.commit([capture(store, common, its, kinds=[Kind.DEBUGINFO])])
        both = collect.collect(store, {BuildId(mine): b""}, [])
        assert {item.build_id for item in both.items} == {mine.hex(), its.hex()}
        assert both.absent == ()
        alone = collect.collect(store, {BuildId(its): b""}, [])
        assert [each.why for each in alone.absent] == ["only debuginfo was captured"]


def test_a_stripped_program_needs_no_dwz_file(tmp_path: Path) -> None:
    """Strip leaves .gnu_debugaltlink in programs, as in all of Debian; only DWARF refers to it."""
    mine, its = BuildId(b"\x02" * 20), BuildId(b"\x03" * 20)
    link = altlink(b"/usr/lib/debug/.dwz/common", its)
    with Store.create(tmp_path / "store") as store:
        store.commit([capture(store, elf_file([TEXT, link], build_id=mine), mine)])
        manifest = collect.collect(store, {mine: b""}, [])
        assert [each.why for each in manifest.absent] == ["no debuginfo was captured"]
        debug = elf_file([DWARF, link], build_id=mine)
        store.commit(
            [capture(store, debug, mine, kinds=[Kind.DEBUGINFO], quality=Quality.DEBUGINFO)]
        )
        manifest = collect.collect(store, {mine: b""}, [])
        (lacking,) = manifest.absent
        assert (lacking.build_id, lacking.path) == (its.hex(), "/usr/lib/debug/.dwz/common")
        assert lacking.why == collect.NO_SUPPLEMENT


def test_what_is_absent_has_a_path(tmp_path: Path) -> None:
    told, seen, unknown = (BuildId(bytes([number]) * 20) for number in (1, 2, 3))
    with Store.create(tmp_path / "store") as store:
        store.note_seen([NewSeen(sighting(b"/journal", seen_ns=NOW), seen)])
        manifest = collect.collect(store, {told: b"/profile", seen: b"", unknown: b""}, [])
    found = {each.build_id: each.path for each in manifest.absent}
    assert found == {told.hex(): "/profile", seen.hex(): "/journal", unknown.hex(): ""}
